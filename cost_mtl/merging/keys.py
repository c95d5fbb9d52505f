"""Which key of a fine-tuned model belongs to which key of the base, and what kind of tensor it is."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, get_args

import torch

from cost_mtl._validation import one_of
from cost_mtl.merging.source import TensorSource, names_of

__all__ = ["KeyPolicy", "MatchedKeys", "is_statistic", "match_keys"]

KeyPolicy = Literal["strict", "intersection", "union"]
_STATISTICS = ("running_mean", "running_var")
_SHOWN = 5


@dataclass(frozen=True)
class MatchedKeys:
    """The outcome of :func:`match_keys`; pairs are (key in the base, key in the fine-tuned model).

    Attributes:
        blocks: weights in both.
        statistics: BatchNorm's running means and variances in both.
        added: weights that the base lacks (policy "union" only), by their key in the fine-tuned model.
        missing, extra: keys left out, because the fine-tuned model or the base lacks them (not policy "strict").
    """

    blocks: tuple[tuple[str, str], ...]
    statistics: tuple[tuple[str, str], ...]
    added: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()


def is_statistic(key: str) -> bool:
    """Whether a key names BatchNorm's running mean or variance."""
    return key.rpartition(".")[2] in _STATISTICS


def match_keys(
    base: TensorSource, finetuned: TensorSource, policy: KeyPolicy = "strict", exclude: Sequence[str] = ()
) -> MatchedKeys:
    """Pairs the keys of a base and of a model fine-tuned from it.

    Tied weights are one block, whichever of their names a model stores them under. Integer and boolean tensors, and
    what a module declares as buffer, are no weights: they stay the base's.

    Args:
        base, finetuned: where the tensors are read from.
        policy: "strict": both have the same keys; "intersection": keys that only one has are left out; "union": a
            weight that only the base has does not change, one that only the fine-tuned model has counts as zero in
            the base.
        exclude: shell patterns of keys to leave alone ("head.*").

    Raises:
        ValueError: keys differ under "strict", shapes differ, a tie of the base is broken in the fine-tuned model, a
            pattern matches nothing, or quantised weights differ.

    Warns:
        UserWarning: buffers differ, and stay the base's.
    """
    one_of("keys", policy, get_args(KeyPolicy))
    excluded = _excluder(base, finetuned, exclude)
    pairs: dict[str, str] = {}
    taken: set[str] = set()
    missing = []
    for key in base.infos:
        candidates = _stored_under(finetuned, names_of(base, key))
        taken.update(candidates)
        if excluded(names_of(base, key)):
            continue
        if candidates:
            pairs[key] = candidates[0]
            _check_tie(base, finetuned, key, candidates)
        else:
            missing.append(key)
    extra = [key for key in finetuned.infos if key not in taken and not excluded(names_of(finetuned, key))]
    if policy == "strict" and (missing or extra):
        raise ValueError(_difference(base, finetuned, missing, extra))
    blocks = {key: other for key, other in pairs.items() if _is_block(base, finetuned, key, other)}
    statistics = {key: other for key, other in pairs.items() if is_statistic(key)}
    _check_shapes(base, finetuned, {**blocks, **statistics}.items())
    _check_left_alone(base, finetuned, [(k, o) for k, o in pairs.items() if k not in blocks and k not in statistics])
    if not blocks:
        raise ValueError(f"{finetuned.name}: expected weights in common with {base.name}, got none")
    return MatchedKeys(
        blocks=tuple(blocks.items()),
        statistics=tuple(statistics.items()),
        added=tuple(k for k in extra if policy == "union" and _is_block(finetuned, finetuned, k, k)),
        missing=tuple(missing),
        extra=tuple(extra),
    )


def _excluder(base: TensorSource, finetuned: TensorSource, patterns: Sequence[str]) -> Callable[[Iterable[str]], bool]:
    if isinstance(patterns, str):
        raise TypeError(f"exclude: expected a sequence of patterns, got the string {patterns!r}")
    known = [*base.infos, *base.aliases, *finetuned.infos, *finetuned.aliases]
    for pattern in patterns:
        if not any(fnmatchcase(key, pattern) for key in known):
            raise ValueError(f"exclude: expected patterns that match a key of {base.name}, got {pattern!r}")
    return lambda names: any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _stored_under(source: TensorSource, names: Iterable[str]) -> list[str]:
    """The stored keys that a source has under any of the names, in their order, each once."""
    stored = (source.aliases.get(name, name) for name in names)
    return list(dict.fromkeys(key for key in stored if key in source.infos))


def _is_block(base: TensorSource, finetuned: TensorSource, key: str, other: str) -> bool:
    dtype = base.infos[key].dtype
    weights = dtype.is_floating_point or dtype.is_complex
    return weights and not (key in base.buffers or other in finetuned.buffers or is_statistic(key))


def _check_tie(base: TensorSource, finetuned: TensorSource, key: str, candidates: Sequence[str]) -> None:
    for other in candidates[1:]:
        if not torch.equal(finetuned.read(candidates[0]), finetuned.read(other)):
            raise ValueError(
                f"{finetuned.name}: expected equal values of {candidates[0]!r} and {other!r}, which {base.name} ties "
                "in one weight, got different ones: untie them in the base first"
            )


def _check_shapes(base: TensorSource, finetuned: TensorSource, pairs: Iterable[tuple[str, str]]) -> None:
    wrong = [
        f"{key!r} {list(base.infos[key].shape)} against {list(finetuned.infos[other].shape)}"
        for key, other in pairs
        if base.infos[key].shape != finetuned.infos[other].shape
    ]
    if wrong:
        raise ValueError(
            f"{finetuned.name}: expected {base.name}'s shapes, got others: {_listed(wrong)}. What only one task uses "
            "(its head) can stay the base's: exclude=['head.*'], --exclude 'head.*'"
        )


def _check_left_alone(base: TensorSource, finetuned: TensorSource, pairs: Sequence[tuple[str, str]]) -> None:
    differing = []
    for key, other in pairs:
        if key.endswith("num_batches_tracked"):  # differs after every training, and is of no use in a merged model
            continue
        mine, its = base.infos[key], finetuned.infos[other]
        if mine.shape == its.shape and torch.equal(base.read(key).cpu(), finetuned.read(other).cpu()):
            continue
        if mine.dtype in (torch.int8, torch.uint8):
            raise ValueError(
                f"{finetuned.name}: expected {base.name}'s values of {key!r}, got others in {mine.dtype}: "
                "dequantise the models first"
            )
        differing.append(repr(key))
    if differing:
        warnings.warn(
            f"{finetuned.name}: buffers that are no weights differ from {base.name}'s, and stay {base.name}'s: "
            f"{_listed(differing)}",
            stacklevel=5,
        )


def _difference(base: TensorSource, finetuned: TensorSource, missing: Sequence[str], extra: Sequence[str]) -> str:
    parts = [f"{finetuned.name}: expected {base.name}'s keys, got others"]
    if missing:
        parts.append(f"it lacks {_listed([repr(key) for key in missing])}")
    if extra:
        parts.append(f"only it has {_listed([repr(key) for key in extra])}")
    prefix = _common_prefix(missing, extra)
    if prefix:
        parts.append(f"they match after taking off {prefix!r}: unwrap the model before saving it")
    else:
        parts.append('keys="intersection" leaves these out, keys="union" counts them as zero where they are missing')
    return "; ".join(parts)


def _common_prefix(missing: Sequence[str], extra: Sequence[str]) -> str | None:
    """What wrappers such as DistributedDataParallel ("module.") or torch.compile put before every key."""
    for longer, shorter in ((extra, set(missing)), (missing, set(extra))):
        if len(longer) == len(shorter) > 0 and "." in longer[0]:
            prefix = longer[0].partition(".")[0] + "."
            if {key.removeprefix(prefix) for key in longer} == shorter:
                return prefix
    return None


def _listed(items: Sequence[str]) -> str:
    rest = len(items) - _SHOWN
    return ", ".join(items[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
