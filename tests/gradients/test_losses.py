import pytest
import torch

import cost_mtl
from cost_mtl.gradients.losses import split_losses
from tests.nets import data, losses, mlp


@pytest.fixture
def problem():
    model = mlp(3)
    x, ys = data(3)
    return model, lambda: losses(model, x, ys)


FORMS = {
    "list": list,
    "tuple": tuple,
    "mapping": lambda ls: dict(zip("abc", ls, strict=True)),
    "stack": torch.stack,
    "cat": lambda ls: torch.cat([loss.reshape(1) for loss in ls]),
    "arithmetic": lambda ls: torch.stack(ls) * 1.0,
}


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_give_the_same_gradients(problem, form):
    model, make = problem
    want = cost_mtl.task_gradients(make(), model.trunk.parameters())
    got = cost_mtl.task_gradients(FORMS[form](make()), model.trunk.parameters())
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


def test_names_come_from_the_mapping(problem):
    assert split_losses(FORMS["mapping"](problem[1]())).names == ("a", "b", "c")
    assert split_losses(problem[1]()).names == ("0", "1", "2")


@pytest.mark.parametrize("form", ["list", "tuple", "mapping", "stack"])
def test_nan_in_one_task_stays_there(problem, form):
    model, make = problem

    def poisoned():
        first, second, third = make()
        return FORMS[form]([first, second * float("nan"), third])

    G = cost_mtl.task_gradients(poisoned(), model.trunk.parameters())
    clean = cost_mtl.task_gradients(make(), model.trunk.parameters())
    assert torch.isnan(G[1]).all()
    torch.testing.assert_close(G[[0, 2]], clean[[0, 2]])


def test_a_stack_is_taken_apart_so_that_unreached_parameters_get_no_gradient(problem):
    model, make = problem
    head = list(model.heads[0].parameters())
    tasks = split_losses(torch.stack(make()))
    torch.autograd.backward(tasks.roots[1], torch.ones(()), inputs=head)
    assert all(p.grad is None for p in head)


def test_a_constant_loss_has_a_zero_row(problem):
    model, make = problem
    for form in (list, torch.stack):
        first, _, third = make()
        G = cost_mtl.task_gradients(form([first, torch.zeros(()), third]), model.trunk.parameters())
        assert (G[1] == 0).all()
        assert (G[0] != 0).any()


@pytest.mark.parametrize(
    ("bad", "error", "words"),
    [
        (None, TypeError, "NoneType"),
        (1.5, TypeError, "float"),
        ("abc", TypeError, "str"),
        ([], ValueError, "none"),
        ([1.0, 2.0], TypeError, "float"),
        (torch.ones(4, 2, requires_grad=True), ValueError, r"\[4, 2\]"),
        (torch.ones(3), ValueError, "graph"),
        ([torch.ones(2, requires_grad=True) * 2], ValueError, r"\[2\]"),
        ({"depth": torch.ones(3, requires_grad=True) * 2}, ValueError, "depth"),
        (torch.tensor([1, 2]), TypeError, "int64"),
    ],
)
def test_wrong_results_are_named(bad, error, words):
    with pytest.raises(error, match=words) as info:
        split_losses(bad)
    assert "closure" in str(info.value)
