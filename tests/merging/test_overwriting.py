"""Overwriting destroys neither what was read nor what is no model, however the paths are spelled."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from cost_mtl.merging import AnisotropicScaling, TaskVector, atomic, breadcrumbs, dare, ties
from cost_mtl.merging.cli import main
from tests.merging.merging_files import merge


def snapshot(folder: Path):
    """Every path below, with what it holds or points to."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.is_file() and path.read_bytes()
        for path in folder.rglob("*")
    }


def link(target, name):
    name.symlink_to(target)
    return name


def hard(folder, source, name):
    """A folder that is a model by itself, and one of whose files is a hard link to a source's."""
    out = folder / name
    shutil.copytree(source, out)
    shard = "model-00002-of-00002.safetensors"
    (out / shard).unlink()
    os.link(source / shard, out / shard)
    return out


def inner(folder, source):
    """The whole of a source is a folder inside the output."""
    shutil.move(source, folder / "keep")
    shutil.copytree(folder / "keep", folder / "outer")
    shutil.move(folder / "keep", folder / "outer" / "inside")
    return folder / "outer", folder / "outer" / "inside"


OUTPUTS = {
    "the base": lambda folder: folder / "base",
    "a model": lambda folder: folder / "one",
    "another spelling": lambda folder: folder / "one" / ".." / "one" / ".",
    "a link to the base": lambda folder: link(folder / "base", folder / "link"),
    "a link to a link": lambda folder: link(link(folder / "two", folder / "a"), folder / "b"),
    "the folder of all": lambda folder: folder,
    "inside the base": lambda folder: folder / "base" / "merged",
    "inside a model": lambda folder: folder / "two" / "merged",
    "a hard link to a shard": lambda folder: hard(folder, folder / "one", "out"),
    "a link inside": lambda folder: link(folder / "one", folder / "x") / "merged",
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_no_input_is_overwritten(folders, tmp_path, capsys, case):
    out = OUTPUTS[case](tmp_path)
    before = snapshot(tmp_path)
    models = [str(tmp_path / "one"), str(tmp_path / "two")]
    argv = ["merge", "--base", str(tmp_path / "base"), "--models", *models, "--out", str(out), "--overwrite", "--quiet"]
    assert main(argv) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("cost-mtl merge: error: out: ")
    assert errors.count("\n") == 1
    assert snapshot(tmp_path) == before


def test_the_current_folder_is_not_emptied(folders, tmp_path, monkeypatch, capsys):
    (tmp_path / "thesis.txt").write_text("four years")
    monkeypatch.chdir(tmp_path)
    before = snapshot(tmp_path)
    argv = ["merge", "--base", "base", "--models", "one", "--out", ".", "--overwrite", "--quiet"]
    assert main(argv) == 1
    assert "out: expected another path, got .: it holds" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path / "base")
    assert main(["merge", "--base", ".", "--models", "../one", "--out", ".", "--overwrite", "--quiet"]) == 1
    assert snapshot(tmp_path) == before


def test_an_input_inside_the_output_stays(folders, tmp_path):
    paths, _ = folders
    out, source = inner(tmp_path, paths[1])
    before = snapshot(tmp_path)
    with pytest.raises(ValueError, match=r"^out: .* holds "):
        merge([paths[0], source], out, overwrite=True)
    assert snapshot(tmp_path) == before


def test_an_input_that_a_link_in_the_output_leads_to_stays_reachable(folders, tmp_path):
    paths, _ = folders
    out = tmp_path / "out"
    out.mkdir()
    for file in paths[1].iterdir():
        link(file, out / file.name)
    before = snapshot(tmp_path)
    with pytest.raises(ValueError, match=r"^out: .* which is read"):
        merge(paths, out, overwrite=True)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("which", ["base", "one"])
@pytest.mark.parametrize("how", ["itself", "symbolic", "hard"])
def test_single_files(tmp_path, state, which, how):
    paths = [tmp_path / f"{name}.safetensors" for name in ("base", "one")]
    for seed, path in enumerate(paths):
        save_file(state(seed), path)
    source, out = tmp_path / f"{which}.safetensors", tmp_path / "out.safetensors"
    if how == "itself":
        out = source
    else:
        (out.symlink_to if how == "symbolic" else out.hardlink_to)(source)
    before = snapshot(tmp_path)
    with pytest.raises(ValueError, match=r"^out: expected another path, got .*which is read"):
        merge(paths, out, overwrite=True)
    assert snapshot(tmp_path) == before


def test_the_tokenizer_beside_a_base_in_one_file_stays(tmp_path, state):
    base = tmp_path / "base"
    base.mkdir()
    save_file(state(0), base / "model.safetensors")
    (base / "tokenizer.json").write_text("{}")
    save_file(state(1), tmp_path / "one.safetensors")
    before = snapshot(tmp_path)
    with pytest.raises(ValueError, match=r"^out: .* holds "):
        merge([base / "model.safetensors", tmp_path / "one.safetensors"], base, overwrite=True)
    assert snapshot(tmp_path) == before


@pytest.fixture
def adapter(tmp_path):
    """A base on disk, another base, and an adapter that was trained on the latter."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 8)

    torch.manual_seed(0)
    for name in ("base", "trained_on"):
        (tmp_path / name).mkdir()
        save_file(Net().state_dict(), tmp_path / name / "model.safetensors")
    model = peft.get_peft_model(Net(), peft.LoraConfig(target_modules=["first"], r=2))
    nn.init.ones_(model.base_model.model.first.lora_B["default"].weight)
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "trained_on")
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path


@pytest.mark.parametrize("out", ["adapter", "base", "trained_on", "trained_on/new"])
def test_an_adapter_and_the_base_that_it_was_trained_on_stay(adapter, out):
    before = snapshot(adapter)
    with pytest.raises(ValueError, match=r"^out: .* which is read"):
        merge([adapter / "base", adapter / "adapter"], adapter / out, overwrite=True)
    assert snapshot(adapter) == before


FOREIGN = {
    "a text": lambda out: (out / "notes.txt").write_text("mine"),
    "code": lambda out: (out / "setup.py").write_text("mine"),
    "a folder": lambda out: (out / "runs").mkdir(),
    "a hidden file": lambda out: (out / ".env").write_text("mine"),
    "a second model": lambda out: save_file({"w": torch.zeros(1)}, out / "other.safetensors"),
    "a damaged shard": lambda out: (out / "model-00001-of-00002.safetensors").write_bytes(b"half"),
    "another configuration of a base's": lambda out: (out / "mine.json").write_text("edited"),
    "an adapter's configuration": lambda out: (out / "adapter_config.json").write_text("{}"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_folder_that_holds_something_else_is_left_alone(folders, tmp_path, case):
    paths, _ = folders
    (paths[0] / "mine.json").write_text("original")  # copied beside the weights: an earlier output has it too
    merge(paths, tmp_path / "out")
    merge(paths, tmp_path / "out", overwrite=True)
    FOREIGN[case](tmp_path / "out")
    before = snapshot(tmp_path)
    with pytest.raises(ValueError, match=r"^out: .*(nothing but a model|expected a model to replace)"):
        merge(paths, tmp_path / "out", overwrite=True)
    assert snapshot(tmp_path) == before


def test_a_folder_with_files_and_no_model_is_left_alone(folders, tmp_path):
    paths, _ = folders
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"^out: expected a model to replace, got "):
        merge(paths, tmp_path / "out", overwrite=True)
    (tmp_path / "out.safetensors").write_text("a plan of mine, badly named")
    save_file({"w": torch.zeros(2)}, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match=r"^out: expected a model to replace, got "):
        merge([tmp_path / "w.safetensors", tmp_path / "w.safetensors"], tmp_path / "out.safetensors", overwrite=True)
    assert (tmp_path / "out.safetensors").read_text() == "a plan of mine, badly named"


# ------------------------------------------------------------------------------------------------ vectors


VECTORS = {
    "lazy": lambda tau: tau,
    "in memory": lambda tau: tau.materialize(),
    "scaled": lambda tau: -(2 * tau),
    "summed": lambda tau: tau + tau,
    "chosen": lambda tau: tau.select(lambda block: block == "a.bias"),
    "block by block": lambda tau: tau.scale_blocks(dict.fromkeys(tau.blocks, 0.5)),
    "without base": lambda tau: tau.without_base(),
    "TIES": lambda tau: ties([tau], 0.5),
    "DARE": lambda tau: dare(tau, 0.5),
    "Breadcrumbs": lambda tau: breadcrumbs(tau, 0.1, 0.9),
}


@pytest.mark.parametrize("case", VECTORS)
@pytest.mark.parametrize("out", ["base", "one", "two/model-00001-of-00002.safetensors", "base/tau", "."])
def test_a_vector_is_not_saved_over_what_it_was_read_from(folders, tmp_path, case, out):
    paths, _ = folders
    tau = VECTORS[case](TaskVector(paths[0], paths[1]) + TaskVector(paths[0], paths[2]))
    before = snapshot(tmp_path)
    with pytest.raises(ValueError, match=r"^out: .* which is read"):
        tau.save(tmp_path / out, overwrite=True)
    assert snapshot(tmp_path) == before


def test_a_loaded_vector_is_not_saved_over_itself(folders, tmp_path):
    _, states = folders
    TaskVector(states[0], states[1]).save(tmp_path / "tau")
    loaded = TaskVector.load(tmp_path / "tau", base=None)
    with pytest.raises(ValueError, match=r"^out: .* which is read"):
        (2 * loaded).save(tmp_path / "tau", overwrite=True)
    TaskVector(states[0], states[2]).save(tmp_path / "tau", overwrite=True)


def test_a_learned_merge_remembers_what_it_was_read_from(tmp_path, mlp, perturb):
    for name, model in (("base", mlp), ("one", perturb(mlp, 1))):
        save_file(model.state_dict(), tmp_path / f"{name}.safetensors")
    tau = TaskVector(tmp_path / "base.safetensors", tmp_path / "one.safetensors")
    learned = AnisotropicScaling(mlp, [tau], init=0.5).vector()
    with pytest.raises(ValueError, match=r"^out: .* which is read"):
        learned.save(tmp_path / "one.safetensors", overwrite=True)


@pytest.mark.parametrize("out", ["there", "there.safetensors"])
def test_a_vector_and_a_model_do_not_replace_each_other(tmp_path, state, out):
    single = out.endswith(".safetensors")
    (tmp_path / "there").mkdir()
    there = tmp_path / "there.safetensors" if single else tmp_path / "there" / "model.safetensors"
    save_file(state(3), there)
    before = snapshot(tmp_path)
    tau = TaskVector(state(0), state(1))
    with pytest.raises(ValueError, match=r"^out: expected a task vector to replace, .* is a model"):
        tau.save(tmp_path / out, overwrite=True)
    assert snapshot(tmp_path) == before
    tau.save(tmp_path / f"tau{there.suffix if single else ''}")
    for seed in (0, 1):
        save_file(state(seed), tmp_path / f"{seed}.safetensors")
    before = snapshot(tmp_path)
    with pytest.raises(ValueError, match=r"^out: expected a model to replace, .* is a task vector"):
        merge(
            [tmp_path / "0.safetensors", tmp_path / "1.safetensors"],
            tmp_path / f"tau{there.suffix if single else ''}",
            overwrite=True,
        )
    assert snapshot(tmp_path) == before


# ------------------------------------------------------------------------------------------------ until the end


def test_what_comes_during_the_merge_is_seen(folders, tmp_path):
    """The folder is looked at again just before the swap."""
    paths, _ = folders
    merge(paths, tmp_path / "out")
    arrived = []

    def arrive(_):
        if not arrived:
            (tmp_path / "out" / "notes.txt").write_text("mine")
            arrived.append(snapshot(tmp_path / "out"))

    with pytest.raises(ValueError, match=r"nothing but a model.*notes\.txt"):
        merge(paths, tmp_path / "out", overwrite=True, on_tensor=arrive)
    assert snapshot(tmp_path / "out") == arrived[0]
    with pytest.raises(FileExistsError):
        merge(paths, tmp_path / "new", on_tensor=lambda _: (tmp_path / "new").mkdir(exist_ok=True) or fill(tmp_path))
    assert snapshot(tmp_path / "new") == {"x": b"mine"}
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def fill(folder):
    (folder / "new" / "x").write_text("mine")


@pytest.mark.parametrize("after", [True, False], ids=["after the call", "before the call"])
@pytest.mark.parametrize("call", [1, 2])
def test_an_interrupt_anywhere_in_the_swap_keeps_the_old(folders, tmp_path, monkeypatch, call, after):
    paths, _ = folders
    merge(paths, tmp_path / "out")
    before, real, calls = snapshot(tmp_path), os.replace, []

    def interrupted(source, target):
        calls.append(source)
        if after:
            real(source, target)
        if len(calls) == call:
            raise KeyboardInterrupt
        if not after:
            real(source, target)

    monkeypatch.setattr(atomic.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        merge(paths, tmp_path / "out", scale=0.25, overwrite=True)
    assert snapshot(tmp_path) == before


def test_the_old_one_is_there_until_the_new_one_is_whole(folders, tmp_path):
    paths, _ = folders
    merge(paths, tmp_path / "out")
    old = load_file(tmp_path / "out" / "model-00001-of-00002.safetensors")
    seen = []
    merge(
        paths, tmp_path / "out", scale=2.0, overwrite=True, on_tensor=lambda _: seen.append(snapshot(tmp_path / "out"))
    )
    assert len(seen) == 3
    assert all(entry == seen[0] for entry in seen)
    new = load_file(tmp_path / "out" / "model-00001-of-00002.safetensors")
    assert not torch.equal(new["a.weight"], old["a.weight"])
