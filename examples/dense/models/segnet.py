"""SegNet (Badrinarayanan et al., 2017) with one prediction head per task on the last decoder feature map."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn import functional

from dense.spec import DenseSpec

__all__ = [
    "FILTERS",
    "Features",
    "SegNet",
    "Trunk",
    "conv_block",
    "finish",
    "head_channels",
    "initialise",
    "make_heads",
]

FILTERS = (64, 128, 256, 512, 512)
"""Channels of the five stages in every published run."""

Features = dict[str, list[Tensor]]


def head_channels(spec: DenseSpec, tasks: tuple[str, ...]) -> dict[str, int]:
    """Task -> output channels."""
    channels = {"segmentation": spec.classes, "depth": 1, "normal": 3}
    return {task: channels[task] for task in tasks}


def conv_block(inputs: int, outputs: int) -> nn.Sequential:
    """3 x 3 convolution, batch norm, ReLU."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


def make_heads(channels: Mapping[str, int], inputs: int) -> nn.ModuleDict:
    """A 3 x 3 and a 1 x 1 convolution per task, without a non-linearity between, as published."""
    return nn.ModuleDict(
        {
            task: nn.Sequential(nn.Conv2d(inputs, inputs, 3, padding=1), nn.Conv2d(inputs, outputs, 1))
            for task, outputs in channels.items()
        }
    )


def finish(task: str, raw: Tensor) -> Tensor:
    """Log-probabilities for the segmentation, unit vectors for the normals, the value itself for the depth."""
    if task == "segmentation":
        return functional.log_softmax(raw, dim=1)
    return functional.normalize(raw, dim=1) if task == "normal" else raw


def initialise(module: nn.Module) -> None:
    """Xavier-normal convolutions with zero bias, identity batch norms (the public scripts' initialisation)."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.xavier_normal_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.BatchNorm2d):
            nn.init.ones_(layer.weight)
            nn.init.zeros_(layer.bias)


class Trunk(nn.Module):
    """The shared encoder-decoder: two or three convolutions a stage, max-unpooling with the encoder's indices.

    Each stage is an *entry* block that changes the number of channels and a *body* that keeps it.
    """

    def __init__(self, filters: tuple[int, ...] = FILTERS) -> None:
        super().__init__()
        if len(filters) != 5:
            raise ValueError(f"filters: expected five stages, got {filters}")
        down = [3, *filters]
        self.encoder_entry = nn.ModuleList(conv_block(down[i], down[i + 1]) for i in range(5))
        self.encoder_body = nn.ModuleList(_body(filters[i], 1 if i < 2 else 2) for i in range(5))
        up = [filters[0], *filters[:-1]]  # channels that the decoder stage i leaves behind
        self.decoder_entry = nn.ModuleList(conv_block(filters[i], up[i]) for i in range(5))
        self.decoder_body = nn.ModuleList(_body(up[i], 1 if i < 2 else 2) for i in range(5))
        self.pool = nn.MaxPool2d(2, return_indices=True)
        self.unpool = nn.MaxUnpool2d(2)

    def forward(self, image: Tensor) -> Features:
        """Feature maps of image [B, 3, H, W], H and W multiples of 32; decoder lists run from the lowest resolution.

        Returns:
            ``encoder_entry``, ``encoder_body``: five maps each before the pooling; ``upsampled``, ``decoder_entry``,
            ``decoder_body``: five maps each after the unpooling; the last body has [B, filters[0], H, W].
        """
        features: Features = {
            key: [] for key in ("encoder_entry", "encoder_body", "upsampled", "decoder_entry", "decoder_body")
        }
        indices, x = [], image
        for entry, body in zip(self.encoder_entry, self.encoder_body, strict=True):
            features["encoder_entry"].append(entry(x))
            features["encoder_body"].append(body(features["encoder_entry"][-1]))
            x, where = self.pool(features["encoder_body"][-1])
            indices.append(where)
        for stage in reversed(range(5)):
            features["upsampled"].append(self.unpool(x, indices[stage]))
            features["decoder_entry"].append(self.decoder_entry[stage](features["upsampled"][-1]))
            x = self.decoder_body[stage](features["decoder_entry"][-1])
            features["decoder_body"].append(x)
        return features


def _body(channels: int, depth: int) -> nn.Module:
    return nn.Sequential(*(conv_block(channels, channels) for _ in range(depth)))


class SegNet(nn.Module):
    """One trunk, one head per task: the split model, and (with one task) the single-task baseline.

    Args:
        channels: task -> output channels (:func:`head_channels`).
        filters: channels of the five stages; smaller ones are for smoke tests.
    """

    def __init__(self, channels: Mapping[str, int], filters: tuple[int, ...] = FILTERS) -> None:
        super().__init__()
        self.trunk = Trunk(filters)
        self.heads = make_heads(channels, filters[0])
        initialise(self)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        """Task -> prediction [B, C, H, W] for image [B, 3, H, W]."""
        last = self.trunk(image)["decoder_body"][-1]
        return {task: finish(task, head(last)) for task, head in self.heads.items()}
