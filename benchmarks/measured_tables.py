"""Reads the measured trials of `benchmarks/data`, for the scripts and tests that fit and judge predictions."""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow.parquet as pq

from wattune.catalog.hardware import DEVICES
from wattune.cost.coefficients import PUBLISHED_STEP_TIME
from wattune.cost.defaults import default_coefficients
from wattune.cost.estimate import Coefficients, estimate
from wattune.errors import PlanError
from wattune.fitting.device import MeasuredTrial, fit_device
from wattune.fitting.power import H200_PRIOR
from wattune.metrics import METRICS
from wattune.run import Run, RunStatus
from wattune.trial import TrialSpec

DATA: Final = Path(__file__).parent / "data"
ALL: Final = "*_h200x*.parquet"
"""Tables of trials on H200."""

KEPT_ASIDE: Final = frozenset({"gpt_slice_h200x2", "llama_3b_h200x2", "moe_tp_h200x2"})
"""Tables that no fit takes, of a later day and a slower host: they judge it (`tests/golden/test_kept_aside.py`)."""

HELD: Final = "*_full_h200_held.parquet"
"""Tables of full plans on H200s of which another process held a part: they judge estimates as well, and no fit."""

SAME_HEAD_NS: Final = 1_795_370_400 * 10**9
"""Wall time since which the torch engine computes head and loss compiled at every tensor degree. Trials from before it
with tp > 1 ran other kernels, and held 6 bytes more of each logit."""

PLAIN_PIECES_NS: Final = 1_795_653_567 * 10**9
"""Wall time since which that engine's tensor parallel pieces are plain tensors. Trials from before it with tp > 1 and
micro-batches of one sequence waited up to 1.3 times as long for their host (`results/tensor_parallel_host.md`). All of
them held two gradients of the head beside its logits, which plain tensors do not: their memory is left out."""

OWN_REDUCE_NS: Final = 1_795_785_000 * 10**9
"""Wall time since which that engine reduces gradients into memory that its forward passes can have. Trials from before
it that filled their device gave memory back twice a step, which most no longer do (`results/memory_kept.md`)."""
FULL_FRAC: Final = 0.8
"""Share of the catalog's memory, held by tensors, from which that was: the least of them held 65.1 of 80 GB."""

TOLD_APART: Final = 0.05
"""Least relative difference of two step times whose order counts."""


def rows(pattern: str = ALL, *, full_before: bool = True) -> list[dict[str, Any]]:
    """Reads every completed trial of the tables of that name, of the engines as they are; no users' commands.

    Each row has the name of its `table` too. Without `full_before` those that filled the memory of an engine before are
    left out: fits leave their steps out themselves, and fit power to what was measured of them.
    """
    paths = [path for path in sorted(DATA.glob(pattern)) if path.stem not in KEPT_ASIDE and not path.match(HELD)]
    found = [row for path in paths for row in completed(path) if row["engine"] != "command" and not is_outdated(row)]
    return [row for row in found if full_before or not was_full(row)]


def completed(path: Path) -> list[dict[str, Any]]:
    """Reads the completed trials of one table, with the table's name."""
    found = [{**row, "table": path.stem} for row in pq.read_table(path).to_pylist()]
    return [row for row in found if row["status"] == "completed" and row["step_time_s"]]


def is_outdated(row: dict[str, Any]) -> bool:
    """Tells whether a trial was measured with an engine that has changed in what it measures."""
    spec = json.loads(row["spec"])
    since_ns = PLAIN_PIECES_NS if spec["plan"]["micro_batch_size"] == 1 else SAME_HEAD_NS
    return spec["engine"] == "torch" and spec["plan"]["tp"] > 1 and row["start_wall_ns"] < since_ns


def was_full(row: Mapping[str, Any]) -> bool:
    """Tells whether a trial filled its device's memory with an engine that gave memory back where today's does not."""
    room, held = DEVICES[json.loads(row["spec"])["cluster"]["device"]].memory_bytes, row["memory_peak_bytes"] or 0
    return row["engine"] == "torch" and row["start_wall_ns"] < OWN_REDUCE_NS and held >= FULL_FRAC * (room or held + 1)


def holds_more(row: Mapping[str, Any]) -> bool:
    """Tells whether a trial was measured with an engine that held more memory than today's."""
    spec = json.loads(row["spec"])
    return spec["engine"] == "torch" and spec["plan"]["tp"] > 1 and row["start_wall_ns"] < PLAIN_PIECES_NS


def trials(pattern: str = ALL, *, full_before: bool = True) -> list[MeasuredTrial]:
    """Reads every completed trial with measured sensors from the tables of that name."""
    return [trial_of(row) for row in rows(pattern, full_before=full_before)]


def trials_of(path: Path) -> list[MeasuredTrial]:
    """Reads the completed trials of one table, outdated ones included."""
    return [trial_of(row) for row in completed(path)]


def held_trials() -> list[MeasuredTrial]:
    """Reads full plans on H200s of which another process held 65.2 GB, as on devices of 80 GB: today's engine."""
    own = replace(DEVICES["h200_sxm"], memory_bytes=DEVICES["h100_sxm"].memory_bytes)
    found = [one for path in sorted(DATA.glob(HELD)) for one in trials_of(path)]
    return [(replace(spec, cluster=replace(spec.cluster, own_device=own)), result) for spec, result in found]


def run_of(row: Mapping[str, Any]) -> Run:
    """Reads the run of one row, whatever became of it."""
    return Run(
        trial_id=row["trial_id"],
        repeat=row["repeat"],
        status=RunStatus(row["status"]),
        metrics={name: row[name] for name in METRICS if row.get(name) is not None},
        tags=json.loads(row.get("tags") or "{}"),
        start_wall_ns=row.get("start_wall_ns") or 0,
        end_wall_ns=row.get("end_wall_ns") or 0,
    )


def trial_of(row: Mapping[str, Any]) -> MeasuredTrial:
    """Reads one row of a table, without memory that today's engine does not hold."""
    gone = {"memory_peak_bytes", "memory_headroom_frac"} if holds_more(row) else set()
    run = run_of({name: value for name, value in row.items() if name not in gone})
    return TrialSpec.from_json(json.loads(row["spec"])), run


def ordered(measured: Sequence[MeasuredTrial], value: Sequence[float]) -> tuple[int, int]:
    """Counts pairs of one model and engine whose step times differ: those predicted in order, and all."""
    right = total = 0
    for (a, (spec, result)), (b, (other, its)) in itertools.combinations(enumerate(measured), 2):
        if (spec.model, spec.engine, spec.workload) != (other.model, other.engine, other.workload):
            continue
        ratio = result.metrics["step_time_s"] / its.metrics["step_time_s"]
        if abs(np.log(ratio)) > np.log(1 + TOLD_APART):
            total += 1
            right += (ratio > 1) == (value[a] > value[b])
    return right, total


def fitted_to(rest: Sequence[MeasuredTrial], studies: Sequence[str], device: str = "h200_sxm") -> Coefficients:
    """Fits coefficients to trials as `wattune fit` does, beginning with published ones: the shipped saw them all."""
    start = default_coefficients(DEVICES[device])
    start = replace(start, step_time=PUBLISHED_STEP_TIME, power=H200_PRIOR)
    fit = fit_device(device, rest, start, studies=list(studies))
    found = {part: getattr(fit, part) or getattr(start, part) for part in ("memory", "step_time", "power")}
    return Coefficients(**found, thermal=start.thermal)


@cache
def held_out_estimates(table: Path, specs: tuple[TrialSpec, ...]) -> dict[str, dict[str, float]]:
    """Predicts a table's trials with coefficients fitted, as `wattune fit` does, to the other tables beside it.

    Returns:
        For each trial id, columns `estimated_METRIC` and `estimated_METRIC_log_std`.

    Raises:
        PlanError: The table is of another device, or of simulated sensors.
    """
    if any(spec.cluster.device != "h200_sxm" for spec in specs):
        raise PlanError(f"{table}: held-out estimates are of h200_sxm only; leave `held_out` away")
    others = [path for path in sorted(table.parent.glob("*_h200x4.parquet")) if path.name != table.name]
    rest = [one for path in others for one in trials_of(path)]
    fitted = fitted_to(rest, [path.stem for path in others])
    found = estimate(specs, lambda _device: fitted)
    rows: dict[str, dict[str, Any]] = {spec.trial_id: {} for spec in specs}
    for name, column in found.columns.items():
        for spec, value, log_std in zip(specs, column.value, column.log_std, strict=True):
            rows[spec.trial_id] |= {f"estimated_{name}": float(value), f"estimated_{name}_log_std": float(log_std)}
    return rows
