"""Plans of a mixture that fill a device of 80 GB, measured on two H200 with the rest held: no fit has them."""

import json

import numpy as np
import pytest
from measured_tables import DATA, completed

from wattune.cost.defaults import default_coefficients
from wattune.cost.estimate import estimate
from wattune.trial import TrialSpec

FREE_BYTES = 84_950_515_712


@pytest.fixture(scope="module")
def rows():
    return completed(DATA / "moe_full_h200_held.parquet")


def test_only_the_fullest_plan_gives_memory_back(rows) -> None:
    waits = [row for row in rows if row["memory_retries_per_step_count"] > 0]
    assert len(rows) == 14 and len(waits) == 1
    assert waits[0]["memory_peak_bytes"] == max(row["memory_peak_bytes"] for row in rows) > 0.89 * FREE_BYTES


@pytest.mark.parametrize(
    ("metric", "median", "tail"),
    [
        ("step_time_s", 0.017, 0.045),
        ("memory_peak_bytes", 0.003, 0.017),
        ("device_power_mean_w", 0.018, 0.089),
        ("node_device_power_peak_1s_w", 0.017, 0.076),
    ],
)
def test_the_others_take_what_their_estimates_say(rows, metric: str, median: float, tail: float) -> None:
    calm = [row for row in rows if row["memory_retries_per_step_count"] == 0]
    column = estimate([TrialSpec.from_json(json.loads(row["spec"])) for row in calm], default_coefficients).columns[
        metric
    ]
    size = np.abs([column.value[place] / row[metric] - 1 for place, row in enumerate(calm)])
    assert np.median(size) <= median and np.quantile(size, 0.95) <= tail
