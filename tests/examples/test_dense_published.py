"""Delta m and mean rank recomputed from the published rows, and the misprints that the audit must find."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import rankdata

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # scripts that users copy, not an installed package

from dense.engine.published import FOLDER, Finding, PublishedTable, audit, audit_summaries, load_published
from dense.engine.scores import delta_m, delta_m_interval, mean_and_error, mean_rank, mean_rank_interval
from dense.errors import UserError

NASH_CITY = "Nash-MTL (ICML 2022) Table 3"
FAMO_NYU = "FAMO (NeurIPS 2023) Table 1 (baselines as in Nash-MTL Table 2)"
NASH_QM9 = "Nash-MTL (ICML 2022) Table 6"


def row(table: PublishedTable, method: str, source: str):
    return next(r for r in table.rows if r.method == method and r.source == source)


def test_delta_m_of_a_hand_computed_row() -> None:
    # +10 % where higher is better is -10, +20 % where lower is better is +20
    assert delta_m([1.1, 6.0], [1.0, 5.0], [True, False]) == pytest.approx(5.0)
    assert delta_m([1.0, 5.0], [1.0, 5.0], [True, False]) == 0


@pytest.mark.parametrize(
    ("name", "source"),
    [("nyuv2", FAMO_NYU), ("cityscapes", NASH_CITY), ("qm9_per_task", NASH_QM9)],
)
def test_delta_m_recomputed_from_the_printed_metrics_is_the_printed_one(name: str, source: str) -> None:
    """To the printed digits: no printed value lies outside what rounding of the printed metrics allows."""
    table = load_published(name)
    checked = 0
    for r in table.of(source):
        if (name, r.method) == ("nyuv2", "IMTL-G"):
            continue  # a misprint: see below
        half = 0.5 * 10.0 ** -np.array(table.decimals[source])
        low, high = delta_m_interval(r.values, table.baseline.values, table.higher_is_better, half)
        assert low <= table.delta_m(r) <= high
        digits = 2 if name != "qm9_per_task" else 1
        assert low - 0.5 * 10**-digits <= r.delta_m <= high + 0.5 * 10**-digits, r
        checked += 1
    assert checked >= 10


def test_four_decimals_of_depth_reproduce_famos_table_to_a_hundredth() -> None:
    table = load_published("nyuv2")
    for r in table.of(FAMO_NYU):
        if r.method != "IMTL-G":
            assert table.delta_m(r) == pytest.approx(r.delta_m, abs=0.0151), r.method


def test_mean_ranks_of_famos_nyuv2_table_are_reproduced_to_the_printed_digits() -> None:
    table = load_published("nyuv2")
    rows = table.of(FAMO_NYU)
    ranks = mean_rank([r.values for r in rows], table.higher_is_better)
    assert [round(float(rank), 2) for rank in ranks] == [r.mean_rank for r in rows]


def test_mean_ranks_of_nash_mtls_cityscapes_table_use_average_ties() -> None:
    table = load_published("cityscapes")
    rows = table.of(NASH_CITY)
    ranks = dict(zip((r.method for r in rows), mean_rank([r.values for r in rows], table.higher_is_better,
                                                         ties="average"), strict=True))  # fmt: skip
    for r in rows:
        if r.method not in ("SI", "RLW", "UW"):  # inconsistent with the table's own numbers: found by the audit
            assert abs(float(ranks[r.method]) - r.mean_rank) <= 0.0051, r.method


@pytest.mark.parametrize(("ties", "method"), [("min", "min"), ("average", "average"), ("max", "max")])
def test_mean_rank_equals_scipys(ties: str, method: str) -> None:
    values = np.random.default_rng(0).integers(0, 4, (7, 5)).astype(float)
    signs = [True, False, True, False, False]
    loss = np.where(signs, -values, values)
    np.testing.assert_allclose(mean_rank(values, signs, ties=ties), rankdata(loss, method, axis=0).mean(1))


def test_rank_and_delta_intervals_contain_what_rounding_hid() -> None:
    rng = np.random.default_rng(1)
    signs = [True, False, False]
    exact = rng.uniform(0.2, 0.9, (6, 3))
    rounded = exact.round(1)
    low, high = mean_rank_interval(rounded, signs)
    ranks = mean_rank(exact, signs)
    assert (low <= ranks).all()
    assert (ranks <= high).all()
    for values in exact:
        a, b = delta_m_interval(values.round(1), exact[0].round(1), signs, [0.05] * 3)
        assert a <= delta_m(values, exact[0], signs) <= b


def kinds(findings: list[Finding]) -> set[tuple[str, str, str]]:
    return {(f.kind, f.method, f.source) for f in findings}


def test_the_known_misprints_are_found() -> None:
    nyu, city = kinds(audit(load_published("nyuv2"))), kinds(audit(load_published("cityscapes")))
    # COST's NYUv2 row "FAMO" is MoCo's, and FAMO's own paper has other numbers
    assert ("duplicate", "FAMO", "COST (NeurIPS 2025) Table 2") in nyu
    assert ("disagreement", "FAMO", "COST (NeurIPS 2025) Table 2") in nyu
    # FAMO's CityScapes row LS repeats Nash-MTL's SI
    assert ("duplicate", "SI", NASH_CITY) in city
    assert ("disagreement", "LS", NASH_CITY) in city


def test_the_two_delta_m_of_dwa_on_celeba_are_found() -> None:
    """2.40 in the COST paper, 3.20 in FAMO's; every other method that both print has one Delta m."""
    (found,) = audit_summaries()
    assert (found.kind, found.method, found.source) == ("disagreement", "DWA", "COST (NeurIPS 2025) Table 3")
    assert found.detail == "CelebA: printed 2.4, 3.2 in FAMO (NeurIPS 2023) Table 3"


def test_sound_tables_give_no_delta_m_or_rank_finding() -> None:
    """All that is found beside the pairs: one Delta m of FAMO's NYUv2 table, three ranks of Nash-MTL's CityScapes."""
    found = {f for name in ("nyuv2", "cityscapes", "qm9_per_task") for f in kinds(audit(load_published(name)))}
    assert {f for f in found if f[0] in ("delta_m", "mean_rank")} == {
        ("delta_m", "IMTL-G", FAMO_NYU),
        ("mean_rank", "SI", NASH_CITY),
        ("mean_rank", "RLW", NASH_CITY),
        ("mean_rank", "UW", NASH_CITY),
    }


def with_value(table: PublishedTable, method: str, source: str, metric: str, value: float) -> PublishedTable:
    column = table.metrics.index(metric)
    rows = tuple(
        dataclasses.replace(r, values=(*r.values[:column], value, *r.values[column + 1 :]))
        if (r.method, r.source) == (method, source)
        else r
        for r in table.rows
    )
    return dataclasses.replace(table, rows=rows)


def test_the_misprint_that_the_file_corrects_would_be_found() -> None:
    """The paper prints 0.30 for FairGrad + COST within 30 degrees; the file has 70.30."""
    table = load_published("nyuv2")
    source = "COST (NeurIPS 2025) App. Table 6"
    assert row(table, "FairGrad+COST", source).values[-1] == 70.3
    broken = with_value(table, "FairGrad+COST", source, "within_30", 0.30)
    assert ("delta_m", "FairGrad+COST", source) in kinds(audit(broken))


def test_the_corrected_ls_row_gives_the_right_delta_m() -> None:
    table = load_published("cityscapes")
    assert table.delta_m(row(table, "LS", NASH_CITY)) == pytest.approx(22.60, abs=0.03)
    assert table.delta_m(row(table, "LS", "FAMO (NeurIPS 2023) Table 3")) == pytest.approx(14.1, abs=0.05)


def test_every_shipped_row_has_a_source() -> None:
    for name in ("nyuv2", "cityscapes", "qm9_per_task"):
        assert all(r.source for r in load_published(name).rows)
    assert "NeurIPS 2025" in (FOLDER / "README.md").read_text()


def test_a_missing_file_and_wrong_lengths_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nyuv2\.csv"):
        load_published("nyuv2", tmp_path)
    with pytest.raises(ValueError, match="baseline"):
        delta_m([1.0], [1.0, 2.0], [True])
    with pytest.raises(ValueError, match="table"):
        mean_rank([[1.0, 2.0]], [True])


def test_standard_error() -> None:
    mean, error = mean_and_error([1.0, 2.0, 3.0])
    assert (mean, error) == pytest.approx((2.0, 1 / 3**0.5))
    assert np.isnan(mean_and_error([1.0])[1])
