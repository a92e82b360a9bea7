"""Two H100s, predicted before any H100 was measured and by the fit to H200.

Both spaces, their trials and their estimates from before the first run are in `benchmarks/data`. Repeats count one by
one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from measured_tables import completed, is_outdated, ordered, trial_of, was_full

from wattune.cost.defaults import default_coefficients
from wattune.cost.estimate import estimate
from wattune.fitting.device import MeasuredTrial
from wattune.run import RunStatus

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DATA = BENCHMARKS / "data"
PAGE = (BENCHMARKS / "results" / "same_chip.md").read_text()
TABLES = {"Llama": "dense_llama_h100x2", "Mixtral": "moe_ep_h100x2"}
METRICS = (
    "step_time_s",
    "memory_peak_bytes",
    "device_power_mean_w",
    "node_device_power_peak_1s_w",
    "energy_per_token_j",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measured run, with its estimates before and now: metric -> value, low, high."""

    trial: MeasuredTrial
    was_full: bool
    predicted: Mapping[str, Mapping[str, tuple[float, float, float]]]

    def error(self, way: str, metric: str) -> float:
        return self.predicted[way][metric][0] / self.trial[1].metrics[metric] - 1

    def inside(self, way: str, metric: str) -> bool:
        _, low, high = self.predicted[way][metric]
        return low <= self.trial[1].metrics[metric] <= high


def before(table: str) -> dict[str, dict[str, Any]]:
    """Reads the estimates of a table's plans from before its first run, by trial."""
    return {row["trial_id"]: row for row in pq.read_table(DATA / "estimates" / f"{table}.parquet").to_pylist()}


def runs_of(table: str) -> list[Run]:
    rows, blind = [row for row in completed(DATA / f"{table}.parquet") if not is_outdated(row)], before(table)
    trials = [trial_of(row) for row in rows]
    columns = estimate([spec for spec, _ in trials], default_coefficients).columns
    found = []
    for number, (row, trial) in enumerate(zip(rows, trials, strict=True)):
        then = {
            metric: tuple(blind[row["trial_id"]][f"estimate.{metric}{end}"] for end in ("", ".low", ".high"))
            for metric in METRICS
        }
        now = {
            metric: tuple(float(part[number]) for part in (column.value, column.low, column.high))
            for metric, column in columns.items()
        }
        found.append(Run(trial=trial, was_full=was_full(row), predicted={"before": then, "now": now}))
    return found


def out_of_memory(table: str) -> list[float]:
    """Returns the peaks [bytes] that were predicted, before, of plans that ran out of memory."""
    rows = pq.read_table(DATA / f"{table}.parquet").to_pylist()
    failed = {row["trial_id"] for row in rows if row["status"] == RunStatus.OUT_OF_MEMORY}
    return [row["estimate.memory_peak_bytes"] for trial_id, row in before(table).items() if trial_id in failed]


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Run]]:
    return {name: runs_of(table) for name, table in TABLES.items()}


def shown(metric: str, model: str) -> list[float]:
    """The figures of a row of the page: median, 90th percentile, worst and inside, before and now."""
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {metric} | {model} |")]
    return [float(cell.strip(" %")) / 100 for cell in line.split("|")[3:-1]]


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        ("step_time_s", "step time"),
        ("device_power_mean_w", "mean power of a device"),
        ("node_device_power_peak_1s_w", "1 s peak of the node"),
        ("energy_per_token_j", "energy a token"),
    ],
)
@pytest.mark.parametrize("model", ["Llama", "Mixtral"])
def test_the_page_shows_the_errors_before_and_now(runs, metric: str, name: str, model: str) -> None:
    of = runs[model]
    for way, figures in zip(("before", "now"), np.split(np.array(shown(name, model)), 2), strict=True):
        size = np.abs([run.error(way, metric) for run in of])
        inside = np.mean([run.inside(way, metric) for run in of])
        found = [np.median(size), np.quantile(size, 0.9), size.max(), inside]
        assert found == pytest.approx(figures.tolist(), abs=0.006)


def test_memory_was_known_before_an_h100_was_seen() -> None:
    rows = [(table, row) for table in TABLES.values() for row in completed(DATA / f"{table}.parquet")]
    blind, name = {table: before(table) for table in TABLES.values()}, "memory_peak_bytes"
    found = [(blind[table][row["trial_id"]], row) for table, row in rows if not is_outdated(row)]
    size = np.abs([then[f"estimate.{name}"] / row[name] - 1 for then, row in found])
    assert len(size) == 62 and np.median(size) <= 0.003 and size.max() <= 0.031


def test_the_fit_to_the_same_chip_is_nearer_than_published_kernels_and_its_intervals_hold(runs) -> None:
    every = [run for of in runs.values() for run in of]
    for metric in ("step_time_s", "device_power_mean_w", "node_device_power_peak_1s_w", "energy_per_token_j"):
        before, now = (np.median(np.abs([run.error(way, metric) for run in every])) for way in ("before", "now"))
        assert now < before, metric
        of_today = [run for run in every if not run.was_full]
        assert len(of_today) == 36 and np.mean([run.inside("now", metric) for run in of_today]) >= 0.95, metric
    held = [run for run in every if "memory_peak_bytes" in run.trial[1].metrics]  # what today's engine holds
    assert len(held) == 56 and all(run.inside("now", "memory_peak_bytes") for run in held)
    right, total = ordered([run.trial for run in every], [run.predicted["now"]["step_time_s"][0] for run in every])
    assert right / total >= 0.925


def test_what_ran_out_of_memory_was_predicted_larger_than_what_did_not_but_for_a_plan_in_fragments(runs) -> None:
    failed = sorted(peak for table in TABLES.values() for peak in out_of_memory(table))
    fitted = max(run.predicted["before"]["memory_peak_bytes"][0] for of in runs.values() for run in of)
    assert len(failed) == 5 and sum(peak > fitted for peak in failed) == 4
