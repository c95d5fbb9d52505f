"""Which parameters are shared, which belong to tasks, and what they are called."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.optim import Optimizer

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


def held_by(base: Optimizer) -> list[Tensor]:
    """The parameters in the optimizer's groups, in order."""
    return [p for group in base.param_groups for p in group["params"]]


def at_rest(base: Optimizer) -> set[int]:
    """Ids of the parameters in groups with learning rate 0, where other groups have one above: these are meant to stay
    where they are. Where all are 0 (the first step of a warm-up, say) that tells nothing."""
    rates = [group.get("lr") for group in base.param_groups]
    still = [rate is not None and float(rate) == 0.0 for rate in rates]
    if all(still):
        return set()
    return {id(p) for group, rests in zip(base.param_groups, still, strict=True) if rests for p in group["params"]}


def all_trainable(base: Optimizer, model: nn.Module) -> list[Tensor]:
    """The distinct trainable parameters of the model and of the optimizer (learned loss weights, say), in order."""
    every = {id(p): p for p in (*model.parameters(), *held_by(base)) if p.requires_grad}
    return list(every.values())


def names_of(model: nn.Module, params: Sequence[Tensor]) -> list[str]:
    """Full names in the model; the shape for a parameter outside of it."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [names.get(id(p), f"a parameter of shape {list(p.shape)} outside the model") for p in params]


def warn_about_shared(shared: Sequence[Tensor], base: Optimizer, model: nn.Module) -> None:
    """Say what is probably a mistake: shared parameters that nothing trains."""
    active = [p for p in shared if p.requires_grad]
    if not active:
        warnings.warn(
            f"shared: none of its {len(shared)} parameters is trainable (requires_grad is False); only the other "
            "parameters train",
            stacklevel=4,
        )
    _warn_about_missing("shared", active, base, model)


@contextmanager
def grads_aside(params: Iterable[Tensor]) -> Iterator[None]:
    """Context in which the parameters have no ``.grad``; afterwards they have theirs back."""
    grads = [(p, p.grad) for p in params]
    try:
        for p, _ in grads:
            p.grad = None
        yield
    finally:
        for p, grad in grads:
            p.grad = grad


def warn_about_rest(shared: Sequence[Tensor], base: Optimizer, model: nn.Module) -> None:
    """Say that no other parameter of the model is in a param group of the base optimizer: the heads were forgotten, or
    it is another model's. Where some are, the choice was made knowingly (matrices for Muon, say)."""
    known = {id(p) for p in shared}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in known]
    if not {id(p) for p in held_by(base)} & {id(p) for p in rest}:
        _warn_about_missing("model", rest, base, model)


def _warn_about_missing(what: str, params: Sequence[Tensor], base: Optimizer, model: nn.Module) -> None:
    held = {id(p) for p in held_by(base)}
    missing = names_of(model, [p for p in params if id(p) not in held])
    if missing:
        warnings.warn(
            f"{what}: {len(missing)} parameters are in no param group of the base optimizer ({few(missing)}); they get "
            "a .grad, but another optimizer has to step them",
            stacklevel=5,
        )


def warn_about_left_out(model: nn.Module, several: Sequence[Tensor]) -> None:
    """Say that several tasks reach parameters which ``shared`` does not name."""
    if several:
        warnings.warn(
            f"shared: several tasks reach {len(several)} parameters outside of it ({few(names_of(model, several))}), "
            "which get the plain sum of their gradients. If they belong to the shared part, name them in shared as "
            "well, or leave shared out: it is then found from the graph",
            stacklevel=6,
        )


def warn_about_nothing_to_weigh(tasks: int, shared: Sequence[Tensor]) -> None:
    """Say that the weighting will have no say: one task, or tasks that have nothing in common."""
    if tasks == 1:
        what = "returned one loss, so there is nothing to weigh: if it is the sum of several, return them one by one"
    elif not shared:
        what = "no trainable parameter is reached by two of its losses (a detach() in between?): each task trains alone"
    else:
        return
    warnings.warn(f"closure: {what}", stacklevel=6)


def warn_about_weighting(own: Sequence[Tensor], base: Optimizer) -> None:
    """Say that parameters which the weighting learns are in no param group of the base optimizer."""
    held = {id(p) for p in held_by(base)}
    missing = [p for p in own if id(p) not in held]
    if missing:
        warnings.warn(
            f"weighting: {len(missing)} parameters of its own are in no param group of the base optimizer, and stay "
            "as they are unless another optimizer steps them: give them to it beside the model's, "
            "[*model.parameters(), *weighting.parameters()]",
            stacklevel=6,
        )


def warn_about_others(others: Sequence[Tensor]) -> None:
    """Say that the losses reach parameters which get no gradient here."""
    if others:
        shapes = few([str(list(p.shape)) for p in others])
        warnings.warn(
            f"closure: the losses reach {len(others)} parameters (shapes {shapes}) that are neither in the model nor "
            "in the base optimizer: they get no .grad. If they are to be trained (learned loss weights, say), give "
            "them to the base optimizer; if not, requires_grad_(False) spares their gradients",
            stacklevel=7,
        )


def few(names: Sequence[str], most: int = 5) -> str:
    """A list for an error message."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
