"""Surface normals from a depth map and the camera."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["NYU_CAMERA", "Intrinsics", "normals_from_depth"]

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Intrinsics:
    """Pinhole camera in pixels: focal lengths fx, fy and principal point cx, cy."""

    fx: float
    fy: float
    cx: float
    cy: float

    def scaled(self, vertical: float, horizontal: float) -> Intrinsics:
        """The camera of the image resized by these factors (pixel centres at whole numbers)."""
        return Intrinsics(
            self.fx * horizontal,
            self.fy * vertical,
            (self.cx + 0.5) * horizontal - 0.5,
            (self.cy + 0.5) * vertical - 0.5,
        )


NYU_CAMERA = Intrinsics(fx=518.8579, fy=519.4696, cx=325.5824, cy=253.7362)
"""Colour camera of the NYU Depth v2 toolbox (``camera_params.m``), to whose plane the labelled depths are projected."""


def normals_from_depth(depth: Array, camera: Intrinsics, *, jump: float = 0.1) -> Array:
    """Unit normals [H, W, 3] of the surface under ``depth`` [H, W] in metres (0: invalid), all-zero where unknown.

    Frame: x right, y down, z forward; the normals look towards the camera. Each is the cross product of the central
    differences of the back-projected points, so a plane gives its normal exactly. A pixel is unknown at the border,
    where one of its four neighbours is invalid, and where the surface jumps: a neighbour is further than ``jump``
    times the depth away from the linear continuation through the other one.

    This is a plain finite-difference estimate; the normals in MTAN's files come from another, smoother one.
    """
    height, width = depth.shape
    v, u = np.mgrid[0:height, 0:width].astype(np.float64)
    points = np.stack([(u - camera.cx) / camera.fx * depth, (v - camera.cy) / camera.fy * depth, depth], -1)
    right, down = np.zeros_like(points), np.zeros_like(points)
    right[:, 1:-1] = points[:, 2:] - points[:, :-2]
    down[1:-1] = points[2:] - points[:-2]
    normal = np.cross(down, right)  # y x z ... down x right looks towards the camera
    length = np.linalg.norm(normal, axis=-1, keepdims=True)
    normal = np.divide(normal, length, out=np.zeros_like(normal), where=length > 0)
    return np.where(_smooth(depth, jump)[..., None], normal, 0.0)


def _smooth(depth: Array, jump: float) -> NDArray[np.bool_]:
    """Interior pixels with four valid neighbours in which 1/depth (linear in u, v on any plane) does not bend."""
    known = depth > 0
    inverse = np.divide(1.0, depth, out=np.zeros_like(depth), where=known)
    result = np.zeros(depth.shape, bool)
    inner = (slice(1, -1), slice(1, -1))
    bend_u = np.abs(inverse[1:-1, 2:] + inverse[1:-1, :-2] - 2 * inverse[inner])
    bend_v = np.abs(inverse[2:, 1:-1] + inverse[:-2, 1:-1] - 2 * inverse[inner])
    result[inner] = (
        known[inner]
        & (known[1:-1, 2:] & known[1:-1, :-2] & known[2:, 1:-1] & known[:-2, 1:-1])
        & (np.maximum(bend_u, bend_v) <= jump * inverse[inner])
    )
    return result
