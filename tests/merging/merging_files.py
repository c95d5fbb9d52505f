"""Checkpoints on disk for the tests of merging."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from cost_mtl.merging import CheckpointSource, combine, merge_checkpoint, open_vectors


def write_sharded(folder: Path, state, cut: int = 2, metadata=None) -> Path:
    """Two shards and an index, as transformers lays them out."""
    folder.mkdir()
    keys = list(state)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    parts = [keys[:cut], keys[cut:]]
    for name, part in zip(names, parts, strict=True):
        save_file({key: state[key].clone() for key in part}, folder / name, metadata or {"format": "pt"})
    weight_map = {key: name for name, part in zip(names, parts, strict=True) for key in part}
    index = {"metadata": {"total_size": sum(v.nbytes for v in state.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "toy"}')
    return folder


def merge(paths, out, scale=0.5, **options):
    base = CheckpointSource(paths[0], "base")
    vectors = open_vectors(base, paths[1:], options.pop("keys", "strict"))
    merge_checkpoint(base, combine(vectors, [1.0] * len(vectors)), out, scale=scale, **options)


def read_all(folder: Path):
    return {key: tensor for file in sorted(folder.glob("*.safetensors")) for key, tensor in load_file(file).items()}


def listing(folder: Path):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
