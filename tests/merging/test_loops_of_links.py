"""A symbolic link that leads to itself ends in one line, as any other bad path."""

import os

import torch
from safetensors.torch import save_file

from cost_mtl.merging.cli import main


def test_an_output_path_that_is_a_loop_of_links(tmp_path, capsys):
    for name in ("base", "model"):
        save_file({"w": torch.randn(2, 2)}, tmp_path / f"{name}.safetensors")
    loop = tmp_path / "loop.safetensors"
    os.symlink(loop, loop)
    words = ["merge", "--base", str(tmp_path / "base.safetensors"), "--models", str(tmp_path / "model.safetensors")]
    assert main([*words, "--out", str(loop), "--overwrite", "--quiet"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert loop.is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base.safetensors", "loop.safetensors", "model.safetensors"]
