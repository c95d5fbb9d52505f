"""Digests of a base's weights, by which a task vector knows the model that it was taken from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from cost_mtl.merging.source import TensorSource, names_of

__all__ = ["BaseDigests", "check_base", "digest"]


def digest(tensor: Tensor) -> str:
    """SHA-256 (first 128 bits, hex) of shape and values.

    16-bit floats are widened to float32 first: a bfloat16 checkpoint loaded in float32 is the same base.
    """
    values = tensor.detach().cpu()
    if values.is_floating_point() and values.dtype.itemsize == 2:
        values = values.float()
    state = hashlib.sha256(f"{values.dtype}{list(values.shape)}".encode())
    state.update(values.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()[:32]


class BaseDigests(Mapping[str, str]):
    """Block -> digest of the base's values, each computed (and kept) when first asked for.

    Args:
        known: the digests at hand.
        blocks: the blocks whose digests can be computed from ``source``.
        source: the base.
    """

    def __init__(
        self, known: Mapping[str, str] | None = None, blocks: Iterable[str] = (), source: TensorSource | None = None
    ) -> None:
        self._known = dict(known or {})
        self._blocks = dict.fromkeys([*self._known, *blocks])
        self._source = source

    def __getitem__(self, block: str) -> str:
        if block not in self._known:
            if self._source is None or block not in self._blocks:
                raise KeyError(block)
            self._known[block] = digest(self._source.read(block))
        return self._known[block]

    def __contains__(self, block: object) -> bool:
        return block in self._blocks

    def __iter__(self) -> Iterator[str]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def combined(self) -> str:
        """One hash for all blocks, whatever their order."""
        lines = "".join(f"{block}\0{value}\n" for block, value in sorted(self.items()))
        return hashlib.sha256(lines.encode()).hexdigest()[:32]

    def computed(self) -> BaseDigests:
        """The same digests, all computed, without the base."""
        return BaseDigests(dict(self))

    @staticmethod
    def merged(several: Sequence[BaseDigests]) -> BaseDigests:
        """The digests of vectors that are to be added.

        Raises:
            ValueError: the bases differ in a block. Bases opened from one path are the same, and are not read for it.
        """
        first = several[0]
        if all(_same_source(first._source, other._source) for other in several):
            known = {block: value for digests in several for block, value in digests._known.items()}
            return BaseDigests(known, [block for digests in several for block in digests], first._source)
        merged: dict[str, str] = {}
        for digests in several:
            clash = [block for block, value in digests.items() if merged.get(block, value) != value]
            if clash:
                raise ValueError(
                    f"vectors: expected task vectors of one base, got different ones ({clash[0]!r} differs in "
                    f"{len(clash)} of {len(digests)} blocks): use without_base() if that is meant"
                )
            merged.update(digests)
        return BaseDigests(merged)


def _same_source(first: TensorSource | None, second: TensorSource | None) -> bool:
    if first is None or second is None:
        return False
    path = getattr(first, "path", None)
    return first is second or (path is not None and path == getattr(second, "path", None))


def check_base(digests: Mapping[str, str], base: TensorSource, label: str) -> None:
    """Checks that ``base`` has the weights that the digests were taken of.

    Raises:
        ValueError: a block is missing or has other values; the message names it.
    """
    stored = {name: key for key in base.infos for name in names_of(base, key)}
    wrong = [b for b, value in digests.items() if b not in stored or digest(base.read(stored[b])) != value]
    if wrong:
        raise ValueError(
            f"{label}: expected a vector taken from {base.name}, got one of another base: {len(wrong)} of "
            f"{len(digests)} blocks differ, {wrong[0]!r} first"
        )
