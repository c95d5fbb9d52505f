"""What is probably a mistake, and is warned of once."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from cost_mtl._torch.param_groups import held_by
from cost_mtl._torch.warn import warn
from cost_mtl.gradients.losses import TaskLosses
from cost_mtl.step.parameters import few, names_of


def warn_about_constants(tasks: TaskLosses) -> None:
    """Say that a value without a graph counts as a task: a metric among the losses, probably. A task without labels,
    given as a constant zero, is no mistake."""
    for name, root, value in zip(tasks.names, tasks.roots, tasks.values.tolist(), strict=True):
        if root is None and value != 0:
            warn(
                f"closure: task {name!r} has no graph (requires_grad is False): nothing is learned from it, but it "
                "counts as a task. A metric? Leave it out of what the closure returns",
            )


def warn_about_shared(shared: Sequence[Tensor], base: Optimizer, model: nn.Module) -> None:
    """Say what is probably a mistake: shared parameters that nothing trains."""
    active = [p for p in shared if p.requires_grad]
    if not active:
        warn(
            f"shared: none of its {len(shared)} parameters is trainable (requires_grad is False); only the other "
            "parameters train",
        )
    _warn_about_missing("shared", active, base, model)


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
        warn(
            f"{what}: {len(missing)} parameters are in no param group of the base optimizer ({few(missing)}); they get "
            "a .grad, but another optimizer has to step them",
        )


def warn_about_left_out(model: nn.Module, several: Sequence[Tensor]) -> None:
    """Say that several tasks reach parameters which ``shared`` does not name."""
    if several:
        warn(
            f"shared: several tasks reach {len(several)} parameters outside of it ({few(names_of(model, several))}), "
            "which get the plain sum of their gradients. If they belong to the shared part, name them in shared as "
            "well, or leave shared out: it is then found from the graph",
        )


def warn_about_length(norm: float, plain: float) -> None:
    """Say that the norm of d has nothing to do with that of the plain sum's gradient."""
    warn(
        f"weighting: the combined gradient has the norm {norm:.2g}, that of the plain sum {plain:.2g}: a learning rate "
        'that suits the sum does not suit this, Adam and its like aside. scale="project" (FairGrad, NashMTL, CAGrad, '
        "MGDA, IMTLG) gives it a length that does; or clip with max_norm, or choose the learning rate again",
    )


def warn_about_nothing_to_weigh(tasks: int, shared: Sequence[Tensor]) -> None:
    """Say that the weighting will have no say: one task, or tasks that have nothing in common."""
    if tasks == 1:
        what = "returned one loss, so there is nothing to weigh: if it is the sum of several, return them one by one"
    elif not shared:
        what = "no trainable parameter is reached by two of its losses (a detach() in between?): each task trains alone"
    else:
        return
    warn(f"closure: {what}")


def warn_about_weighting(own: Sequence[Tensor], base: Optimizer) -> None:
    """Say that parameters which the weighting learns are in no param group of the base optimizer."""
    held = {id(p) for p in held_by(base)}
    missing = [p for p in own if id(p) not in held]
    if missing:
        warn(
            f"weighting: {len(missing)} parameters of its own are in no param group of the base optimizer, and stay "
            "as they are unless another optimizer steps them: give them to it beside the model's, "
            "[*model.parameters(), *weighting.parameters()]",
        )


def warn_about_others(others: Sequence[Tensor]) -> None:
    """Say that the losses reach parameters which get no gradient here."""
    if others:
        shapes = few([str(list(p.shape)) for p in others])
        warn(
            f"closure: the losses reach {len(others)} parameters (shapes {shapes}) that are neither in the model nor "
            "in the base optimizer: they get no .grad. If they are to be trained (learned loss weights, say), give "
            "them to the base optimizer; if not, requires_grad_(False) spares their gradients",
        )
