"""Places of a plan's ranks and layers: the map of the slots from a study's runs, the placement that pays, its check."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, median
from typing import Final

import numpy as np

from wattune.analysis.metrics.step_breakdown import GATHERS_INSIDE, MODEL, OPTIMIZER, WAIT, PhaseSpans
from wattune.analysis.run_data import RunData
from wattune.api.decisions import parse_budget
from wattune.api.results import rank
from wattune.api.runs import run_study
from wattune.api.spaces import StudyPlan, plan
from wattune.api.studies import find_measured, find_study
from wattune.arrays import Floats
from wattune.cost.power import power_coefficients
from wattune.errors import PlanError
from wattune.fidelity import is_burst
from wattune.orchestrate.events import Listener
from wattune.placement.gain import Move, PlacementAdvice, place_plan
from wattune.placement.slots import SlotMap, SlotReading, fit_map
from wattune.plans.axes import AXES
from wattune.plans.parallel import coordinates, num_micro_batches
from wattune.plans.placement import place as slots_of
from wattune.plans.program import is_command
from wattune.ranking.answer import answer_of
from wattune.ranking.assessment import is_simulated
from wattune.ranking.bounds import LIMIT
from wattune.ranking.difference import Counted, Difference, difference
from wattune.ranking.spreads import Spreads
from wattune.run import Run, RunStatus
from wattune.search.cluster_entry import plain_cluster
from wattune.storage.files import storage_path
from wattune.storage.space_changes import plain_value
from wattune.storage.study import StudyFolder, TrialFolder
from wattune.trial import TrialSpec
from wattune.units import NS_PER_S

FREE_BELOW: Final = 0.95
"""Share of the slowest stage's time below which power tells what a device would draw without a limit. Our choice, made
after errors were seen: at 0.8 three of 20 cases told it, at 0.95 three pairs of H200 agree (`placement_on_gpus.md`)."""

HELD_BELOW: Final = 0.95
"""Share of what a limit leaves below which a device is not held by it. Our choice."""

VERIFYING_REPEATS: Final = 6
"""Runs of each placement, in turn: they tell a difference of about their scatter. Our choice."""


def slot_map(study: str | None = None, *, storage: str | None = None) -> SlotMap:
    """Fits the map of the slots that a study's trials ran on; None is the study of the storage that changed last.

    Raises `PlanError`: there is no such study, or none of its trials measured a device.
    """
    place = storage_path(storage)
    latest = max(place.glob("*/study.yaml"), key=lambda path: path.stat().st_mtime_ns, default=None)
    if study is None and latest is None:
        raise PlanError(f"{place} has no study; run one, or name one")
    folder = find_study(study or str(latest.parent if latest else ""), storage=storage, whole=True)
    return fit_map([one for spec, run in _measured(folder) for one in _readings(folder, spec, run)[0]])


def place(
    study: str, *, horizon: str | float = "24h", map_of: str | None = None, storage: str | None = None
) -> PlacementAdvice:
    """Finds the best placement of a study's best plan, or of `STUDY:TRIAL_ID`, and whether it pays.

    `horizon` is the time that the plan still has to run. `map_of` is the study of the same plan and machines whose map
    counts; None is the trial's own. Raises `PlanError`: there is no such study or trial, the plan has one stage, all is
    simulated, or the map is of other machines or cannot compare their slots.
    """
    horizon_s, (name, _, trial) = parse_budget(horizon, "--horizon"), study.rpartition(":")
    names_trial = bool(name) and "/" not in trial
    folder = find_study(name if names_trial else study, storage=storage, whole=True)
    best = None if names_trial else answer_of(rank(folder, storage=storage)).plan
    if best is None and not names_trial:
        raise PlanError(f"{folder.path} has no plan that was measured; run it, or name a trial")
    spec = TrialFolder(find_measured(study, storage=storage)).spec() if best is None else best.spec
    runs = [run for one, run in _measured(folder) if one.trial_id == spec.trial_id]
    if not runs:
        raise PlanError(f"trial {spec.trial_id} of {folder.path} has no run that measured devices in full; run it")
    own, backward_frac, optimizer_s, exchange_s, behind_s = _readings(folder, spec, runs[-1])
    starts = [(run.numbers.start_time_s, run.numbers.build_time_s, run.numbers.first_step_time_s) for run in runs]
    restart_s = median(sum(one or 0.0 for one in each) for each in starts)
    times_s = mean(run.metrics["step_time_s"] for run in runs), restart_s, horizon_s
    peak_bytes = max((one for run in runs if (one := run.metrics.get("memory_peak_bytes"))), default=None)
    slots = slot_map(map_of or str(folder.path), storage=storage)
    beside = backward_frac, optimizer_s, _drawn(spec, runs[-1], own), exchange_s, behind_s
    return replace(place_plan(spec, slots, own, beside, times_s, peak_bytes), study=str(folder.path))


def verify(
    found: PlacementAdvice,
    *,
    storage: str | None = None,
    watch: Callable[[StudyPlan], AbstractContextManager[Listener]],
) -> tuple[Move, Difference]:
    """Runs a placement's most promising move and the present one in turn, as a study of two plans, or goes on with it.

    `watch` makes a listener of that study. Returns the move, and the change of step time by it. Raises `PlanError`:
    nothing that a run can do differs from the present placement, or there are no runs of both.
    """
    move = found.chosen or next((one for one in found.moves if not one.needs), None)
    if move is None:
        raise PlanError("there is nothing to verify: no other order of ranks or layers is better on the map")
    document, spec = StudyFolder(Path(found.study)).document(), found.spec
    moved, work, axes = replace(spec, plan=move.plan), spec.workload, ("layout", "rank_order")
    document |= {
        "study": f"{document['study'][:60]}_place_{moved.trial_id}",
        "model": [{key: value for key, value in asdict(spec.model).items() if key != "source"}],
        "cluster": [plain_cluster(spec.cluster)],
        "engine": [spec.engine],
        "workload": document["workload"] | {"seq_len": work.seq_len, "global_batch_size": work.global_batch_size},
        "plans": [{name: plain_value(getattr(one.plan, name)) for name in axes} for one in (spec, moved)],
        "space": {name: [plain_value(getattr(spec.plan, name))] for name in AXES if name not in axes},
        "measure": document["measure"] | {"repeats": VERIFYING_REPEATS, "reference_every": 0, "soak_finalists": 0},
        "search": {"strategy": "grid"},
    }
    planned = plan(document | {"objective": "minimize step_time_s", "requires": [], "constraints": []})
    ids = [one.trial_id for one in planned.candidates.specs]
    if ids != [spec.trial_id, moved.trial_id]:
        raise PlanError(f"the space of {found.study} does not give its own trial again; run both plans in a new study")
    with watch(planned) as listener:
        study = run_study(planned, storage=storage, listener=listener).study
    results = [one for one in study.folder.results() if one[1].status is RunStatus.COMPLETED]
    sides = [[run for _, run in results if run.trial_id == one] for one in ids]
    told = difference("step_time_s", *(Counted(one, Spreads(results)) for one in sides)) if all(sides) else None
    if told is None:
        raise PlanError(f"{study.path} has no runs of both placements; the same command goes on")
    return move, told


def _measured(folder: StudyFolder) -> list[tuple[TrialSpec, Run]]:
    """Returns a study's full runs of engines on devices that were measured."""
    ended = [one for one in folder.results() if one[1].status is RunStatus.COMPLETED and not is_burst(one[1])]
    found = [one for one in ended if not is_command(one[0]) and not is_simulated(one[1])]
    if not found:
        what = "only simulated sensors, commands" if ended else "no full run"
        raise PlanError(f"{folder.path} has {what}: a map needs times of real devices; run an engine on them")
    return found


def _drawn(spec: TrialSpec, run: Run, own: Sequence[SlotReading]) -> Floats | float:
    """Returns what devices draw at work, over what their limit leaves, of those that wait in much of a round, else NaN.

    0 where no power is known, and of a device that never waits and yet draws less: something else slows it.
    """
    c, slowest_s = power_coefficients(spec.cluster.sensed_device), max((one.time_s for one in own), default=0.0)
    power_w = np.array([np.nan if one.power_w is None else one.power_w for one in own])
    waits = np.array([one.time_s < FREE_BELOW * slowest_s for one in own], bool) & ~np.isnan(power_w)
    if c is None or not waits.any():
        return 0.0
    each = num_micro_batches(spec.plan, spec.cluster.world_size, spec.workload.global_batch_size)
    busy = np.minimum(each * np.array([one.time_s for one in own]) / run.metrics["step_time_s"], 1.0)
    free_w = (power_w - c.idle_w - (1 - busy) * c.wait_w) / busy
    strain = free_w / (c.regulated_frac * run.metrics.get(LIMIT, c.limit_w) - c.idle_w)
    return np.where(waits, strain, np.where(strain < HELD_BELOW, 0.0, np.nan))


def _readings(
    folder: StudyFolder, spec: TrialSpec, run: Run
) -> tuple[list[SlotReading], Floats | float, Floats, float, float]:
    """Reads each device in a run, by slot, and what `Pipe` takes of the run beside.

    There are no devices without spans.
    """
    path, own, size = folder.trial(run.trial_id, run.repeat).path, spec.plan, spec.cluster.world_size
    data = RunData.of(path)
    examined = data.examined
    if examined is None or examined.aligned.steps is None or data.spans is None:
        return [], 0.0, np.zeros(own.pp), 0.0, 0.0
    aligned, steps = examined.aligned, examined.aligned.steps
    phases = PhaseSpans.of(data.spans, steps)
    own_s, backward_s = (phases.time_s(*of, WAIT) - phases.time_s(WAIT) for of in (MODEL, MODEL[1:]))
    each = num_micro_batches(own, size, spec.workload.global_batch_size)
    each_s = np.median(own_s, axis=0) / each
    work = replace(spec, plan=replace(own, rank_order="topology")).trial_id
    traces, places, settled = examined.traces, slots_of(own, spec.cluster), examined.settled
    at_s, found, optimizer_s = run.start_wall_ns / NS_PER_S, list[SlotReading](), np.zeros(own.pp)
    stages = [coordinates(number, own, size).pp for number in steps.rank.tolist()]
    np.maximum.at(optimizer_s, stages, np.median(phases.time_s(OPTIMIZER), axis=0))
    for index, stage in enumerate(stages if own.pp > 1 and own.vpp == 1 and each > 1 else ()):
        if (found_passes := phases.passes([index], stage, own, each)) is not None:
            forward_s = np.median(found_passes[1][[not one.backward for one in found_passes[0]]], axis=(1, 2))
            # The first pass counts as its others: that its device was idle takes time, whatever its layers.
            each_s[index] -= (forward_s[0] - np.median(forward_s[1:])) / each
    alone = own.tp == own.cp == own.ep == 1 and own.sharding not in GATHERS_INSIDE
    ranks = zip(steps.rank.tolist(), steps.device, each_s.tolist(), strict=True)
    for number, device, time_s in sorted(ranks, key=lambda one: (places[one[0]].node, places[one[0]].device)):
        where = device[0], places[number].device, str(aligned.known.get(device, {}).get("uuid") or "")
        temp_c = settled[device].mean_c if device in settled else None
        power_w = traces[device][0].mean_w / traces[device][0].share if device in traces else None
        stage = coordinates(number, own, size).pp
        found.append(SlotReading(path.name, where, (work, stage), at_s, time_s, alone, temp_c, power_w))
    # Without what the first pass takes beside: with it a share is too small, and a gain 0.1 points too high.
    shares = np.median(backward_s, axis=0) / np.maximum(each * each_s, 1e-12)
    backward_frac = np.bincount(stages, shares) / np.bincount(stages)
    exchange_s = phases.exchange_s() if own.pp > 1 and own.vpp == 1 else 0.0
    behind_s = float(np.median(phases.behind_s()[:, np.array(stages) == 0])) if own.pp > 1 else 0.0
    return (found if each_s.min() > 0 else []), backward_frac, optimizer_s, exchange_s, behind_s
