import pytest
import torch
from torch import nn

import cost_mtl
from cost_mtl.gradients.backward import collect
from cost_mtl.gradients.gramian import cosines, exact_gramian
from cost_mtl.gradients.layout import Layout
from cost_mtl.gradients.losses import split_losses
from tests.nets import closure, data, losses, mlp, reference_gradients


def test_task_gradients_equal_the_obvious_way():
    model = mlp(4, dtype=torch.float64)
    x, ys = data(4)
    make = closure(model, x.double(), ys)
    params = list(model.trunk.parameters())
    G = cost_mtl.task_gradients(make(), params)
    assert G.dtype == torch.float64
    torch.testing.assert_close(G, reference_gradients(model, make, params), rtol=1e-12, atol=1e-14)


def test_the_buffer_is_reused_and_grad_is_left_alone():
    model = mlp(2)
    x, ys = data(2)
    params = list(model.trunk.parameters())
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    out = torch.full((2, sum(p.numel() for p in params)), float("nan"))
    G = cost_mtl.task_gradients(losses(model, x, ys), params, out=out)
    assert G.data_ptr() == out.data_ptr()
    assert torch.isfinite(G).all()
    assert all((p.grad == 7.0).all() for p in model.parameters())


def test_empty_shared_is_refused():
    with pytest.raises(ValueError, match="shared"):
        cost_mtl.task_gradients([torch.ones((), requires_grad=True) * 2], [])


def test_a_view_of_a_row_has_the_strides_of_its_parameter():
    conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
    odd = nn.Parameter(torch.randn(4, 6)[:, ::2])  # not dense in memory
    layout = Layout([conv.weight, conv.bias, odd])
    flat = torch.arange(layout.numel, dtype=torch.float32)
    views = layout.views(flat)
    assert views[0].stride() == conv.weight.stride()
    assert views[2].shape == odd.shape
    torch.testing.assert_close(layout.flatten(views), flat)


def test_gradients_in_channels_last_are_right():
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 5, 3).double()
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    plain = cost_mtl.task_gradients([conv(x).square().mean(), conv(x).mean()], [conv.weight])
    want = Layout([conv.weight]).view(plain[0], 0).clone()
    conv.to(memory_format=torch.channels_last)
    last = cost_mtl.task_gradients([conv(x).square().mean(), conv(x).mean()], [conv.weight])
    torch.testing.assert_close(Layout([conv.weight]).view(last[0], 0), want, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(last @ last.T, plain @ plain.T, rtol=1e-12, atol=1e-14)


def test_own_gradients_are_kept_apart_by_task():
    model = mlp(3)
    x, ys = data(3)
    heads = list(model.heads.parameters())
    got = collect(split_losses(losses(model, x, ys)), Layout(list(model.trunk.parameters())), heads)
    for i, head in enumerate(model.heads):
        assert set(got.own[id(head.weight)]) == {i}
        want = torch.autograd.grad(losses(model, x, ys)[i], head.weight)[0]
        torch.testing.assert_close(got.own[id(head.weight)][i], want)


def test_a_layer_used_twice_counts_once_in_full():
    layer = nn.Linear(4, 4)
    x = torch.randn(3, 4)
    make = lambda: [layer(layer(x)).square().mean(), layer(x).mean()]  # noqa: E731
    G = cost_mtl.task_gradients(make(), layer.parameters())
    want = torch.cat([g.flatten() for g in torch.autograd.grad(make()[0], list(layer.parameters()))])
    torch.testing.assert_close(G[0], want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gramian_is_accurate_over_millions_of_columns(dtype):
    g = torch.Generator().manual_seed(0)
    G = torch.randn(3, 3_000_001, generator=g).add_(1.0).to(dtype)
    M = cost_mtl.gramian(G, dtype=torch.float64)
    want = G.double() @ G.double().T
    lengths = want.diagonal().sqrt()
    assert ((M - want).abs() / lengths.outer(lengths)).max() < 1e-6
    assert torch.equal(M, M.T)
    assert cost_mtl.gramian(G).dtype == dtype


@pytest.mark.parametrize("K", [1, 3, 4, 11, 12, 13, 33])
@pytest.mark.parametrize("columns", [0, 1, 1023, 1024, 1025, 50_000])
@pytest.mark.parametrize("came_out_of", [torch.float32, torch.bfloat16])
def test_gramian_of_any_size_and_of_rounded_gradients(K, columns, came_out_of):
    G = torch.randn(K, columns).to(came_out_of).float()
    want = G.double() @ G.double().T
    scale = want.diagonal().sqrt().clamp_min(1e-30)
    M = cost_mtl.gramian(G, dtype=torch.float64)
    assert ((M - want).abs() <= 1e-6 * scale[:, None] * scale).all()
    assert torch.equal(M, M.T)


def test_gramian_ignores_autocast():
    G = torch.randn(3, 1000)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        M = cost_mtl.gramian(G)
    torch.testing.assert_close(M, cost_mtl.gramian(G), rtol=0, atol=0)


@pytest.mark.parametrize("scale", [1e-30, 1e25])
def test_exact_gramian_beyond_the_range_of_float32(scale):
    G = torch.randn(2, 500) * scale
    torch.testing.assert_close(exact_gramian(G), G.double() @ G.double().T)


def test_combine_equals_the_product_and_may_write_into_a_row():
    G = torch.randn(3, 100_003, dtype=torch.float64)
    w = torch.tensor([0.5, -2.0, 3.0])
    want = w.double() @ G
    torch.testing.assert_close(cost_mtl.combine(G, w), want)
    got = cost_mtl.combine(G, w, out=G[0])
    assert got.data_ptr() == G.data_ptr()
    torch.testing.assert_close(got, want)


def test_combine_names_wrong_weights():
    with pytest.raises(ValueError, match=r"weights.*\[3\].*\[2\]"):
        cost_mtl.combine(torch.randn(3, 4), torch.ones(2))


def test_cosines_with_the_mean_gradient():
    G = torch.randn(4, 50, dtype=torch.float64)
    G[2] = 0
    want = torch.cosine_similarity(G, G.mean(dim=0, keepdim=True))
    torch.testing.assert_close(cosines(G @ G.T), want)
    assert cosines(G @ G.T)[2] == 0
    assert (cosines(torch.zeros(3, 3)) == 0).all()
