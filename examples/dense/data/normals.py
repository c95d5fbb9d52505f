"""Surface normals from a depth map and the camera."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["NYU_CAMERA", "Intrinsics", "normals_from_depth"]

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Intrinsics:
    """Pinhole camera in pixels: focal lengths fx, fy and principal point cx, cy."""

    fx: float
    fy: float
    cx: float
    cy: float


NYU_CAMERA = Intrinsics(fx=518.8579, fy=519.4696, cx=325.5824, cy=253.7362)
"""Colour camera of the NYU Depth v2 toolbox (``camera_params.m``), to whose plane the labelled depths are projected."""


def normals_from_depth(
    depth: Array,
    camera: Intrinsics,
    *,
    rows: ArrayLike | None = None,
    columns: ArrayLike | None = None,
    jump: float = 0.1,
) -> Array:
    """Unit normals [H, W, 3] of the surface under ``depth`` [H, W] in metres (0: invalid), all-zero where unknown.

    Frame: x right, y down, z forward; the normals look towards the camera. Each is the cross product of the central
    differences of the back-projected points, so a plane gives its normal exactly. A pixel is unknown at the border,
    where one of its four neighbours is invalid, and where the surface jumps: a neighbour is further than ``jump``
    times the depth away from the linear continuation through the other one.

    This is a plain finite-difference estimate; the normals in MTAN's files come from another, smoother one.

    Args:
        depth: in metres.
        camera: of the image whose pixels ``rows`` and ``columns`` count.
        rows, columns: [H] and [W], the pixels of the camera's image that ``depth`` was sampled at, ascending;
            by default 0, 1, ... They need not be evenly spaced: taking every 1.67th pixel rounds.
        jump: relative to the depth.
    """
    height, width = depth.shape
    y = np.arange(height, dtype=np.float64) if rows is None else np.asarray(rows, np.float64)
    x = np.arange(width, dtype=np.float64) if columns is None else np.asarray(columns, np.float64)
    if y.shape != (height,) or x.shape != (width,):
        raise ValueError(f"rows, columns: expected [{height}] and [{width}], got {y.shape} and {x.shape}")
    v, u = np.meshgrid(y, x, indexing="ij")
    points = np.stack([(u - camera.cx) / camera.fx * depth, (v - camera.cy) / camera.fy * depth, depth], -1)
    right, down = np.zeros_like(points), np.zeros_like(points)
    right[:, 1:-1] = points[:, 2:] - points[:, :-2]
    down[1:-1] = points[2:] - points[:-2]
    normal = np.cross(down, right)  # y x z ... down x right looks towards the camera
    length = np.linalg.norm(normal, axis=-1, keepdims=True)
    normal = np.divide(normal, length, out=np.zeros_like(normal), where=length > 0)
    return np.where(_smooth(depth, y, x, jump)[..., None], normal, 0.0)


def _smooth(depth: Array, y: Array, x: Array, jump: float) -> NDArray[np.bool_]:
    """Interior pixels with four valid neighbours in which 1/depth (linear in u, v on any plane) does not bend."""
    known = depth > 0
    inverse = np.divide(1.0, depth, out=np.zeros_like(depth), where=known)
    result = np.zeros(depth.shape, bool)
    inner = (slice(1, -1), slice(1, -1))
    bend_u = 2 * np.abs(_between(inverse[1:-1, :-2], inverse[1:-1, 2:], x) - inverse[inner])
    bend_v = 2 * np.abs(_between(inverse[:-2, 1:-1].T, inverse[2:, 1:-1].T, y).T - inverse[inner])
    result[inner] = (
        known[inner]
        & (known[1:-1, 2:] & known[1:-1, :-2] & known[2:, 1:-1] & known[:-2, 1:-1])
        & (np.maximum(bend_u, bend_v) <= jump * inverse[inner])
    )
    return result


def _between(before: Array, after: Array, at: Array) -> Array:
    """The values at ``at[1:-1]`` on the line through those at the neighbours before and after (last axis)."""
    share = (at[1:-1] - at[:-2]) / (at[2:] - at[:-2])
    return (1 - share) * before + share * after
