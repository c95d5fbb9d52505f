"""Objectives for the coefficients of a merge, beside the supervised losses that everyone has."""

from __future__ import annotations

from torch import Tensor

from cost_mtl.merging.fitting import Loss

__all__ = ["entropy", "negation_loss"]


def entropy(logits: Tensor) -> Tensor:
    """Mean entropy of softmax(logits) [n, classes], in nats: the unsupervised objective of test-time merging.

    It knows no labels: driven far it makes a model certain, not right (25 points of accuracy lost on the digits of
    docs/merging.md). Select on a few labelled data (``fit(..., selection=...)``) where there are any.

    Example:
        >>> entropy(torch.zeros(3, 2))  # log 2
        tensor(0.6931)
    """
    log_p = logits.log_softmax(dim=-1)
    return -(log_p.exp() * log_p).sum(dim=-1).mean()


def negation_loss(target: Loss, control: Loss) -> Loss:
    """−L_target + L_control, the published objective for unlearning with learned coefficients.

    ``loss(model, (target_batch, control_batch))``. Unbounded below: it relies on early stopping, and on a selection
    that includes the control task.

    Example:
        >>> loss = negation_loss(lambda model, batch: batch.sum(), lambda model, batch: batch.mean())
        >>> loss(None, (torch.tensor([1.0, 3.0]), torch.tensor([1.0, 3.0])))  # control 2, target 4
        tensor(-2.)
    """

    def loss(model: object, batch: tuple[object, object]) -> Tensor:
        return control(model, batch[1]) - target(model, batch[0])

    return loss
