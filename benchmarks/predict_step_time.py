#!/usr/bin/env python3
"""Prints the errors of step times predicted of published configurations, by source, precision, device and kind.

    python benchmarks/predict_step_time.py

Rows and their sources are in `benchmarks/data` (`published_steps.py` reads them). What was measured here is judged by
`prediction.py`. Growth with the number of devices: `git show b47a596:benchmarks/predict_step_time.py`.
"""

from argparse import Namespace
from collections import defaultdict

import numpy as np
from harness import Found, Rows, benchmark
from published_steps import SPEEDUP, Step, adjusted, published_world, read
from step_time_baselines import at_rate, calculon_s, model_flop, roofline_s

from wattune.cost.batch import batches
from wattune.cost.coefficients import PUBLISHED_STEP_TIME
from wattune.cost.power import power_coefficients
from wattune.cost.step_time.predict import predict


def published(steps: list[Step]) -> np.ndarray:
    """Predicts published steps as `wattune plan` does for a device without a fit."""
    times = np.empty(len(steps))
    groups = defaultdict(list)
    for at, step in enumerate(steps):
        groups[step.precision, step.spec.cluster.device].append(at)
    for (precision, name), rows in groups.items():
        coefficients = adjusted(PUBLISHED_STEP_TIME, name, precision)
        for positions, batch in batches([steps[at].spec for at in rows]):
            power, limit_w = power_coefficients(batch.device), batch.device.power_limit_w
            assert power is not None and limit_w is not None, "the catalog has the limits of published devices"
            times[np.array(rows)[positions]] = predict(batch, coefficients, power, limit_w=limit_w).step_time_s
    return times


def group(step: Step) -> tuple[str, str, str, str]:
    """Names the source, precision, device and kind of a row."""
    kind = "lora" if step.spec.workload.mode == "lora" else "experts" if step.spec.model.is_moe else "dense"
    return step.source, step.precision, step.spec.cluster.device, kind


def errors_of(steps: list[Step]) -> dict[tuple[str, ...], dict[str, list[tuple[float, ...]]]]:
    """Returns errors by source, precision, device and kind, then by configuration: ours, and of three baselines."""
    times = published(steps)
    rates = [model_flop(one.spec) / (one.measured_s * one.spec.cluster.world_size) for one in steps]
    groups: dict[tuple[str, ...], dict[str, list[tuple[float, ...]]]] = defaultdict(lambda: defaultdict(list))
    for at, one in enumerate(steps):
        alike = (one.precision, one.spec.cluster.device)
        others = [
            rate
            for rate, two in zip(rates, steps, strict=True)
            if (two.precision, two.spec.cluster.device) == alike
            and two.spec.model.hidden_size != one.spec.model.hidden_size
        ]
        constant_s = at_rate(one.spec, float(np.median(others))) if others else np.nan
        baselines = (function(one.spec, SPEEDUP[one.precision]) for function in (roofline_s, calculon_s))
        errors = tuple(guess_s / one.measured_s - 1 for guess_s in (times[at], constant_s, *baselines))
        for key in (group(one), ("all", *group(one)[1:])):
            groups[key][one.configuration].append(errors)
    return groups


@benchmark(
    claim="Steps that others published are known from kernel tables and datasheets alone.",
    bar="median of bf16 dense steps on H100 below 12 %, of every other source, precision and device below 20 %",
)
def main(_: Namespace) -> Found:
    """Predicts every published step; errors are of configurations."""
    with published_world():
        steps, reasons = read()
        groups = errors_of(steps)
    columns = ("median_frac", "p90_frac", "bias_frac", "constant_rate_frac", "roofline_frac", "calculon_frac")
    rows, missed = Rows("source", "precision", "device", "kind", "num_configurations", *columns), []
    for key, by_configuration in sorted(groups.items()):
        table = np.array([np.mean(values, axis=0) for values in by_configuration.values()])
        middle = [float(np.nanmedian(one)) if np.isfinite(one).any() else None for one in np.abs(table).T]
        p90, bias = float(np.quantile(np.abs(table[:, 0]), 0.9)), float(np.median(table[:, 0]))
        rows.add(*key, len(table), middle[0], p90, bias, *middle[1:])
        if key[0] != "all" and middle[0] >= (0.12 if key[1:] == ("bf16", "h100_sxm", "dense") else 0.20):
            missed.append(f"{' '.join(key)} {middle[0]:.1%}")
    left_out = [f"{count} left out: {reason}" for reason, count in sorted(reasons.items(), key=lambda one: -one[1])]
    return Found(rows, [f"{len(steps)} of {len(steps) + sum(reasons.values())} published rows.", *left_out], missed)


if __name__ == "__main__":
    main()
