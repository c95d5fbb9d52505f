"""Task vectors on disk, and the files that this package writes."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from cost_mtl.merging import CheckpointSource, TaskVector, open_vectors, storage, writer
from cost_mtl.merging.source import TensorInfo
from tests.merging.merging_files import merge, read_all


@pytest.mark.parametrize("target", ["tau.safetensors", "tau"])
def test_a_vector_comes_back_as_it_was_saved(folders, tmp_path, target):
    paths, states = folders
    tau = TaskVector(states[0], states[1])
    tau.save(tmp_path / target)
    for base in (states[0], str(paths[0])):
        loaded = TaskVector.load(tmp_path / target, base=base)
        assert set(loaded.blocks) == set(tau.blocks)
        assert all(torch.equal(loaded.blocks[block], value) for block, value in tau.blocks.items())
        assert loaded.base_hash == tau.base_hash
    assert TaskVector.load(tmp_path / target, base=None).norm() == tau.norm()
    with pytest.raises(FileExistsError):
        tau.save(tmp_path / target)


def test_a_vector_in_shards(folders, tmp_path):
    _, states = folders
    tau = TaskVector(states[0], states[1])
    storage.save_vector(tau, tmp_path / "tau", shard_bytes=50)
    assert len(list((tmp_path / "tau").glob("task_vector-*.safetensors"))) == 3
    loaded = TaskVector.load(tmp_path / "tau", base=states[0])
    assert all(torch.equal(loaded.blocks[block], value) for block, value in tau.blocks.items())


def test_the_base_is_checked_on_load(folders, tmp_path):
    _, states = folders
    TaskVector(states[0], states[1]).save(tmp_path / "tau.safetensors")
    with pytest.raises(
        ValueError, match=r"taken from base, got one of another base: 3 of 3 blocks differ, 'a\.weight' first"
    ):
        TaskVector.load(tmp_path / "tau.safetensors", base=states[2])
    nearly = {key: value.clone() for key, value in states[0].items()}
    nearly["b.weight"].view(-1)[-1] += 1
    with pytest.raises(ValueError, match=r"1 of 3 blocks differ, 'b\.weight' first"):
        TaskVector.load(tmp_path / "tau.safetensors", base=nearly)
    with pytest.raises(ValueError, match="2 of 3 blocks differ"):
        TaskVector.load(tmp_path / "tau.safetensors", base={"a.bias": states[0]["a.bias"]})
    TaskVector(states[0], states[1]).without_base().save(tmp_path / "free.safetensors")
    with pytest.raises(ValueError, match="expected None for a vector saved after without_base"):
        TaskVector.load(tmp_path / "free.safetensors", base=states[0])


def test_loading_something_else(tmp_path, state):
    save_file(state(0), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"expected a task vector that TaskVector\.save wrote, got "):
        TaskVector.load(tmp_path / "model.safetensors", base=None)


def test_storing_in_bfloat16_costs_what_the_documentation_says(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tau = TaskVector({"w": torch.zeros(50_000)}, {"w": torch.randn(50_000, generator=generator)})
    tau.save(tmp_path / "tau.safetensors", dtype=torch.bfloat16)
    stored = TaskVector.load(tmp_path / "tau.safetensors", base=None).blocks["w"]
    assert stored.dtype == torch.float32
    error = float((stored - tau.blocks["w"]).norm() / tau.norm())
    assert 0.0005 < error < 0.003
    with pytest.raises(ValueError, match="at least 16 bits"):
        tau.save(tmp_path / "x.safetensors", dtype=torch.int8)


def test_statistics_and_added_blocks_are_saved_too(tmp_path, normed, perturb):
    tuned = perturb(normed, 1)
    tuned[1].running_mean.fill_(2.0)
    tau = TaskVector(normed.state_dict(), tuned.state_dict() | {"extra": torch.ones(2).half()}, keys="union")
    tau.save(tmp_path / "tau.safetensors")
    loaded = TaskVector.load(tmp_path / "tau.safetensors", base=normed)
    merged = loaded.apply_to(normed.state_dict(), buffers="average")
    assert torch.equal(merged["1.running_mean"], torch.full((6,), 2.0))
    assert torch.equal(merged["extra"], torch.ones(2).half())


def test_saved_vectors_are_merged_like_models(folders, tmp_path):
    paths, states = folders
    TaskVector(states[0], states[1]).save(tmp_path / "tau.safetensors")
    merge([paths[0], tmp_path / "tau.safetensors", paths[2]], tmp_path / "mixed")
    merge(paths, tmp_path / "plain")
    assert all(torch.equal(read_all(tmp_path / "mixed")[k], v) for k, v in read_all(tmp_path / "plain").items())
    base = CheckpointSource(paths[0], "base")
    (chosen,) = open_vectors(base, [tmp_path / "tau.safetensors"], "strict", exclude=["a.*"])
    assert list(chosen.blocks) == ["b.weight"]
    with pytest.raises(ValueError, match="got one of another base"):
        merge([paths[1], tmp_path / "tau.safetensors"], tmp_path / "wrong")


# ------------------------------------------------------------------------------------------------ the writer


def test_files_are_what_the_library_reads(tmp_path):
    """Every dtype of the format, odd sizes that misalign, a scalar, an empty tensor, a transposed view."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{code}": torch.randint(0, 2, (3, 5), generator=generator).to(dtype) for code, dtype in writer.CODES.items()
    }
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "turned \u00e9": torch.randn(3, 4).T}
    infos = {key: TensorInfo(tuple(value.shape), value.dtype) for key, value in tensors.items()}
    size = writer.write_safetensors(tmp_path / "x.safetensors", infos, tensors.__getitem__, {"format": "pt"})
    assert size == sum(value.nbytes for value in tensors.values())
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    for key, value in tensors.items():
        assert loaded[key].dtype == value.dtype
        bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (loaded[key], value)]
        assert torch.equal(*bits)
    assert CheckpointSource(tmp_path / "x.safetensors", "x").infos == infos


def test_the_writer_refuses_a_tensor_that_is_not_as_announced(tmp_path):
    infos = {"w": TensorInfo((2,), torch.float32)}
    with pytest.raises(ValueError, match=r"'w': expected .*, got \[3\] in torch\.float32"):
        writer.write_safetensors(tmp_path / "x.safetensors", infos, lambda _: torch.ones(3), {})
    with pytest.raises(ValueError, match=r"can hold, got torch\.complex128"):
        writer.write_safetensors(tmp_path / "x", {"w": TensorInfo((2,), torch.complex128)}, lambda _: torch.ones(3), {})
