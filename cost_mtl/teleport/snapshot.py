"""Everything about a model that a teleport must give back untouched, values of the moved parameters aside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Structure:
    """Module tree, modes, attributes, ``requires_grad`` flags, storages and ``.grad`` of a model and of parameters
    outside of it: references, no copies."""

    modules: tuple[tuple[nn.Module, bool, dict[str, nn.Module | None], tuple[str, ...]], ...]
    params: tuple[tuple[Tensor, bool, Tensor, Tensor | None], ...]

    @classmethod
    def capture(cls, roots: Sequence[nn.Module], params: Iterable[Tensor]) -> Structure:
        modules = {id(m): m for root in roots for m in root.modules()}
        every = {id(p): p for root in roots for p in root.parameters()} | {id(p): p for p in params}
        return cls(
            tuple((m, m.training, dict(m._modules), tuple(vars(m))) for m in modules.values()),
            tuple((p, p.requires_grad, p.data, p.grad) for p in every.values()),
        )

    def restore(self) -> None:
        for module, training, children, attributes in self.modules:
            module.training = training
            if module._modules != children:
                module._modules.clear()
                module._modules.update(children)
            for name in [name for name in vars(module) if name not in attributes]:
                delattr(module, name)
        for p, flag, data, grad in self.params:
            if p.requires_grad != flag:
                p.requires_grad_(flag)
            if p.data_ptr() != data.data_ptr():
                p.data = data
            p.grad = grad


def surely(undo: Callable[[], None], tries: int = 8) -> None:
    """Run an undo, which may be run again, to its end: an exception that breaks it off (of a signal handler, mostly) is
    raised when it is done."""
    late: BaseException | None = None
    for _ in range(tries):
        try:
            undo()
            break
        except BaseException as error:  # raised below
            late = error
    if late is not None:
        raise late
