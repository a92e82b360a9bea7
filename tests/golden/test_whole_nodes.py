"""Plans of whole nodes, which no fit has: estimates, the search's regret, gains that were foretold of placements."""

import itertools
import json

import numpy as np
import pytest
import whole_node_rows as room
from harness import Rows
from measured_tables import completed

from wattune.cost.defaults import default_coefficients
from wattune.cost.estimate import estimate
from wattune.trial import TrialSpec

POWER = "node_device_power_peak_1s_w"


@pytest.fixture(scope="module", params=room.NODES)
def judged(request):
    rows = completed(room.DATA / request.param / "sweep.parquet")
    rows = [
        next(group)
        for _, group in itertools.groupby(sorted(rows, key=lambda r: r["trial_id"]), key=lambda r: r["trial_id"])
    ]
    specs = [TrialSpec.from_json(json.loads(row["spec"])) for row in rows]
    return rows, estimate(specs, default_coefficients).columns


@pytest.mark.parametrize(
    ("metric", "median"),
    [("tokens_per_s", 0.06), (POWER, 0.04), ("device_power_mean_w", 0.04), ("memory_peak_bytes", 0.02)],
)
def test_plans_of_a_node_are_estimated(judged, metric: str, median: float) -> None:
    rows, columns = judged
    got = np.array([row[metric] for row in rows])
    column = columns[metric]
    assert np.median(abs(column.value / got - 1)) <= median
    assert np.mean((column.low <= got) & (got <= column.high)) >= 0.92


def test_a_guided_search_finds_the_best_of_an_exhaustive_table_under_each_bound(monkeypatch) -> None:
    monkeypatch.setattr(room, "SEEDS", 2)
    rows = Rows("node", "case", "model", "metric", "num_runs", *room.FIGURES)
    room.replayed(rows, "h200x4")
    found = [one for one in rows.objects() if "model_guided" in one["case"]]
    assert len(found) == 6 and all(one["regret_frac"] <= 0.02 for one in found)


def test_both_placements_gained_what_was_foretold() -> None:
    rows = Rows("node", "case", "model", "metric", "num_runs", *room.FIGURES)
    room.placements(rows, "h200x4")
    found = rows.objects()
    assert len(found) == 2
    for one in found:
        assert one["low_log_ratio"] > 0 and abs(one["estimated_log_ratio"] - one["effect_log_ratio"]) <= 0.015
