"""Measured runs at another size: of a study's best plans, of a table of runs, or of a recording."""

from dataclasses import replace

from wattune.analysis.run_data import RunData
from wattune.api.beforehand import OtherStudies
from wattune.api.results import AnyStudy, folder_of, rank
from wattune.api.studies import find_recording
from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.networks import network as network_named
from wattune.errors import PlanError
from wattune.plans.program import is_command
from wattune.plans.settings import setting_problem
from wattune.projection.cluster_power import measured_load
from wattune.projection.operation import operated
from wattune.projection.projected import Projected, nodes_and_devices, project_recording, project_runs, project_trials
from wattune.projection.runs import read_runs
from wattune.recording.recording import run_of
from wattune.run import Run
from wattune.storage.files import named_path, storage_path
from wattune.storage.study import StudyFolder

NUM_OVER_DAYS = 3
"""Best plans whose traces of power are read."""


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
    storage: str | None = None,
) -> list[Projected]:
    """Projects measured runs to another size, with intervals that widen with the distance. Starts nothing.

    `source` is a study, a recording, or the path of a CSV table of runs. `to` is the size, such as `1024x8`. `against`,
    a CSV table of steps that were measured there, scores it, and gives a table's sizes. `network`, `limit_w` of a
    device and coolant of `inlet_c` are as measured unless given, and the batch grows unless `global_batch_size` holds
    it. What is `transferred` is neither ordered nor checked against bounds unless `include_transferred`. A study's best
    plans have figures of days too, with failures every `mtbf_h` (`wattune.projection.operation`). Raises
    `PlanError` where size or table cannot be used, or nothing that was measured can be projected.
    """
    size = None if to is None else nodes_and_devices(to)
    devices = 0 if size is None else size[0] * size[1]
    asked = {"--limit": limit_w, "--global-batch-size": global_batch_size, "--mtbf": mtbf_h, "--inlet": inlet_c}
    for name, value in asked.items():
        if value is not None and not 0 < value <= (70 if name == "--inlet" else 1e9):
            raise PlanError(
                f"{name}: got {value:,.10g}, allowed: above 0, up to 1e9 and of a coolant 70; give another one"
            )
    is_table = str(source).endswith(".csv")
    recording = find_recording(source, storage=storage) if isinstance(source, str) and not is_table else None
    if (is_table or recording) and (network or limit_w or mtbf_h or inlet_c is not None):
        raise PlanError(f"--network, --limit, --inlet, --mtbf: {source} does not tell its fabric or plan; name a study")
    truth = [] if against is None else read_runs(named_path(against))
    if is_table and (size or truth):
        return project_runs(read_runs(named_path(str(source))), devices or None, truth, global_batch_size)
    if size is None:
        raise PlanError("--to: got nothing, allowed: nodes x devices a node, or a table with --against; name a size")
    truth_s = next((one.numbers["step_time_s"] for one in truth if one.numbers["gpus"] == devices), None)
    if recording:
        return [replace(project_recording(run_of(recording), devices), truth_s=truth_s)]
    ranking = rank(folder := folder_of(source, storage=storage), storage=storage)
    able = [row for row in (*ranking.feasible, *ranking.undecided) if not is_command(row.spec)]
    rows = [row for row in able if row.quality == "publishable" and not row.simulated]
    if not rows:
        why = "none is publishable on measured sensors" if able else "none holds its bounds with a built-in engine"
        raise PlanError(f"{folder.name}: no plan can be projected: {why}; measure such a plan")
    trials = []
    for row in rows:
        cluster, work, device = row.spec.cluster, row.spec.workload, row.spec.cluster.sensed_device
        if limit_w is not None and (problem := setting_problem(cluster, "power_limit_w", limit_w)):
            raise PlanError(f"--limit: {problem}")
        there = replace(cluster, num_nodes=size[0], devices_per_node=size[1])
        there = replace(there, network=network_named(network)) if network else there
        there = replace(there, own_device=replace(device, power_limit_w=limit_w)) if limit_w else there
        there = there if inlet_c is None else replace(there, inlet_c=inlet_c)
        batch = global_batch_size or work.global_batch_size * there.world_size // cluster.world_size
        trials.append((row, replace(row.spec, cluster=there, workload=replace(work, global_batch_size=batch))))
    known = OtherStudies(storage_path(storage), apart_from=folder.name).coefficients
    found = []
    for one, (row, spec) in zip(project_trials(trials, known), trials, strict=True):
        metrics = {name: figure.value for name, figure in one.figures.items()}
        told = include_transferred or not one.untested
        breaks = [str(one) for one in ranking.constraints if one.holds(metrics) is False] if told else None
        found.append((replace(one, breaks=breaks, truth_s=truth_s), row.repeats[-1], spec.cluster))
    if include_transferred or not any(one.untested for one, _, _ in found):
        found.sort(key=lambda each: (bool(each[0].breaks), each[0].figures["step_time_s"].value))
    best = [_over_days(*each, folder, mtbf_h) for each in found[:NUM_OVER_DAYS]]
    return [*best, *(one for one, _, _ in found[NUM_OVER_DAYS:])]


def _over_days(one: Projected, run: Run, there: ClusterSpec, folder: StudyFolder, mtbf_h: float | None) -> Projected:
    """Adds figures of days to a plan, from the traces of its last run; none where those are gone or not usable."""
    examined, step_s = RunData.of(folder.trial(run.trial_id, run.repeat).path).examined, run.metrics.get("step_time_s")
    if examined is None or step_s is None or not examined.powers.usable:
        return one
    load = measured_load(examined.powers, step_s)
    more = {} if load is None else operated(one.figures, load, there, apart_h=mtbf_h)
    return replace(one, figures={**one.figures, **more})
