"""Running a study: on a Ray cluster, until it is finished, interrupted, or its budget is used."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import datetime, time, timedelta
from functools import cache
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Final

from wattune.api.beforehand import Beforehand
from wattune.api.decisions import over_all_plans, parse_budget
from wattune.api.environment import environment_tags, require_here
from wattune.api.reports import Known, report
from wattune.api.spaces import Space, StudyPlan, plan
from wattune.api.studies import Study
from wattune.catalog.hardware import ClusterSpec
from wattune.deadline import within
from wattune.errors import PlanError, WattuneError
from wattune.forced_exit import last_act
from wattune.orchestrate.events import Event, Listener, Preview, TrialEvent
from wattune.orchestrate.scheduling.budget import Budget
from wattune.orchestrate.scheduling.controller import Ending, StudyController
from wattune.orchestrate.scheduling.study_run import StudyRun
from wattune.orchestrate.scheduling.trial_queue import TrialQueue
from wattune.ranking.order import Ranking, finalists
from wattune.ranking.order import rank as rank_trials
from wattune.ranking.sources import Source, collector_paused, rank_sources
from wattune.run import Numbers, Run, RunStatus
from wattune.search.forecast import MEMORY_RULE
from wattune.search.prune import Candidates
from wattune.search.search_entry import Finalists
from wattune.storage.files import find_storage, require_writable, storage_path
from wattune.storage.remote import RemoteStorage
from wattune.storage.spaces import space_number
from wattune.storage.study import StudyFolder
from wattune.tracking.destinations import trackers_of
from wattune.tracking.store import default_uri
from wattune.tracking.tracker import Tracker
from wattune.trial import TrialSpec
from wattune.upload import Delivery
from wattune.view.files import ranking_table

_FORCED_S: Final = 20.0
"""Longest that the ranking of a study may take whose end is forced: the machine may be busy."""

_INTERRUPTED_S: Final = 2.0

_NOT_DONE: Final = (
    "tracking: ended by force before all was sent",
    "report: ended by force before it was written; `wattune report` writes it",
)

RETRIABLE: Final = (
    RunStatus.CRASHED,
    RunStatus.TIMED_OUT,
    RunStatus.OUT_OF_MEMORY,
    RunStatus.INFRA_FAILED,
    RunStatus.ABORTED,
)
"""Statuses that `run_study` takes as `retry`. Trials that are `infra_failed` run again in any case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyOutcome:
    """The results of one call of `run_study`, and the reason it ended."""

    study: Study
    candidates: Candidates
    ranking: Ranking
    report_path: Path
    tracking_uri: str
    tracking_page: str
    """The study's page there, after the address of MLflow's UI; empty where the store could not be reached."""
    tracking_problem: str
    """The reason results were not sent to the tracking store; empty when all were."""
    storage_problem: str
    """The reason results were not sent to the storage's URL; empty when all were, or there is none."""
    report_problem: str
    """The reason the report was not written; empty when it was."""
    ending: Ending
    """`finished`, `interrupted` (Ctrl-C), `budget`, `nodes` (missing for what is left), or `failures` (the cluster
    failed trials that are left, or all of a kind failed alike)."""
    num_left: int
    """Trials, with repeats, that the same call would go on with, as far as it is known."""
    missing: tuple[str, ...]
    """The nodes that are needed and that the cluster lacks, in words."""
    stopped: tuple[str, ...]
    """Other reasons that trials which are left were not started, in words."""
    search_ended: str = ""
    """The reason the strategy proposed nothing more although candidates are left; empty where it did not stop."""

    @property
    def finished(self) -> bool:
        """True where the study ran to its end."""
        return self.ending == "finished"


def run_study(
    space: Space,
    *,
    storage: str | None = None,
    address: str | None = None,
    tracking_uri: str | None = None,
    wandb: str | None = None,
    tensorboard: str | None = None,
    max_hours: float | None = None,
    max_trials: int | None = None,
    max_gpu_hours: float | None = None,
    deadline: str | datetime | None = None,
    retry: Collection[str] = (),
    until_decided: bool = False,
    try_all: bool = False,
    set_power_limits: bool = False,
    wait_nodes: str | float | None = None,
    listener: Listener | None = None,
    if_forced: Callable[[StudyOutcome], object] | None = None,
) -> StudyOutcome:
    """Runs a study to its end, or to Ctrl-C, and ranks what it found.

    Called again it continues: finished trials are not run again. The space may have changed meanwhile, as long as
    nothing contradicts the results that are there (`wattune.storage.space_changes`). Where the call fails before its
    trials can start, the study stays what it was.

    Args:
        space: The search space: its file, its content, or what `plan` returned.
        storage: The place studies are kept in, a folder or a URL; see `wattune.storage.files.find_storage`.
        address: Ray cluster to use; None is the environment's, else one of our own on this machine.
        tracking_uri: MLflow store; None is `mlflow.db` in the storage folder.
        wandb: Project of Weights & Biases, as `PROJECT` or `ENTITY/PROJECT`, that results are sent to as well.
        tensorboard: Folder that results are written to for TensorBoard as well.
        max_hours: Hours of this call on the wall clock: no trial starts that is expected to end later. 0 starts none
            and only ranks what is there.
        max_trials: Trials this call starts at most, repeats and references counted.
        max_gpu_hours: Hours of one device that the trials of this call may take together, failed ones too.
        deadline: The next time of day such as `07:00`, or a date with time: no trial starts that is expected to end
            later. With `max_hours` the earlier counts.
        retry: Statuses of failed trials that run again (`RETRIABLE`); what they left stays in `attempts/`.
        until_decided: True repeats, after the search, the most informative of the two most likely plans until P(best),
            or the probability that no plan keeps every bound, is 1 less the space's risk: a race with this end, of at
            most as many repeats as the search had completed runs. It stands in for `search.finalists`.
        try_all: True also runs what is estimated to run out of memory; else such plans are rejected by the rule
            `memory`, as `wattune plan --estimate` lists them.
        set_power_limits: True lets it set devices as plans ask; see docs/power_limits.md. It needs the right to.
        wait_nodes: Longest that it stands idle for nodes that do not live or that other jobs use: seconds, or text such
            as `30m`. None waits for other jobs, and for nodes where an autoscaler is there that can start them.
        listener: Called with what is going to happen, and with every trial that starts or ends.
        if_forced: Called from a thread with what there is, without a new report, where the process is about to be ended
            by force after a signal: inside `wattune.forced_exit.ended_in_time`, where a part of the end hangs.

    Raises:
        SpaceError: The space is not valid, names a reference trial it does not have, or contradicts the results of
            the study.
        NothingToTryError: Every candidate is rejected, also by its memory; nothing was written.
        PlanError: The study is being run already, nothing can be written in the storage, the library of a tracker
            is not installed, or Ray is to start here, where no device of its trials is.
        EngineError: The Ray cluster cannot be reached, or is too small, or an engine's library is not installed here.
    """
    planned = _runnable(space)
    if planned.untrained:
        raise PlanError("\n".join(planned.untrained))
    asked = {name for one in planned.kept for name in one.spec.plan.settings}
    if asked and not set_power_limits:
        raise PlanError(
            f"{', '.join(sorted(asked))}: nothing is set on devices unasked; add --set-power-limits to run it"
        )
    budget, statuses = _budget(max_hours, max_trials, max_gpu_hours, deadline), _statuses(retry)
    wait_s = None if wait_nodes is None else parse_budget(wait_nodes, "--wait-nodes")
    folder, url = find_storage(storage)
    remote = RemoteStorage(url) if url else None
    study, document = StudyFolder(folder / planned.name), planned.spec.document
    study.require_space(document)
    before = Beforehand(planned, folder)
    _fitting(before, study, try_all=try_all)  # where nothing fits, nothing is written
    uri = tracking_uri or default_uri(folder)
    mlflow, further = Tracker(uri, study.name, document=document), trackers_of(study.name, folder, wandb, tensorboard)
    with study.running(), Delivery(study, mlflow, remote, further) as delivery:
        changes = study.require_space(document)  # a URL may have brought a newer space, and trials that began
        known = _fitting(before, study, try_all=try_all)
        planned = known.planned
        run = _study_run(known, study, budget, changes, statuses, until_decided=until_decided, try_all=try_all)
        run = replace(run, wait_nodes_s=wait_s, numbers=run.numbers | known.scatter())
        strategy = known.strategy()
        controller = StudyController(study, strategy, run, _passing_on(delivery, listener))
        starts_here = not address and wait_s is None
        needed = controller.begin(require_here if starts_here else None).load_s.keys()

        @cache
        def hold() -> None:
            """Makes the space the one that holds, once. A call that fails before leaves the study what it was."""
            study.commit(document, planned.candidates.rows())
            delivery.send_study()

        def outcome(ranking: Ranking, page: str, tracking_problem: str, report_problem: str) -> StudyOutcome:
            ending = controller.ending or ("budget" if needed else "finished")
            return StudyOutcome(
                study=Study(study),
                candidates=planned.candidates,
                ranking=ranking,
                report_path=study.report_path,
                tracking_uri=uri,
                tracking_page=page,
                tracking_problem=tracking_problem,
                storage_problem=delivery.storage_problem,
                report_problem=report_problem,
                ending=ending,
                num_left=0 if ending == "finished" else controller.num_left,
                missing=tuple(controller.missing),
                stopped=tuple(controller.stopped),
                search_ended=strategy.stopped_because or "",
            )

        def force() -> None:
            with suppress(TimeoutError):  # the main thread may hang inside the controller
                within(_INTERRUPTED_S, controller.interrupt, name="interrupt")
            hold()
            ranking = _ranked(study, Source.of_folder(study))
            if if_forced is not None:
                if_forced(outcome(ranking, "", *_NOT_DONE))

        with last_act(force, _FORCED_S):
            try:
                if needed and budget.allows(0.0):  # a study that is done needs no cluster
                    waits = wait_s is not None
                    _run_on_cluster(
                        study, controller, planned.candidates, needed, address, hold, waits=waits, url=url or ""
                    )
                else:
                    hold()
            except KeyboardInterrupt:  # while Ray started or ended: what was done is ranked and reported all the same
                controller.interrupt()
                hold()
            before.keep(study.path)
            source = Source.of_folder(study)
            done = known.fitting(study), source
            ranking = _ranked(study, source, lambda found: over_all_plans(found, *done))
            report_problem = _report(study, ranking, done)
            delivery.conclude(ranking, stopped=controller.ending == "interrupted")
    return outcome(ranking, mlflow.page, delivery.tracking_problem, report_problem)


def preview(
    space: Space,
    *,
    storage: str | None = None,
    max_hours: float | None = None,
    max_trials: int | None = None,
    max_gpu_hours: float | None = None,
    deadline: str | datetime | None = None,
    retry: Collection[str] = (),
    until_decided: bool = False,
    try_all: bool = False,
) -> Preview:
    """Computes what `run_study` would do with the same arguments. Starts nothing and writes nothing.

    Trials that are finished in the local folder are left out; storage at a URL is not asked. Raises `SpaceError`: the
    space is not valid, names a reference trial it does not have, or contradicts the results of the study,
    `NothingToTryError`: every candidate is rejected, `PlanError`: nothing could be written in the storage, or the study
    that is there cannot be read.
    """
    planned = _runnable(space)
    study = StudyFolder(storage_path(storage) / planned.name)
    require_writable(study.path)
    changes = study.require_space(planned.spec.document)
    budget = _budget(max_hours, max_trials, max_gpu_hours, deadline)
    known = _fitting(Beforehand(planned, study.path.parent), study, try_all=try_all)
    run = _study_run(known, study, budget, changes, _statuses(retry), until_decided=until_decided, try_all=try_all)
    return TrialQueue(known.strategy(), run, *study.finished()).preview()


def _runnable(space: Space) -> StudyPlan:
    planned = plan(space)
    planned.candidates.require_kept()
    return planned


def _fitting(known: Beforehand, study: StudyFolder, *, try_all: bool) -> Beforehand:
    """Returns what is known of a study whose candidates fit their devices; at least one does."""
    known = known if try_all else known.fitting(study)
    known.planned.candidates.require_kept()
    return known


def _budget(
    max_hours: float | None, max_trials: int | None, max_gpu_hours: float | None, deadline: str | datetime | None
) -> Budget:
    if max_trials is not None and max_trials < 1:
        raise PlanError(f"--max-trials: got {max_trials}, allowed: 1 or more; --dry-run says what would run")
    if max_hours is not None and not max_hours >= 0:
        raise PlanError(f"--max-hours: got {max_hours}, allowed: 0 or more")
    if max_gpu_hours is not None and not max_gpu_hours >= 0:
        raise PlanError(f"--gpu-hours: got {max_gpu_hours}, allowed: 0 or more")
    if deadline is not None:
        # With no zone: an offset of today's would stay where summer time begins or ends.
        until_h = _hours_until(deadline, datetime.now())  # noqa: DTZ005
        max_hours = until_h if max_hours is None else min(max_hours, until_h)
    return Budget(max_hours=max_hours, max_trials=max_trials, max_device_hours=max_gpu_hours)


def _hours_until(deadline: str | datetime, now: datetime) -> float:
    """Returns the hours from now to a deadline: the next time of that clock reading, or a date with time.

    A deadline without a zone is in that of `now`, which without one is this machine's local time. Raises `PlanError`
    where it is neither, or it has passed.
    """
    try:
        at = time.fromisoformat(deadline) if isinstance(deadline, str) and len(deadline) < len("2026-01-01") else None
        when = datetime.fromisoformat(deadline) if isinstance(deadline, str) and at is None else deadline
    except ValueError:
        raise PlanError(
            f'--deadline: got "{deadline}", allowed: a time of day such as 07:00, or 2026-12-31T07:00'
        ) from None
    if at is not None:
        there = now.astimezone(at.tzinfo) if at.tzinfo else now  # its date may be another one than here
        when = datetime.combine(there.date(), at, tzinfo=there.tzinfo)
        when += timedelta(days=when <= there)
    assert isinstance(when, datetime), "a text became one of the two"
    hours = ((when if when.tzinfo else when.replace(tzinfo=now.tzinfo)).timestamp() - now.timestamp()) / 3600
    if hours <= 0:
        raise PlanError(f"--deadline: got {when:%Y-%m-%d %H:%M}, which has passed; give a later one")
    return hours


def _statuses(names: Collection[str]) -> frozenset[RunStatus]:
    allowed = [str(status) for status in RETRIABLE]
    for name in names:
        if name not in allowed:
            raise PlanError(f'--retry: got "{name}", allowed: {", ".join(allowed)}; it may be given several times')
    return frozenset(map(RunStatus, names))


def _study_run(
    known: Beforehand,
    study: StudyFolder,
    budget: Budget,
    changes: Sequence[str],
    retry: frozenset[RunStatus],
    *,
    until_decided: bool,
    try_all: bool,
) -> StudyRun:
    planned, spec, search = known.planned, known.planned.spec, known.planned.spec.search
    if until_decided:
        race = Finalists(until=1.0 - spec.question.risk, max_share=1.0)
        search = search.model_copy(update={"finalists": race})
    return StudyRun(
        measure=spec.measure,
        num_trials=planned.num_trials,
        search=search,
        question=spec.question,
        limits=spec.limits,
        tags=environment_tags(),
        numbers=Numbers(space=study.number_of(spec.document)),
        finalists=lambda: _finalists(planned, study),
        clusters=tuple(dict.fromkeys(one.cluster for one in planned.candidates.specs)) or spec.clusters,
        isolation=spec.isolation,
        reference=planned.reference,
        candidates=planned.candidates.specs,
        budget=budget,
        changes=tuple(changes),
        retry=retry,
        outdated=_outdated(study, spec.limits, try_all=try_all),
        duration_s=known.durations(),
        earlier=known.earlier,
        waits=known.waits_for_host,
        out_of_memory=known.out_of_memory,
        learns_memory=known.out_of_memory.note,
        rejects=None if try_all else known.rejects,
        estimate=known.lowest_figures(),
    )


def _finalists(planned: StudyPlan, study: StudyFolder) -> list[TrialSpec]:
    """Ranks the trials of a study that its space lists, by that space's question, whether it holds already or not."""
    ranking = rank_trials(Source.of_folder(study).results, planned.spec.question)
    listed = {kept.spec.read_as: kept.spec for kept in planned.kept}
    return [listed[spec] for spec in finalists(ranking) if spec in listed]


def _outdated(study: StudyFolder, limits: Mapping[str, float], *, try_all: bool) -> Callable[[Run], bool]:
    """Returns a test of earlier results: whether what kept a trial from its end, such as a limit, holds no more."""
    spaces = study.spaces() if study.exists else []
    before: dict[int, Mapping[str, float]] = {one.number: one.document.get("limits") or {} for one in spaces}

    def outdated(result: Run) -> bool:
        if result.status not in (RunStatus.ABORTED, RunStatus.REJECTED):
            return False
        then = before.get(space_number(result), {})
        if try_all and result.reason.startswith(f"{MEMORY_RULE}:"):
            return True
        return any(limits.get(name, math.inf) > bound for name, bound in then.items())

    return outdated


def _passing_on(delivery: Delivery, listener: Listener | None) -> Listener:
    """Returns a listener that sends results where they are kept, then calls the caller's own."""

    def heard(event: Event) -> None:
        if isinstance(event, TrialEvent) and event.result is not None and not event.again:
            send = delivery.send_again if event.kind == "skipped" else delivery.send
            send(event.spec, event.result)
        if listener is not None:
            listener(event)

    return heard


def _run_on_cluster(
    study: StudyFolder,
    controller: StudyController,
    candidates: Candidates,
    needed: Collection[ClusterSpec],
    address: str | None,
    hold: Callable[[], None],
    *,
    waits: bool,
    url: str,
) -> None:
    """Connects to Ray and runs what the controller has to do on the clusters it needs; calls `hold` before it runs.

    `waits` starts it although no trial has its nodes yet, as it does where an autoscaler is there. Raises
    `EngineError`: the Ray cluster cannot be reached, or is too small, or an engine's library is not installed here.
    """
    # Ray takes seconds to import; calls that only read do without it.
    from wattune.engines.ahead import early
    from wattune.orchestrate.cluster import connect, is_here

    loading = Thread(target=import_module, args=("wattune.orchestrate.run_study",))  # Tune, while Ray starts
    loading.start()
    compiling = early(coming, study.path.parent, is_here) if (coming := controller.coming()) else nullcontext()
    with connect(address, compiling) as cluster:
        loading.join()  # no module is loaded by two threads
        from wattune.orchestrate.demand import has_autoscaler
        from wattune.orchestrate.run_study import require_libraries
        from wattune.orchestrate.run_study import run_study as run_on_ray

        lacking = [spec for spec in needed if len(cluster.fitting(spec)) < spec.num_nodes]
        # Else what can run runs, and the rest waits for its nodes.
        if len(lacking) == len(needed) and not waits and not has_autoscaler():
            cluster.resources_per_rank(lacking[0])
        require_libraries(candidates.specs, cluster)
        run_on_ray(study, controller, replace(cluster, url=url), candidates.specs, hold)


def _ranked(study: StudyFolder, source: Source, beside: Callable[[Ranking], Ranking] = lambda one: one) -> Ranking:
    """Ranks the results of a study and writes its ranking, with what `beside` knows of plans not measured."""
    with collector_paused():
        ranking = beside(rank_sources([source]))
    study.write_ranking(ranking_table(ranking))
    return ranking


def _report(study: StudyFolder, ranking: Ranking, known: Known) -> str:
    """Writes the report; returns the reason it was not written, empty when it was."""
    try:
        report(study, ranking, known)
    except WattuneError as error:  # the results are stored, and `wattune report` writes the page later
        return str(error)
    return ""
