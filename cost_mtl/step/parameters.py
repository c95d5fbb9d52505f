"""Which parameters are shared, which belong to tasks, and what they are called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.optim import Optimizer

from cost_mtl._torch.undo import undoing
from cost_mtl.gradients.graph import leaves
from cost_mtl.gradients.losses import TaskLosses

if TYPE_CHECKING:
    from cost_mtl.gradients.layout import Layout
from cost_mtl._torch.param_groups import held_by

Shared = nn.Module | Tensor | Iterable[nn.Module | Tensor]


def resolve_shared(shared: Shared | None) -> list[Tensor] | None:
    """The distinct shared parameters of modules and parameters given singly or in any iterable, in order.

    Overlaps and doubles count once, and a generator is read once. None stays None.

    Raises:
        TypeError: something in it is neither a module nor a parameter.
        ValueError: empty.
    """
    if shared is None:
        return None
    items = [shared] if isinstance(shared, nn.Module | Tensor) else list(_iterable(shared))
    found: dict[int, Tensor] = {}
    for item in items:
        if isinstance(item, nn.Module):
            found.update((id(p), p) for p in item.parameters() if id(p) not in found)
        elif isinstance(item, Tensor):
            if not item.is_leaf:
                raise ValueError("shared: expected parameters (leaf tensors), got the result of an operation")
            found.setdefault(id(item), item)
        else:
            raise TypeError(f"shared: expected modules or parameters, got {type(item).__name__} among them")
    if not found:
        raise ValueError(
            "shared: expected at least one parameter, got an empty selection; None finds it from the graph"
        )
    return list(found.values())


def _iterable(shared: object) -> Iterable[object]:
    if not isinstance(shared, Iterable) or isinstance(shared, str):
        raise TypeError(f"shared: expected a module, a parameter or an iterable of them, got {type(shared).__name__}")
    return shared


class Trainable:
    """Which parameters were trainable when a step began: a closure may switch ``requires_grad`` on or off.

    Args:
        model, base: the parameters are theirs.
        choose: makes the layout of the shared parameters and the list of the others, from the flags as they are.
    """

    def __init__(self, model: nn.Module, base: Optimizer, choose: Callable[[], tuple[Layout, list[Tensor]]]) -> None:
        self.model, self.choose = model, choose
        self.params = list({id(p): p for p in (*model.parameters(), *held_by(base))}.values())
        self.flags = [p.requires_grad for p in self.params]

    def after(self, tasks: TaskLosses, *, first: bool) -> tuple[Layout, list[Tensor]] | None:
        """Both after the closure was called, or None where it is unchanged. As in a loop of one's own, a parameter
        that the closure has unfrozen is trained, and one that it has frozen before the forward pass is not.

        Args:
            first: of the micro-batches.

        Raises:
            RuntimeError: a parameter that the losses depend on was frozen: it would get no gradient, silently. Or
                micro-batches differ.
        """
        flags = [p.requires_grad for p in self.params]
        if flags == self.flags:
            return None
        off = {id(p): p for p, flag, before in zip(self.params, flags, self.flags, strict=True) if before and not flag}
        reached = leaves(tasks.roots)
        lost = [p for k, p in off.items() if k in reached]
        if lost:
            raise RuntimeError(
                f"closure: it switched requires_grad off for {len(lost)} parameters that its losses depend on "
                f"({few(names_of(self.model, lost))}), so that they would get no gradient, silently. Does it call "
                "peft's set_adapter(), which freezes the other adapters, or requires_grad_(False)? Give the flags back "
                "at the end of the closure, before it returns the losses: model.set_requires_grad(names, True), or "
                "requires_grad_(True) for each. All flags are again as they were before the step"
            )
        if not first:
            changed = [p for p, flag, before in zip(self.params, flags, self.flags, strict=True) if flag != before]
            raise RuntimeError(
                "closure: expected the same trainable parameters in every micro-batch, but it switched requires_grad "
                f"of {few(names_of(self.model, changed))}"
            )
        self.flags = flags
        return self.choose()


def names_of(model: nn.Module, params: Sequence[Tensor]) -> list[str]:
    """Full names in the model; the shape for a parameter outside of it."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [names.get(id(p), f"a parameter of shape {list(p.shape)} outside the model") for p in params]


@contextmanager
def grads_aside(params: Iterable[Tensor]) -> Iterator[None]:
    """Context in which the parameters have no ``.grad``; afterwards they have theirs back."""
    grads = [(p, p.grad) for p in params]

    def give_back() -> None:
        for p, grad in grads:
            p.grad = grad

    with undoing(give_back):
        for p, _ in grads:
            p.grad = None
        yield


def few(names: Sequence[str], most: int = 5) -> str:
    """A list for an error message."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
