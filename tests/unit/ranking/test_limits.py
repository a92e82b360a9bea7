"""Plans at limits of power: measured where they ran, predicted where not, and a rack's watts split over jobs."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from specs import made_run, trial_spec

from wattune.cost.defaults import default_coefficients
from wattune.cost.estimate import estimate
from wattune.objective import VariedBound, parse_constraint
from wattune.ranking.limits import FIGURES, by_limit, every_50_w, split
from wattune.trial import limit_of

LIMITS_W = (400.0, 450.0, 500.0, 550.0, 600.0, 650.0, 700.0)
VARIED = VariedBound(parse_constraint("device_power_limit_w <= 700"), LIMITS_W)


def plan(limit_w, **more):
    base = trial_spec("llama3_8b", on="1x8 h200_sxm", batch=16, **more)
    return replace(base, plan=replace(base.plan, power_limit_w=limit_w))


def ran(spec, factor=1.0):
    """A run whose every figure is a factor of its estimate."""
    columns = estimate([spec], default_coefficients).columns
    metrics = {name: factor * float(columns[name].value[0]) for name in FIGURES}
    return spec, made_run(spec, quality="indicative", metrics=metrics)


def test_a_plan_is_measured_where_it_ran_and_else_read_from_its_nearest_run():
    pairs = [ran(plan(400), 1.1), ran(plan(None), 1.1)]
    (rows,) = by_limit(pairs, VARIED, default_coefficients)
    assert [row["measured"] for row in rows] == [True, False, False, False, False, False, True]
    truth = estimate([plan(int(value)) for value in LIMITS_W], default_coefficients).columns
    over = np.maximum(1.1 * truth["device_power_mean_w"].value / LIMITS_W, 1.0)
    over[[0, -1]] = 1.0  # as measured; elsewhere no device draws more than its limit
    assert max(over) > 1.05
    for name in FIGURES:  # the factor of the runs is kept
        known = 1.1 * truth[name].value / (1.0 if name == "tokens_per_s" else over)
        assert [row[name]["value"] for row in rows] == pytest.approx(known.tolist())
    rates = [row["tokens_per_s"]["value"] for row in rows]
    assert [row["buys_frac"] for row in rows[1:]] == pytest.approx((np.array(rates[1:]) / rates[:-1] - 1).tolist())
    assert rows[0]["buys_frac"] is None
    wide = [row["tokens_per_s"]["high"] / row["tokens_per_s"]["value"] for row in rows]
    assert wide[0] == wide[-1] == 1.0 and min(wide[1:-1]) > 1.03 and wide[3] >= wide[1]


def test_the_five_fastest_at_the_highest_limit_are_shown_whether_they_were_measured_there_or_not():
    factors = np.random.default_rng(1).uniform(0.8, 1.2, 8)
    pairs = [
        ran(plan(400 if place % 2 else None, micro_batch_size=1 if place < 4 else 2, tp=2 ** (place % 4)), factor)
        for place, factor in enumerate(factors)
    ]
    alone = [by_limit([pair], VARIED, default_coefficients)[0] for pair in pairs]
    fastest = sorted(alone, key=lambda rows: -rows[-1]["tokens_per_s"]["value"])[:5]
    assert by_limit(pairs, VARIED, default_coefficients) == fastest
    slow = ran(trial_spec("llama3_70b", on="4x8 h200_sxm", batch=32))
    plans = by_limit([*pairs, slow], VARIED, default_coefficients)
    assert plans[:5] == fastest and [one[0]["job"] for one in plans[5:]] == ["llama3_70b"], "a job of the rack"


def test_a_trial_without_a_figure_or_a_limit_is_left_out():
    spec, run = ran(plan(500))
    bare = replace(run, metrics={"tokens_per_s": 1.0})
    assert by_limit([(spec, bare)], VARIED, default_coefficients) == []
    assert limit_of(plan(None)) == 700.0 and limit_of(plan(450)) == 450.0
    assert every_50_w([plan(480), plan(None)]).values == (500.0, 550.0, 600.0, 650.0, 700.0)
    assert every_50_w([plan(480), plan(None)], to_least=True) == every_50_w([plan(480), plan(None)])
    assert every_50_w([plan(None)]).values == (700.0,), "a report has no price of what nobody varies"
    assert every_50_w([plan(None)], to_least=True).values == tuple(range(200, 701, 50)), "what an H200 takes"


def test_no_other_split_of_a_rack_is_better():
    rng = np.random.default_rng(0)
    for _ in range(50):
        plans = []
        for job, devices in (("a", 8), ("b", 4), ("c", 16)):
            gains = np.sort(rng.uniform(1, 9, 4))[::-1]  # concave in watts
            rates = 50 + np.concatenate([[0], np.cumsum(gains)])
            plans.append(
                [
                    {"job": job, "limit_w": 400.0 + 50 * n, "num_devices": devices, "tokens_per_s": {"value": rate}}
                    for n, rate in enumerate(rates)
                ]
            )
        every = [
            (
                sum(row["limit_w"] * row["num_devices"] for row in rows),
                sum(
                    row["tokens_per_s"]["value"] / each[-1]["tokens_per_s"]["value"]
                    for row, each in zip(rows, plans, strict=True)
                )
                / 3,
            )
            for rows in product(*plans)
        ]
        found = split(plans)
        assert found[-1]["rate_frac"] == pytest.approx(1.0) and len(found) == 13
        for row in found:
            assert row["rate_frac"] == pytest.approx(max(rate for watts, rate in every if watts <= row["budget_w"]))
            assert set(row["limits_w"]) == {"a", "b", "c"}
    assert split([plans[0]]) == []
