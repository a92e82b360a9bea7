"""Metrics of a run by name, each found where it is asked for: by its formula, or by the function of its group."""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Final

from wattune.analysis.metrics.energy import integral_error_frac
from wattune.analysis.metrics.phases import step_energies_j
from wattune.analysis.metrics.power import excursion_metrics, power_metrics
from wattune.analysis.metrics.saturation import link_peaks
from wattune.analysis.metrics.speed import speed_metrics, step_to_step_s
from wattune.analysis.metrics.step_breakdown import decompose_metrics
from wattune.analysis.metrics.thermal import thermal_metrics
from wattune.analysis.metrics.throttle import throttle_metrics
from wattune.analysis.metrics.utilization import memory_metrics, use_metrics
from wattune.analysis.run_data import Examined, RunData
from wattune.intervals import of_series
from wattune.metrics import METRICS


class Figures(dict[str, float]):
    """Finite metrics of a run by name; one that was not measured is a `KeyError`."""

    def __init__(self, examined: Examined) -> None:
        super().__init__()
        self._examined = examined
        self._groups: dict[str, Mapping[str, float]] = {}

    def __missing__(self, name: str) -> float:
        value = self._value(name)
        # Drops readings of infinity and counters beyond floats here, so that no ranking sees them.
        if value is None or not math.isfinite(value):
            raise KeyError(name)
        self[name] = value
        return value

    def _value(self, name: str) -> float | None:
        metric = METRICS[name]
        if metric.formula is not None:
            return metric.formula(self._examined, self)
        if metric.group not in self._groups:
            self._groups[metric.group] = found = GROUPS[metric.group](self._examined)
            assert found.keys() <= METRICS.keys(), found.keys() - METRICS.keys()
        return self._groups[metric.group].get(name, self._examined.data.told.get(name))


def figures(examined: Examined, names: Iterable[str] = METRICS) -> dict[str, float]:
    """Returns metrics by name, in the order of `wattune.metrics.METRICS`; those that were not measured are absent."""
    known, found = Figures(examined), {}
    for name in names:
        with suppress(KeyError):
            found[name] = known[name]
    return found


def figures_over(data: RunData, first: int, last: int) -> dict[str, float]:
    """Returns speed, energy and their uncertainties over some steps, by their places in the stream of data."""
    examined = data.over(first, last)
    if examined is None or examined.aligned.steps is None:
        return {}
    return figures(examined, [name for name in METRICS if is_of_steps(name)])


def is_of_steps(name: str) -> bool:
    """Tells whether a metric is one of speed or energy, or the uncertainty of one."""
    return METRICS[name].group in ("speed", "energy") or name.endswith("_uncertainty_frac")


def _trust(examined: Examined) -> dict[str, float]:
    """Computes sampling of power and scatter from step to step.

    `sample_coverage_frac`: the worst sensor's share of the window in intervals of at most three of its usual ones, 0
    for a sensor that was never read. `sensor_period_s`: the slowest sensor's period. `energy_integral_error_frac`: see
    `wattune.analysis.metrics.energy.integral_error_frac`. `step_time_uncertainty_frac`,
    `energy_per_step_uncertainty_frac`: half the 95 % interval of the mean time and energy from step to step
    (`wattune.intervals.of_series`), over the mean.
    """
    aligned, traces = examined.aligned, examined.powers
    found: dict[str, float | None] = {}
    if traces.traces:
        complete = len(traces.traces) == traces.num_sensors
        found["sample_coverage_frac"] = min(trace.coverage_frac for trace in traces.traces) if complete else 0.0
        found["sensor_period_s"] = max(trace.sensor_period_s for trace in traces.traces)
        found["energy_integral_error_frac"] = integral_error_frac(traces) if complete else None
    if aligned.steps is not None:
        energies_j = step_energies_j(aligned, traces)
        each = {
            "step_time_uncertainty_frac": step_to_step_s(aligned.steps),
            "energy_per_step_uncertainty_frac": None if energies_j is None else energies_j[:-1],
        }
        for name, values in each.items():
            interval = None if values is None else of_series(values)
            found[name] = None if interval is None else interval.half_width_frac
    return {name: value for name, value in found.items() if value is not None}


def _memory(examined: Examined) -> dict[str, float]:
    spec = examined.data.spec
    return memory_metrics(examined.data.memory_peak_bytes, None if spec is None else spec.cluster.rank_device)


GROUPS: Final[Mapping[str, Callable[[Examined], Mapping[str, float]]]] = {
    "speed": lambda run: speed_metrics(run.aligned, run.data.spec, run.data.tokens_per_step),
    "power": lambda run: power_metrics(run.aligned, run.powers),
    "excursion": lambda run: excursion_metrics(run.powers),
    "throttle": lambda run: throttle_metrics(run.aligned, run.throttles),
    "thermal": lambda run: thermal_metrics(run.aligned, run.temperatures, run.settled),
    "utilization": lambda run: use_metrics(run.aligned, link_peaks(run.aligned, run.sensed)),
    "memory": _memory,
    "step_breakdown": lambda run: decompose_metrics(run.division) or run.profiled_metrics,
    "measurement_quality": _trust,
}
"""Functions that find the metrics without a formula, by group."""
