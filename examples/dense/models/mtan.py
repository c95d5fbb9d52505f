"""SegNet-MTAN (Liu et al., CVPR 2019): each task reads the shared trunk through its own soft attention masks.

The attention masks are per task; the convolutions that carry a task's masked features to the next stage are shared by
all tasks, as in the authors' code. Which parameters two or more losses reach is left to the optimizer to find out.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from dense.models.segnet import FILTERS, Features, Trunk, conv_block, finish, initialise, make_heads

__all__ = ["SegNetMTAN"]


def _attention(inputs: int, outputs: int) -> nn.Sequential:
    """Mask in (0, 1): two 1 x 1 convolutions with batch norms."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 1),
        nn.BatchNorm2d(outputs),
        nn.Sigmoid(),
    )


class _TaskAttention(nn.Module):
    """One task's masks: five on the encoder (first to last stage) and five on the decoder (last to first stage)."""

    encoder: nn.ModuleList
    decoder: nn.ModuleList

    def __init__(self, filters: tuple[int, ...]) -> None:
        super().__init__()
        encoder_inputs = [filters[0], *(2 * f for f in filters[1:])]
        self.encoder = nn.ModuleList(_attention(encoder_inputs[i], filters[i]) for i in range(5))
        left = [filters[0], *filters[:-1]]
        decoder_inputs = [2 * filters[0], *(filters[i] + left[i] for i in range(1, 5))]
        self.decoder = nn.ModuleList(_attention(decoder_inputs[i], left[i]) for i in reversed(range(5)))


class SegNetMTAN(nn.Module):
    """SegNet with task attention.

    Args:
        channels: task -> output channels (:func:`dense.models.head_channels`).
        filters: channels of the five stages; smaller ones are for smoke tests.
    """

    def __init__(self, channels: Mapping[str, int], filters: tuple[int, ...] = FILTERS) -> None:
        super().__init__()
        self.trunk = Trunk(filters)
        self.attention = nn.ModuleDict({task: _TaskAttention(filters) for task in channels})
        following = [*filters[1:], filters[-1]]
        self.encoder_carry = nn.ModuleList(conv_block(filters[i], following[i]) for i in range(5))
        left = [filters[0], *filters[:-1]]
        self.decoder_carry = nn.ModuleList(conv_block(filters[i], left[i]) for i in reversed(range(5)))
        self.heads = make_heads(channels, filters[0])
        initialise(self)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        """Task -> prediction [B, C, H, W] for image [B, 3, H, W]."""
        features = self.trunk(image)
        return {task: finish(task, head(self._task_features(task, features))) for task, head in self.heads.items()}

    def _task_features(self, task: str, features: Features) -> Tensor:
        masks = self.attention[task]
        seen = features["encoder_entry"][0]
        for stage, (mask, carry) in enumerate(zip(masks.encoder, self.encoder_carry, strict=True)):
            x = functional.max_pool2d(carry(mask(seen) * features["encoder_body"][stage]), 2)
            if stage < 4:
                seen = torch.cat((features["encoder_entry"][stage + 1], x), dim=1)
        for step, (mask, carry) in enumerate(zip(masks.decoder, self.decoder_carry, strict=True)):
            x = carry(functional.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True))
            x = mask(torch.cat((features["upsampled"][step], x), dim=1)) * features["decoder_body"][step]
        return x
