"""What a merge on disk holds in memory, and what importing the package costs."""

from __future__ import annotations

import ast
import graphlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import cost_mtl.merging

SHARDS, BLOCKS, SIDE = 3, 24, 512
SHARD_BYTES = BLOCKS * SIDE * SIDE * 2  # bfloat16: 12 MiB

MEASURE = """
import sys
import torch, safetensors.torch
from cost_mtl.merging.cli import main

def read(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))

split = sys.argv.index("then")
main(sys.argv[1:split])
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak starts again from here
before = read("VmRSS")
code = main(sys.argv[split + 1 :])
print(read("VmHWM") - before)
sys.exit(code)
"""


def run(*argv):
    # With a fixed threshold the C library gives freed tensors back, so that the peak is what was in use.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    words = [sys.executable, "-c", *argv]
    return subprocess.run(words, capture_output=True, text=True, check=True, env=environment).stdout


def command(base, models, out, folder):
    return [
        "merge",
        "--base",
        str(folder / base),
        "--out",
        str(folder / out),
        "--models",
        *(str(folder / m) for m in models),
    ]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is read from /proc")
def test_a_merge_holds_no_more_than_two_shards(tmp_path):
    """Four models of three shards: 144 MiB on disk, 24 MiB allowed in memory."""
    for name in ("base", "a", "b", "c"):
        folder = tmp_path / name
        folder.mkdir()
        weight_map = {}
        for number in range(SHARDS):
            filename = f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors"
            tensors = {f"s{number}.b{i}": torch.randn(SIDE, SIDE).bfloat16() for i in range(BLOCKS)}
            save_file(tensors, folder / filename, {"format": "pt"})
            weight_map |= dict.fromkeys(tensors, filename)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    # A small merge first: it loads the libraries' code, which is memory too, and none of the merge's.
    small = {key: torch.ones(300, 300).bfloat16() for key in "xy"}
    save_file(small, tmp_path / "small.safetensors")
    first = command("small.safetensors", ["small.safetensors"], "warm.safetensors", tmp_path)
    peak = int(run(MEASURE, *first, "then", *command("base", "abc", "out", tmp_path)))
    assert SHARD_BYTES / BLOCKS < peak < 2 * SHARD_BYTES


def test_importing_loads_nothing_heavy():
    heavy = ("peft", "transformers", "matplotlib")
    names = "sorted({name.split('.')[0] for name in sys.modules})"
    loaded = run(f"import sys, cost_mtl.merging, cost_mtl.merging.cli; print(*{names})").split()
    assert "torch" in loaded
    assert not set(heavy) & set(loaded)


def imports(file):
    """The modules that a file imports anywhere in it: late, or for types alone, as well."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_modules_import_each_other_in_one_direction():
    files = {f"cost_mtl.merging.{file.stem}": file for file in Path(cost_mtl.merging.__file__).parent.glob("*.py")}
    graph = {name: set(imports(file)) & files.keys() for name, file in files.items()}
    assert sum(map(len, graph.values())) > len(files)
    order = list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle
    assert set(order) == set(graph)


def test_no_import_of_the_project_is_late():
    """Only heavy packages of others are imported inside functions."""
    for file in Path(cost_mtl.merging.__file__).parent.glob("*.py"):
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cost_mtl"):
                assert node in tree.body, (file.name, node.module)


def test_the_source_imports_nothing_else_of_the_project():
    allowed = ("cost_mtl.merging", "cost_mtl._version", "cost_mtl._validation")
    for file in Path(cost_mtl.merging.__file__).parent.glob("*.py"):
        assert [name for name in imports(file) if name.startswith("cost_mtl") and not name.startswith(allowed)] == []
