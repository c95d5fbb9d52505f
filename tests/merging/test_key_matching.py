"""Keys, ties and buffers: what belongs to what, and what is refused by name."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from cost_mtl.merging import AnisotropicScaling, TaskVector, task_arithmetic


def test_strict_lists_what_differs(state):
    base, tuned = state(0), state(1)
    del tuned["a.bias"]
    tuned["c.weight"] = torch.zeros(2)
    with pytest.raises(
        ValueError, match=r"finetuned: .*lacks 'a\.bias'; only it has 'c\.weight'; keys=\"intersection\""
    ):
        TaskVector(base, tuned)


def test_intersection_leaves_out_what_only_one_has(state):
    base, tuned = state(0), state(1)
    del tuned["a.bias"]
    tuned["c.weight"] = torch.ones(2)
    tau = TaskVector(base, tuned, keys="intersection")
    assert list(tau.blocks) == ["a.weight", "b.weight"]
    merged = tau.apply_to(base)
    assert list(merged) == list(base)
    assert torch.equal(merged["a.bias"], base["a.bias"])


def test_union_counts_a_missing_weight_as_zero(state):
    base, tuned = state(0), state(1)
    del tuned["a.bias"]
    tuned["c.weight"] = torch.tensor([1.0, 3.0]).bfloat16()
    tau = TaskVector(base, tuned, keys="union")
    merged = tau.apply_to(base, 0.5)
    assert list(merged) == [*base, "c.weight"]
    assert torch.equal(merged["a.bias"], base["a.bias"])
    assert torch.equal(merged["c.weight"], torch.tensor([0.5, 1.5]).bfloat16())


def test_union_can_not_add_a_parameter_to_a_module(mlp):
    tuned = mlp.state_dict() | {"extra": torch.ones(2)}
    with pytest.raises(ValueError, match="adds 'extra', got a module without it"):
        TaskVector(mlp, tuned, keys="union").apply_to(mlp)


def test_an_unknown_policy(state):
    with pytest.raises(ValueError, match="keys: expected one of 'strict', 'intersection', 'union', got 'loose'"):
        TaskVector(state(0), state(1), keys="loose")


def test_nothing_in_common(state):
    with pytest.raises(ValueError, match="expected weights in common"):
        TaskVector(state(0), {"x": torch.ones(2)}, keys="intersection")


@pytest.mark.parametrize("wrapped", ["base", "finetuned"])
def test_a_wrapper_prefix_is_recognised(state, wrapped):
    base, tuned = state(0), state(1)
    longer = {f"module.{key}": value for key, value in (base if wrapped == "base" else tuned).items()}
    pair = (longer, tuned) if wrapped == "base" else (base, longer)
    with pytest.raises(ValueError, match=r"match after taking off 'module\.'"):
        TaskVector(*pair)


@pytest.mark.parametrize("policy", ["strict", "intersection", "union"])
def test_shapes_that_differ_are_an_error_under_every_policy(state, policy):
    tuned = state(1) | {"a.weight": torch.zeros(5, 3)}
    with pytest.raises(ValueError, match=r"'a\.weight' \[4, 3\] against \[5, 3\]"):
        TaskVector(state(0), tuned, keys=policy)


def test_exclude_leaves_heads_of_other_sizes_alone(state):
    base, tuned = state(0), state(1) | {"b.weight": torch.zeros(9, 9)}
    tau = TaskVector(base, tuned, exclude=["b.*"])
    assert list(tau.blocks) == ["a.weight", "a.bias"]
    assert torch.equal(tau.apply_to(base)["b.weight"], base["b.weight"])
    with pytest.raises(ValueError, match=r"expected patterns that match a key of base, got 'head\.\*'"):
        TaskVector(base, tuned, exclude=["head.*"])
    with pytest.raises(TypeError, match="expected a sequence of patterns"):
        TaskVector(base, tuned, exclude="b.*")


# ------------------------------------------------------------------------------------------------ tied weights


def test_a_tied_weight_is_one_block_and_is_added_once(tied, perturb):
    tuned = perturb(tied, 1)
    tau = TaskVector(tied, tuned)
    assert sorted(tau.blocks) == ["body.bias", "body.weight", "embed.weight"]
    merged = tau.apply_to(tied, 0.5)
    expected = tied.embed.weight + 0.5 * (tuned.embed.weight - tied.embed.weight)
    torch.testing.assert_close(merged.embed.weight, expected)
    assert merged.head.weight is merged.embed.weight
    state = tau.apply_to(tied.state_dict())
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()


def test_a_tie_survives_a_fine_tuned_file_that_stores_one_name(tied, perturb):
    tuned = perturb(tied, 1).state_dict()
    for dropped in ("head.weight", "embed.weight"):
        stored = {key: value.clone() for key, value in tuned.items() if key != dropped}
        merged = task_arithmetic(tied, [stored], 1.0)
        torch.testing.assert_close(merged.embed.weight.data, tuned["embed.weight"])
        assert merged.head.weight is merged.embed.weight


def test_a_tie_that_the_fine_tuned_model_broke_is_refused(tied, perturb):
    tuned = {key: value.clone() for key, value in perturb(tied, 1).state_dict().items()}
    tau = TaskVector(tied, tuned)  # untied copies of one value: fine
    assert "head.weight" not in tau.blocks
    tuned["head.weight"] += 1
    with pytest.raises(
        ValueError, match=r"'embed\.weight' and 'head\.weight', which base ties in one weight, got different"
    ):
        TaskVector(tied, tuned)


def test_untied_in_the_base_stays_untied(tied, perturb):
    base = {key: value.clone() for key, value in tied.state_dict().items()}
    merged = task_arithmetic(base, [perturb(tied, 1)], 0.5)
    assert merged["head.weight"].data_ptr() != merged["embed.weight"].data_ptr()
    torch.testing.assert_close(merged["head.weight"], merged["embed.weight"])


def test_a_vector_of_untied_weights_does_not_fit_a_model_that_ties_them(tied, perturb):
    base, tuned = ({k: v.clone() for k, v in m.state_dict().items()} for m in (tied, perturb(tied, 1)))
    untied = TaskVector(base, tuned)
    for use in (untied.apply_to, lambda model: AnisotropicScaling(model, [untied])):
        with pytest.raises(ValueError, match=r"two blocks .* 'embed\.weight' and 'head\.weight'"):
            use(tied)


def test_a_tie_of_a_weight_with_its_transpose_is_refused():
    weight = torch.randn(3, 4)
    with pytest.raises(ValueError, match=r"'a' and 'b', which share memory.*\[3, 4\] and \[4, 3\]"):
        TaskVector({"a": weight, "b": weight.T}, {"a": weight, "b": weight.T})


def test_slices_of_one_flat_buffer_are_weights_of_their_own():
    flat = torch.arange(12.0)
    base = {"a": flat[:8].view(2, 4), "b": flat[8:]}
    tuned = {"a": torch.ones(2, 4), "b": torch.ones(4)}
    assert torch.equal(TaskVector(base, tuned).apply_to(base)["b"], torch.ones(4))


def test_a_layer_that_is_reached_under_two_names(perturb):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.second = self.first

        def forward(self, x):
            return self.second(self.first(x))

    model = Twice()
    tuned = perturb(model, 1)
    merged = task_arithmetic(model, [tuned], 1.0)
    torch.testing.assert_close(merged.second.weight, tuned.first.weight)
    scaling = AnisotropicScaling(model, [TaskVector(model, tuned)], init=1.0)
    x = torch.randn(2, 3)
    torch.testing.assert_close(scaling(x), tuned(x))
    assert isinstance(model.first.weight, nn.Parameter)
    assert isinstance(model.second.weight, nn.Parameter)


# ------------------------------------------------------------------------------------------------ buffers


class Positions(nn.Module):
    """Integer, boolean and float buffers beside a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("position_ids", torch.arange(3))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("frequencies", torch.tensor([0.5, 0.25]))


def test_buffers_are_no_weights(perturb):
    model = Positions()
    tau = TaskVector(model, perturb(model, 1))
    assert list(tau.blocks) == ["weight"]
    merged = tau.apply_to(model, 3.0)
    for name, buffer in model.named_buffers():
        assert torch.equal(dict(merged.named_buffers())[name], buffer)


@pytest.mark.parametrize("name", ["position_ids", "mask", "frequencies"])
def test_a_buffer_that_differs_stays_the_base_s_with_a_warning(name):
    model, tuned = Positions(), Positions()
    buffer = getattr(tuned, name)
    buffer.copy_(~buffer if buffer.dtype == torch.bool else buffer + 1)
    with pytest.warns(UserWarning, match=rf"stay base's: '{name}'"):
        tau = TaskVector(model, tuned)
    merged = tau.apply_to(model)
    assert torch.equal(getattr(merged, name), getattr(model, name))


def test_the_module_says_what_a_state_dict_can_not():
    """A float buffer in plain state_dicts looks like a weight; a module on either side settles it."""
    tuned = Positions()
    assert "frequencies" in TaskVector(Positions().state_dict(), tuned.state_dict()).blocks
    assert "frequencies" not in TaskVector(Positions().state_dict(), tuned).blocks
    assert "frequencies" not in TaskVector(Positions(), tuned.state_dict()).blocks


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_quantised_weights_are_refused(state, dtype):
    base, tuned = state(0), state(1)
    base["q"], tuned["q"] = torch.ones(3, dtype=dtype), torch.zeros(3, dtype=dtype)
    with pytest.raises(ValueError, match=r"expected base's values of 'q', got others in torch\.u?int8: dequantise"):
        TaskVector(base, tuned)


def test_eight_bit_floats_are_refused():
    base = {"w": torch.ones(3).to(torch.float8_e4m3fn)}
    with pytest.raises(ValueError, match=r"finetuned, 'w': expected floating-point .*dequantise them first"):
        TaskVector(base, base)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({}, "empty state_dict"),
        ({"model": {"w": torch.ones(1)}}, "got dict under 'model'.*pass the state_dict inside"),
        ({"w": torch.ones(2, device="meta")}, "got a meta tensor under 'w'"),
        ({"w": torch.ones(2, 2).to_sparse()}, "got a sparse tensor under 'w'"),
        (3, "expected a module, a state_dict or a path, got int"),
        (None, "got NoneType"),
    ],
)
def test_what_is_no_model(model, message):
    with pytest.raises((TypeError, ValueError), match=f"base: .*{message}"):
        TaskVector(model, {"w": torch.ones(2)})


def test_a_module_s_extra_state_is_left_alone(state):
    base, tuned = state(0) | {"a._extra_state": {"any": "thing"}}, state(1) | {"a._extra_state": {"other": 1}}
    merged = TaskVector(base, tuned).apply_to(base)
    assert merged["a._extra_state"] == {"any": "thing"}


# ------------------------------------------------------------------------------------------------ BatchNorm


def statistics(model):
    return {k: v for k, v in model.state_dict().items() if k.endswith(("running_mean", "running_var"))}


@pytest.fixture
def trained(normed, perturb):
    """A BatchNorm model and three fine-tunings with other statistics, much smaller variances among them."""
    normed[1].running_var.fill_(1.0)
    models = [perturb(normed, seed) for seed in (1, 2, 3)]
    for number, model in enumerate(models):
        model[1].running_var.fill_(0.05 * (number + 1))
        model[1].running_mean.fill_(number)
        model[1].num_batches_tracked.fill_(100 + number)
    return normed, models


def test_statistics_are_kept_by_default_and_with_a_warning(trained):
    base, models = trained
    taus = [TaskVector(base, model) for model in models]
    assert not any("running" in block or "num_batches" in block for tau in taus for block in tau.blocks)
    with pytest.warns(UserWarning, match="other BatchNorm statistics than the base in 2 buffers"):
        merged = task_arithmetic(base, taus, 1.0)
    assert all(torch.equal(value, statistics(base)[key]) for key, value in statistics(merged).items())
    # What adding them up would have done: 1 + sum(0.05 i - 1) < 0, and NaN in every output.
    assert 1 + sum(float(model[1].running_var[0]) - 1 for model in models) < 0
    assert torch.isfinite(merged.eval()(torch.randn(4, 5))).all()


def test_no_warning_where_nothing_differs(normed, perturb):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        task_arithmetic(normed, [perturb(normed, 1)], 1.0)


def test_statistics_can_be_averaged(trained):
    base, models = trained
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        merged = task_arithmetic(base, models, 1.0, buffers="average")
    torch.testing.assert_close(merged[1].running_var, torch.full((6,), 0.1))
    torch.testing.assert_close(merged[1].running_mean, torch.full((6,), 1.0))
    assert torch.equal(merged[1].num_batches_tracked, base[1].num_batches_tracked)  # integer: left alone


def test_statistics_can_be_measured_again(trained):
    base, models = trained
    batches = [torch.randn(32, 5) for _ in range(3)]
    merged = task_arithmetic(base, models, 0.3, buffers="recalibrate", batches=batches)
    with torch.no_grad():
        activations = [merged[0](batch) for batch in batches]
    torch.testing.assert_close(merged[1].running_mean, torch.stack([a.mean(0) for a in activations]).mean(0))
    torch.testing.assert_close(merged[1].running_var, torch.stack([a.var(0) for a in activations]).mean(0))
    assert not torch.equal(base[1].running_mean, merged[1].running_mean)


def test_recalibration_keeps_modes_and_momentum(trained):
    base, models = trained
    base.eval()
    merged = task_arithmetic(base, models, 0.3, buffers="recalibrate", batches=[torch.randn(8, 5)])
    assert not any(module.training for module in merged.modules())
    assert merged[1].momentum == base[1].momentum


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buffers": "sum"}, "buffers: expected one of 'keep', 'average', 'recalibrate', got 'sum'"),
        ({"buffers": "recalibrate"}, "expected a module as base, and batches, got"),
        ({"buffers": "recalibrate", "batches": []}, "at least one batch"),
        ({"buffers": "keep", "batches": [torch.ones(2, 5)]}, 'expected buffers="recalibrate" with them'),
        (
            {"buffers": "recalibrate", "batches": [torch.full((4, 5), float("nan"))]},
            "expected finite statistics of '1'",
        ),
    ],
)
def test_wrong_buffer_options(trained, options, message):
    base, models = trained
    with pytest.raises(ValueError, match=message):
        task_arithmetic(base, models, 1.0, **options)


def test_recalibrating_a_model_without_batchnorm(mlp, perturb):
    with pytest.raises(ValueError, match="expected BatchNorm layers"):
        task_arithmetic(mlp, [perturb(mlp, 1)], 1.0, buffers="recalibrate", batches=[torch.ones(2, 5)])


def test_vectors_add_up_their_statistics(trained):
    base, models = trained
    total = TaskVector(base, models[0]) + 0.5 * TaskVector(base, models[2])
    merged = total.apply_to(copy.deepcopy(base), buffers="average")
    torch.testing.assert_close(merged[1].running_var, torch.full((6,), 0.1))
