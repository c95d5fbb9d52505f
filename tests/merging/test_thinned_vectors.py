"""TIES, DARE and Breadcrumbs against their defining equations, weight by weight."""

from __future__ import annotations

import math

import pytest
import torch

from cost_mtl.merging import TaskVector, breadcrumbs, combine, dare, ties


def vector(values, name="w"):
    values = torch.as_tensor(values, dtype=torch.float32)
    return TaskVector({name: torch.zeros_like(values)}, {name: values})


def random_vectors(count, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [vector(torch.randn(size, generator=generator)) for _ in range(count)]


def slow_ties(taus, density, weights):
    """Yadav et al., algorithm 1, with one loop per step (trimming per block)."""
    count = len(taus[0])
    keep = int(density * count)
    trimmed = []
    for tau in taus:
        ranked = sorted(range(count), key=lambda i: -abs(tau[i]))[:keep]
        trimmed.append([tau[i] if i in ranked else 0.0 for i in range(count)])
    merged = []
    for i in range(count):
        sign = 1 if sum(tau[i] for tau in trimmed) >= 0 else -1
        agreeing = [w * tau[i] for w, tau in zip(weights, trimmed, strict=True) if tau[i] * sign > 0]
        merged.append(sum(agreeing) / len(agreeing) if agreeing else 0.0)
    return torch.tensor(merged)


@pytest.mark.parametrize("density", [0.2, 0.55, 1.0])
@pytest.mark.parametrize("weights", [None, [1.0, 0.5, 2.0]])
def test_ties_is_its_algorithm(density, weights):
    taus = random_vectors(3, 60)
    merged = ties(taus, density, weights).blocks["w"]
    reference = slow_ties([tau.blocks["w"].tolist() for tau in taus], density, weights or [1.0] * 3)
    torch.testing.assert_close(merged, reference)


def test_ties_by_hand():
    taus = [vector([3.0, -1.0, 0.1, 2.0]), vector([1.0, 4.0, -0.2, -3.0])]
    # Trimmed to half: [3, 0, 0, 2] and [0, 4, 0, -3]; elected signs + + + -.
    assert ties(taus, 0.5).blocks["w"].tolist() == [3.0, 4.0, 0.0, -3.0]


def test_ties_of_one_vector_keeps_its_largest_values():
    tau = random_vectors(1, 100)[0]
    merged = ties([tau], 0.3).blocks["w"]
    threshold = tau.blocks["w"].abs().sort(descending=True).values[29]
    assert torch.equal(merged, tau.blocks["w"].where(tau.blocks["w"].abs() >= threshold, 0.0))


def test_a_block_that_one_vector_lacks_has_no_sign_in_it():
    one, two = vector([1.0, -2.0]), vector([5.0], "other")
    merged = ties([one.without_base(), two.without_base()], 1.0)
    assert merged.blocks["w"].tolist() == [1.0, -2.0]
    assert merged.blocks["other"].tolist() == [5.0]


def test_dare_keeps_a_share_and_rescales_it():
    tau = random_vectors(1, 40_000)[0]
    density = 0.25
    thinned = dare(tau, density, seed=3).blocks["w"]
    kept = thinned != 0
    torch.testing.assert_close(thinned[kept], tau.blocks["w"][kept] / density)
    # Binomial: five standard deviations.
    assert abs(float(kept.float().mean()) - density) < 5 * math.sqrt(density * (1 - density) / 40_000)


def test_dare_is_right_on_average():
    tau = vector([1.0, -2.0, 3.0])
    draws = torch.stack([dare(tau, 0.5, seed).blocks["w"] for seed in range(2000)])
    error = tau.blocks["w"].abs() / math.sqrt(2000)  # a draw is 0 or 2 tau: its standard deviation is |tau|
    assert ((draws.mean(dim=0) - tau.blocks["w"]).abs() < 5 * error).all()


def test_dare_masks_depend_on_seed_and_block_alone():
    values = torch.ones(500)
    base = {"a": torch.zeros(500), "b": torch.zeros(500)}
    tau = TaskVector(base, {"a": values, "b": values})
    state = torch.get_rng_state()
    first, again, other = dare(tau, 0.5, 1), dare(tau, 0.5, 1), dare(tau, 0.5, 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.blocks["a"], again.blocks["a"])
    assert not torch.equal(first.blocks["a"], other.blocks["a"])
    assert not torch.equal(first.blocks["a"], first.blocks["b"])
    assert dare(tau, 1.0) is tau


def test_breadcrumbs_keeps_the_middle():
    values = torch.tensor([5.0, -1.0, 2.0, -4.0, 3.0, 0.5, -8.0, 6.0, 7.0, -9.0])
    thinned = breadcrumbs(vector(values), lower=0.3, upper=0.8).blocks["w"]
    # By size: 0.5 1 2 | 3 4 5 6 7 | 8 9.
    assert thinned.tolist() == [5.0, 0.0, 0.0, -4.0, 3.0, 0.0, 0.0, 6.0, 7.0, 0.0]


def test_breadcrumbs_counts():
    tau = random_vectors(1, 1000)[0]
    thinned = breadcrumbs(tau, 0.85, 0.99).blocks["w"]
    assert int((thinned != 0).sum()) == 1000 - 850 - 10
    kept, all_sizes = thinned[thinned != 0].abs(), tau.blocks["w"].abs().sort().values
    assert kept.min() == all_sizes[850]
    assert kept.max() == all_sizes[989]
    assert torch.equal(breadcrumbs(tau, 0.0, 1.0).blocks["w"], tau.blocks["w"])


def test_shapes_and_strides_are_kept():
    values = torch.randn(4, 6).T
    for thin in (lambda t: dare(t, 0.5), breadcrumbs, lambda t: ties([t], 0.5)):
        assert thin(vector(values)).blocks["w"].shape == (6, 4)


def test_thinning_a_vector_from_files_is_repeatable(tmp_path):
    from safetensors.torch import save_file

    taus = random_vectors(2, 64)
    save_file({"w": torch.zeros(64)}, tmp_path / "base.safetensors")
    for number, tau in enumerate(taus):
        save_file({"w": tau.blocks["w"].clone()}, tmp_path / f"{number}.safetensors")
    lazy = [TaskVector(tmp_path / "base.safetensors", tmp_path / f"{number}.safetensors") for number in range(2)]
    for thin in (lambda ts: combine([dare(t, 0.5, 9) for t in ts], [1, 1]), lambda ts: ties(ts, 0.5)):
        result = thin(lazy)
        assert "computed at access" in repr(result)
        assert torch.equal(result.blocks["w"], result.blocks["w"])
        assert torch.equal(result.blocks["w"], thin(taus).blocks["w"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: ties([t], 0.0), "density: expected a number in"),
        (lambda t: ties([t], 1.5), "density: expected a number in"),
        (lambda t: ties([], 0.5), "at least one task vector"),
        (lambda t: ties([t, t], 0.5, [1.0]), "one for each of the 2 vectors, got 1"),
        (lambda t: ties([t, vector([1.0, 2.0])], 0.5), "'w': expected task vectors of one shape, got "),
        (lambda t: dare(t, -0.1), "density: expected a number in"),
        (lambda t: dare(t, float("nan")), "density: expected a number in"),
        (lambda t: breadcrumbs(t, 0.9, 0.8), "expected lower < upper"),
        (lambda t: breadcrumbs(t, -0.1, 0.8), "lower: expected a number in"),
    ],
)
def test_wrong_settings(call, message):
    with pytest.raises(ValueError, match=message):
        call(vector([1.0, 2.0, 3.0]))
