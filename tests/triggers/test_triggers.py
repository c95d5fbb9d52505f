import pytest
import torch

from cost_mtl import ConflictShare, DominatedConflict, TeleportSchedule, WeakConflict


def gram_of(*rows):
    G = torch.tensor(rows, dtype=torch.float64)
    return G @ G.T


AGREE = gram_of([1, 0], [1, 1])
WEAK = gram_of([1, 0.2], [-0.5, 1])  # obtuse, yet both within 90 degrees of the mean
SMALL_AGAINST = gram_of([-1, 0.1], [5, 0], [5, 1])
LARGE_AGAINST = gram_of([-3, 0], [2, 0.5], [2, -0.5], [0.1, 0])  # the largest, not the smallest, is against the mean


def test_the_cases_are_what_their_names_say():
    for gram, against in ((WEAK, []), (SMALL_AGAINST, [0]), (LARGE_AGAINST, [0])):
        assert torch.nonzero(gram.sum(dim=1) < 0).flatten().tolist() == against


@pytest.mark.parametrize(
    ("trigger", "fires_on"),
    [
        (DominatedConflict(), ["small", "large"]),
        (DominatedConflict(rule="smallest"), ["small"]),
        (WeakConflict(), ["weak", "small", "large"]),
        (ConflictShare(0.3), ["small"]),
        (ConflictShare(0.25), ["small", "large"]),
        (ConflictShare(0.5), []),
    ],
)
def test_when_they_fire(trigger, fires_on):
    grams = {"agree": AGREE, "weak": WEAK, "small": SMALL_AGAINST, "large": LARGE_AGAINST}
    assert [name for name, gram in grams.items() if trigger(gram)] == fires_on


@pytest.mark.parametrize(
    "trigger", [DominatedConflict(), DominatedConflict("smallest"), WeakConflict(), ConflictShare(0.01)]
)
def test_a_task_without_gradient_is_never_in_conflict(trigger):
    assert not trigger(gram_of([1, 0], [0, 0]))
    assert not trigger(gram_of([0, 0], [0, 0]))


@pytest.mark.parametrize("trigger", [DominatedConflict(), DominatedConflict("smallest"), WeakConflict()])
@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_scale_does_not_matter(trigger, scale):
    for gram in (AGREE, WEAK, SMALL_AGAINST, LARGE_AGAINST):
        assert trigger(gram * scale) == trigger(gram)


def test_the_smallest_rule_passes_over_tasks_without_gradient():
    assert DominatedConflict("smallest")(gram_of([0, 0], [-1, 0.1], [5, 0], [5, 1]))


def test_schedule():
    s = TeleportSchedule(start=10, cooldown=5, limit=2)
    assert not s.allows(9, 0, None)
    assert s.allows(10, 0, None)
    assert not s.allows(14, 1, 10)
    assert s.allows(15, 1, 10)
    assert not s.allows(100, 2, 15)


def test_an_unconfirmed_conflict_is_asked_about_again_a_tenth_of_the_cooldown_later():
    s = TeleportSchedule(start=0, cooldown=50)
    assert not s.allows(104, 1, 40, last_asked=100)
    assert s.allows(105, 1, 40, last_asked=100)
    assert not s.allows(105, 1, 60, last_asked=100)
    assert TeleportSchedule(start=0, cooldown=1).allows(101, 0, None, last_asked=100)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: DominatedConflict("largest"), "rule"),
        (lambda: ConflictShare(0.0), "share"),
        (lambda: ConflictShare(1.5), "share"),
        (lambda: TeleportSchedule(start=-1), "start"),
        (lambda: TeleportSchedule(cooldown=0), "cooldown"),
        (lambda: TeleportSchedule(limit=1.5), "limit"),
    ],
)
def test_wrong_settings_are_named(make, word):
    with pytest.raises(ValueError, match=word):
        make()
