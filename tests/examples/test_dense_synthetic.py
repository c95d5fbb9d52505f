"""The rendered scenes agree with geometry, and the converters with files made by hand."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # scripts that users copy, not an installed package

from dense.data import synthetic
from dense.data.check import check_split
from dense.data.geometry import Box, Camera, Ellipsoid, Plane, cast
from dense.data.layout import open_split
from dense.data.normals import Intrinsics, normals_from_depth
from dense.data.prepare_cityscapes import LABEL_TO_7, LABEL_TO_19, disparity_values, prepare_cityscapes
from dense.data.prepare_nyuv2 import CLASS_40_TO_13, NyuSources, prepare_nyuv2
from dense.data.synthetic import SyntheticSettings, render_scene, write_synthetic
from dense.errors import UserError
from dense.spec import CITYSCAPES, NYUV2, DenseSpec, cityscapes_spec

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


def test_a_conversion_takes_nothing_over_from_an_interrupted_one(tmp_path: Path) -> None:
    source = city_folders(tmp_path / "source")
    picture = source / "leftImg8bit/val/ulm/ulm_000000_000019_leftImg8bit.png"
    whole = picture.read_bytes()
    picture.write_bytes(whole[:200])  # the last of the three images
    with pytest.raises(UserError, match="truncated"):
        prepare_cityscapes(source, tmp_path / "out", size=(32, 64), progress=False)
    picture.write_bytes(whole)
    shutil.rmtree(source / "leftImg8bit/train/bochum")
    root = prepare_cityscapes(source, tmp_path / "out", size=(32, 64), progress=False)
    assert open_split(root, CITYSCAPES, "train").indices == (0,)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


@pytest.mark.parametrize("kwargs", [{"train": 0}, {"height": 40}, {"width": 0}])
def test_settings_that_make_no_sense_are_named(kwargs: dict[str, int]) -> None:
    with pytest.raises(UserError, match="synthetic"):
        SyntheticSettings(**kwargs)


# ------------------------------------------------------------------------------------------------ normals


def test_normals_of_a_slanted_plane_are_exact() -> None:
    camera = Intrinsics(50.0, 55.0, 31.0, 23.0)
    n = np.array([0.2, -0.5, -0.8]) / np.linalg.norm([0.2, -0.5, -0.8])
    v, u = np.mgrid[0:48, 0:64]
    rays = np.stack([(u - 31.0) / 50.0, (v - 23.0) / 55.0, np.ones_like(u)], -1)
    depth = -2.0 / (rays @ n)  # n . p = -2
    normal = normals_from_depth(depth, camera)
    np.testing.assert_allclose(normal[1:-1, 1:-1], np.broadcast_to(n, (46, 62, 3)), atol=1e-9)
    assert not normal[0].any()  # the border has no central difference


def test_normals_next_to_holes_and_jumps_are_unknown() -> None:
    depth = np.full((20, 20), 2.0)
    depth[5, 5] = 0
    depth[:, 12:] = 6.0
    known = (normals_from_depth(depth, Intrinsics(20, 20, 9.5, 9.5)) != 0).any(-1)
    assert not known[4:7, 5].any()
    assert not known[5, 4:7].any()
    assert not known[:, 11:13].any()
    assert known[10, 3]


def test_the_camera_of_a_resized_image_sees_the_same_directions() -> None:
    full = Intrinsics(518.8, 519.4, 325.6, 253.7)
    half = full.scaled(0.5, 0.5)
    # the centre of the small pixel 10 lies between the big pixels 20 and 21
    assert (10 - half.cx) / half.fx == pytest.approx((20.5 - full.cx) / full.fx)
    assert (7 - half.cy) / half.fy == pytest.approx((14.5 - full.cy) / full.fy)


# ------------------------------------------------------------------------------------------------ converters


def nyu_sources(folder: Path) -> NyuSources:
    """A tiny file in the layout of nyu_depth_v2_labeled.mat: HDF5, MATLAB's axes reversed, here 5 images of 60 x 80."""
    import h5py
    from scipy.io import savemat

    rng = np.random.default_rng(0)
    with h5py.File(folder / "nyu.mat", "w") as file:
        file["images"] = rng.integers(0, 255, (5, 3, 80, 60), dtype=np.uint8)
        file["labels"] = rng.integers(0, 895, (5, 80, 60), dtype=np.uint16)
        file["depths"] = np.full((5, 80, 60), 2.5, np.float32)
        raw = np.full((5, 80, 60), 2.0, np.float32)
        raw[:, :10] = 0
        file["rawDepths"] = raw
    savemat(folder / "splits.mat", {"trainNdxs": np.array([[2], [5]]), "testNdxs": np.array([[1], [3], [4]])})
    savemat(folder / "map.mat", {"mapClass": rng.integers(1, 41, (1, 894))})
    return NyuSources(folder / "nyu.mat", folder / "splits.mat", folder / "map.mat", size=(32, 64))


def test_nyuv2_is_converted(tmp_path: Path) -> None:
    import h5py
    from scipy.io import loadmat

    sources = nyu_sources(tmp_path)
    root = prepare_nyuv2(sources, tmp_path / "out", progress=False)
    for name, count in (("train", 2), ("val", 3)):
        split = open_split(root, NYUV2, name)
        assert len(split.indices) == count
        check_split(split, NYUV2, "full", progress=False)
    with h5py.File(sources.mat) as file:
        source = file["labels"][4].T  # image 5 of the file is the second training image
    to_40 = loadmat(sources.classes)["mapClass"].ravel()
    label = np.load(root / "train/label/1.npy")
    y, x = 10, 33
    name_id = int(source[int((y + 0.5) * 60 / 32), int((x + 0.5) * 80 / 64)])
    expected = -1 if name_id == 0 else CLASS_40_TO_13[to_40[name_id - 1] - 1] - 1
    assert label[y, x] == expected
    depth, normal = np.load(root / "val/depth/2.npy"), np.load(root / "val/normal/2.npy")
    assert (depth[:, :8] == 0).all()  # the hole
    assert (depth[:, 8:] == 2.0).all()
    np.testing.assert_allclose(normal[1:-1, 10:-1], np.broadcast_to([0, 0, -1], (30, 53, 3)), atol=1e-6)
    assert not normal[:, :9].any()
    image = np.load(root / "train/image/0.npy")
    assert image.dtype == np.float32
    assert 0 <= image.min() < image.max() <= 1


def test_nyuv2_takes_inpainted_depth_and_given_normals(tmp_path: Path) -> None:
    sources = nyu_sources(tmp_path)
    (tmp_path / "normals").mkdir()
    for n in range(1, 6):
        np.save(tmp_path / "normals" / f"{n}.npy", np.full((60, 80, 3), [0.6, 0.0, -0.8]) * (n == 2))
    given = NyuSources(sources.mat, sources.splits, sources.classes, tmp_path / "normals", "filled", (32, 64))
    root = prepare_nyuv2(given, tmp_path / "out", progress=False)
    assert (np.load(root / "train/depth/0.npy") == 2.5).all()
    np.testing.assert_allclose(np.load(root / "train/normal/0.npy"), np.broadcast_to([0.6, 0, -0.8], (32, 64, 3)))
    assert not np.load(root / "train/normal/1.npy").any()


def test_the_forty_classes_fall_into_thirteen() -> None:
    """Spot checks by name: wall, floor, cabinet, bed, ..., television, person, other furniture."""
    assert len(CLASS_40_TO_13) == 40
    assert set(CLASS_40_TO_13) == set(range(1, 14))
    names = NYUV2.class_names
    for number, name in {1: "wall", 2: "floor", 3: "furniture", 4: "bed", 5: "chair", 6: "sofa", 7: "table",
                         9: "window", 11: "picture", 22: "ceiling", 23: "books", 25: "tv"}.items():  # fmt: skip
        assert names[CLASS_40_TO_13[number - 1] - 1] == name


def city_folders(root: Path) -> Path:
    rng = np.random.default_rng(0)
    for split, city in (("train", "aachen"), ("train", "bochum"), ("val", "ulm")):
        for kind, suffix in (("leftImg8bit", "leftImg8bit"), ("gtFine", "gtFine_labelIds"), ("disparity", "disparity")):
            folder = root / kind / split / city
            folder.mkdir(parents=True)
            if kind == "leftImg8bit":
                image = Image.fromarray(rng.integers(0, 255, (64, 128, 3), dtype=np.uint8))
            elif kind == "gtFine":
                image = Image.fromarray(np.repeat(np.arange(64, dtype=np.uint8) % 34, 128).reshape(64, 128))
            else:
                image = Image.fromarray((np.arange(64 * 128, dtype=np.uint16) * 4).reshape(64, 128))
            image.save(folder / f"{city}_000000_000019_{suffix}.png")
    return root


def test_cityscapes_is_converted(tmp_path: Path) -> None:
    source = city_folders(tmp_path / "source")
    root = prepare_cityscapes(source, tmp_path / "out", size=(32, 64), progress=False)
    for classes in (7, 19):
        spec = cityscapes_spec(classes)
        for name, count in (("train", 2), ("val", 1)):
            split = open_split(root, spec, name)
            assert len(split.indices) == count
            check_split(split, spec, "full", progress=False)
    seven, nineteen = (np.load(root / f"val/label_{n}/0.npy")[:, 0] for n in (7, 19))
    ids = [(2 * y + 1) % 34 for y in range(32)]  # nearest neighbour of a halved image
    assert seven.tolist() == [LABEL_TO_7[i] for i in ids]
    assert nineteen.tolist() == [LABEL_TO_19[i] for i in ids]


def test_disparity_codes() -> None:
    """0 is invalid; p is (p - 1)/256 px; the largest of MTAN's values, 0.4922, is 126 px."""
    np.testing.assert_allclose(disparity_values(np.array([0, 1, 257, 126 * 256 + 1])), [0, 0, 1 / 256, 0.4921875])


def test_label_tables_have_cityscapes_counts() -> None:
    assert len(LABEL_TO_7) == len(LABEL_TO_19) == 34
    assert sorted(set(LABEL_TO_7)) == list(range(-1, 7))
    assert sorted(LABEL_TO_19)[-19:] == list(range(19))
    assert all(b == -1 or a >= 0 for a, b in zip(LABEL_TO_7, LABEL_TO_19, strict=True))


def test_converters_name_what_is_missing_or_damaged(tmp_path: Path) -> None:
    sources = nyu_sources(tmp_path)
    with pytest.raises(UserError, match=r"absent\.mat"):
        NyuSources(tmp_path / "absent.mat", sources.splits, sources.classes)
    sources.mat.write_bytes(sources.mat.read_bytes()[:2000])
    with pytest.raises(UserError, match=r"nyu\.mat: truncated"):
        prepare_nyuv2(sources, tmp_path / "out", progress=False)
    source = city_folders(tmp_path / "source")
    picture = source / "leftImg8bit/val/ulm/ulm_000000_000019_leftImg8bit.png"
    picture.write_bytes(picture.read_bytes()[:200])
    with pytest.raises(UserError, match=r"ulm_000000_000019_leftImg8bit\.png: truncated"):
        prepare_cityscapes(source, tmp_path / "out2", size=(32, 64), progress=False)
    (source / "disparity/train/aachen/aachen_000000_000019_disparity.png").unlink()
    with pytest.raises(UserError, match=r"disparity\.png: no such file"):
        prepare_cityscapes(source, tmp_path / "out3", size=(32, 64), progress=False)
    with pytest.raises(UserError, match="missing folder"):
        prepare_cityscapes(tmp_path, tmp_path / "out4", progress=False)
    assert not any((tmp_path / name).exists() for name in ("out", "out2", "out3", "out4"))
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match="exists already"):
        prepare_cityscapes(source, tmp_path / "there")


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
