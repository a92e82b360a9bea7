"""The fit of one kind of device to the trials of studies: memory, step time and power, each with its held-out error."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from wattune.arrays import Floats
from wattune.cost.batch import batches
from wattune.cost.estimate import Coefficients, predict
from wattune.cost.power import room_frac
from wattune.errors import PlanError
from wattune.fitting.links import SweepFit
from wattune.fitting.memory import fit_memory
from wattune.fitting.power import MIN_CONFIGURATIONS, PREDICTED, fit_power, has_activity, with_intervals
from wattune.fitting.step_time import Unseen
from wattune.fitting.step_time import fit as fit_step_time
from wattune.fitting.store import HoldOut, StoredFit, missing_data, note
from wattune.metrics import METRICS
from wattune.run import Run, RunStatus
from wattune.trial import TrialSpec

MeasuredTrial = tuple[TrialSpec, Run]


def fit_device(
    device: str,
    measured: Sequence[MeasuredTrial],
    default: Coefficients,
    *,
    studies: Sequence[str],
    device_uuids: Sequence[str] = (),
    sweep: SweepFit | None = None,
) -> StoredFit:
    """Fits the coefficients of a device.

    `default` are the coefficients to start from. Trials that did not complete say nothing, those with simulated sensors
    are left out. The fit of step times begins with `sweep`. Raises `PlanError` where no trial can be fitted to.
    """
    real = [one for one in measured if one[0].cluster.simulate_sensors_of is None]
    usable = [one for one in real if one[1].status is RunStatus.COMPLETED and "step_time_s" in one[1].metrics]
    if not usable:
        raise PlanError(
            f"none of {len(measured)} trials on {device} completed with measured sensors; "
            "run a study on GPUs, or name another one"
        )
    hold_out: dict[str, HoldOut] = dict(sweep.hold_out) if sweep else {}
    if sweep is not None:
        default = replace(default, step_time=sweep.applied(default.step_time))
        device_uuids = [*device_uuids, *sweep.device_uuids]
    limit_w = usable[0][0].cluster.sensed_device.power_limit_w or math.inf
    rows = [row for row in map(_row, usable) if has_activity(row)]
    power = fit_power(rows, default.power, limit_w=limit_w) if rows else default.power
    number = len({spec.trial_id for spec, _ in usable})
    step, _, errors, unseen = fit_step_time([(a, b.metrics) for a, b in usable], default.step_time, power)
    note(hold_out, "step_time_s", errors, number)
    if rows:
        power = with_intervals(power, *_needed(unseen, rows, default, limit_w))
        configurations = len({row["trial_id"] for row in rows})
        if configurations >= MIN_CONFIGURATIONS:
            for metric, frac in zip(PREDICTED, (power.error_frac, power.peak_error_frac), strict=True):
                hold_out[metric] = HoldOut(median_frac=None, p95_frac=frac, num_configurations=configurations)
    peaks = [
        (spec, result.metrics["memory_peak_bytes"]) for spec, result in usable if "memory_peak_bytes" in result.metrics
    ]
    memory = None
    if peaks:
        memory, errors = fit_memory(peaks, default.memory, _versions(usable))
        note(hold_out, "memory_peak_bytes", errors, number)
    return StoredFit(
        device=device,
        device_uuids=tuple(sorted(set(device_uuids))),
        fitted_at=datetime.now(UTC).isoformat(timespec="seconds"),
        studies=tuple(studies),
        num_trials=len(usable),
        num_configurations=number,
        memory=memory,
        step_time=step,
        power=power if rows else None,
        hold_out=hold_out,
        sharpen=missing_data([_axes(spec) for spec, _ in usable], longest_s=max(result.took_s for _, result in usable)),
        links=sweep.label if sweep else "",
    )


def _needed(
    unseen: Sequence[Unseen], rows: Sequence[Mapping[str, Any]], default: Coefficients, limit_w: float
) -> tuple[Floats, Floats, Floats, list[str]]:
    """Finds how wide an interval of mean power and of peaks must be beyond what a step's own adds, by trial.

    Steps are predicted; no fit has seen the trial. Returns both, the room that the
    peak leaves below the limit, and trial ids.
    """
    mean, peak, room, of = list[float](), list[float](), list[float](), list[str]()
    for step, trials in unseen:
        hidden = {spec.trial_id for spec, _ in trials}
        c = fit_power([row for row in rows if row["trial_id"] not in hidden], default.power, limit_w=limit_w)
        alone = replace(c, error_frac=0.0, peak_error_frac=0.0, full_peak_error_frac=0.0)
        for positions, batch in batches([spec for spec, _ in trials]):
            found = predict(batch, replace(default, step_time=step, power=alone).on(batch.cluster)).power
            each_w = found["node_device_power_peak_1s_w"].value / batch.cluster.devices_per_node
            left = room_frac(each_w, each_w, batch.limit_w)
            for at, (spec, metrics) in enumerate(trials[place] for place in positions):
                if all(metrics.get(name) for name in PREDICTED):
                    for needed, name in zip((mean, peak), PREDICTED, strict=True):
                        one = found[name]
                        away, own = (metrics[name] or 0.0) / one.value[at] - 1, 1 - one.low[at] / one.value[at]
                        needed.append(math.sqrt(max(away**2 - own**2, 0.0)))
                    room.append(float(left[at]))
                    of.append(spec.trial_id)
    return np.array(mean), np.array(peak), np.array(room), of


def add_sweep(before: StoredFit | None, sweep: SweepFit, default: Coefficients) -> StoredFit:
    """Adds a sweep to a device's fit, if there is one, without fitting its trials again."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    step = sweep.applied((before and before.step_time) or default.step_time)
    if before is None:
        return StoredFit(
            device=sweep.device,
            device_uuids=sweep.device_uuids,
            fitted_at=now,
            studies=(),
            num_trials=0,
            num_configurations=0,
            memory=None,
            step_time=step,
            power=None,
            hold_out=dict(sweep.hold_out),
            sharpen=("trials of any study on it: no step of training was measured",),
            links=sweep.label,
        )
    changed: dict[str, Any] = {
        "device_uuids": tuple(sorted({*before.device_uuids, *sweep.device_uuids})),
        "fitted_at": now,
        "step_time": step,
        "hold_out": {**before.hold_out, **sweep.hold_out},
        "links": sweep.label,
    }
    return before.model_copy(update=changed)


def _versions(trials: Sequence[MeasuredTrial]) -> dict[str, str]:
    """Says each engine's library and its torch, of its latest trial; empty where that named none."""
    found = dict[str, str]()
    for spec, result in sorted(trials, key=lambda one: one[1].start_wall_ns):
        names = dict.fromkeys(("megatron-core" if spec.engine == "megatron" else spec.engine, "torch"))
        tags = [(name, result.tags.get(f"version.{name}")) for name in names]
        found[spec.engine] = ", ".join(f"{name} {text}" for name, text in tags if text)
    return found


def _row(one: MeasuredTrial) -> dict[str, Any]:
    spec, result = one
    facts = {"trial_id": result.trial_id, "status": str(result.status), "spec": json.dumps(spec.to_json())}
    return facts | {name: result.metrics.get(name) for name in METRICS}


def _axes(spec: TrialSpec) -> dict[str, int | str]:
    plan = spec.plan
    degrees = {name: getattr(plan, name) for name in ("tp", "pp", "ep", "vpp")}
    names = {name: getattr(plan, name) for name in ("sharding", "recompute", "overlap")}
    return {**degrees, **names, "engine": spec.engine}
