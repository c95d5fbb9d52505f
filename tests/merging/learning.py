"""What the tests of learned merges share."""

from __future__ import annotations

import torch


def square_loss(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()


def same_state(first, second, **tolerance):
    assert first.keys() == second.keys()
    for key, value in first.items():
        torch.testing.assert_close(value, second[key], **tolerance)
