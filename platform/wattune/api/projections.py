"""Measured runs at another size: of a study's best plans, of a table of runs, or of a recording."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from wattune.analysis.run_data import RunData
from wattune.api.beforehand import OtherStudies
from wattune.api.results import AnyStudy, folder_of, rank
from wattune.api.studies import find_recording
from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.networks import network as network_named
from wattune.errors import PlanError, WattuneError
from wattune.objective import parse_constraint
from wattune.plans.program import is_command
from wattune.plans.settings import setting_problem
from wattune.projection.cluster_power import measured_load
from wattune.projection.operation import operated
from wattune.projection.projected import (
    FIGURES,
    Projected,
    nodes_and_devices,
    project_recording,
    project_runs,
    project_trials,
    truth_of,
)
from wattune.projection.runs import TableRun, read_runs
from wattune.ranking.assessment import RankedTrial
from wattune.ranking.order import Ranking
from wattune.recording.recording import run_of
from wattune.run import PUBLISHABLE, Run
from wattune.scale_down.reading import SCALED
from wattune.storage.files import named_path, storage_path
from wattune.storage.study import StudyFolder
from wattune.trial import TrialSpec

NUM_OVER_DAYS, MOST_OVER_DAYS = 3, 20
"""Best plans that hold their bounds whose traces of power are read; and most that are read to find those."""
DAYS = "figures of days"


def project(
    source: AnyStudy,
    *,
    to: str | None = None,
    against: str | None = None,
    network: str | None = None,
    limit_w: float | None = None,
    inlet_c: float | None = None,
    global_batch_size: int | None = None,
    include_transferred: bool = False,
    mtbf_h: float | None = None,
    bounds: Sequence[str] = (),
    storage: str | None = None,
) -> list[Projected]:
    """Projects measured runs to another size, with intervals that widen with the distance. Starts nothing.

    `source` is a study, a recording, or the path of a CSV table of runs. `to` is the size, such as `1024x8`. `against`,
    a CSV table of steps that were measured there, scores it, and gives a table's sizes. `network`, `limit_w` of a
    device and coolant of `inlet_c` are as measured unless given, and the batch grows unless `global_batch_size` holds
    it. What is `transferred` is neither ordered nor checked against the study's bounds unless `include_transferred`.
    A study's best plans and recordings have figures of days too, with failures every `mtbf_h`
    (`wattune.projection.operation`). `bounds`, such as `cluster_swing_rms_w <= 2e5`, are an operator's: the best plans
    that hold them are looked for. Raises `PlanError` or `SpaceError` where an argument cannot be used, or nothing that
    was measured can be projected.
    """
    size = None if to is None else nodes_and_devices(to)
    devices = 0 if size is None else size[0] * size[1]
    limits = [parse_constraint(one, FIGURES) for one in bounds]
    asked = {"--limit": limit_w, "--global-batch-size": global_batch_size, "--mtbf": mtbf_h, "--inlet": inlet_c}
    if problems := [
        f"{name}: got {value:,.10g}, allowed: above 0, up to {70 if name == '--inlet' else 1e9:,.0f}"
        for name, value in asked.items()
        if value is not None and not 0 < value <= (70 if name == "--inlet" else 1e9)
    ]:
        raise PlanError(f"{'; '.join(problems)}; give another one")
    is_table = str(source).endswith(".csv")
    recording = find_recording(source, storage=storage) if isinstance(source, str) and not is_table else None
    unknown = network is not None or limit_w or inlet_c is not None or (mtbf_h and is_table)
    if (is_table or recording) and unknown:
        raise PlanError(f"--network, --limit, --inlet, --mtbf: {source} does not tell its fabric or plan; name a study")
    truth = [] if against is None else read_runs(named_path(against))
    if is_table and (size or truth):
        found = project_runs(read_runs(named_path(str(source))), devices or None, truth, global_batch_size)
        return [one.judged(limits) for one in found]
    if size is None:
        raise PlanError("--to: got nothing, allowed: nodes x devices a node, or a table with --against; name a size")
    if recording:
        return [_of_recording(recording, size, truth, mtbf_h).judged(limits)]

    def there(cluster: ClusterSpec) -> ClusterSpec:
        if limit_w is not None and (problem := setting_problem(cluster, "power_limit_w", limit_w)):
            raise PlanError(f"--limit: {problem}")
        limited = limit_w and replace(cluster.sensed_device, power_limit_w=limit_w)
        return replace(
            cluster,
            num_nodes=size[0],
            devices_per_node=size[1],
            network=cluster.network if network is None else network_named(network),
            own_device=limited or cluster.own_device,
            inlet_c=cluster.inlet_c if inlet_c is None else inlet_c,
        )

    ranking = rank(folder := folder_of(source, storage=storage), storage=storage)
    trials = _projectable(ranking, folder, there, global_batch_size)
    steps_s = [truth_of(target, truth) for _, target, _ in trials]
    if truth and not any(steps_s):
        raise PlanError(f"{against}: no row is a plan of {folder.name} on {devices:,} of its devices; add one")
    known = OtherStudies(storage_path(storage), apart_from=folder.name).coefficients
    found = [replace(one, truth_s=step_s) for one, step_s in zip(project_trials(trials, known), steps_s, strict=True)]

    def judged(one: Projected) -> Projected:
        is_told = include_transferred or not one.untested
        asked = [*(ranking.constraints if is_told else ()), *limits]
        return one.judged(asked) if is_told or limits else replace(one, breaks=None)

    told = include_transferred or not any(one.untested for one in found)
    in_order = partial(sorted, key=_order if told else lambda _: 0)  # as they rank
    pairs, num_holding = in_order(zip(map(judged, found), trials, strict=True)), 0
    for place, (one, (row, target, own)) in enumerate(pairs[:MOST_OVER_DAYS]):
        if num_holding < NUM_OVER_DAYS:
            trial = folder.trial((run := row.counted[-1]).trial_id, run.repeat)
            more = judged(_over_days(one, trial.path, trial.result() or run, target.cluster, mtbf_h))
            pairs[place], num_holding = (more, (row, target, own)), num_holding + (not more.breaks)
    return [one for one, _ in in_order(pairs)]


def _order(pair: tuple[Projected, object]) -> tuple[bool, float]:
    return bool(pair[0].breaks), pair[0].figures["step_time_s"].value


def _of_recording(path: Path, size: tuple[int, int], truth: Sequence[TableRun], mtbf_h: float | None) -> Projected:
    run = run_of(path)
    one, cluster = project_recording(run, *size)
    truth_s = next((n["step_time_s"] for n in (own.numbers for own in truth) if n["gpus"] == one.num_devices), None)
    return _over_days(replace(one, truth_s=truth_s), path, run, cluster, mtbf_h)


def _projectable(
    ranking: Ranking, folder: StudyFolder, there: Callable[[ClusterSpec], ClusterSpec], global_batch_size: int | None
) -> list[tuple[RankedTrial, TrialSpec, ClusterSpec]]:
    """Returns the plans that were measured well, each as it would run there and with what it was measured on."""
    able = [row for row in (*ranking.feasible, *ranking.undecided) if not is_command(row.spec)]
    trials = []
    for row in able:
        run, own, work = row.counted[-1], row.spec.cluster, row.spec.workload
        quality, place = row.quality, own
        if SCALED in run.tags:  # a small run is no worse for being read as the large one
            small, stored = folder.trial(run.trial_id, run.repeat).read()
            quality, place = stored.quality if stored else quality, small.cluster
        if quality == PUBLISHABLE and not row.simulated:
            cluster = there(own)
            batch = global_batch_size or work.global_batch_size * cluster.world_size // own.world_size
            target = replace(row.spec, cluster=cluster, workload=replace(work, global_batch_size=batch))
            trials.append((row, target, place))
    if not trials:
        why = "none is publishable on measured sensors" if able else "none holds its bounds with a built-in engine"
        raise PlanError(f"{folder.name}: no plan can be projected: {why}; measure such a plan")
    return trials


def _over_days(one: Projected, path: Path, run: Run, there: ClusterSpec | None, mtbf_h: float | None) -> Projected:
    """Adds figures of days, from the traces of a run, in its folder; says why where those are gone or not usable."""
    step_s, load = run.metrics.get("step_time_s"), None
    try:
        examined = RunData.of(path).examined
    except WattuneError as error:
        return replace(one, notes={**one.notes, DAYS: f"none, {error}"})
    if examined is not None and step_s is not None and examined.powers.usable:
        load = measured_load(examined.powers, step_s)
    more = {} if load is None or there is None else operated(one.figures, load, there, apart_h=mtbf_h)
    if not more:
        return replace(
            one, notes={**one.notes, DAYS: "none, without traces of power of a step or more on a known device"}
        )
    return replace(one, figures={**one.figures, **more})
