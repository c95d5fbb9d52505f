"""Writes a procedurally rendered data set in MTAN's layout, so that the whole path runs on a fresh machine.

Segmentation, depth and normals come from one ray casting and agree geometrically (a test differentiates the depth).
As in the real sets some pixels are invalid: void labels along edges and in blobs, holes in the depth, no normals
there. The scenes are no benchmark: rows made from them say nothing about the published ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from dense.data.geometry import Array, Camera, cast
from dense.data.layout import save_array, whole_folder
from dense.data.scenes import SCENES, SKY, Item
from dense.errors import UserError
from dense.spec import DenseSpec

__all__ = [
    "DISPARITY_CAMERA",
    "Rendering",
    "SyntheticSettings",
    "make_set",
    "render_scene",
    "write_synthetic",
]

DISPARITY_CAMERA = 0.22 * 2262.0
"""Baseline (m) times focal length (px) of CityScapes' stereo rig; MTAN stores the
disparity in px, over 256."""
_MANIFEST = "synthetic.json"
"""Says what was rendered, so that a finished set is told from anything else of that name."""


@dataclass(frozen=True)
class SyntheticSettings:
    """What to render.

    Attributes:
        train, val: numbers of scenes.
        height, width: image size, multiples of 32.
        seed: every scene is keyed on (seed, split, number).
    """

    train: int = 300
    val: int = 60
    height: int = 96
    width: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        if self.train < 1 or self.val < 1:
            raise UserError(f"synthetic scenes: expected at least one per split, got {self.train} and {self.val}")
        if self.height % 32 or self.width % 32 or min(self.height, self.width) < 32:
            raise UserError(f"synthetic size: expected multiples of 32, got {self.height}x{self.width}")


@dataclass(frozen=True)
class Rendering:
    """One scene: image [H, W, 3] in [0, 1], label [H, W] (-1 void), depth [H, W] in metres (inf: none), camera-frame
    unit normals [H, W, 3], and the mask [H, W] of pixels that a sensor would have measured."""

    image: Array
    label: NDArray[np.int64]
    depth: Array
    normal: Array
    measured: NDArray[np.bool_]
    camera: Camera


def render_scene(spec: DenseSpec, settings: SyntheticSettings, split: int, number: int) -> Rendering:
    """Render scene ``number`` of ``split`` (0: train, 1: val)."""
    rng = np.random.default_rng([settings.seed, split, number])
    camera, items = SCENES[spec.name](settings.height, settings.width, rng)
    depth, normal, index = cast(camera, [item.shape for item in items])
    labels = np.array([item.label for item in items] + [SKY])  # index -1, no hit, reads the last entry
    label = labels[index]
    image = _shade(camera, items, depth, normal, index, rng)
    label = np.where(_edges(index) | _blobs(label.shape, rng, 1), -1, label)
    return Rendering(image, label, depth, normal, ~_blobs(label.shape, rng, 2), camera)


def write_synthetic(root: Path, spec: DenseSpec, settings: SyntheticSettings, *, progress: bool = True) -> Path:
    """Render into ``root`` and return it; a finished set with the same settings is used as it is.

    Raises:
        UserError: if ``root`` exists and is something else.
    """
    manifest = {"dataset": spec.name, "classes": spec.classes, **asdict(settings)}

    def render(folder: Path) -> None:
        jobs = [(0, i) for i in range(settings.train)] + [(1, i) for i in range(settings.val)]
        for split, number in tqdm(jobs, "rendering scenes", unit="scene", disable=not progress, leave=False):
            _write(folder / ("train", "val")[split], spec, render_scene(spec, settings, split, number), number)

    return make_set(root, manifest, render)


def make_set(root: Path, manifest: dict[str, Any], write: Callable[[Path], None]) -> Path:
    """Let ``write`` fill the folder ``root``, unless the set that ``manifest`` describes is already there.

    Raises:
        UserError: if ``root`` is something else.
    """
    if _is_finished(root, manifest):
        return root
    try:
        with whole_folder(root) as folder:
            write(folder)
            (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1))
    except UserError:
        if not _is_finished(root, manifest):  # two programs at once: the first one's set serves both
            raise
    return root


def _is_finished(root: Path, manifest: dict[str, Any]) -> bool:
    if not root.exists():
        return False
    with suppress(OSError, ValueError):
        if json.loads((root / _MANIFEST).read_text()) == manifest:
            return True
    raise UserError(f"{root}: exists, but is not the synthetic set asked for; remove it or choose another folder")


def _write(base: Path, spec: DenseSpec, scene: Rendering, number: int) -> None:
    valid = scene.measured & np.isfinite(scene.depth)
    depth = np.where(valid, scene.depth, 0)
    if spec.disparity:
        # 126/256 is the largest value in MTAN's files.
        depth = np.where(valid, np.minimum(DISPARITY_CAMERA / np.where(valid, scene.depth, 1) / 256, 126 / 256), 0)
    save_array(base / "image" / f"{number}.npy", scene.image.astype(np.float32))
    save_array(base / spec.label_folders[0] / f"{number}.npy", scene.label.astype(np.float32))
    save_array(base / "depth" / f"{number}.npy", depth[..., None].astype(np.float32))
    if "normal" in spec.tasks:
        normal = np.where(valid[..., None], scene.normal, 0)
        save_array(base / "normal" / f"{number}.npy", normal.astype(np.float32))


def _shade(
    camera: Camera, items: list[Item], depth: Array, normal: Array, index: NDArray[np.int64], rng: np.random.Generator
) -> Array:
    """Lambert's law with one light, a checkerboard on some shapes, haze with the distance, and sensor noise."""
    sky = np.array([0.62, 0.76, 0.92])
    colours = np.array([item.colour for item in items] + [tuple(sky)])[index]
    tiles = np.array([item.tile for item in items] + [0.0])[index]
    near = np.where(np.isfinite(depth), depth, 0.0)
    point = near[..., None] * camera.rays()
    with np.errstate(divide="ignore", invalid="ignore"):
        cell = np.floor(point / np.where(tiles > 0, tiles, np.inf)[..., None] + 1e-6).sum(-1)
    colours = colours * np.where((tiles > 0) & (cell % 2 == 1), 0.8, 1.0)[..., None]
    light = np.array([rng.uniform(-0.5, 0.5), -0.8, -0.5])
    lambert = np.clip(normal @ (light / np.linalg.norm(light)), 0, 1)
    lit = np.where(index < 0, 1.0, 0.45 + 0.55 * lambert)
    reach = 25.0 if items[0].tile < 1 else 60.0  # rooms, streets
    haze = np.where(index < 0, 0.0, 1 - np.exp(-near / reach))[..., None]
    image = (1 - haze) * colours * lit[..., None] + haze * sky
    return np.clip(image + rng.normal(0, 0.02, image.shape), 0, 1)


def _edges(index: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Pixels whose right neighbour belongs to another shape: void, as between two annotated polygons."""
    edge = np.zeros(index.shape, bool)
    edge[:, :-1] = index[:, :-1] != index[:, 1:]
    return edge


def _blobs(shape: tuple[int, ...], rng: np.random.Generator, count: int) -> NDArray[np.bool_]:
    """A few small rectangles."""
    mask = np.zeros(shape, bool)
    for _ in range(count):
        h, w = shape[0] // int(rng.integers(6, 12)) + 1, shape[1] // int(rng.integers(6, 12)) + 1
        top, left = rng.integers(shape[0] - h), rng.integers(shape[1] - w)
        mask[top : top + h, left : left + w] = True
    return mask
