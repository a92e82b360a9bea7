"""Summary of one trial or recording: from spans and readings to metrics and a verdict."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from wattune.analysis.metrics.energy import (
    Powers,
    PowerTrace,
    energy_metrics,
    integral_error_frac,
    limit_readings_w,
    powers,
)
from wattune.analysis.metrics.excursion import excursion_metrics
from wattune.analysis.metrics.outlier import VARIES_FRAC
from wattune.analysis.metrics.phases import step_energies_j
from wattune.analysis.metrics.power import power_metrics
from wattune.analysis.metrics.saturation import link_peaks
from wattune.analysis.metrics.speed import speed_metrics, step_times_s, step_to_step_s
from wattune.analysis.metrics.step_breakdown import decompose_metrics, host_bound_frac
from wattune.analysis.metrics.thermal import all_settled_from_s, temperature_rise_c_per_min, thermal_metrics
from wattune.analysis.metrics.throttle import throttle_metrics
from wattune.analysis.metrics.utilization import memory_metrics, use_metrics
from wattune.analysis.quality import INVALID, Facts, assess_quality
from wattune.analysis.run_data import WINDOW_TAGS, Examined, RunData
from wattune.analysis.signals.align import Aligned
from wattune.analysis.signals.energy_grid import SWING_BAND_HZ, EnergySum, pieces
from wattune.analysis.signals.readings import HOST
from wattune.analysis.signals.series import Series
from wattune.analysis.signals.steady_state import drift_frac
from wattune.arrays import Floats
from wattune.errors import ImpossibleValueError
from wattune.fidelity import BURST, FIDELITY, STOPPED_EARLY
from wattune.intervals import of_series
from wattune.schema import METRICS, DeviceKey
from wattune.units import ns_to_s

NO_WINDOW: Final = "no_window"
"""Without spans or a given window nothing was measured."""

IMPOSSIBLE: Final = "impossible_value"
"""A table has a value that cannot be (`wattune.schema.BOUNDS`); the tag of this name has the place and the value."""

_OF_SEVERAL: Final = ("node_", "cluster_", "nic_", "power_coincidence", "device_temp_spread")
"""Prefixes of metrics that do not describe a single device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Metrics and quality of a trial or recording."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Finite values by the names of `wattune.schema.METRICS`; unmeasured metrics are absent."""
    quality: str
    """`publishable`, `indicative` or `invalid`."""
    quality_reasons: tuple[str, ...] = ()
    """Codes of `wattune.analysis.quality.THRESHOLDS`, of `wattune.analysis.signals.schema_check`, or `no_window` or
    `impossible_value`."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Method of the measurement: `window_s`, `power_source`, `excursion_limit`, `power_swing_band_hz`, `simulated`,
    `steps` (first and last, by the order of the data), `steady_from_step`, `thermally_settled_from_s`, `outlier`,
    `saturated`, schema problems, and `quality_<group>` for a group of metrics (`thermal`, `step_breakdown`) of lower
    quality than the rest."""


def summarize(data: RunData) -> Summary:
    """Computes every metric that the data allow, and a verdict. Pure: the same data give the same summary."""
    try:
        if data.examined is not None:
            return summary_of(data.examined)
        return Summary(quality=INVALID, quality_reasons=tuple(data.problems) or (NO_WINDOW,), tags=data.problems)
    except ImpossibleValueError as error:
        return impossible(error)


def impossible(error: ImpossibleValueError) -> Summary:
    """Returns the summary of tables with a value that cannot be: no figure of them is trusted."""
    return Summary(quality=INVALID, quality_reasons=(IMPOSSIBLE,), tags={IMPOSSIBLE: str(error)})


def summary_of(examined: Examined) -> Summary:
    """Computes metrics and verdict of what is examined."""
    data, aligned, traces = examined.data, examined.aligned, examined.powers
    spec, sensors = data.spec, examined.together.sensors
    speed = speed_metrics(aligned, spec, data.tokens_per_step)
    metrics = {
        **speed,
        **energy_metrics(aligned, traces, step_time_s=speed.get("step_time_s"), tokens_per_step=data.tokens_per_step),
        **power_metrics(aligned, traces, examined.together),
        **excursion_metrics(
            traces, [sensor.excursions for sensor in sensors], [sensor.above_limit_frac for sensor in sensors]
        ),
        **throttle_metrics(aligned, examined.throttles),
        **thermal_metrics(aligned, examined.temperatures),
        **use_metrics(aligned, link_peaks(aligned, examined.sensed)),
        **({} if data.expert_imbalance_frac is None else {"expert_imbalance_frac": data.expert_imbalance_frac}),
        **memory_metrics(data.memory_peak_bytes, None if spec is None else spec.cluster.rank_device),
        **(decompose_metrics(examined.division) or examined.profiled_metrics),
        **_host_metrics(examined, speed.get("step_time_s")),
        **_trust_metrics(examined),
    }
    assert metrics.keys() <= METRICS.keys(), metrics.keys() - METRICS.keys()
    # Drops readings of infinity and counters beyond floats here, so that no ranking sees them.
    metrics = {name: metrics[name] for name in METRICS if name in metrics and math.isfinite(metrics[name])}
    verdict = assess_quality(_facts(examined, metrics))
    tags = {
        "window_s": f"{aligned.duration_s:.3f}",
        "simulated": str(data.simulated).lower(),
        **_power_tags(aligned, traces, metrics),
        **_found_tags(examined),
        **{f"quality_{group}": quality for group, quality in verdict.groups.items()},
    }
    return Summary(metrics=metrics, quality=verdict.quality, quality_reasons=verdict.reasons, tags=tags)


def metrics_by_device(data: RunData) -> dict[DeviceKey, dict[str, float]]:
    """Metrics of each device as if it had been sampled alone; those of nodes and between devices are left out."""
    examined = data.examined
    found = {} if examined is None else {one: summary_of(examined.only(one)).metrics for one in data.devices}
    return {
        device: {name: value for name, value in metrics.items() if not name.startswith(_OF_SEVERAL)}
        for device, metrics in found.items()
    }


def power_series(aligned: Aligned) -> dict[DeviceKey, tuple[Floats, Floats]]:
    """Returns each power sensor's samples in the window, for plots: seconds from its start, and watts.

    Args:
        aligned: From `wattune.analysis.signals.align.align`.

    Returns:
        Samples by node and device. Devices that share a sensor appear once, with the undivided power.
    """
    return {trace.devices[0]: (trace.series.time_s, trace.series.value) for trace in powers(aligned).traces}


def node_power_series(aligned: Aligned, *, window_s: float = 0.1) -> dict[str, tuple[Floats, Floats]]:
    """Sums each node's devices in consecutive windows, for plots: middles of windows in seconds, and mean watts.

    Args:
        aligned: From `wattune.analysis.signals.align.align`.
        window_s: Length of a window, a multiple of `wattune.analysis.signals.energy_grid.GRID_S`.

    Returns:
        Sums by node; empty if a sensor does not cover the window.
    """
    sums: dict[str, EnergySum] = {}

    def add(trace: PowerTrace, series: Series) -> None:
        node = sums.setdefault(trace.node, EnergySum(aligned.duration_s))
        for _ in node.add(pieces(series), trace.sensor_period_s, trace.smoothed_s):
            pass

    usable = powers(aligned, add).usable
    return {node: total.energy.means_w(window_s) for node, total in sums.items()} if usable else {}


def _trust_metrics(examined: Examined) -> dict[str, float]:
    """Computes the metrics of measurement quality: sampling of power, scatter of figures, odd devices.

    `sample_coverage_frac`: the worst sensor's share of the window in intervals of at most three of its usual ones, 0
    for a sensor that was never read. `sensor_period_s`: the slowest sensor's period. `energy_integral_error_frac`: see
    `wattune.analysis.metrics.energy.integral_error_frac`. `step_time_uncertainty_frac`,
    `energy_per_step_uncertainty_frac`: half the 95 % interval of the mean time and energy from step to step
    (`wattune.intervals.of_series`), over the mean.
    `device_outlier_frac`: see `wattune.analysis.metrics.outlier.outliers`, the furthest device.
    """
    aligned, traces = examined.aligned, examined.powers
    metrics: dict[str, float] = {}
    if traces.traces:
        complete = len(traces.traces) == traces.num_sensors
        metrics["sample_coverage_frac"] = min(trace.coverage_frac for trace in traces.traces) if complete else 0.0
        metrics["sensor_period_s"] = max(trace.sensor_period_s for trace in traces.traces)
        error = integral_error_frac(traces) if complete else None
        if error is not None:
            metrics["energy_integral_error_frac"] = error
    metrics |= _uncertainties(aligned, traces)
    if examined.outliers:
        metrics["device_outlier_frac"] = examined.outliers[0].deviation_frac
    return metrics


def _uncertainties(aligned: Aligned, traces: Powers) -> dict[str, float]:
    """Computes half the 95 % interval of the mean time and energy from step to step, over the mean."""
    if aligned.steps is None:
        return {}
    energies_j = step_energies_j(aligned, traces)
    each = {
        "step_time_uncertainty_frac": step_to_step_s(aligned.steps),
        "energy_per_step_uncertainty_frac": None if energies_j is None else energies_j[:-1],
    }
    intervals = {name: of_series(values) for name, values in each.items() if values is not None}
    return {name: interval.half_width_frac for name, interval in intervals.items() if interval is not None}


def metrics_over(data: RunData, first: int, last: int) -> dict[str, float]:
    """Computes speed, energy and their uncertainties over some steps, by their places in the stream of data."""
    examined = data.over(first, last)
    if examined is None or examined.aligned.steps is None:
        return {}
    aligned, tokens = examined.aligned, data.tokens_per_step
    traces = powers(aligned)
    speed = speed_metrics(aligned, data.spec, tokens)
    energy = energy_metrics(aligned, traces, step_time_s=speed["step_time_s"], tokens_per_step=tokens)
    return {**speed, **energy, **_uncertainties(aligned, traces)}


def _found_tags(examined: Examined) -> dict[str, str]:
    """Returns findings that are not numbers, as tags."""
    tags = {}
    if examined.aligned.steps is not None:
        number, start = examined.aligned.steps.number, examined.data.first_step
        tags["steps"] = f"{int(number.min()) - start}-{int(number.max()) - start}"
    if examined.num_unsteady_steps:
        tags["steady_from_step"] = str(examined.num_unsteady_steps)
    settled_s = all_settled_from_s(examined.temperatures)
    if settled_s is not None:
        tags["thermally_settled_from_s"] = f"{settled_s:.0f}"
    if examined.outliers and examined.outliers[0].deviation_frac > VARIES_FRAC:
        tags["outlier"] = str(examined.outliers[0])
    saturated = [one.claim for one in examined.saturation if one.saturated]
    if saturated:
        tags["saturated"] = ", ".join(saturated)
    return tags


def _facts(examined: Examined, metrics: Mapping[str, float]) -> Facts:
    data, aligned, traces = examined.data, examined.aligned, examined.powers
    spec, manifests = data.spec, data.manifests
    steps, missing = aligned.steps, aligned.missing
    gone = 0 if len(missing) == len(aligned.devices) else len(missing)
    has_power = bool(traces.traces)
    rings = nodes_with_ring(manifests)
    return Facts(
        num_steps=None if steps is None else len(steps.number),
        num_missing_ranks=0 if steps is None or spec is None else max(spec.cluster.world_size - len(steps.rank), 0),
        num_missing_devices=gone,
        num_outside_sensors=traces.num_outside,
        has_power=has_power,
        simulated=data.simulated,
        replayed=data.read_by("replay"),
        num_stand_ins=sum(trace.stands_in or (not trace.from_ring and trace.node in rings) for trace in traces.traces),
        coverage_frac=metrics.get("sample_coverage_frac"),
        largest_gap_s=max((trace.largest_gap_s for trace in traces.traces), default=None),
        energy_error_frac=metrics.get("energy_integral_error_frac"),
        energy_checked=not has_power or "energy_integral_error_frac" in metrics,
        rate_frac=_rate_frac(manifests),
        clock_step_s=_clock_step_s(manifests),
        clock_uncertainty_s=_clock_uncertainty_s(aligned, manifests),
        num_other_processes=_num_other_processes(aligned),
        outlier_frac=metrics.get("device_outlier_frac"),
        steady=examined.num_unsteady_steps is not None,
        step_time_drift_frac=None if steps is None else drift_frac(step_times_s(steps)),
        temperature_rise_c_per_min=temperature_rise_c_per_min(examined.temperatures),
        thermal_window_s=aligned.duration_s if "device_temp_max_c" in metrics else None,
        unexplained_frac=metrics.get("other_frac"),
        host_bound_frac=metrics.get("host_bound_frac"),
        start_up_counts=WINDOW_TAGS[0] in data.tags,
        burst=data.tags.get(FIDELITY) == BURST,
        stopped_early=STOPPED_EARLY in data.tags,
        num_edited_files=len(data.files.accepted),
        num_missing_files=len(data.files.missing),
    )


def _host_metrics(examined: Examined, step_time_s: float | None) -> dict[str, float]:
    """Returns what devices wait for their host where a pass was profiled and steps are known."""
    if examined.busy_s is None or not step_time_s:
        return {}
    own_s = examined.own_busy_s or 0.0
    waits_frac = host_bound_frac(examined.busy_s, own_s, step_time_s, examined.division)
    return {"host_bound_frac": waits_frac, "device_bound_step_time_s": (1.0 - waits_frac) * step_time_s}


def nodes_with_ring(manifests: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Returns the nodes whose sampler wrote ring samples: power from elsewhere then means that their file is lost."""
    return {node for node, manifest in manifests.items() if manifest.get("tiers", {}).get("ring", {}).get("rows")}


def _rate_frac(manifests: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Returns achieved over requested rate of the worst tier; None if no sampler reports it."""
    rates = [
        tier["achieved_hz"] / tier["requested_hz"]
        for manifest in manifests.values()
        for name, tier in manifest.get("tiers", {}).items()
        if name != HOST and tier.get("achieved_hz") is not None and tier.get("requested_hz")
    ]
    return min(rates, default=None)


def _clock_step_s(manifests: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Returns the largest jump of any node's wall clock; None if no sampler checked."""
    looked = [clock["steps"] for manifest in manifests.values() if "steps" in (clock := manifest.get("clock", {}))]
    return max((ns_to_s(abs(step["step_ns"])) for steps in looked for step in steps), default=0.0) if looked else None


def _clock_uncertainty_s(aligned: Aligned, manifests: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Returns the largest clock uncertainty of the summed nodes; None for one node, or if no manifest has it."""
    nodes = {node for node, _ in aligned.devices}
    said_ns = [manifests.get(node, {}).get("clock_offset_uncertainty_ns") for node in nodes]
    return max((ns_to_s(one) for one in said_ns if one is not None), default=None) if len(nodes) > 1 else None


def _num_other_processes(aligned: Aligned) -> int | None:
    """Counts foreign processes on the busiest device from beginning to end; None if no backend can list them.

    A process that came or left in between may be a worker of this trial, or of the one before.
    """
    counts = []
    for known in map(aligned.known.get, aligned.devices):
        found = [
            {process["pid"] for process in facts["other_processes"]}
            for when in ("at_start", "at_end")
            if "other_processes" in (facts := (known or {}).get(when, {}))
        ]
        if found:
            counts.append(len(set.intersection(*found)))
    return max(counts, default=None)


def _power_tags(aligned: Aligned, traces: Powers, metrics: Mapping[str, float]) -> dict[str, str]:
    tags = {}
    if traces.traces:
        tags["power_source"] = "+".join(sorted({"ring" if trace.from_ring else "fast" for trace in traces.traces}))
    if "excursion_count" in metrics or "over_limit_20ms_time_frac" in metrics:
        read = all(len(limit_readings_w(aligned, trace)) for trace in traces.traces)
        tags["excursion_limit"] = "enforced" if read else "manifest"
    if "power_swing_rms_w" in metrics:
        high_hz = min(SWING_BAND_HZ[1], 0.5 / metrics["sensor_period_s"])
        tags["power_swing_band_hz"] = f"{SWING_BAND_HZ[0]:g}-{high_hz:g}"
    return tags
