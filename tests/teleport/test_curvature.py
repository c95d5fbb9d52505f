"""A lack of memory in a double backward pass is not taken for a model that has none."""

import pytest
import torch

from cost_mtl.distributed.failures import lacks_memory
from cost_mtl.gradients.losses import split_losses
from cost_mtl.teleport.base import NoDoubleBackwardError
from cost_mtl.teleport.curvature import curvature


class Fails(torch.autograd.Function):
    """x * x, whose backward pass can be differentiated but for the error."""

    @staticmethod
    def forward(ctx, x, words):
        ctx.save_for_backward(x)
        ctx.words = words
        return x * x

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            raise RuntimeError(ctx.words)
        return 2 * ctx.saved_tensors[0] * grad, None


def second_derivative(words):
    x = torch.ones(3, requires_grad=True)
    return curvature(split_losses([Fails.apply(x, words).sum()]), [0], [x], [torch.ones(3)], [x])


def test_a_plain_error_that_says_out_of_memory_is_passed_on():
    with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
        second_derivative("DefaultCPUAllocator: can't allocate memory: you tried to allocate 80 bytes")
    assert not isinstance(caught.value, NoDoubleBackwardError)
    assert lacks_memory(caught.value)


def test_any_other_error_means_no_double_backward():
    with pytest.raises(NoDoubleBackwardError, match="not implemented"):
        second_derivative("derivative is not implemented")
