#!/usr/bin/env python
"""Holds predicted power against trials that its coefficients never saw, whole configurations and engines left out.

    python benchmarks/predict_power.py          # prints the errors and the coefficients to ship

Temperature is held to recordings in `tests/golden/test_predicted_power.py`.
"""

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final
from unittest.mock import patch

import measured_tables
import numpy as np
import numpy.typing as npt
from harness import Found, Rows, benchmark

from wattune.catalog.hardware import DEVICES
from wattune.cost import power as power_module
from wattune.cost.batch import batches
from wattune.cost.clock import compute_w, working_clock_frac
from wattune.cost.coefficients import PowerCoefficients
from wattune.cost.defaults import default_coefficients
from wattune.cost.estimate import predict as predict_parts
from wattune.cost.power import predict
from wattune.cost.tables import StepTime
from wattune.fitting.power import H200_PRIOR, fit_power, has_activity, measured_steps
from wattune.trial import TrialSpec

Array = npt.NDArray[np.float64]
Trials = Sequence[Mapping[str, Any]]

H200: Final = DEVICES["h200_sxm"]
LIMIT_W: Final = 700.0
METRICS: Final = ("device_power_mean_w", "node_device_power_peak_1s_w", "energy_per_token_j", "clock_deficit_frac")
SHORT: Final = ("device_power_peak_100ms_w", "device_power_peak_20ms_w")
BARS: Final = {"device_power_mean_w": 0.05, "node_device_power_peak_1s_w": 0.05, "energy_per_token_j": 0.06}


def trials() -> list[dict[str, Any]]:
    """Reads every completed trial of the device."""
    return [row for row in measured_tables.rows() if row["device"] == H200.name and has_activity(row)]


def predicted(c: PowerCoefficients, rows: Trials, solve: bool) -> Array:
    """Predicts `METRICS` from measured activity, [trials, metrics]."""
    result = np.empty((len(rows), len(METRICS)))
    for positions, batch, step in measured_steps(rows):
        power = predict(batch, with_solved_clock(step, c, LIMIT_W) if solve else step, c)
        result[positions] = np.stack([getattr(power, name) for name in METRICS], axis=1)
    return result


def with_solved_clock(step: StepTime, c: PowerCoefficients, limit_w: float) -> StepTime:
    """Returns the step with the clock that the limit leaves in the place of the measured one."""
    a = step.activity
    work = {"matrix_s": a.matrix_s, "memory_s": a.memory_s, "matrix_frac": a.matrix_frac}
    dynamic = compute_w(c, **work, overlapped_s=a.overlapped_s)
    collective_s = a.collective_s + step.parts_s["straggler_s"][:, None]
    own, clock = (
        working_clock_frac(c, dynamic, a.matrix_s + a.memory_s, collective_s, each_w)
        for each_w in (max(limit_w, c.limit_w), limit_w)
    )
    return replace(step, activity=replace(a, clock_frac=clock, held_frac=clock / own))


def held_out(rows: Trials, groups: Sequence[str], prior: PowerCoefficients) -> dict[str, Array]:
    """Predicts every trial with coefficients fitted without its group; baselines likewise."""
    names = np.array(groups)
    found = {name: np.empty((len(rows), len(METRICS))) for name in ("measured clock", "solved clock", *BASELINES)}
    for name in np.unique(names):
        rest, places = (
            [row for row, each in zip(rows, names, strict=True) if each != name],
            np.flatnonzero(names == name),
        )
        these = [rows[place] for place in places]
        c = fit_power(rest, prior, limit_w=LIMIT_W)
        found["measured clock"][places] = predicted(c, these, solve=False)
        found["solved clock"][places] = predicted(c, these, solve=True)
        for baseline, function in BASELINES.items():
            found[baseline][places] = from_mean(these, function(rest, these))
    return found


def from_mean(rows: Trials, mean_w: Array) -> Array:
    """Returns `METRICS` of a baseline that predicts a mean power and nothing else."""
    world = np.array([row["world_size"] for row in rows])
    tokens_per_s = np.array([row["seq_len"] * row["global_batch_size"] / row["step_time_s"] for row in rows])
    return np.stack([mean_w, mean_w * world, mean_w * world / tokens_per_s, np.full(len(rows), np.nan)], axis=1)


def constant(rest: Trials, rows: Trials) -> Array:
    """A constant share of the limit: the mean of the other trials."""
    return np.full(len(rows), np.mean([row["device_power_mean_w"] for row in rest]))


def linear(rest: Trials, rows: Trials) -> Array:
    """A line in compute's share of the step, cut at the limit."""
    shares, watts = (np.array([row[name] for row in rest]) for name in ("compute_frac", "device_power_mean_w"))
    slope, offset = np.polyfit(shares, watts, 1)
    return np.minimum(offset + slope * np.array([row["compute_frac"] for row in rows]), LIMIT_W)


BASELINES: Final = {"constant share of the limit": constant, "linear in compute, capped": linear}


def off(values: Array, actual: Array, metric: str) -> Array:
    """Returns the errors of a metric: relative, of a deficit of the clock as they are."""
    error = np.abs(values - actual)
    return error if metric == "clock_deficit_frac" else error / actual


def short_peaks() -> tuple[list[str], dict[str, tuple[Array, Array]], dict[str, Array]]:
    """Predicts peaks of short windows through the product, by factors fitted without each model and engine.

    Returns the families of trials on H100 and H200; measured and predicted peaks by metric; and factors fitted to all.
    """
    rows = [row for row in measured_tables.rows("*_h[12]00*.parquet") if all(row[name] for name in SHORT)]
    specs = [TrialSpec.from_json(json.loads(row["spec"])) for row in rows]
    families = [f"{spec.model.name} {spec.engine}" for spec in specs]
    bases = {name: np.zeros((len(rows), 2)) for name in SHORT}
    for column, factors in enumerate(((1.0, 0.0), (1.0, 1.0))):
        with patch.dict(power_module.SHORT_WINDOWS, dict.fromkeys(power_module.SHORT_WINDOWS, factors)):
            for positions, batch in batches(specs):
                drawn = predict_parts(batch, default_coefficients(batch.device)).power
                for name, basis in bases.items():
                    basis[positions, column] = getattr(drawn, name)
    found, fitted = {}, {}
    for name, basis in bases.items():
        basis[:, 1] -= basis[:, 0]
        actual, values = np.array([row[name] for row in rows], float), np.empty(len(rows))
        for family in set(families):
            own = np.array([one == family for one in families])
            values[own] = basis[own] @ huber(basis[~own], actual[~own])
        found[name], fitted[name] = (actual, values), huber(basis, actual)
    return families, found, fitted


def huber(basis: Array, actual: Array) -> Array:
    """Returns the factors with the least relative errors, those beyond 5 % counted by their size."""
    weights = np.ones(len(actual))
    for _ in range(20):
        factors: Array = np.linalg.lstsq(basis / actual[:, None] * weights[:, None], weights, rcond=None)[0]
        weights = np.sqrt(np.minimum(1.0, 0.05 / np.maximum(np.abs(basis @ factors / actual - 1), 1e-9)))
    return factors


@benchmark(
    claim="Power of a trial is known from its plan, whole configurations and engines left out of the fit.",
    bar="; ".join(f"{metric} within {bar:.0%} in the median" for metric, bar in BARS.items()),
)
def main(_: Namespace) -> Found:
    """Leaves out each configuration, then each model with its engine."""
    measured = trials()
    rows, missed = Rows("left_out", "method", "metric", "median_frac", "p90_frac", "p95_frac", "worst_frac"), []
    for what, groups in (
        ("configuration", [row["trial_id"] for row in measured]),
        ("model and engine", [row["model"] + row["engine"] for row in measured]),
    ):
        for method, values in held_out(measured, groups, H200_PRIOR).items():
            for column, metric in enumerate(METRICS):
                errors = off(values[:, column], np.array([row[metric] for row in measured]), metric)
                if np.isfinite(errors).all():
                    figures = [float(one) for one in np.percentile(errors, [50, 90, 95, 100])]
                    rows.add(what, method, metric, *figures)
                    if (what, method) == ("configuration", "solved clock") and figures[0] > BARS.get(metric, 1.0):
                        missed.append(f"{metric} {figures[0]:.1%}")
    _, peaks, factors = short_peaks()
    for metric, (actual, values) in peaks.items():
        rows.add(
            "model and engine", "whole plan", metric, *np.percentile(np.abs(values / actual - 1), [50, 90, 95, 100])
        )
    notes = [f"fitted to all: {fit_power(measured, H200_PRIOR, limit_w=LIMIT_W)}", f"short windows: {factors}"]
    return Found(rows, notes, missed)


if __name__ == "__main__":
    main()
