"""Which parameters are shared, which belong to tasks, and what they are called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.optim import Optimizer

from cost_mtl._torch.undo import undoing
from cost_mtl.gradients.graph import leaves
from cost_mtl.gradients.layout import Layout
from cost_mtl.gradients.losses import TaskLosses

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


class Parameters:
    """All parameters of the model and the base optimizer in one step, and which of the trainable ones are shared.

    Args:
        shared: the shared parameters that the user named, or None.
        found: indices among the model's of those found from the graph so far, which count where ``shared`` is None.

    Attributes:
        every: the distinct parameters, in order.
        flags: their ``requires_grad``. A closure may switch it on or off, see :meth:`after`.
        layout: the trainable shared ones; own: the other trainable ones.
    """

    def __init__(
        self, model: nn.Module, base: Optimizer, shared: Sequence[Tensor] | None, found: Sequence[int]
    ) -> None:
        self.model = model
        mine: list[Tensor] = list(model.parameters())
        held = [p for group in base.param_groups for p in group["params"]]
        self.every = list({id(p): p for p in (*mine, *held)}.values())
        self.flags = [p.requires_grad for p in self.every]
        self.shared = [mine[k] for k in found] if shared is None else shared
        self.layout, self.own = self._split()

    def _split(self) -> tuple[Layout, list[Tensor]]:
        layout = Layout([p for p in self.shared if p.requires_grad])
        return layout, self.outside(layout)

    def outside(self, layout: Layout) -> list[Tensor]:
        """The parameters that are trainable now and not in the layout."""
        return [p for p in self.every if p.requires_grad and id(p) not in layout.index]

    def share(self, found: Sequence[int]) -> Layout:
        """Of the model's parameters, those with these indices are shared; the layout of them."""
        mine = list(self.model.parameters())
        self.shared = [mine[k] for k in found]
        self.layout, self.own = self._split()
        return self.layout

    def clear_grads(self) -> None:
        """``.grad`` is None."""
        for p in self.every:
            p.grad = None

    def restoring(self, *, with_grads: bool) -> Callable[[], None]:
        """What puts ``requires_grad`` back as it is now; ``.grad`` too, or None for all."""
        before = [(p, flag, p.grad if with_grads else None) for p, flag in zip(self.every, self.flags, strict=True)]

        def back() -> None:
            for p, flag, grad in before:
                if p.requires_grad != flag:
                    p.requires_grad_(flag)
                p.grad = grad

        return back

    def after(self, tasks: TaskLosses, *, first: bool) -> bool:
        """Look at the flags after the closure was called; whether ``layout`` and ``own`` are others now. As in a loop
        of one's own, a parameter that the closure has unfrozen is trained, and one that it has frozen before the
        forward pass is not.

        Args:
            first: of the micro-batches.

        Raises:
            RuntimeError: a parameter that the losses depend on was frozen: it would get no gradient, silently. Or
                micro-batches differ.
        """
        flags = [p.requires_grad for p in self.every]
        if flags == self.flags:
            return False
        off = {id(p): p for p, flag, before in zip(self.every, flags, self.flags, strict=True) if before and not flag}
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
            changed = [p for p, flag, before in zip(self.every, flags, self.flags, strict=True) if flag != before]
            raise RuntimeError(
                "closure: expected the same trainable parameters in every micro-batch, but it switched requires_grad "
                f"of {few(names_of(self.model, changed))}"
            )
        self.flags = flags
        self.layout, self.own = self._split()
        return True


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
