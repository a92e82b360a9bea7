"""One trial: telemetry on, a lane's workers train, telemetry off; then analysis, and the result into the study folder.

A trial is a coroutine of the process that holds the lanes. The sensors open while the workers build, and are awaited
before the steps that settle. The nodes are free as soon as the workers are clean: the next trial starts, builds and
compiles while this one's sensors close and its result is made, by a process that is there for that. Measured steps on
these nodes begin when that is done (`LaneKeeper.run`), so no step is measured beside it. A trial counts once its result
is stored: one whose driver dies before that is run again.
"""

import contextlib
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import pyarrow as pa
from ray.exceptions import ObjectLostError, RayError

from wattune.clock import ClockAnchor
from wattune.engines.registry import check_libraries
from wattune.errors import EngineError, NodeError, TelemetryError
from wattune.orchestrate.ask import ask_all
from wattune.orchestrate.attempt import PASSED_ON, Attempt
from wattune.orchestrate.cluster import Cluster
from wattune.orchestrate.command_result import command_spans, run_spans
from wattune.orchestrate.cooldown import wait_until_cool
from wattune.orchestrate.failures import Cause, Failure, is_of_the_machine
from wattune.orchestrate.lanes.actor import LaneKeeper
from wattune.orchestrate.lanes.messages import Answer, Assignment, GroupKey, RankTables, whole
from wattune.orchestrate.lanes.ray_errors import KEEPER_ENDED, cause
from wattune.orchestrate.power_limit import NODE_POWER, PowerLimit, simulated_power_w
from wattune.orchestrate.ray_settings import DASHBOARD, STARTING, dashboard
from wattune.orchestrate.telemetry_actor import NO_OFFSET, NodeTelemetry
from wattune.orchestrate.trial_result import status_of, trial_result
from wattune.orchestrate.trial_telemetry import STOP_S, TrialTelemetry, sampling, sensor_backends
from wattune.plans.program import is_command
from wattune.run import NO_NUMBERS, Numbers, Run, RunStatus
from wattune.simulation.sensors import simulate
from wattune.storage.digests import NO_FILES
from wattune.storage.files import with_calibrations
from wattune.storage.measured import tier_files
from wattune.storage.study import TrialFolder
from wattune.units import ns_to_s, s_to_ns

_TEMPERATURES_S: Final = 30.0
"""Longest a node may take to report its temperatures."""


@dataclass(slots=True)
class _Course:
    """A trial on its way: the parts of it that exist so far, also after an error."""

    nodes: Cluster
    assignment: Assignment | None = None
    telemetry: TrialTelemetry | None = None
    answer: Answer = field(default_factory=Answer)
    limit: PowerLimit | None = None
    asked_ns: int = 0
    """Time at which its workers were asked for, on the monotonic clock."""
    lost: str = ""
    """The reason the trial cost its workers, empty if it did not; known once they have settled."""


async def drive(workers: LaneKeeper, attempt: Attempt, cluster: Cluster, free: Callable[[], None]) -> None:
    """See `wattune.orchestrate.lanes.actor.Drive`; a failure of the trial, or of this program, becomes its status.

    Raises `RayError`: the cluster failed. The study's controller checks whether a node died, and repeats the trial.
    """
    tags = {**cluster.tags, **attempt.tags}
    if tags.get(DASHBOARD) == STARTING:
        tags[DASHBOARD] = await workers.in_thread(dashboard)
    attempt = replace(attempt, tags=tags)
    try:
        await _run(await _cooled(attempt, workers), cluster, workers, free)
    except (RayError, ConnectionError):
        TrialFolder(attempt.folder).write_error(traceback.format_exc())
        raise
    except Exception as error:  # not the trial's fault, but people look for it in its result
        _note_failure(attempt, error)


async def _run(attempt: Attempt, cluster: Cluster, workers: LaneKeeper, free: Callable[[], None]) -> None:
    """Runs a trial. `free` is called before its result is made where it was measured to its end.

    What failed keeps its nodes until its result is there, on which the choice of the next trial depends.
    """
    begun = ClockAnchor.now()  # a wall clock that is set meanwhile makes no trial longer
    await workers.in_thread(partial(TrialFolder(attempt.folder).write_spec, attempt.spec))
    # Each command starts anew, though its lane stays.
    isolation = "fresh" if is_command(attempt.spec) else attempt.isolation
    with ExitStack() as held:
        sensing = ExitStack()
        """Ends the sensors when it is closed."""
        course = _Course(nodes=cluster)
        try:
            await _measure(attempt, course, workers, sensing)
            tags = {**attempt.tags, "isolation": isolation, "lane": ",".join(node.name for node in course.nodes.nodes)}
            numbers = attempt.numbers | _lane_numbers(course.answer, attempt.numbers)
            numbers |= course.limit.numbers if course.limit is not None else NO_NUMBERS
            measured = replace(attempt, nodes=course.nodes.nodes, tags=tags, numbers=numbers)
            ended_mono_ns = None
            is_measured = status_of(attempt.spec, course.answer)[0] is RunStatus.COMPLETED
            frees = is_measured and course.telemetry is not None and attempt.isolation == "warm"
            if frees:
                if is_command(attempt.spec):  # the next command's processes would seem strangers
                    await workers.in_thread(sensing.close)
                held.enter_context(workers.concluding(measured))
            if course.assignment is not None:
                course.lost = await workers.settle(course.assignment)
            if frees:
                ended_mono_ns = time.monotonic_ns()
                free()
        finally:
            await workers.in_thread(sensing.close)
        course.limit = None  # it holds the lanes, which stay here
        await workers.aside(partial(_conclude, measured, course, begun, ended_mono_ns))


def _conclude(measured: Attempt, course: _Course, begun: ClockAnchor, ended_mono_ns: int | None) -> None:
    """Makes and stores the result of a trial whose steps and sensors have ended; None is the end where it is now."""
    folder, telemetry, spans = TrialFolder(measured.folder), course.telemetry, None
    if len(folder.attempts()) >= (measured.numbers.attempt or 1):  # see `conclude`
        return
    try:
        course.answer, tables = whole(course.answer, STOP_S)
        spans = _write_spans(measured, folder, course.answer, tables, telemetry)
    except ObjectLostError:
        lost = "the post of a node ended, and took with it what ranks there had measured"
        course.answer = replace(course.answer, failure=lost, infra=Cause.WORKERS_LOST)
    digests: dict[str, str] = {}
    if telemetry is not None:
        telemetry.places = course.answer.places
        digests = telemetry.keep(folder.path, used_alone=is_command(measured.spec) and spans is None)
        course.answer = _with_losses(course.answer, telemetry)
    digests |= _write_telemetry(
        measured, folder, course.answer, spans, telemetry.recorded if telemetry is not None else ()
    )
    beside = telemetry.beside if telemetry is not None else None
    start_wall_ns = begun.wall_ns + s_to_ns(course.answer.node_wait_s)  # what it waited for nodes is not its own time
    result = trial_result(measured, course.answer, spans, start_wall_ns=start_wall_ns, beside=beside)
    if result.status is RunStatus.INVALID and telemetry is not None and (died := telemetry.died):
        why = "; ".join(f"the sampler of node {node} died: {words}" for node, words in died.items())
        result = Failure(Cause.TELEMETRY, why, tuple(died)).of(result)
    told = {"group_lost": course.lost, PASSED_ON: telemetry.passed_on if telemetry is not None else ""}
    result = replace(result, tags={**result.tags, **{name: text for name, text in told.items() if text}})
    result = _timed(result, measured, course, begun, ended_mono_ns or time.monotonic_ns())
    conclude(folder, result, digests)
    if telemetry is not None:
        telemetry.forget()


def _with_losses(answer: Answer, telemetry: TrialTelemetry) -> Answer:
    """Makes a failure of telemetry that was lost."""
    told = answer.failure
    lost = [one for one in telemetry.lost if not (told and one.startswith(KEEPER_ENDED))]  # it says so itself
    if not telemetry.lost:
        return answer
    infra = answer.infra if told else Cause.TELEMETRY
    return replace(answer, failure="; ".join(filter(None, (told, *lost))), infra=infra)


async def _measure(attempt: Attempt, course: _Course, workers: LaneKeeper, sensing: ExitStack) -> None:
    """Runs the trial on workers with telemetry around it; an error of either becomes the answer's failure."""
    spec, cluster = attempt.spec, course.nodes
    try:
        resources = cluster.resources_per_rank(spec.cluster)
        course.nodes = cluster.only(cluster.fitting(spec.cluster)[: spec.cluster.num_nodes])
        if any(node.node_id == cluster.driver_node_id for node in course.nodes.nodes):
            check_libraries(spec)  # before workers start; on other nodes the workers check it
        sampled = sampling(attempt.key, spec, course.nodes, workers)
        course.telemetry = telemetry = await workers.in_thread(partial(sensing.enter_context, sampled))
        placed = replace(attempt, nodes=course.nodes.nodes)
        key = GroupKey.of(spec, resources)
        course.assignment = Assignment(attempt=placed, key=key, sensed=telemetry.sensed)
        course.limit = _limit(attempt, telemetry, workers)
        course.asked_ns = time.monotonic_ns()
        over_limit = course.limit if NODE_POWER in attempt.limits else None
        course.answer = answer = await workers.run(course.assignment, over_limit, telemetry.await_sensors)
        if answer.deaths:
            deaths = await workers.in_thread(partial(telemetry.explained, answer.deaths))
            words = {death.rank: death.words for death in deaths if death.words}
            course.answer = replace(answer, deaths=deaths, stacks={**answer.stacks, **words})
        telemetry.warm = course.answer.warm and not is_command(spec)  # a command's own processes are new
    except (EngineError, TelemetryError) as error:
        kinds = ((NodeError, Cause.NODE_UNFIT), (TelemetryError, Cause.TELEMETRY))
        infra = next((infra for kind, infra in kinds if isinstance(error, kind)), Cause.PLACEMENT)
        course.answer = Answer(failure=cause(error), infra=infra, interrupted=course.answer.interrupted)


async def _cooled(attempt: Attempt, workers: LaneKeeper) -> Attempt:
    """Waits until the trial's devices are as cool as it asks."""
    measure = attempt.measure
    if measure.cooldown_temp_c is None:
        return attempt
    tags, numbers = await wait_until_cool(
        lambda: workers.in_thread(partial(_temperatures_c, attempt, workers)),
        below_c=measure.cooldown_temp_c,
        max_s=measure.cooldown_max_s,
    )
    return replace(attempt, tags={**attempt.tags, **tags}, numbers=attempt.numbers | numbers)


def _temperatures_c(attempt: Attempt, workers: LaneKeeper) -> dict[str, float]:
    """Temperature of every device of a trial's nodes; empty if one node does not report them."""
    # The lanes' actors, not new ones: an actor ends with the handle of its maker.
    actors = zip(attempt.nodes, workers.telemetry_actors(attempt.nodes, sensor_backends(attempt.spec)), strict=True)
    told, silent = ask_all({node.name: actor.temperatures_c.remote() for node, actor in actors}, _TEMPERATURES_S)
    if silent or not all(told.values()):
        return {}
    return {f"{node}/{name}": value for node, found in told.items() for name, value in found.items()}


def _note_failure(attempt: Attempt, error: Exception) -> None:
    """Stores the result of a trial that an error of this program ended, and the error's stack beside it."""
    folder, now_ns = TrialFolder(attempt.folder), time.time_ns()
    with contextlib.suppress(OSError):  # the disk may be what failed
        folder.write_error("".join(traceback.format_exception(error)))
    said = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}; see error.txt"
    reason = f"wattune failed: {said}"
    result = attempt.ended(RunStatus.CRASHED, reason, start_wall_ns=now_ns, end_wall_ns=now_ns)
    if is_of_the_machine(error):
        result = Failure(Cause.HEAD, f"the study's node failed: {said}").of(result)
    conclude(folder, result)


def conclude(folder: TrialFolder, result: Run, digests: Mapping[str, str] = NO_FILES) -> None:
    """Writes a trial's result; if its study was stopped meanwhile, only a completed one.

    A result that is there already is the controller's. It marks a trial as interrupted before it takes its workers
    away, so a failure after that comes from the stop. Stored as a failure it would be final, and the trial would not be
    run again. Where the trial's driver died, it is run again, and what comes late of the attempt before is dropped.
    `digests` are of files that others wrote.
    """
    if len(folder.attempts()) >= (result.numbers.attempt or 1):
        return
    kept = folder.result()
    if result.status is RunStatus.COMPLETED and (kept is None or kept.status is RunStatus.INTERRUPTED):
        folder.write_result(result, digests)
    else:
        folder.keep_result(result, digests)


def _limit(attempt: Attempt, telemetry: TrialTelemetry, lanes: LaneKeeper) -> PowerLimit:
    """Makes the watch over the trial's hard limit."""
    spec = attempt.spec

    def simulated() -> Mapping[str, float]:
        return simulated_power_w(spec, lanes.spans(attempt.name), seed=attempt.seed)

    look = simulated if spec.cluster.simulate_sensors_of else telemetry.node_power_w
    return PowerLimit(attempt.limits.get(NODE_POWER), spec.cluster.num_nodes, look)


def _lane_numbers(answer: Answer, told: Numbers) -> Numbers:
    waited_s = (told.node_wait_s or 0.0) + answer.node_wait_s
    return Numbers(
        lane_trial=answer.number or None,
        group_start_s=round(answer.group_start_s, 3) if answer.number else None,
        group_restart_s=None if answer.restart_s is None else round(answer.restart_s, 3),
        node_wait_s=round(waited_s, 3) or None,
    )


def _timed(result: Run, attempt: Attempt, course: _Course, begun: ClockAnchor, ended_ns: int) -> Run:
    """Ends a result when its nodes were free, and adds what its driver knows of time before and after its ranks."""
    told = result.numbers
    before_s = ns_to_s(course.asked_ns - begun.mono_ns) + course.answer.group_start_s if course.asked_ns else None
    numbers = replace(
        told,
        wait_time_s=round(ns_to_s(begun.mono_ns - attempt.free_since_ns), 3) if attempt.free_since_ns else None,
        start_time_s=None if before_s is None else round(before_s + (told.start_time_s or 0.0), 3),
    )
    result = replace(result, numbers=numbers, end_wall_ns=begun.to_wall_ns(ended_ns))
    if told.close_time_s is None:  # no rank told how far it came, so the rest is nobody's
        return result
    closed = replace(numbers, close_time_s=round(told.close_time_s + result.times_s["other"], 3))
    return replace(result, numbers=closed)


def _write_spans(
    attempt: Attempt, folder: TrialFolder, answer: Answer, tables: RankTables, telemetry: TrialTelemetry | None
) -> pa.Table | None:
    """Writes what the ranks brought home; returns their spans."""
    spec = attempt.spec
    if is_command(spec):
        offsets = telemetry.offsets if telemetry is not None else {}
        offsets_ns = {place.node: offsets.get(place.node, NO_OFFSET)["clock_offset_ns"] for place in answer.places}
        spans = command_spans(answer.outcomes, answer.places, offsets_ns)
    else:
        found = [own for own, _ in tables if own is not None and own.num_rows]
        spans = pa.concat_tables(found).unify_dictionaries() if found else None
    for outcome in answer.outcomes:
        if outcome.command is not None:
            folder.write_output(outcome.rank, outcome.command.output)
    if answer.places:
        folder.write_ranks([place.to_json() for place in answer.places])
    folder.write_stacks(answer.stacks)
    kernels = [own for _, own in tables if own is not None]
    if len(kernels) == spec.cluster.world_size:  # all ranks are needed to see who waited for whom
        folder.write_kernels(pa.concat_tables(kernels).unify_dictionaries())
    if spans is not None:
        folder.write_spans(spans)
    return spans


def _write_telemetry(
    attempt: Attempt, folder: TrialFolder, answer: Answer, spans: pa.Table | None, recorded: Sequence[NodeTelemetry]
) -> dict[str, str]:
    """Writes simulated sensors, computed from the spans, and last the nodes' manifests; returns digests of tables."""
    digests: dict[str, str] = {}
    spec, manifests = attempt.spec, {part.node: {**part.manifest, "losses": list(part.losses)} for part in recorded}
    sensed_by = run_spans(answer.outcomes, answer.places) if is_command(spec) and spans is None else spans
    if sensed_by is not None and spec.cluster.simulate_sensors_of:
        for node, (tables, manifest) in simulate(spec, sensed_by, seed=attempt.seed).items():
            digests |= folder.write_files(node, tier_files(tables))
            own = manifests.get(node, {"losses": []})
            both = {key: {**own.get(key, {}), **manifest[key]} for key in ("devices", "tiers")}
            manifests[node] = {**manifest, **own, **both, "simulated": True}
    for node, manifest in manifests.items():
        folder.write_manifest(node, with_calibrations(attempt.storage, manifest))
    return digests
