"""Trials that no fit has: a later day, other devices, a host 1.5 times as slow, and models of other sizes."""

import numpy as np
import pytest
from measured_tables import DATA, KEPT_ASIDE, completed
from stored_tables import estimates_of

WAITS_FRAC = 0.1
"""Least `host_bound_frac` of a trial that runs at its host's pace."""


@pytest.fixture(scope="module")
def judged():
    rows = [row for name in sorted(KEPT_ASIDE) for row in completed(DATA / f"{name}.parquet")]
    return rows, estimates_of(rows)


def errors(judged, metric: str, *, waits: bool) -> np.ndarray:
    rows, columns = judged
    return np.array(
        [
            columns[metric].value[place] / row[metric] - 1
            for place, row in enumerate(rows)
            if ((row["host_bound_frac"] or 0.0) > WAITS_FRAC) == waits
        ]
    )


@pytest.mark.parametrize(
    ("metric", "median", "worst"),
    [
        ("step_time_s", 0.05, 0.09),
        ("memory_peak_bytes", 0.005, 0.01),
        ("device_power_mean_w", 0.01, 0.09),
        ("node_device_power_peak_1s_w", 0.01, 0.09),
    ],
)
def test_trials_that_do_not_wait_for_their_host_are_predicted(judged, metric: str, median: float, worst: float) -> None:
    size = np.abs(errors(judged, metric, waits=False))
    assert len(size) >= 12 and np.median(size) <= median and size.max() <= worst


def test_trials_that_wait_for_a_slow_host_are_told_too_fast_but_within_their_interval(judged) -> None:
    too_fast = errors(judged, "step_time_s", waits=True) < 0
    assert len(too_fast) >= 2 and np.all(too_fast), "the host of the fit was faster"
    rows, columns = judged
    step = columns["step_time_s"]
    inside = [step.low[place] <= row["step_time_s"] <= step.high[place] for place, row in enumerate(rows)]
    assert np.mean(inside) >= 0.95


@pytest.mark.parametrize(
    "metric", ["step_time_s", "node_device_power_peak_1s_w", "memory_peak_bytes", "device_power_mean_w"]
)
def test_intervals_hold_19_of_20_runs_that_no_fit_took(metric: str) -> None:
    """Those kept aside, and those of four and eight H200: their widths are of models and engines that were left out."""
    paths = [DATA / f"{name}.parquet" for name in sorted(KEPT_ASIDE)] + [
        *DATA.glob("nodes/*/sweep.parquet"),
        *DATA.glob("nodes/*/slots.parquet"),
    ]
    rows = [row for path in paths for row in completed(path) if row["engine"] != "command"]
    column = estimates_of(rows)[metric]
    inside = [column.low[place] <= row[metric] <= column.high[place] for place, row in enumerate(rows) if row[metric]]
    assert len(inside) >= 70 and np.mean(inside) >= 0.95
