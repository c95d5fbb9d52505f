"""Files that someone damaged or made up, and every dtype there is: one clear line, or the right result."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from cost_mtl.merging import DVBASI, AnisotropicScaling, RankPruning, TaskVector, breadcrumbs, dare, ties, writer
from cost_mtl.merging.cli import main
from cost_mtl.merging.source import TensorInfo

DEEP = "[" * 200_000


def metadata_of(path):
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


METADATA = {
    "no digests": ({"base_digests": None}, "base_digests"),
    "no added": ({"added": None}, "added"),
    "digests are no JSON": ({"base_digests": "{"}, "base_digests"),
    "digests are nested": ({"base_digests": DEEP}, "base_digests"),
    "digests are a list": ({"base_digests": "[1, 2]"}, "base_digests"),
    "digests are numbers": ({"base_digests": '{"a.bias": 3}'}, "base_digests"),
    "added is nested": ({"added": DEEP}, "added"),
    "no dtype": ({"added": '{"a.bias": "nn"}'}, "got 'a.bias' in 'nn'"),
    "an unknown dtype": ({"added": '{"a.bias": "float37"}'}, "got 'a.bias' in 'float37'"),
    "an integer": ({"added": '{"a.bias": "int8"}'}, "at least 16 bits"),
    "complex": ({"added": '{"a.bias": "complex64"}'}, "all weights real or all complex"),
    "a block that is not there": ({"added": '{"z": "float32"}'}, "got 'z'"),
}


@pytest.mark.parametrize("case", METADATA)
def test_a_saved_vector_with_other_metadata(tmp_path, state, capsys, case):
    changes, message = METADATA[case]
    TaskVector(state(0), state(1)).save(tmp_path / "tau.safetensors")
    metadata = metadata_of(tmp_path / "tau.safetensors") | changes
    known = {key: value for key, value in metadata.items() if value is not None}
    save_file(load_file(tmp_path / "tau.safetensors"), tmp_path / "bad.safetensors", known)
    with pytest.raises(ValueError, match=f"^path: .*({message})"):
        TaskVector.load(tmp_path / "bad.safetensors", base=None)
    save_file(state(0), tmp_path / "base.safetensors")
    argv = ["merge", "--base", str(tmp_path / "base.safetensors"), "--models", str(tmp_path / "bad.safetensors")]
    assert main([*argv, "--out", str(tmp_path / "out.safetensors"), "--quiet"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("which", ["base", "one"])
def test_a_deeply_nested_index_is_one_line(folders, tmp_path, capsys, which):
    (tmp_path / which / "model.safetensors.index.json").write_text(DEEP)
    argv = [
        "merge",
        "--base",
        str(tmp_path / "base"),
        "--models",
        str(tmp_path / "one"),
        "--out",
        str(tmp_path / "out"),
    ]
    assert main([*argv, "--quiet"]) == 1
    errors = capsys.readouterr().err
    assert re.fullmatch(r"cost-mtl merge: error: .*a readable index, got .*\n", errors)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", [DEEP, '{"a":' * 5000 + "1" + "}" * 5000], ids=["open", "closed"])
def test_a_deeply_nested_configuration(folders, tmp_path, text, capsys):
    """A model's is copied as it is; an adapter's is an error."""
    (tmp_path / "base" / "config.json").write_text(text)
    argv = ["merge", "--base", str(tmp_path / "base"), "--quiet", "--out", str(tmp_path / "out"), "--models"]
    assert main([*argv, str(tmp_path / "one"), "--dtype", "float32"]) == 0
    assert (tmp_path / "out" / "config.json").read_text() == text
    (tmp_path / "two" / "adapter_config.json").write_text(text)
    assert main([*argv, str(tmp_path / "two"), "--overwrite"]) == 1
    assert re.fullmatch(r"cost-mtl merge: error: .*expected a (readable|LoRA).*\n", capsys.readouterr().err)


def test_a_deeply_nested_header(tmp_path, state, capsys):
    header = (b'{"w":' + DEEP.encode())[: 100_000 // 8 * 8]
    (tmp_path / "one.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    save_file(state(0), tmp_path / "base.safetensors")
    argv = ["merge", "--base", str(tmp_path / "base.safetensors"), "--models", str(tmp_path / "one.safetensors")]
    assert main([*argv, "--out", str(tmp_path / "out.safetensors"), "--quiet"]) == 1
    assert re.fullmatch(r"cost-mtl merge: error: .*expected a complete safetensors file.*\n", capsys.readouterr().err)


# ------------------------------------------------------------------------------------------------ dtypes


def values(dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (6,), generator=generator).to(torch.float32).add(seed % 2 * 0.5).to(dtype)


METHODS = ["task_arithmetic", "average", "ties", "dare", "breadcrumbs"]


def store(path, tensors):
    infos = {key: TensorInfo(tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
    writer.write_safetensors(path, infos, tensors.__getitem__, {})


@pytest.mark.filterwarnings("ignore:.*buffers that are no weights")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("out_dtype", [None, "float16", "float64"])
@pytest.mark.parametrize("pair", ["same", "mixed"])
def test_every_dtype_is_merged_or_refused_in_one_line(tmp_path, capsys, method, out_dtype, pair):
    for code, dtype in writer.CODES.items():
        other = torch.float32 if pair == "mixed" else dtype
        store(tmp_path / "base.safetensors", {"w": values(dtype, 0), "plain": torch.zeros(2)})
        store(tmp_path / "one.safetensors", {"w": values(other, 1), "plain": torch.ones(2)})
        out = tmp_path / f"{code}.safetensors"
        argv = ["merge", "--base", str(tmp_path / "base.safetensors"), "--models", str(tmp_path / "one.safetensors")]
        argv += ["--out", str(out), "--method", method, "--quiet", *(["--dtype", out_dtype] if out_dtype else [])]
        status = main(argv)
        lines = [line for line in capsys.readouterr().err.splitlines() if " warning: " not in line]
        assert (status, len(lines)) in ((0, 0), (1, 1)), (code, lines)
        assert out.exists() == (status == 0)
        real = dtype.is_floating_point and dtype.itemsize > 1
        expected = real or not (dtype.is_floating_point or dtype.is_complex or dtype in (torch.int8, torch.uint8))
        if dtype.is_complex:
            expected = pair == "same" and out_dtype is None and method in ("task_arithmetic", "average")
        if expected:
            assert status == 0, (code, lines)
            merged = load_file(out)["w"]
            named = getattr(torch, out_dtype) if out_dtype and real else dtype
            assert merged.dtype == named
            if not (real or dtype.is_complex):  # no weights: the base's
                assert torch.equal(merged, values(dtype, 0))
            elif method in ("task_arithmetic", "average"):
                torch.testing.assert_close(merged, values(other, 1).to(named))
        elif dtype.is_complex:
            assert status == 1, code


def test_complex_weights_keep_their_imaginary_parts_or_are_refused(tmp_path):
    generator = torch.Generator().manual_seed(0)
    base, tuned = (torch.randn(3, 2, generator=generator, dtype=torch.complex64) for _ in range(2))
    tau = TaskVector({"w": base}, {"w": tuned})
    torch.testing.assert_close(tau.apply_to({"w": base}, 0.5)["w"], base + 0.5 * (tuned - base))
    for real, other in (({"w": base.real.clone()}, {"w": tuned}), ({"w": base}, {"w": tuned.real.clone()})):
        with pytest.raises(ValueError, match=r"'w': expected all weights real or all complex, got torch"):
            TaskVector(real, other)
    with pytest.raises(ValueError, match="'w': expected all weights real or all complex"):
        tau.apply_to({"w": base.real.clone()})
    with pytest.raises(ValueError, match=r"dtype, 'w': expected all weights real or all complex"):
        tau.save(tmp_path / "tau.safetensors", dtype=torch.bfloat16)
    tau.save(tmp_path / "tau.safetensors")
    assert torch.equal(TaskVector.load(tmp_path / "tau.safetensors", base={"w": base}).blocks["w"], tau.blocks["w"])
    for thin in (lambda t: ties([t], 0.5), lambda t: dare(t, 0.5), breadcrumbs):
        with pytest.raises(ValueError, match=r"'w': expected real weights, got torch\.complex64"):
            thin(tau)


class Spectral(nn.Module):
    """A complex weight, as in Fourier layers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.w = nn.Parameter(torch.randn(3, 3, generator=generator, dtype=torch.complex64))

    def forward(self, x):
        return (x.to(self.w) @ self.w).abs()


def test_complex_weights_in_learned_merges():
    base, tuned = Spectral(0), Spectral(1)
    tau = TaskVector(base, tuned)
    batches = [torch.eye(3)]

    def loss(model, batch):
        return (model(batch) - tuned(batch).detach()).square().mean()

    scaling = AnisotropicScaling(base, [tau], init=0.5)
    assert scaling.fit(loss, batches, batches).best < float(loss(scaling.__class__(base, [tau], init=0.5), batches[0]))
    with pytest.raises(ValueError, match=r"'w': expected real weights"):
        RankPruning(base, [tau])
    start = AnisotropicScaling(base, [tau], init=0.5).merged_model()
    with pytest.raises(ValueError, match=r"'w': expected real weights"):
        DVBASI(1, direction="random_matched").run(start, base, loss, batches, batches)


def test_weights_that_the_vector_does_not_change_do_not_overflow_silently(tmp_path, capsys):
    base = {"w": torch.ones(2), "big": torch.tensor([1.0, 1e6])}
    save_file(base, tmp_path / "base.safetensors")
    save_file({"w": torch.zeros(2), "big": base["big"]}, tmp_path / "one.safetensors")
    argv = ["merge", "--base", str(tmp_path / "base.safetensors"), "--models", str(tmp_path / "one.safetensors")]
    argv += ["--exclude", "big", "--dtype", "float16", "--out", str(tmp_path / "out.safetensors"), "--quiet"]
    assert main(argv) == 1
    assert "'big': expected weights that are finite in torch.float16, got" in capsys.readouterr().err
    tau = TaskVector({"w": base["w"]}, {"w": base["w"], "big": torch.tensor([3e4]).half()}, keys="union")
    with pytest.raises(ValueError, match=r"'big': expected weights that are finite in torch\.float16, got"):
        tau.apply_to({"w": base["w"]}, 4.0)
