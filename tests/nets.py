"""Small models and problems that several rooms' tests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MultiHead(nn.Module):
    """A trunk and K linear heads; forward gives the K outputs."""

    def __init__(self, trunk: nn.Module, width: int, K: int) -> None:
        super().__init__()
        self.trunk = trunk
        self.heads = nn.ModuleList(nn.Linear(width, 1) for _ in range(K))

    def forward(self, x: Tensor) -> list[Tensor]:
        z = self.trunk(x).flatten(1)
        return [head(z) for head in self.heads]


def mlp(K: int = 3, *, width: int = 8, seed: int = 0, dtype: torch.dtype = torch.float32) -> MultiHead:
    torch.manual_seed(seed)
    trunk = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
    return MultiHead(trunk, width, K).to(dtype)


def convnet(K: int = 2, *, seed: int = 0, batch_norm: bool = True, dropout: float = 0.2) -> MultiHead:
    torch.manual_seed(seed)
    trunk = nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1),
        nn.BatchNorm2d(8) if batch_norm else nn.Identity(),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Conv2d(8, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8) if batch_norm else nn.Identity(),
        nn.ReLU(),
        nn.Flatten(),
    )
    return MultiHead(trunk, 8 * 4 * 4, K)


def data(K: int = 3, n: int = 16, *, seed: int = 1, shape: Sequence[int] = (6,)) -> tuple[Tensor, list[Tensor]]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, *shape, generator=g)
    return x, [torch.randn(n, 1, generator=g) for _ in range(K)]


def losses(model: nn.Module, x: Tensor, ys: Sequence[Tensor]) -> list[Tensor]:
    return [F.mse_loss(out, y.to(out.dtype)) for out, y in zip(model(x), ys, strict=True)]


def closure(model: nn.Module, x: Tensor, ys: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    return lambda: losses(model, x, ys)


def reference_gradients(model: nn.Module, make: Callable[[], Sequence[Tensor]], params: Sequence[Tensor]) -> Tensor:
    """G [K, m] the obvious way, in float64 (the model must be in float64)."""
    rows = []
    for i in range(len(make())):
        grads = torch.autograd.grad(make()[i], list(params), allow_unused=True)
        rows.append(torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten() for p, g in zip(params, grads, strict=True)]))  # noqa: E501  # fmt: skip
    return torch.stack(rows)


def flat(params: Sequence[Tensor]) -> Tensor:
    return torch.cat([p.detach().flatten() for p in params])


def conflicting(K: int = 2, *, seed: int = 0, n: int = 32) -> tuple[MultiHead, Tensor, list[Tensor]]:
    """A problem whose first task's gradient points against the mean gradient."""
    for k in range(seed * 100, seed * 100 + 100):
        model = mlp(K, seed=k)
        x, ys = data(K, n, seed=k + 1)
        ys = [ys[0] * 0.3, *[3 * y + 1 for y in ys[1:]]]
        params = list(model.trunk.parameters())
        G = reference_gradients(model, closure(model, x, ys), params)
        cos = torch.cosine_similarity(G, G.mean(dim=0, keepdim=True))
        if -0.8 < float(cos.min()) < -0.1:
            return model, x, ys
    raise RuntimeError("no seed with a conflict found")
