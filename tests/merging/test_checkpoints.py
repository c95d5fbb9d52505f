"""Checkpoints on disk: what is read, what is written, and what a damaged one leads to."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cost_mtl.merging import CheckpointSource, TaskVector, combine, open_vectors, storage
from tests.merging.merging_files import listing, merge, read_all, write_sharded


def test_a_merge_on_disk_is_the_merge_in_memory(folders, tmp_path):
    paths, states = folders
    merge(paths, tmp_path / "out")
    total = TaskVector(states[0], states[1]) + TaskVector(states[0], states[2])
    expected = total.apply_to(states[0], 0.5)
    merged = read_all(tmp_path / "out")
    assert merged.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(merged[key], value)


def test_the_layout_of_the_base_is_kept(folders, tmp_path):
    paths, _ = folders
    merge(paths, tmp_path / "out")
    assert listing(tmp_path / "out") == listing(paths[0])
    assert (tmp_path / "out" / "config.json").read_bytes() == (paths[0] / "config.json").read_bytes()
    index, original = (
        json.loads((p / "model.safetensors.index.json").read_text()) for p in (tmp_path / "out", paths[0])
    )
    assert index == original
    metadata = CheckpointSource(tmp_path / "out", "out").metadata
    assert metadata["format"] == "pt"
    assert json.loads(metadata["cost_mtl"])["scale"] == 0.5


def test_another_dtype_is_written_and_counted(folders, tmp_path):
    paths, states = folders
    merge(paths, tmp_path / "out", dtype=torch.float32)
    merged = read_all(tmp_path / "out")
    assert {value.dtype for value in merged.values()} == {torch.float32}
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in merged.values())
    expected = states[0]["a.bias"].float() + 0.5 * sum(
        s["a.bias"].float() - states[0]["a.bias"].float() for s in states[1:]
    )
    torch.testing.assert_close(merged["a.bias"], expected)


def test_vectors_from_files_are_lazy_and_equal(folders):
    paths, states = folders
    tau = TaskVector(paths[0], paths[1])
    assert "computed at access" in repr(tau)
    assert "in memory" in repr(tau.materialize())
    reference = TaskVector(states[0], states[1])
    for vector, expected in ((tau, reference), (2 * tau - tau / 2, 2 * reference - reference / 2)):
        for block in reference.blocks:
            assert torch.equal(vector.blocks[block], expected.blocks[block])
    assert tau.base_hash == reference.base_hash
    assert tau.select(lambda b: b == "a.bias").norm() == pytest.approx(reference.norms()["a.bias"])
    with pytest.raises(KeyError):
        tau.blocks["no such block"]


def test_opening_reads_no_values(folders, monkeypatch):
    paths, _ = folders

    def refuse(self, key):
        raise AssertionError(f"{key} was read")

    monkeypatch.setattr(CheckpointSource, "read", refuse)
    base = CheckpointSource(paths[0], "base")
    combine(open_vectors(base, paths[1:], "strict"), [1.0, 1.0])


def test_union_adds_keys_to_the_last_shard(folders, tmp_path, state):
    paths, states = folders
    shutil.rmtree(paths[1])
    write_sharded(paths[1], states[1] | {"extra": torch.tensor([2.0, 4.0]).bfloat16()})
    merge(paths[:2], tmp_path / "out", keys="union")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["extra"] == "model-00002-of-00002.safetensors"
    assert torch.equal(read_all(tmp_path / "out")["extra"], torch.tensor([1.0, 2.0]).bfloat16())


def test_a_single_file(tmp_path, state):
    for name, seed in (("base", 0), ("one", 1)):
        save_file(state(seed), tmp_path / f"{name}.safetensors", {"format": "pt", "author": "someone"})
    merge([tmp_path / "base.safetensors", tmp_path / "one.safetensors"], tmp_path / "out.safetensors", scale=1.0)
    merged = load_file(tmp_path / "out.safetensors")
    for key, value in state(1).items():
        torch.testing.assert_close(merged[key], value, rtol=1e-6, atol=1e-6)
    assert CheckpointSource(tmp_path / "out.safetensors", "out").metadata["author"] == "someone"


def test_outputs_have_the_permissions_of_any_new_file(folders, tmp_path):
    paths, states = folders
    (tmp_path / "new").touch()
    expected = oct((tmp_path / "new").stat().st_mode)
    merge(paths, tmp_path / "out")
    TaskVector(states[0], states[1]).save(tmp_path / "tau.safetensors")
    for file in (*(tmp_path / "out").iterdir(), tmp_path / "tau.safetensors"):
        assert oct(file.stat().st_mode) == expected


# ------------------------------------------------------------------------------------------------ damaged input


def truncate(folder):
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-5])


def truncate_header(folder):
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"\x10\x00\x00")


def garble_header(folder):
    shard = folder / "model-00001-of-00002.safetensors"
    data = bytearray(shard.read_bytes())
    data[8:20] = b"x" * 12
    shard.write_bytes(data)


def empty_file(folder):
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")


def drop_shard(folder):
    (folder / "model-00002-of-00002.safetensors").unlink()


def edit_index(change):
    def damage(folder):
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        change(index)
        path.write_text(json.dumps(index))

    return damage


def swap_shape(folder):
    shard = folder / "model-00001-of-00002.safetensors"
    tensors = load_file(shard)
    tensors["a.bias"] = torch.zeros(5, dtype=torch.bfloat16)
    save_file(tensors, shard)


def put_nan(folder):
    shard = folder / "model-00002-of-00002.safetensors"  # the last one: the first shard is written by then
    tensors = load_file(shard)
    tensors["b.weight"].view(-1)[0] = float("nan")
    save_file(tensors, shard)


DAMAGE = {
    "truncated": (truncate, "a complete safetensors file, got .*00002-of-00002"),
    "truncated header": (truncate_header, "a complete safetensors file, got .*00001-of-00002"),
    "garbled header": (garble_header, "a complete safetensors file, got "),
    "empty": (empty_file, "a complete safetensors file, got "),
    "missing shard": (drop_shard, "00002-of-00002.safetensors, got no such file"),
    "index is no JSON": (lambda f: (f / "model.safetensors.index.json").write_text("{"), "a readable index, got "),
    "index without map": (edit_index(lambda i: i.pop("weight_map")), "an index with a weight_map, got "),
    "key not in shard": (
        edit_index(lambda i: i["weight_map"].update(x="model-00001-of-00002.safetensors")),
        "'x' should",
    ),
    "key not in index": (edit_index(lambda i: i["weight_map"].pop("a.bias")), "1 keys that disagree: 'a.bias'"),
    "shard outside": (
        edit_index(lambda i: i["weight_map"].update(x="../x.safetensors")),
        "expected the name of a file beside .*, got ",
    ),
    "another shape": (swap_shape, r"'a.bias' \[4\] against \[5\]"),
    "NaN": (put_nan, "'b.weight'.*NaN or infinity in the fine-tuned model"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_one_error_and_leaves_nothing(folders, tmp_path, damage):
    paths, _ = folders
    change, message = DAMAGE[damage]
    change(paths[2])
    before = listing(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=f"models.*two.*{message}"):
        merge(paths, tmp_path / "out")
    assert listing(tmp_path) == before


@pytest.mark.parametrize("damage", ["truncated", "missing shard", "garbled header"])
def test_a_damaged_base_is_named(folders, tmp_path, damage):
    paths, _ = folders
    change, message = DAMAGE[damage]
    change(paths[0])
    with pytest.raises((ValueError, FileNotFoundError), match=f"base: .*{message}"):
        merge(paths, tmp_path / "out")


def test_what_is_no_checkpoint(tmp_path, state):
    with pytest.raises(FileNotFoundError, match=r"base: expected a file or folder, got .* which does not exist"):
        CheckpointSource(tmp_path / "nowhere", "base")
    with pytest.raises(FileNotFoundError, match=r"expected a \.safetensors file in the folder .*, got none"):
        CheckpointSource(tmp_path, "base")
    torch.save(state(0), tmp_path / "model.bin")
    with pytest.raises(ValueError, match=r"expected a \.safetensors file.*torch\.load"):
        CheckpointSource(tmp_path / "model.bin", "base")
    for name in ("a", "b"):
        save_file(state(0), tmp_path / f"{name}.safetensors")
    with pytest.raises(
        ValueError,
        match=r"expected one checkpoint in .*, got several \(a\.safetensors, b\.safetensors\): name the file",
    ):
        CheckpointSource(tmp_path, "base")


def test_an_empty_checkpoint_and_no_models(tmp_path, state):
    save_file({}, tmp_path / "empty.safetensors")
    with pytest.raises(ValueError, match="expected at least one tensor"):
        CheckpointSource(tmp_path / "empty.safetensors", "base")
    save_file(state(0), tmp_path / "base.safetensors")
    with pytest.raises(ValueError, match="models: expected at least one model"):
        open_vectors(CheckpointSource(tmp_path / "base.safetensors", "base"), [], "strict")


# ------------------------------------------------------------------------------------------------ the output


def test_an_existing_output_is_not_replaced_by_accident(folders, tmp_path):
    paths, _ = folders
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("keep")
    with pytest.raises(FileExistsError, match=r"out: expected a path that does not exist, got "):
        merge(paths, out)
    assert listing(out) == ["mine.txt"]
    with pytest.raises(ValueError, match=r"out: expected a folder that holds nothing but a model, .* 'mine\.txt'"):
        merge(paths, out, overwrite=True)
    assert listing(out) == ["mine.txt"]
    (out / "mine.txt").unlink()
    for scale in (0.5, 0.25):
        merge(paths, out, scale=scale, overwrite=True)
        assert listing(out) == listing(paths[0])
        assert json.loads(CheckpointSource(out, "out").metadata["cost_mtl"])["scale"] == scale
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_an_earlier_output_survives_a_merge_that_fails(folders, tmp_path):
    paths, _ = folders
    merge(paths, tmp_path / "out")
    before = {name: (tmp_path / "out" / name).read_bytes() for name in listing(tmp_path / "out")}
    put_nan(paths[2])
    with pytest.raises(ValueError, match="NaN"):
        merge(paths, tmp_path / "out", overwrite=True)
    assert {name: (tmp_path / "out" / name).read_bytes() for name in listing(tmp_path / "out")} == before
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device"), MemoryError()]
)
@pytest.mark.parametrize("out", ["out", "out.safetensors"])
def test_nothing_is_left_of_an_interrupted_merge(folders, tmp_path, monkeypatch, state, error, out):
    paths, states = folders
    if out.endswith("safetensors"):
        paths = [tmp_path / f"{number}.safetensors" for number in range(3)]
        for path, values in zip(paths, states, strict=True):
            save_file(values, path)
    before = listing(tmp_path)
    real, calls = storage.write_safetensors, []

    def failing(path, *rest):
        calls.append(path)
        if len(calls) == (1 if out.endswith("safetensors") else 2):
            Path(path).write_bytes(b"half a file")
            raise error
        return real(path, *rest)

    monkeypatch.setattr(storage, "write_safetensors", failing)
    with pytest.raises(type(error)):
        merge(paths, tmp_path / out)
    assert listing(tmp_path) == before


@pytest.mark.parametrize("out", ["base", "base/model-00001-of-00002.safetensors", "out.safetensors", "no/such/folder"])
def test_outputs_that_can_not_be(folders, tmp_path, out):
    paths, _ = folders
    before = read_all(paths[0])
    with pytest.raises((ValueError, FileNotFoundError), match=r"^out: "):
        merge(paths, tmp_path / out, overwrite=True)
    assert all(torch.equal(value, before[key]) for key, value in read_all(paths[0]).items())


def test_statistics_on_disk(tmp_path, normed, perturb):
    tuned = perturb(normed, 1)
    tuned[1].running_var.fill_(3.0)
    for name, model in (("base", normed), ("one", tuned)):
        save_file(model.state_dict(), tmp_path / f"{name}.safetensors")
    paths = [tmp_path / "base.safetensors", tmp_path / "one.safetensors"]
    with pytest.warns(UserWarning, match="keeps the base's"):
        merge(paths, tmp_path / "kept.safetensors", scale=1.0, dtype=torch.float16)
    merge(paths, tmp_path / "averaged.safetensors", scale=1.0, buffers="average")
    kept, averaged = load_file(tmp_path / "kept.safetensors"), load_file(tmp_path / "averaged.safetensors")
    assert torch.equal(kept["1.running_var"], torch.ones(6))  # of its own dtype, though weights are written as float16
    assert kept["0.weight"].dtype == torch.float16
    assert torch.equal(averaged["1.running_var"], torch.full((6,), 3.0))
    assert averaged["1.num_batches_tracked"].dtype == torch.int64
    with pytest.raises(ValueError, match="buffers: expected one of 'keep', 'average', got 'recalibrate'"):
        merge(paths, tmp_path / "x.safetensors", buffers="recalibrate")


@pytest.mark.parametrize("single", [False, True])
def test_a_symbolic_link_is_written_through(folders, tmp_path, state, single):
    paths, _ = folders
    name = "real.safetensors" if single else "real"
    if single:
        paths = [tmp_path / f"{seed}.safetensors" for seed in range(2)]
        for seed, path in enumerate(paths):
            save_file(state(seed), path)
    merge(paths, tmp_path / name)
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / name
    link.symlink_to(tmp_path / name)
    before = listing(tmp_path)
    merge(paths, link, scale=0.25, overwrite=True)
    assert listing(tmp_path) == before
    assert link.is_symlink()
    source = CheckpointSource(tmp_path / name, "out")
    assert json.loads(source.metadata["cost_mtl"])["scale"] == 0.25


def test_a_folder_that_cannot_be_moved_is_left_as_it_was(folders, tmp_path, monkeypatch):
    paths, _ = folders
    merge(paths, tmp_path / "out")
    before, replace = listing(tmp_path), os.replace

    def refuse(source, target):
        if Path(source) == tmp_path / "out":  # a mount point
            raise OSError(errno.EBUSY, "busy")
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="busy"):
        merge(paths, tmp_path / "out", scale=0.25, overwrite=True)
    assert listing(tmp_path) == before
