"""The arithmetic of task vectors, against float64 references and in every supported dtype."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from cost_mtl.merging import TaskVector, combine, gram, search_scale, task_analogy, task_arithmetic


def assert_same(first, second, **tolerance):
    assert list(first) == list(second)
    for key, value in first.items():
        assert value.dtype == second[key].dtype
        torch.testing.assert_close(value, second[key], **tolerance)


def exact(first, second):
    assert_same(first, second, rtol=0, atol=0)


def test_is_the_difference_in_float64(state):
    base, tuned = state(0), state(1)
    tau = TaskVector(base, tuned)
    for key in base:
        reference = tuned[key].double() - base[key].double()
        torch.testing.assert_close(tau.blocks[key].double(), reference, rtol=1e-6, atol=1e-7)
        assert tau.blocks[key].dtype == torch.float32


def test_models_and_state_dicts_give_the_same_vector(mlp, perturb):
    tuned = perturb(mlp, 1)
    from_modules = TaskVector(mlp, tuned)
    from_states = TaskVector(mlp.state_dict(), tuned.state_dict())
    exact(from_modules.blocks, from_states.blocks)


@pytest.mark.parametrize(("dtype", "spread"), [(torch.bfloat16, 15), (torch.float16, 12)])
def test_half_precision_is_exact_within_the_documented_spread(dtype, spread):
    """base, base + tau and (base + tau) - tau are bit-exact for values within a factor 2^spread of each other."""
    generator = torch.Generator().manual_seed(0)
    n = 20_000
    mantissas = 1 + torch.rand(2, n, generator=generator, dtype=torch.float64)
    exponents = torch.randint(0, spread, (2, n), generator=generator).double() - spread / 2
    signs = torch.randint(0, 2, (2, n), generator=generator).double() * 2 - 1
    base, tuned = (signs * mantissas * 2**exponents).to(dtype)
    tau = TaskVector({"w": base}, {"w": tuned})
    applied = tau.apply_to({"w": base})
    exact(applied, {"w": tuned})
    exact(tau.apply_to(applied, -1.0), {"w": base})


def test_float32_is_exact_within_a_factor_of_two_and_one_rounding_off_elsewhere():
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(20_000, generator=generator)
    near = base * (0.51 + 1.48 * torch.rand(20_000, generator=generator))
    tau = TaskVector({"w": base}, {"w": near})
    exact(tau.apply_to({"w": base}), {"w": near})
    exact(tau.apply_to({"w": near}, -1.0), {"w": base})
    far = torch.randn(20_000, generator=generator) * 10 ** (8 * torch.rand(20_000, generator=generator) - 4)
    back = TaskVector({"w": base}, {"w": far}).apply_to({"w": base})["w"]
    larger = torch.maximum(base.abs(), far.abs()).double()
    assert ((back.double() - far.double()).abs() <= 2**-23 * larger).all()
    assert not torch.equal(back, far)  # the documentation does not promise more than there is


def test_subtracting_in_bfloat16_would_lose_the_vector():
    """Why blocks are float32: the mean relative error of the naive subtraction."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(10_000, generator=generator, dtype=torch.float64)
    tuned = base + 1e-3 * torch.randn(10_000, generator=generator, dtype=torch.float64)
    wide = TaskVector({"w": base.float()}, {"w": tuned.float()}).blocks["w"].double()
    naive = (tuned.bfloat16() - base.bfloat16()).double()
    reference = tuned - base
    assert (wide - reference).norm() / reference.norm() < 1e-3
    assert (naive - reference).norm() / reference.norm() > 0.5


def test_the_operators_are_a_vector_space(state):
    base = state(0)
    one, two = TaskVector(base, state(1)), TaskVector(base, state(2))
    for key in base:
        a, b = one.blocks[key], two.blocks[key]
        torch.testing.assert_close((one + two).blocks[key], a + b)
        torch.testing.assert_close((one - two).blocks[key], a - b)
        torch.testing.assert_close((-one).blocks[key], -a)
        torch.testing.assert_close((2.5 * one).blocks[key], 2.5 * a)
        torch.testing.assert_close((np.float32(2.5) * one).blocks[key], 2.5 * a)
        torch.testing.assert_close((one * np.float64(2.5)).blocks[key], 2.5 * a)
        torch.testing.assert_close((one / 4).blocks[key], a / 4)
        torch.testing.assert_close(sum([one, two]).blocks[key], a + b)
    exact((one - one).blocks, (0 * one).blocks)


@pytest.mark.parametrize("operand", ["2", None, torch.tensor(2.0)])
def test_other_operands_are_refused(state, operand):
    tau = TaskVector(state(0), state(1))
    with pytest.raises(TypeError):
        tau + operand
    if not isinstance(operand, torch.Tensor):
        with pytest.raises(TypeError):
            tau * operand


def test_norms_and_cosines(state):
    base = state(0)
    vectors = [TaskVector(base, state(seed)) for seed in (1, 2, 3)]
    flat = torch.stack([torch.cat([v.blocks[k].double().flatten() for k in base]) for v in vectors])
    torch.testing.assert_close(gram(vectors), flat @ flat.T)
    assert vectors[0].norm() == pytest.approx(float(flat[0].norm()), rel=1e-12)
    assert vectors[0].norms()["a.bias"] == pytest.approx(float(vectors[0].blocks["a.bias"].double().norm()), rel=1e-12)
    cosine = float(torch.nn.functional.cosine_similarity(flat[0], flat[1], dim=0))
    assert vectors[0].cosine(vectors[1]) == pytest.approx(cosine, rel=1e-12)
    assert vectors[0].cosine(-vectors[0]) == pytest.approx(-1)
    assert vectors[0].cosine(0 * vectors[0]) == 0


def test_a_long_inner_product_is_accurate():
    """One float32 product over millions of elements is not; the reference is NumPy in float64."""
    generator = torch.Generator().manual_seed(0)
    tuned = torch.rand(3_000_001, generator=generator)
    tau = TaskVector({"w": torch.zeros_like(tuned)}, {"w": tuned})
    assert tau.norm() == pytest.approx(float(np.linalg.norm(tuned.numpy().astype(np.float64))), rel=1e-12)


def test_task_arithmetic_is_its_definition(state):
    base, tuned = state(0), [state(1), state(2)]
    vectors = [TaskVector(base, model) for model in tuned]
    merged = task_arithmetic(base, vectors, 0.3)
    weighted = task_arithmetic(base, vectors, [0.3, -0.7])
    for key, value in base.items():
        taus = [model[key].double() - value.double() for model in tuned]
        torch.testing.assert_close(merged[key].double(), value.double() + 0.3 * sum(taus), rtol=1e-5, atol=1e-6)
        reference = value.double() + 0.3 * taus[0] - 0.7 * taus[1]
        torch.testing.assert_close(weighted[key].double(), reference, rtol=1e-5, atol=1e-6)
    exact(task_arithmetic(base, tuned, 0.3), merged)  # models stand for their vectors
    exact(task_arithmetic(base, [-vectors[0]], 0.5), task_arithmetic(base, [vectors[0]], -0.5))


def test_the_order_of_the_vectors_does_not_matter(state):
    base = state(0)
    vectors = [TaskVector(base, state(seed)) for seed in range(1, 6)]
    assert_same(task_arithmetic(base, vectors, 0.2), task_arithmetic(base, vectors[::-1], 0.2), rtol=1e-5, atol=1e-6)


def test_analogy(state):
    a, b, c = state(1), state(2), state(3)
    result = task_analogy(a, b, c)
    for key in a:
        torch.testing.assert_close(result[key], c[key] + b[key] - a[key], rtol=1e-5, atol=1e-6)


def test_models_keep_dtype_and_are_not_changed(mlp, perturb):
    half = mlp.to(torch.bfloat16)
    before = copy.deepcopy(half.state_dict())
    tuned = perturb(half, 1)
    merged = task_arithmetic(half, [tuned], 0.5)
    assert isinstance(merged, nn.Sequential)
    assert merged is not half
    assert {p.dtype for p in merged.parameters()} == {torch.bfloat16}
    assert all(p.requires_grad for p in merged.parameters())
    exact(before, half.state_dict())
    merged[0].weight.data.zero_()
    exact(before, half.state_dict())


def test_a_merged_state_dict_has_memory_of_its_own(normed, perturb):
    base = normed.state_dict()
    merged = task_arithmetic(base, [perturb(normed, 1).state_dict()], 0.5, buffers="average")
    assert list(merged) == list(base)
    assert merged._metadata == base._metadata  # load_state_dict reads versions from it
    before = copy.deepcopy(dict(base))
    for value in merged.values():
        value.zero_()
    exact(before, dict(base))


def test_a_float64_model_is_computed_in_float64(state):
    base, tuned = state(0, torch.float64), state(1, torch.float64)
    tau = TaskVector(base, tuned)
    assert tau.blocks["a.weight"].dtype == torch.float64
    exact(dict(tau.blocks), {key: tuned[key] - base[key] for key in base})


def test_complex_weights():
    base = {"w": torch.tensor([1 + 2j, 3 - 1j])}
    tuned = {"w": torch.tensor([2 + 2j, 3 + 1j])}
    tau = TaskVector(base, tuned)
    exact(tau.apply_to(base), tuned)
    assert tau.norm() == pytest.approx(5**0.5)


def test_per_block_scaling(state):
    base = state(0)
    tau = TaskVector(base, state(1))
    scaled = tau.scale_blocks({"a.weight": 2.0, "a.bias": 0.0, "b.weight": -1.0})
    torch.testing.assert_close(scaled.blocks["a.weight"], 2 * tau.blocks["a.weight"])
    assert not scaled.blocks["a.bias"].any()
    torch.testing.assert_close(scaled.blocks["b.weight"], -tau.blocks["b.weight"])
    with pytest.raises(ValueError, match=r"got 'a\.bias' in only one"):
        tau.scale_blocks({"a.weight": 2.0, "b.weight": 1.0})
    chosen = tau.select(lambda block: block.startswith("a."))
    assert list(chosen.blocks) == ["a.weight", "a.bias"]
    applied = chosen.apply_to(base)
    assert torch.equal(applied["b.weight"], base["b.weight"])


def test_vectors_of_different_bases_do_not_add_up(state):
    one, other = TaskVector(state(0), state(1)), TaskVector(state(5), state(1))
    with pytest.raises(ValueError, match=r"'a\.weight' differs in 3 of 3 blocks.*without_base"):
        one + other
    torch.testing.assert_close(
        (one.without_base() + other.without_base()).blocks["a.bias"], one.blocks["a.bias"] + other.blocks["a.bias"]
    )


def test_a_base_in_bfloat16_and_its_float32_copy_are_one_base(state):
    base, tuned = state(0, torch.bfloat16), state(1, torch.bfloat16)
    widened = {key: value.float() for key, value in base.items()}
    assert TaskVector(base, tuned).base_hash == TaskVector(widened, tuned).base_hash
    assert TaskVector(base, tuned).base_hash != TaskVector(state(5, torch.bfloat16), tuned).base_hash


def test_vectors_of_different_blocks_count_the_missing_as_zero(state):
    base = state(0)
    tau = TaskVector(base, state(1))
    part = TaskVector(base, state(2)).select(lambda block: block == "a.bias")
    total = tau + part
    torch.testing.assert_close(total.blocks["a.weight"], tau.blocks["a.weight"])
    torch.testing.assert_close(total.blocks["a.bias"], tau.blocks["a.bias"] + part.blocks["a.bias"])
    assert gram([tau, part])[0, 1] == pytest.approx(float((tau.blocks["a.bias"] * part.blocks["a.bias"]).sum()))


@pytest.mark.parametrize(
    "call", [lambda b, v: task_arithmetic(b, v), lambda b, v: combine(v, []), lambda b, v: gram(v)]
)
def test_no_vectors_is_an_error(state, call):
    with pytest.raises(ValueError, match="at least one"):
        call(state(0), [])


def test_one_vector_in_place_of_a_sequence_is_an_error(state):
    with pytest.raises(TypeError, match="expected a sequence"):
        task_arithmetic(state(0), TaskVector(state(0), state(1)))
    with pytest.raises(TypeError, match="expected a sequence"):
        task_arithmetic(state(0), state(1))


def test_weights_must_match(state):
    tau = TaskVector(state(0), state(1))
    with pytest.raises(ValueError, match="one for each of the 2 vectors, got 3"):
        task_arithmetic(state(0), [tau, tau], [1.0, 1.0, 1.0])


def test_applied_to_another_architecture(state):
    tau = TaskVector(state(0), state(1))
    with pytest.raises(
        ValueError,
        match=r"base: expected all blocks of the task vector, got a model that lacks 'a\.bias'.*1 such blocks",
    ):
        tau.apply_to({key: value for key, value in state(0).items() if key != "a.bias"})
    other = state(0) | {"a.bias": torch.zeros(5)}
    with pytest.raises(ValueError, match=r"'a\.bias': expected the base's shape \[5\], got \[4\]"):
        tau.apply_to(other)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["base", "fine-tuned model"])
def test_not_finite_weights_are_named(state, bad, where):
    base, tuned = state(0), state(1)
    (base if where == "base" else tuned)["a.bias"][1] = bad
    with pytest.raises(ValueError, match=rf"finetuned, 'a\.bias'.*NaN or infinity in the {where}"):
        TaskVector(base, tuned)


def test_an_overflow_of_float16_is_an_error():
    base, tuned = {"w": torch.tensor([4e4]).half()}, {"w": torch.tensor([6e4]).half()}
    tau = TaskVector(base, tuned)
    with pytest.raises(
        ValueError, match=r"'w': expected finite merged weights, got NaN or infinity in torch\.float16 \(scale 2\)"
    ):
        tau.apply_to(base, 2.0)


def test_search_scale(state):
    base = state(0)
    tau = TaskVector(base, state(1))
    target = tau.apply_to(base, 0.35)
    found = search_scale(base, [tau], lambda merged: -float((merged["a.weight"] - target["a.weight"]).norm()))
    assert found.scale == 0.35
    assert found.score == max(found.scores.values())
    assert len(found.scores) == 21
    with pytest.raises(ValueError, match="at least one scale"):
        search_scale(base, [tau], lambda _: 0.0, [])
    with pytest.raises(ValueError, match="expected a finite score"):
        search_scale(base, [tau], lambda _: float("nan"))


def test_copies_and_pickles(state):
    tau = TaskVector(state(0), state(1))
    for other in (copy.deepcopy(tau), pickle.loads(pickle.dumps(tau))):
        exact(dict(other.blocks), dict(tau.blocks))
        assert other.base_hash == tau.base_hash
    assert repr(tau) == "TaskVector(3 blocks, 28 weights, in memory)"


def test_a_vector_in_memory_does_not_follow_the_models(mlp, perturb):
    tuned = perturb(mlp, 1)
    tau = TaskVector(mlp, tuned)
    before, known = {k: v.clone() for k, v in tau.blocks.items()}, tau.base_hash
    for parameter in (*tuned.parameters(), *mlp.parameters()):
        parameter.data.zero_()
    exact(before, dict(tau.blocks))
    assert tau.base_hash == known


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e39])
def test_factors_that_no_weight_can_take_are_refused_by_name(state, value):
    base, tau = state(0), TaskVector(state(0), state(1))
    with pytest.raises(ValueError, match="scale: expected a finite number"):
        tau.apply_to(base, value)
    with pytest.raises(ValueError, match="scale: expected a finite number"):
        value * tau
    with pytest.raises(ValueError, match="weights: expected a finite number"):
        combine([tau, tau], [1.0, value])
    with pytest.raises(ValueError, match=r"coefficients\['.*'\]: expected a finite number"):
        tau.scale_blocks(dict.fromkeys(tau.blocks, value))
    with pytest.raises(ZeroDivisionError):
        tau / 0
