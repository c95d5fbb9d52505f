"""The tensors of a LoRA adapter: which weight of the base each belongs to."""

from __future__ import annotations

from dataclasses import dataclass

from cost_mtl.merging.adapter_layers import WHAT_TO_DO
from cost_mtl.merging.source import TensorSource

__all__ = ["PREFIX", "Parts", "parse_adapter", "plain_name"]

PREFIX = "base_model.model."
"""What peft puts before the names of the model's parameters."""


@dataclass
class Parts:
    """What an adapter holds for one weight: factors, or the whole new value, or both."""

    factor_a: str = ""
    factor_b: str = ""
    whole: str = ""
    embedding: bool = False
    module: str = ""


def parse_adapter(source: TensorSource, name: str) -> dict[str, Parts]:
    """Base key -> what the adapter holds for it."""
    parts: dict[str, Parts] = {}
    for stored in source.infos:
        key = stored.removeprefix(PREFIX)
        if ".base_layer." in key and ".lora_" in key:
            raise ValueError(
                f"{name}: expected layers whose change is s·B·A, got {stored!r} of a layer that peft wraps twice "
                f"(MultiheadAttention): {WHAT_TO_DO}"
            )
        if key.endswith(".lora_A.weight"):
            _entry(parts, key, ".lora_A.weight").factor_a = stored
        elif key.endswith(".lora_B.weight"):
            _entry(parts, key, ".lora_B.weight").factor_b = stored
        elif key.endswith(".lora_embedding_A"):
            _entry(parts, key, ".lora_embedding_A", embedding=True).factor_a = stored
        elif key.endswith(".lora_embedding_B"):
            _entry(parts, key, ".lora_embedding_B", embedding=True).factor_b = stored
        elif ".lora_" in key:
            raise ValueError(f"{name}: expected tensors of a plain LoRA, got {stored!r}: {WHAT_TO_DO}")
        else:
            parts.setdefault(plain_name(key), Parts()).whole = stored
    for key, part in parts.items():
        if bool(part.factor_a) != bool(part.factor_b):
            raise ValueError(f"{name}: expected two factors A and B of {key!r}, got only one of the two factors")
    return parts


def plain_name(key: str) -> str:
    """A parameter's name without what peft's wrappers put into it."""
    for wrapper in (".base_layer.", ".original_module.", ".modules_to_save."):
        key = key.replace(wrapper, ".")
    return key


def _entry(parts: dict[str, Parts], key: str, suffix: str, embedding: bool = False) -> Parts:
    module = key.removesuffix(suffix)
    part = parts.setdefault(module + ".weight", Parts())
    part.embedding, part.module = embedding, module
    return part
