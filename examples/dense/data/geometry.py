"""Ray casting of a few analytic shapes: exact depth, normals and classes for the synthetic scenes.

Frame: x right, y down, z forward, metres, the camera in the origin. A ray through pixel (u, v) has the direction
((u - cx)/f, (v - cy)/f, 1), so that the ray parameter t at a hit *is* the depth z. A pitched camera is had by turning
the rays instead of the world; normals are turned back into the camera's frame.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Array", "Box", "Camera", "Ellipsoid", "Hit", "Plane", "Shape", "cast"]

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Camera:
    """A pinhole camera: H x W pixels, focal length in pixels, pitch in radians (positive looks down)."""

    height: int
    width: int
    focal: float
    pitch: float = 0.0

    def rays(self) -> Array:
        """Directions [H, W, 3] in the world's frame."""
        v, u = np.mgrid[0 : self.height, 0 : self.width].astype(np.float64)
        x = (u - (self.width - 1) / 2) / self.focal
        y = (v - (self.height - 1) / 2) / self.focal
        return np.stack([x, y, np.ones_like(x)], -1) @ self.world_from_camera().T

    def world_from_camera(self) -> Array:
        """Rotation [3, 3] about the x axis."""
        c, s = np.cos(self.pitch), np.sin(self.pitch)
        return np.array([[1, 0, 0], [0, c, s], [0, -s, c]])


@dataclass(frozen=True)
class Hit:
    """Where rays meet a shape: t [H, W] (infinite where they do not) and outward unit normals [H, W, 3]."""

    t: Array
    normal: Array


@dataclass(frozen=True)
class Plane:
    """The points p with normal · p = offset; the normal looks to the side that is seen."""

    normal: tuple[float, float, float]
    offset: float

    def hit(self, rays: Array) -> Hit:
        normal = np.asarray(self.normal, np.float64)
        slope = rays @ normal
        with np.errstate(divide="ignore", invalid="ignore"):
            t = self.offset / slope
        t = np.where((slope < 0) & (t > 0), t, np.inf)
        return Hit(t, np.broadcast_to(normal, rays.shape))


@dataclass(frozen=True)
class Ellipsoid:
    """Axis-aligned, with half-axes ``radii``."""

    center: tuple[float, float, float]
    radii: tuple[float, float, float]

    def hit(self, rays: Array) -> Hit:
        radii = np.asarray(self.radii)
        center = np.asarray(self.center) / radii
        unit = rays / radii  # a unit sphere in scaled space
        a, b, c = (unit**2).sum(-1), unit @ center, center @ center - 1
        root = b**2 - a * c
        t = (b - np.sqrt(np.maximum(root, 0))) / a
        t = np.where((root > 0) & (t > 0), t, np.inf)
        point = np.where(np.isfinite(t), t, 0)[..., None] * unit - center
        normal = point / radii
        return Hit(t, normal / np.linalg.norm(normal, axis=-1, keepdims=True))


@dataclass(frozen=True)
class Box:
    """Half-sizes ``half`` about ``center``, turned by ``yaw`` radians about the vertical."""

    center: tuple[float, float, float]
    half: tuple[float, float, float]
    yaw: float = 0.0

    def hit(self, rays: Array) -> Hit:
        c, s = np.cos(self.yaw), np.sin(self.yaw)
        box_from_world = np.array([[c, 0, -s], [0, 1, 0], [s, 0, c]])
        local = rays @ box_from_world.T
        origin = -box_from_world @ np.asarray(self.center)
        with np.errstate(divide="ignore", invalid="ignore"):
            first, second = (-np.asarray(self.half) - origin) / local, (np.asarray(self.half) - origin) / local
        near, far = np.minimum(first, second), np.maximum(first, second)
        axis = near.argmax(-1)
        t, leave = near.max(-1), far.min(-1)
        t = np.where((t < leave) & (t > 0), t, np.inf)
        normal = np.zeros_like(rays)
        sign = -np.sign(np.take_along_axis(local, axis[..., None], -1))
        np.put_along_axis(normal, axis[..., None], sign, -1)
        return Hit(t, normal @ box_from_world)


Shape = Plane | Ellipsoid | Box


def cast(camera: Camera, shapes: list[Shape]) -> tuple[Array, Array, NDArray[np.int64]]:
    """Depth [H, W] (infinite for no hit), camera-frame normals [H, W, 3] and the index of the shape [H, W] (-1)."""
    rays = camera.rays()
    depth = np.full(rays.shape[:2], np.inf)
    normal = np.zeros_like(rays)
    index = np.full(depth.shape, -1)
    for number, shape in enumerate(shapes):
        hit = shape.hit(rays)
        closer = hit.t < depth
        depth = np.where(closer, hit.t, depth)
        normal = np.where(closer[..., None], hit.normal, normal)
        index = np.where(closer, number, index)
    return depth, normal @ camera.world_from_camera(), index
