"""What a merge would do: keys, norms and cosines of the task vectors, as a dictionary and as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cost_mtl.merging.checkpoint import CheckpointSource
from cost_mtl.merging.keys import is_statistic
from cost_mtl.merging.task_vector import TaskVector, gram

__all__ = ["format_report", "merge_report"]


def merge_report(base: CheckpointSource, vectors: Sequence[TaskVector], names: Sequence[str]) -> dict[str, Any]:
    """Reads everything once and reports norms and cosines of the task vectors; T tensors of one block are in memory.

    Returns:
        A dictionary that json can write: the base's tensors, bytes and shards; for each model its blocks, the keys
        of the base that it does not change, the keys that it adds, its norm; cosines [T][T].
    """
    products = gram(vectors)
    norms = products.diagonal().sqrt()
    scale = norms.where(norms > 0, 1.0)
    cosines = products / scale / scale.unsqueeze(1)
    return {
        "base": {
            "tensors": len(base.infos),
            "bytes": sum(info.nbytes for info in base.infos.values()),
            "shards": len(base.shards),
            "dtypes": sorted({str(info.dtype).removeprefix("torch.") for info in base.infos.values()}),
            "batchnorm_statistics": sum(is_statistic(key) for key in base.infos),
        },
        "models": [
            {
                "name": name,
                "blocks": len(vector),
                "unchanged_keys": [key for key in base.infos if key not in vector.blocks],
                "added_keys": sorted(vector.added),
                "norm": float(norm),
            }
            for name, vector, norm in zip(names, vectors, norms, strict=True)
        ],
        "cosines": [[float(value) for value in row] for row in cosines],
    }


def format_report(report: dict[str, Any]) -> str:
    """The report as a few lines of text."""
    base = report["base"]
    lines = [
        f"base: {base['tensors']} tensors, {base['bytes'] / 2**20:.1f} MiB, {base['shards']} file(s), "
        f"{', '.join(base['dtypes'])}; {base['batchnorm_statistics']} BatchNorm statistics",
        "",
        f"{'model':<32} {'blocks':>7} {'unchanged':>10} {'added':>6} {'norm':>12}",
    ]
    for model in report["models"]:
        lines.append(
            f"{model['name'][-32:]:<32} {model['blocks']:>7} {len(model['unchanged_keys']):>10} "
            f"{len(model['added_keys']):>6} {model['norm']:>12.5g}"
        )
    lines += ["", "cosines of the task vectors"]
    for model, row in zip(report["models"], report["cosines"], strict=True):
        lines.append(f"{model['name'][-32:]:<32} " + " ".join(f"{value:>7.3f}" for value in row))
    return "\n".join(lines)
