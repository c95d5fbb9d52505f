"""MTAN's layout on disk: loading, the integrity check, augmentation, order and workers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # scripts that users copy, not an installed package

from dense.data.augment import SCALES, View, apply_view, draw_view, flip, zoom
from dense.data.check import check_split
from dense.data.dataset import DenseDataset, EpochSampler, make_loader
from dense.data.layout import load_array, open_split, save_array
from dense.errors import UserError
from dense.spec import CITYSCAPES, NYUV2, DenseSpec, cityscapes_spec

H, W = 32, 64


def write_set(root: Path, spec: DenseSpec = NYUV2, count: int = 3, label: str | None = None) -> Path:
    """Random files in MTAN's layout."""
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for i in range(count):
            base = root / split
            save_array(base / "image" / f"{i}.npy", rng.random((H, W, 3)).astype(np.float32))
            labels = rng.integers(-1, spec.classes, (H, W)).astype(np.float64)
            save_array(base / (label or spec.label_folders[0]) / f"{i}.npy", labels)
            save_array(base / "depth" / f"{i}.npy", rng.random((H, W, 1)).astype(np.float32))
            if "normal" in spec.tasks:
                normal = rng.normal(size=(H, W, 3))
                normal /= np.linalg.norm(normal, axis=-1, keepdims=True)
                save_array(base / "normal" / f"{i}.npy", normal.astype(np.float32))
    return root


# ------------------------------------------------------------------------------------------------ layout and check


def test_a_sample_has_the_files_values_channels_first(tmp_path: Path) -> None:
    split = open_split(write_set(tmp_path), NYUV2, "train")
    sample = DenseDataset(split, NYUV2)[1]
    assert {k: (tuple(v.shape), v.dtype) for k, v in sample.items()} == {
        "image": ((3, H, W), torch.float32),
        "segmentation": ((H, W), torch.int64),
        "depth": ((1, H, W), torch.float32),
        "normal": ((3, H, W), torch.float32),
    }
    image = np.load(tmp_path / "train" / "image" / "1.npy")
    np.testing.assert_array_equal(sample["image"].permute(1, 2, 0).numpy(), image)
    np.testing.assert_array_equal(sample["segmentation"].numpy(), np.load(tmp_path / "train" / "label" / "1.npy"))
    np.testing.assert_array_equal(sample["depth"][0].numpy(), np.load(tmp_path / "train" / "depth" / "1.npy")[..., 0])


def test_files_are_mapped_not_read(tmp_path: Path) -> None:
    write_set(tmp_path)
    assert isinstance(load_array(tmp_path / "train" / "image" / "0.npy"), np.memmap)


def test_a_correct_set_passes_the_check(tmp_path: Path) -> None:
    for spec, name in ((NYUV2, "a"), (CITYSCAPES, "b"), (cityscapes_spec(19), "c")):
        root = write_set(tmp_path / name, spec)
        for split in ("train", "val"):
            check_split(open_split(root, spec, split), spec, "full", progress=False)


def test_libmtls_label_folder_is_found(tmp_path: Path) -> None:
    root = write_set(tmp_path, CITYSCAPES, label="label")
    assert open_split(root, CITYSCAPES, "train").folders["segmentation"].name == "label"


def edit(root: Path, relative: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    np.save(root / relative, change(np.load(root / relative)))


def truncate(root: Path, relative: str) -> None:
    path = root / relative
    path.write_bytes(path.read_bytes()[:-7])


def write_npz(path: Path) -> None:
    with path.open("wb") as file:  # np.savez would add a suffix to a name
        np.savez(file, a=np.ones(3))


LONG_HEADER = b"\x93NUMPY\x01\x00" + (60_000).to_bytes(2, "little") + 60_000 * b" "
"""numpy explains over three lines why it does not trust this."""


BROKEN: list[tuple[str, Callable[[Path], None], str]] = [
    ("no root", lambda r: r.rename(r.with_name("gone")), "no such folder"),
    ("no split", lambda r: (r / "val").rename(r / "test"), "val: missing folder"),
    ("no folder", lambda r: (r / "val" / "depth").rename(r / "val" / "d"), "depth: missing folder"),
    ("no labels", lambda r: (r / "val" / "label").rename(r / "val" / "x"), "label: missing folder"),
    ("missing file", lambda r: (r / "train" / "normal" / "2.npy").unlink(), r"normal/2\.npy: missing \(1 of 3"),
    ("surplus file", lambda r: (r / "train" / "image" / "2.npy").unlink(), r"image/2\.npy: missing"),
    ("empty", lambda r: [p.unlink() for p in (r / "train" / "image").iterdir()], "no files named"),
    ("truncated", lambda r: truncate(r, "val/image/1.npy"), r"image/1\.npy: truncated"),
    ("cut header", lambda r: (r / "val/label/0.npy").write_bytes(b"\x93NUM"), r"label/0\.npy: truncated"),
    ("no npy", lambda r: (r / "val/depth/0.npy").write_text("hello"), r"depth/0\.npy: .*not a \.npy"),
    ("npz", lambda r: write_npz(r / "val/depth/1.npy"), r"depth/1\.npy: a zip archive"),
    ("flat image", lambda r: edit(r, "val/image/0.npy", np.ravel), r"image/0\.npy: expected an image of shape"),
    ("no pixel", lambda r: edit(r, "val/image/0.npy", lambda a: a[:0]), r"image/0\.npy: expected an image of shape"),
    ("long header", lambda r: (r / "val/label/0.npy").write_bytes(LONG_HEADER), r"label/0\.npy: truncated"),
    ("label high", lambda r: edit(r, "val/label/1.npy", lambda a: a + 13), r"label/1\.npy: expected labels from -1"),
    ("label low", lambda r: edit(r, "val/label/1.npy", lambda a: a - 1), r"label/1\.npy: expected labels from -1"),
    ("label half", lambda r: edit(r, "val/label/2.npy", lambda a: np.clip(a, 0, 5) + 0.5), "whole numbers"),
    ("depth sign", lambda r: edit(r, "train/depth/2.npy", lambda a: -a), r"depth/2\.npy: expected depth >= 0"),
    ("nan", lambda r: edit(r, "train/depth/1.npy", lambda a: a * np.nan), r"depth/1\.npy: NaN"),
    ("normals", lambda r: edit(r, "train/normal/0.npy", lambda a: a * 3), r"normal/0\.npy: expected normals"),
    ("shape", lambda r: edit(r, "train/depth/0.npy", lambda a: a[:-1]), r"depth/0\.npy: expected shape"),
    ("channels", lambda r: edit(r, "train/image/1.npy", lambda a: a[..., :1]), r"image/1\.npy: expected shape"),
    ("dtype", lambda r: edit(r, "train/image/1.npy", lambda a: a.astype("<U4")), r"image/1\.npy: expected numbers"),
]  # fmt: skip


@pytest.mark.parametrize(("breakage", "message"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN])
def test_the_first_bad_file_is_named_in_one_line(
    tmp_path: Path, breakage: Callable[[Path], None], message: str
) -> None:
    root = write_set(tmp_path / "set")
    breakage(root)

    def check_both() -> None:
        for split in ("train", "val"):
            check_split(open_split(root, NYUV2, split), NYUV2, "full", progress=False)

    with pytest.raises(UserError, match=message) as caught:
        check_both()
    assert "\n" not in str(caught.value)


def test_the_header_check_reads_no_pixel_but_sees_a_truncated_file(tmp_path: Path) -> None:
    root = write_set(tmp_path)
    edit(root, "train/label/1.npy", lambda a: a + 99)
    split = open_split(root, NYUV2, "train")
    check_split(split, NYUV2, "headers", progress=False)
    truncate(root, "train/label/2.npy")
    with pytest.raises(UserError, match=r"label/2\.npy"):
        check_split(split, NYUV2, "headers", progress=False)


def test_a_size_that_five_poolings_do_not_divide_is_named(tmp_path: Path) -> None:
    root = write_set(tmp_path)
    for path in root.glob("train/*/*.npy"):
        np.save(path, np.load(path)[:-2])
    with pytest.raises(UserError, match="30x64"):
        check_split(open_split(root, NYUV2, "train"), NYUV2, progress=False)


def test_a_bad_label_is_named_by_a_worker_process_too(tmp_path: Path) -> None:
    root = write_set(tmp_path)
    edit(root, "train/label/1.npy", lambda a: a + 99)
    loader = make_loader(DenseDataset(open_split(root, NYUV2, "train"), NYUV2), 1, shuffle=False, workers=1)
    with pytest.raises(UserError, match=r"label/1\.npy: expected labels"):
        list(loader)


# ------------------------------------------------------------------------------------------------ augmentation


def random_sample(seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    normal = torch.randn(3, H, W, generator=g)
    return {
        "image": torch.rand(3, H, W, generator=g),
        "segmentation": torch.randint(-1, 13, (H, W), generator=g),
        "depth": torch.rand(1, H, W, generator=g) + 1,
        "normal": normal / normal.norm(dim=0),
    }


def test_flipping_mirrors_everything_and_turns_the_normals_x() -> None:
    sample = random_sample()
    flipped = flip(sample)
    for name in ("image", "segmentation", "depth"):
        assert torch.equal(flipped[name], sample[name].flip(-1))
    assert torch.equal(flipped["normal"][0], -sample["normal"][0].flip(-1))
    assert torch.equal(flipped["normal"][1:], sample["normal"][1:].flip(-1))
    again = flip(flipped)
    assert all(torch.equal(again[name], sample[name]) for name in sample)


@pytest.mark.parametrize("scale", [1.2, 1.5])
@pytest.mark.parametrize(
    ("disparity", "faithful", "power"), [(False, False, -1), (False, True, -1), (True, False, 1), (True, True, -1)]
)
def test_zooming_scales_depth_down_and_disparity_up(scale: float, disparity: bool, faithful: bool, power: int) -> None:
    """A wall at 2 m fills the picture as if at 2/s m: depth / s, inverse depth x s. The public scripts divide both."""
    sample = random_sample() | {"depth": torch.full((1, H, W), 2.0)}
    zoomed = zoom(sample, View(scale, 1, 2, False), disparity=disparity, faithful=faithful)
    torch.testing.assert_close(zoomed["depth"], torch.full((1, H, W), 2.0 * scale**power))


@pytest.mark.parametrize("scale", [1.2, 1.5])
def test_depth_and_labels_are_nearest_and_the_image_is_bilinear_with_aligned_corners(scale: float) -> None:
    sample = random_sample()
    view = View(scale, 3, 5, False)
    zoomed = zoom(sample, view, disparity=False)
    h, w = int(H / scale), int(W / scale)
    rows, columns = 3 + (np.arange(H) * h / H).astype(int), 5 + (np.arange(W) * w / W).astype(int)
    expected = sample["segmentation"].numpy()[rows][:, columns]
    np.testing.assert_array_equal(zoomed["segmentation"].numpy(), expected)
    np.testing.assert_allclose(zoomed["depth"][0].numpy(), sample["depth"][0].numpy()[rows][:, columns] / scale, 1e-6)
    corners = zoomed["image"][:, [0, 0, -1, -1], [0, -1, 0, -1]]
    torch.testing.assert_close(corners, sample["image"][:, [3, 3, 3 + h - 1, 3 + h - 1], [5, 5 + w - 1, 5, 5 + w - 1]])


def test_normals_are_unit_vectors_again_unless_faithful() -> None:
    sample = random_sample()
    view = View(1.5, 0, 0, False)
    right = zoom(sample, view, disparity=False)["normal"].norm(dim=0)
    scripts = zoom(sample, view, disparity=False, faithful=True)["normal"].norm(dim=0)
    assert ((right - 1).abs() < 1e-5).logical_or(right == 0).all()
    assert (scripts < 0.9).float().mean() > 0.3


def test_an_invalid_neighbour_does_not_turn_a_normal() -> None:
    normal = torch.zeros(3, H, W)
    normal[2, :, : W // 2] = -1  # the right half is invalid
    zoomed = zoom(random_sample() | {"normal": normal}, View(1.2, 0, 0, False), disparity=False)["normal"]
    valid = (zoomed != 0).any(0)
    assert torch.equal(zoomed[:, valid], torch.tensor([0.0, 0.0, -1.0])[:, None].expand(-1, int(valid.sum())))
    assert 0.4 < valid.float().mean() < 0.7


def test_views_are_inside_the_image_and_every_scale_and_side_occurs() -> None:
    rng = np.random.default_rng(0)
    views = [draw_view(H, W, rng) for _ in range(300)]
    assert {view.scale for view in views} == set(SCALES)
    assert 0.4 < np.mean([view.flipped for view in views]) < 0.6
    assert all(view.top + int(H / view.scale) <= H and view.left + int(W / view.scale) <= W for view in views)
    assert max(view.top for view in views if view.scale == 1.5) == H - int(H / 1.5)
    assert apply_view(random_sample(), View(1.0, 0, 0, False), disparity=False)["image"].shape == (3, H, W)


# ------------------------------------------------------------------------------------------------ order


def test_the_order_is_a_permutation_keyed_on_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = EpochSampler(50, seed=seed)
        sampler.epoch = epoch
        keys = list(sampler)
        assert {key[0] for key in keys} == {epoch}
        return [key[1] for key in keys]

    assert sorted(order(0, 1)) == list(range(50))
    assert order(0, 1) == order(0, 1)
    assert order(0, 1) != order(0, 2)
    assert order(0, 1) != order(1, 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_do_not_depend_on_workers_or_on_what_ran_before(tmp_path: Path, workers: int) -> None:
    split = open_split(write_set(tmp_path, count=5), NYUV2, "train")

    def epoch(number: int, workers: int, warm: bool) -> list[dict[str, torch.Tensor]]:
        loader = make_loader(DenseDataset(split, NYUV2, augment=True, seed=3), 2, shuffle=True, workers=workers)
        if warm:
            loader.sampler.epoch = 1
            list(loader)
            torch.rand(7)
        loader.sampler.epoch = number
        return list(loader)

    expected = epoch(2, 0, warm=False)
    found = epoch(2, workers, warm=True)
    assert len(found) == len(expected) == 3  # the last batch is kept
    for a, b in zip(expected, found, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_pass_leaves_the_global_random_stream_alone(tmp_path: Path) -> None:
    split = open_split(write_set(tmp_path), NYUV2, "train")
    before = torch.get_rng_state()
    list(make_loader(DenseDataset(split, NYUV2, augment=True), 2, shuffle=True))
    assert torch.equal(torch.get_rng_state(), before)
