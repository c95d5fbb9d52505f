"""The rendered scenes agree with geometry, and the written sets with their settings."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # scripts that users copy, not an installed package

from dense.data import synthetic
from dense.data.check import check_split
from dense.data.geometry import Box, Camera, Ellipsoid, Plane, cast
from dense.data.layout import open_split
from dense.data.normals import Intrinsics, normals_from_depth
from dense.data.synthetic import SyntheticSettings, render_scene, write_synthetic
from dense.errors import UserError
from dense.spec import CITYSCAPES, NYUV2, DenseSpec

SPECS = [NYUV2, CITYSCAPES]


# ------------------------------------------------------------------------------------------------ ray casting


def test_a_wall_has_constant_depth_and_looks_back() -> None:
    depth, normal, index = cast(Camera(8, 10, 9.0), [Plane((0, 0, -1), -3.0)])
    np.testing.assert_allclose(depth, 3.0)
    np.testing.assert_allclose(normal, np.broadcast_to([0, 0, -1], (8, 10, 3)))
    assert (index == 0).all()


def test_a_sphere_is_hit_where_its_equation_says() -> None:
    camera = Camera(33, 33, 30.0)
    depth, normal, _ = cast(camera, [Ellipsoid((0.2, -0.1, 4.0), (1.0, 1.0, 1.0))])
    hit = np.isfinite(depth)
    assert 0.1 < hit.mean() < 0.6
    points = (camera.rays() * np.where(hit, depth, 0)[..., None])[hit]
    np.testing.assert_allclose(np.linalg.norm(points - [0.2, -0.1, 4.0], axis=-1), 1.0, atol=1e-9)
    np.testing.assert_allclose(normal[hit], points - [0.2, -0.1, 4.0], atol=1e-9)
    assert depth[16, 16] == pytest.approx(3.0, abs=0.05)


def test_a_turned_box_is_hit_on_its_faces() -> None:
    camera, yaw = Camera(40, 40, 40.0), 0.5
    depth, normal, _ = cast(camera, [Box((0.0, 0.0, 4.0), (0.5, 0.7, 0.9), yaw)])
    hit = np.isfinite(depth)
    points = (camera.rays() * np.where(hit, depth, 0)[..., None])[hit] - [0.0, 0.0, 4.0]
    c, s = np.cos(yaw), np.sin(yaw)
    local = points @ np.array([[c, 0, -s], [0, 1, 0], [s, 0, c]]).T / [0.5, 0.7, 0.9]
    np.testing.assert_allclose(np.abs(local).max(-1), 1.0, atol=1e-9)
    assert (np.einsum("nc,nc->n", normal[hit], camera.rays()[hit]) < 0).all()  # every visible face looks back
    np.testing.assert_allclose(np.linalg.norm(normal[hit], axis=-1), 1.0)


def test_a_pitched_camera_sees_the_same_plane_turned() -> None:
    pitch = 0.3
    _, normal, _ = cast(Camera(8, 8, 8.0, pitch), [Plane((0, -1, 0), -1.5)])
    expected = [0, -np.cos(pitch), -np.sin(pitch)]  # the camera looks down: the floor's normal leans towards it
    np.testing.assert_allclose(normal[-1, 0], expected, atol=1e-12)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_depth_and_normals_of_a_scene_agree(spec: DenseSpec) -> None:
    """Normals from differentiating the depth are the rendered ones, wherever the neighbourhood is one plane."""
    settings = SyntheticSettings(height=96, width=128)
    for number in range(4):
        scene = render_scene(spec, settings, 0, number)
        camera = Intrinsics(scene.camera.focal, scene.camera.focal, 63.5, 47.5)
        estimated = normals_from_depth(np.where(np.isfinite(scene.depth), scene.depth, 0), camera, jump=1e-9)
        known = (estimated != 0).any(-1)
        cosine = (estimated * scene.normal).sum(-1)[known]
        assert known.mean() > 0.3
        assert np.quantile(cosine, 0.02) > 0.999  # a pixel between two parallel faces may be fooled


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_a_scene_has_unit_normals_that_look_back_and_labels_of_its_classes(spec: DenseSpec) -> None:
    settings = SyntheticSettings(height=64, width=96)
    scenes = [render_scene(spec, settings, 0, n) for n in range(6)]
    for scene in scenes:
        hit = np.isfinite(scene.depth)
        np.testing.assert_allclose(np.linalg.norm(scene.normal[hit], axis=-1), 1, atol=1e-9)
        view = scene.camera.rays() @ scene.camera.world_from_camera()
        assert ((scene.normal * view).sum(-1)[hit] < 1e-9).all()
        assert scene.image.min() >= 0
        assert scene.image.max() <= 1
        assert -1 in scene.label
    seen = set(np.concatenate([scene.label.ravel() for scene in scenes]).tolist())
    assert len(seen - {-1}) >= spec.classes - 4
    assert max(seen) < spec.classes


def test_the_sky_has_no_depth() -> None:
    for number in range(3):
        scene = render_scene(CITYSCAPES, SyntheticSettings(height=64, width=128), 1, number)
        assert not np.isfinite(scene.depth[scene.label == 4]).any()
        assert np.isfinite(scene.depth[(scene.label >= 0) & (scene.label != 4)]).all()


# ------------------------------------------------------------------------------------------------ written sets

TINY = SyntheticSettings(train=3, val=2, height=32, width=64)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_a_written_set_passes_the_full_check_and_has_invalid_pixels(tmp_path: Path, spec: DenseSpec) -> None:
    root = write_synthetic(tmp_path / "set", spec, TINY, progress=False)
    for name, count in (("train", 3), ("val", 2)):
        split = open_split(root, spec, name)
        assert len(split.indices) == count
        check_split(split, spec, "full", progress=False)
    label = np.load(root / "train" / spec.label_folders[0] / "0.npy")
    depth = np.load(root / "train" / "depth" / "0.npy")
    assert (label == -1).any()
    assert (depth == 0).any()
    assert depth.shape == (32, 64, 1)
    if spec.disparity:
        assert depth.max() <= 126 / 256
    else:
        normal = np.load(root / "train" / "normal" / "0.npy")
        assert ((normal == 0).all(-1) == (depth[..., 0] == 0)).all()


def test_a_set_depends_on_its_settings_alone(tmp_path: Path) -> None:
    a, b = (write_synthetic(tmp_path / n, NYUV2, TINY, progress=False) for n in ("a", "b"))
    for path in sorted(a.rglob("*.npy")):
        np.testing.assert_array_equal(np.load(path), np.load(b / path.relative_to(a)))
    other = write_synthetic(tmp_path / "c", NYUV2, SyntheticSettings(3, 2, 32, 64, seed=1), progress=False)
    assert (np.load(a / "train/image/0.npy") != np.load(other / "train/image/0.npy")).any()
    assert (np.load(a / "train/image/0.npy") != np.load(a / "val/image/0.npy")).any()


def test_a_finished_set_is_reused_and_another_one_refused(tmp_path: Path) -> None:
    root = write_synthetic(tmp_path / "set", NYUV2, TINY, progress=False)
    stamp = (root / "train/image/0.npy").stat().st_mtime_ns
    write_synthetic(root, NYUV2, TINY, progress=False)
    assert (root / "train/image/0.npy").stat().st_mtime_ns == stamp
    with pytest.raises(UserError, match="not the synthetic set"):
        write_synthetic(root, NYUV2, SyntheticSettings(4, 2, 32, 64), progress=False)


def test_what_is_not_whole_is_not_taken_for_a_finished_set(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set/synthetic.json").write_text("{")
    with pytest.raises(UserError, match="not the synthetic set"):
        write_synthetic(tmp_path / "set", NYUV2, TINY, progress=False)


def test_an_interrupted_rendering_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(synthetic, "render_scene", stop)
        with pytest.raises(KeyboardInterrupt):
            write_synthetic(tmp_path / "set", NYUV2, TINY, progress=False)
    assert not any(tmp_path.iterdir())
    root = write_synthetic(tmp_path / "set", NYUV2, TINY, progress=False)
    check_split(open_split(root, NYUV2, "train"), NYUV2, "full", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_two_programs_that_render_one_set_at_once_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one finishes while the first is still writing; the first one then takes what is there."""
    root, calls, original = tmp_path / "set", 0, synthetic.render_scene

    def render(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            write_synthetic(root, NYUV2, TINY, progress=False)
        return original(*args)

    monkeypatch.setattr(synthetic, "render_scene", render)
    assert write_synthetic(root, NYUV2, TINY, progress=False) == root
    assert calls == 2 * 5
    check_split(open_split(root, NYUV2, "val"), NYUV2, "full", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


@pytest.mark.parametrize("kwargs", [{"train": 0}, {"height": 40}, {"width": 0}])
def test_settings_that_make_no_sense_are_named(kwargs: dict[str, int]) -> None:
    with pytest.raises(UserError, match="synthetic"):
        SyntheticSettings(**kwargs)


def test_the_manifest_says_what_was_rendered(tmp_path: Path) -> None:
    root = write_synthetic(tmp_path / "set", CITYSCAPES, TINY, progress=False)
    manifest = json.loads((root / "synthetic.json").read_text())
    assert manifest == {
        "dataset": "cityscapes",
        "classes": 7,
        "train": 3,
        "val": 2,
        "height": 32,
        "width": 64,
        "seed": 0,
    }
