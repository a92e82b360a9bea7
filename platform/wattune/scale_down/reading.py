"""Results of small trials, read as those of the large trials that they stand for, with the error of doing so.

A figure is read by the ratio of both estimates (`wattune.cost.transfer`). The part of a step that the small cluster
lacks is added as predicted. What nothing reads is left out: a share of the small step says nothing of the large one.
"""

import math
from collections.abc import Iterable
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

_KEPT: Final = {
    "device_power_limit_w",
    "host_bound_frac",
    *(f"{n}_uncertainty_frac" for n in ("step_time", "energy_per_step")),
}
"""Metrics that are the large trial's as they are: of the device, or of the measurement."""


def as_large(results: Iterable[tuple[TrialSpec, Run]]) -> list[tuple[TrialSpec, Run]]:
    """Returns results, those of small trials as the large trials' own. Others stay: read twice is read once.

    A trial whose large one surely takes more memory than its device has becomes one that ran out of memory.
    """
    listed = list(results)
    found = _compared(tuple(dict.fromkeys(spec for spec, _ in listed if spec.stands_for is not None)))
    return [(spec.read_as, _read(found[spec], run) if spec in found else run) for spec, run in listed]


def read_run(spec: TrialSpec, run: Run) -> Run:
    """Returns one result likewise."""
    return as_large([(spec, run)])[0][1]


@lru_cache(maxsize=16)
def _compared(small: tuple[TrialSpec, ...]) -> dict[TrialSpec, Scaled]:
    return dict(zip(small, compare(small, default_coefficients), strict=True)) if small else {}


def _read(one: Scaled, run: Run) -> Run:
    metrics, errors = _metrics(one, run)
    read = replace(run, metrics=metrics, reading_errors=errors, tags={**run.tags, SCALED: one.label})
    if metrics.get("memory_headroom_frac", 0.0) + 2 * errors.get("memory_headroom_frac", 0.0) < 0:
        text = f"read as the large trial it takes {1 - metrics['memory_headroom_frac']:.2f} times its device's memory"
        return replace(read, status=RunStatus.OUT_OF_MEMORY, reason=text)
    quality = INVALID if run.quality == INVALID else min(run.quality, INDICATIVE)
    return replace(read, quality=quality, quality_reasons=(*run.quality_reasons, SCALED))


def _metrics(one: Scaled, run: Run) -> tuple[dict[str, float], dict[str, float]]:
    """Reads every metric that can be, each with the standard deviation of its reading, in its own unit."""
    known, cluster, relative = run.metrics, one.large.cluster, dict[str, float]()
    found = {name: known[name] for name in _KEPT if name in known}

    def add(values: dict[str, float], error: float) -> None:
        found.update({name: value for name, value in values.items() if name in known})
        relative.update(dict.fromkeys(values.keys() & known.keys(), error))

    wider, mean = cluster.devices_per_node / one.small.cluster.devices_per_node, one.estimated["device_power_mean_w"]
    for name in (name for name in one.estimated if METRICS[name].group in ("power", "memory")):
        # Memory follows the parts that grow. Power of a device should be the same: its peaks follow its mean, since
        # estimates of peaks jump where a window holds one phase more of a longer step.
        (before, after), kept = one.estimated[name], wider if name.startswith("node_") else 1.0
        if is_power := METRICS[name].group == "power":
            before, after = mean[0], mean[1] * kept
        if min(known.get(name, 0.0), before, after) > 0:
            away = 100 * abs(math.log(after / before / kept)) if is_power else 0.0
            read = read_as(known[name], before, after, measured_log_std=0.0, distance_percent=away)
            add({name: float(read.value[0])}, float(read.log_std[0]))
    step_s, tokens = known.get("step_time_s", 0.0), one.large.workload.tokens_per_step
    if step_s > 0:
        large_s, error = _step(one, step_s)
        steps = ("step_time_s", "step_time_p95_s", "device_bound_step_time_s")
        add({name: known.get(name, 0.0) * large_s / step_s for name in steps}, error)
        rate, flop = tokens / large_s, one.estimated["mfu_frac"][1] * one.estimated["step_time_s"][1]
        speeds = {"tokens_per_s": rate, "tokens_per_s_per_device": rate / cluster.world_size}
        add(speeds | {"mfu_frac": flop / large_s}, error)
        if (watts := "device_power_mean_w") in found:
            ratio = large_s / step_s * found[watts] / known[watts] * cluster.world_size / one.small.cluster.world_size
            joules = known.get("energy_per_step_j", math.nan) * ratio
            energies = {"energy_per_step_j": joules, "energy_per_token_j": joules / tokens}
            energies |= {"tokens_per_j": tokens / joules, "energy_delay_product_js": joules * large_s}
            add(energies, math.hypot(error, relative[watts]))
    errors = {name: error * found[name] for name, error in relative.items()}
    room, warmest = cluster.sensed_device.memory_bytes, one.estimated["device_temp_max_c"]
    if (name := "memory_peak_bytes") in found and room:
        found["memory_headroom_frac"], errors["memory_headroom_frac"] = 1 - found[name] / room, errors[name] / room
    for name in {"device_temp_max_c", "device_temp_settled_c"} & known.keys():
        warmer = warmest[1] - warmest[0]
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
