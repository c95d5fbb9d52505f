"""The problems of ``default_scale.py``: those of ``ablation_problems.py``, unbalanced binary tasks, rendered rooms."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import ablation_problems
import torch
import torch.nn.functional as F
from ablation_problems import Study
from problems import Batch, Heads, Problem
from torch import Tensor, nn

NAMES = ("qm9", "multimnist", "yeast", "rare", "rooms")

PREVALENCES = {
    "yeast": (0.31, 0.43, 0.41, 0.36, 0.30, 0.25, 0.18, 0.20, 0.07, 0.10, 0.12, 0.75, 0.74, 0.014),
    "rare": (0.5, 0.3, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01),
}
"""Shares of positives of the binary tasks. ``yeast``: those of the 14 labels of the yeast data set (Elisseeff and
Weston, 2001)."""


class Labels(Problem):
    """Made-up multi-label data shaped like yeast's: 103 correlated features, tasks of one teacher network with noise,
    each thresholded at its share of positives. MLP 103-64-64."""

    def model(self, seed: int) -> Heads:
        torch.manual_seed(seed)
        trunk = nn.Sequential(nn.Linear(103, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        return Heads(trunk, 64, {str(i): 1 for i in range(self.train[1].shape[1])})

    def losses(self, model: nn.Module, *batch: Tensor) -> dict[str, Tensor]:
        x, y = batch
        return {name: F.binary_cross_entropy_with_logits(out[:, 0], y[:, int(name)]) for name, out in model(x).items()}


class Rooms(Problem):
    """Rooms rendered at 32 x 32 in the layout of NYUv2: segmentation, depth, normals; SegNet of 8 to 16 channels."""

    def model(self, seed: int) -> nn.Module:  # type: ignore[override]
        from dense.models import SegNet, head_channels
        from dense.problem import SMOKE_FILTERS
        from dense.spec import NYUV2

        torch.manual_seed(seed)
        return SegNet(head_channels(NYUV2, NYUV2.tasks), SMOKE_FILTERS)

    def losses(self, model: nn.Module, *batch: Tensor) -> dict[str, Tensor]:
        from dense.losses import dense_losses

        image, *targets = batch
        return dense_losses(model(image), dict(zip(("segmentation", "depth", "normal"), targets, strict=True)))


def load(name: str, *, smoke: bool, data_dir: Path) -> Study:
    """Raises ValueError for a name that is not one of :data:`NAMES`."""
    if name not in NAMES:
        raise ValueError(f"name: expected one of {', '.join(NAMES)}, got {name!r}")
    if name in PREVALENCES:
        return _labels(name, smoke=smoke)
    if name == "rooms":
        return _rooms(smoke=smoke, data_dir=data_dir)
    return ablation_problems.load(name, smoke=smoke, data_dir=data_dir)


def _labels(name: str, *, smoke: bool) -> Study:
    sizes, batch = ((96, 64, 64), 32) if smoke else ((1500, 500, 1500), 64)
    g = torch.Generator().manual_seed(0)
    latent, tasks, count = 20, len(PREVALENCES[name]), sum(sizes)
    z = torch.randn(count, latent, generator=g)
    mixing, first, second = (torch.randn(*s, generator=g) for s in ((latent, 103), (latent, 32), (32, tasks)))
    x = z @ mixing / latent**0.5 + 0.5 * torch.randn(count, 103, generator=g)
    score = torch.tanh(z @ first / latent**0.5) @ second / 32**0.5
    score = score / score.std(dim=0) + 0.5 * torch.randn(count, tasks, generator=g)
    bounds = [score[:, k].quantile(1 - share) for k, share in enumerate(PREVALENCES[name])]
    y = (score > torch.stack(bounds)).float()
    train, val, test = zip(x.split(sizes), y.split(sizes), strict=True)
    return Study(Labels(name, train, test, batch, 1e-3), val)


def _rooms(*, smoke: bool, data_dir: Path) -> Study:
    from dense.data.dataset import DenseDataset
    from dense.data.layout import open_split
    from dense.data.synthetic import SyntheticSettings, write_synthetic
    from dense.spec import NYUV2

    train, rest, batch = (8, 8, 4) if smoke else (192, 96, 4)
    settings = SyntheticSettings(train, rest, 32, 32, 0)
    root = write_synthetic(data_dir / f"rooms-32x32-{train}-{rest}", NYUV2, settings, progress=False)

    def tensors(split: str) -> Batch:
        items = list(DenseDataset(open_split(root, NYUV2, split), NYUV2, augment=False, seed=0))
        return tuple(torch.stack([item[key] for item in items]) for key in ("image", *NYUV2.tasks))

    held_out = tensors("val")
    val, test = zip(*(t.chunk(2) for t in held_out), strict=True)
    return Study(Rooms("rooms", tensors("train"), test, batch, 1e-3), val)


# ------------------------------------------------------------------------------------------------ test metrics


def metrics(problem: Problem, model: nn.Module, data: Batch) -> list[float]:
    """One figure for each task, lower is better, in evaluation mode: 1 - average precision of a binary task; the share
    of wrong pixels, the absolute depth error and 1 - mean cosine of the normals; else ``ablation_problems.metrics``."""
    if problem.name in PREVALENCES:
        return _evaluated(model, data, lambda out: _precisions(out, data[1]))
    if problem.name == "rooms":
        return _evaluated(model, data, lambda out: _dense(out, data))
    return ablation_problems.metrics(problem, model, data)  # type: ignore[arg-type]


def _evaluated(model: nn.Module, data: Batch, values: object) -> list[float]:
    model.eval()
    with torch.no_grad():
        found = values(model(data[0]))  # type: ignore[operator]
    model.train()
    return [float(v) for v in found]


def _precisions(out: dict[str, Tensor], y: Tensor) -> list[Tensor]:
    return [1 - average_precision(o[:, 0], y[:, int(name)]) for name, o in out.items()]


def average_precision(score: Tensor, truth: Tensor) -> Tensor:
    """Mean over the positives of the precision at their rank []; ties in the order of the examples."""
    hits = truth[score.argsort(descending=True, stable=True)]
    precision = hits.cumsum(0) / torch.arange(1, len(hits) + 1)
    return (precision * hits).sum() / hits.sum()


def _dense(out: dict[str, Tensor], data: Batch) -> Sequence[Tensor]:
    from dense.losses import VOID, depth_loss, normal_loss

    _, label, depth, normal = data
    known = label != VOID
    wrong = ((out["segmentation"].argmax(1) != label) & known).sum() / known.sum()
    return wrong, depth_loss(out["depth"], depth), normal_loss(out["normal"], normal)
