"""The converters against files made by hand in the official layouts, and normals from depth against planes."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # scripts that users copy, not an installed package

from dense.data.check import check_split
from dense.data.layout import open_split
from dense.data.normals import NYU_CAMERA, Intrinsics, normals_from_depth
from dense.data.prepare_cityscapes import LABEL_TO_7, LABEL_TO_19, disparity_values, prepare_cityscapes
from dense.data.prepare_nyuv2 import CLASS_40_TO_13, NyuSources, prepare_nyuv2
from dense.errors import UserError
from dense.spec import CITYSCAPES, NYUV2, cityscapes_spec

# ------------------------------------------------------------------------------------------------ normals


def slanted(camera: Intrinsics, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Depth of a plane that fills the picture, and its normal."""
    n = np.array([0.3, -0.5, -0.8]) / np.linalg.norm([0.3, -0.5, -0.8])
    v, u = np.mgrid[0:height, 0:width]
    rays = np.stack([(u - camera.cx) / camera.fx, (v - camera.cy) / camera.fy, np.ones_like(u)], -1)
    depth = -2.0 / (rays @ n)  # n . p = -2
    assert depth.min() > 0
    return depth, n


def test_normals_of_a_slanted_plane_are_exact() -> None:
    camera = Intrinsics(50.0, 55.0, 31.0, 23.0)
    depth, n = slanted(camera, 48, 64)
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


def test_normals_are_exact_where_rows_and_columns_were_left_out_unevenly() -> None:
    camera = Intrinsics(50.0, 55.0, 31.0, 23.0)
    depth, n = slanted(camera, 48, 64)
    rows, columns = np.array([0, 1, 3, 5, 6, 8, 20, 21]), np.array([2, 3, 5, 8, 9, 40])
    normal = normals_from_depth(depth[rows[:, None], columns], camera, rows=rows, columns=columns, jump=1e-9)
    np.testing.assert_allclose(normal[1:-1, 1:-1], np.broadcast_to(n, (6, 4, 3)), atol=1e-9)
    with pytest.raises(ValueError, match="rows, columns"):
        normals_from_depth(depth, camera, rows=rows)


def test_the_normals_of_a_converted_plane_are_the_planes(tmp_path: Path) -> None:
    """At the real sizes, where 480 x 640 pixels do not thin out evenly to 288 x 384."""
    import h5py

    sources = nyu_sources(tmp_path)
    depth, n = slanted(NYU_CAMERA, 480, 640)
    with h5py.File(sources.mat, "w") as file:
        for name, kind in (("images", np.uint8), ("labels", np.uint16)):
            file[name] = np.zeros((5, 3, 640, 480) if name == "images" else (5, 640, 480), kind)
        file["rawDepths"] = np.broadcast_to(depth.T, (5, 640, 480)).astype(np.float32)
    root = prepare_nyuv2(dataclasses.replace(sources, size=NYUV2.size), tmp_path / "out", progress=False)
    normal = np.load(root / "train/normal/0.npy")[1:-1, 1:-1]
    cosine = np.clip(normal @ n, -1, 1)
    assert np.degrees(np.arccos(cosine)).max() < 0.1  # float32 depths


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
