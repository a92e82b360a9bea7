"""Results of small trials, read as those of the large trials that they stand for, with the error of doing so.

A figure is read by the ratio of both estimates (`wattune.cost.transfer`). The part of a step that the small cluster
lacks is added as predicted. What nothing reads is left out: a share of the small step says nothing of the large one.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

from wattune.cost.defaults import default_coefficients
from wattune.cost.transfer import read_as
from wattune.metrics import METRICS
from wattune.run import INDICATIVE, INVALID, Run, RunStatus
from wattune.scale_down.invariants import Scaled, compare
from wattune.trial import TrialSpec

SCALED: Final = "scaled_down"
"""Tag of a result that is read as a large trial's, with the words that its tables and plots have; also the quality
reason that makes it `indicative` at most."""

_KEPT: Final = (
    "device_power_limit_w",
    "host_bound_frac",
    "step_time_uncertainty_frac",
    "energy_per_step_uncertainty_frac",
)
"""Metrics that are the large trial's as they are: of the device, or of the measurement."""


def as_large(results: Iterable[tuple[TrialSpec, Run]]) -> list[tuple[TrialSpec, Run]]:
    """Returns results, those of small trials as the large trials' own. Others stay: read twice is read once.

    A trial whose large one surely takes more memory than its device has becomes one that ran out of memory.
    """
    listed = list(results)
    small = tuple(dict.fromkeys(spec for spec, _ in listed if spec.stands_for is not None))
    found = dict(zip(small, _compared(small), strict=True)) if small else {}
    return [(found[spec].large, _read(found[spec], run)) if spec in found else (spec, run) for spec, run in listed]


@lru_cache(maxsize=16)
def _compared(small: tuple[TrialSpec, ...]) -> Sequence[Scaled]:
    return compare(small, default_coefficients)


def read_run(spec: TrialSpec, run: Run) -> Run:
    """Returns one result likewise."""
    return as_large([(spec, run)])[0][1]


def _read(one: Scaled, run: Run) -> Run:
    metrics, errors = _metrics(one, run)
    tags = {**run.tags, SCALED: one.label}
    read = replace(run, metrics=metrics, reading_errors=errors, tags=tags)
    peak, room = metrics.get("memory_peak_bytes", 0.0), one.large.cluster.sensed_device.memory_bytes or math.inf
    if run.status is RunStatus.COMPLETED and peak - 2 * errors.get("memory_peak_bytes", 0.0) > room:
        text = f"read as the large trial it takes {peak / room:.2f} times the memory of its device"
        return replace(read, status=RunStatus.OUT_OF_MEMORY, reason=text)
    quality = INVALID if run.quality == INVALID else min(run.quality, INDICATIVE)
    return replace(read, quality=quality, quality_reasons=(*run.quality_reasons, SCALED))


def _metrics(one: Scaled, run: Run) -> tuple[dict[str, float], dict[str, float]]:
    """Reads every metric that can be, each with the standard deviation of its reading, in its own unit."""
    large, small, known = one.large, one.small, run.metrics
    found = {name: known[name] for name in _KEPT if name in known}
    relative: dict[str, float] = {}
    if known.get("step_time_s", 0.0) > 0:
        step_s, error = _step(one, known["step_time_s"])
        longer = step_s / known["step_time_s"]
        for name in ("step_time_s", "step_time_p95_s", "device_bound_step_time_s"):
            if name in known:
                found[name], relative[name] = longer * known[name], error
        before, after = one.estimated["mfu_frac"][1], one.estimated["step_time_s"][1]
        tokens = large.workload.tokens_per_step
        speeds = {
            "tokens_per_s": tokens / step_s,
            "tokens_per_s_per_device": tokens / step_s / large.cluster.world_size,
            "mfu_frac": before * after / step_s,
        }
        for name in speeds.keys() & known.keys():
            found[name], relative[name] = speeds[name], error
    for name, (before, after) in one.estimated.items():
        group = METRICS[name].group
        if group in ("power", "memory") and known.get(name, 0.0) > 0 and min(before, after) > 0:
            devices = small.cluster.devices_per_node, large.cluster.devices_per_node
            kept = devices[1] / devices[0] if name.startswith("node_") else 1.0
            # Memory follows the parts that grow; power of a device should be the same.
            away = 100 * abs(math.log(after / before / kept)) if group == "power" else 0.0
            read = read_as(known[name], before, after, measured_log_std=0.0, distance_percent=away)
            found[name], relative[name] = float(read.value[0]), float(read.log_std[0])
    watts = "device_power_mean_w"
    if watts in found and "step_time_s" in found and "energy_per_step_j" in known:
        joules = known["energy_per_step_j"] * longer * found[watts] / known[watts]
        joules *= large.cluster.world_size / small.cluster.world_size
        energies = {
            "energy_per_step_j": joules,
            "energy_per_token_j": joules / tokens,
            "tokens_per_j": tokens / joules,
            "energy_delay_product_js": joules * step_s,
        }
        for name in energies.keys() & known.keys():
            found[name], relative[name] = energies[name], math.hypot(relative["step_time_s"], relative[watts])
    errors = {name: error * found[name] for name, error in relative.items()}
    if (name := "memory_peak_bytes") in found and (room := large.cluster.sensed_device.memory_bytes):
        found["memory_headroom_frac"] = 1 - found[name] / room
        errors["memory_headroom_frac"] = errors[name] / room
    warmer = one.estimated["device_temp_max_c"][1] - one.estimated["device_temp_max_c"][0]
    for name in ("device_temp_max_c", "device_temp_settled_c"):
        if name in known:
            found[name], errors[name] = known[name] + warmer, abs(warmer) / math.sqrt(3)
    return found, errors


def _step(one: Scaled, measured_s: float) -> tuple[float, float]:
    """Reads a step time: the kept part by the ratio of estimates, the lacking network as predicted."""
    before, after = one.estimated["step_time_s"]
    network_s = one.predicted_frac * after
    read = read_as(measured_s, before, after - network_s, measured_log_std=0.0, distance_percent=one.percent)
    kept_s = float(read.value[0])
    error_s = math.hypot(kept_s * float(read.log_std[0]), network_s * one.predicted_log_std)
    return kept_s + network_s, error_s / (kept_s + network_s)
