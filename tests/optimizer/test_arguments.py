"""Every check names the argument, what was expected and what came."""

import numpy as np
import pytest

import cost_mtl


@pytest.mark.parametrize("value", [0, 0.0, -1, float("nan"), True, "1", None, [1.0]])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda v: cost_mtl.LevelSet(length=v), "length"),
        (lambda v: cost_mtl.LevelSet(epsilon=v), "epsilon"),
        (lambda v: cost_mtl.Penalty(lr=v), "lr"),
        (lambda v: cost_mtl.Acceptance(tolerance=v), "tolerance"),
        (lambda v: cost_mtl.Acceptance(tolerance_heldout=v), "tolerance_heldout"),
    ],
)
def test_numbers_above_zero(make, name, value):
    with pytest.raises(ValueError, match=rf"^{name}: expected a number > 0, got "):
        make(value)


@pytest.mark.parametrize("value", [1, 0.5, np.float32(0.5), np.float64(2), float("inf")])
def test_any_real_number_will_do(value):
    assert cost_mtl.Acceptance(tolerance=value).tolerance == value
