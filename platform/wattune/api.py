"""What the command line and `experiments/*.py` call: plan a space, run a study, rank it, report it, send it on."""

import queue
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import wattune
from wattune.analysis.align import Aligned, align
from wattune.analysis.summary import Summary, node_power_series, summarize
from wattune.analysis.thermal import mean_temperatures_c
from wattune.calibration import Listener as CalibrationListener
from wattune.calibration import calibrate as measure_sensors
from wattune.catalog.hardware import DEVICES
from wattune.catalog.models import MODELS
from wattune.errors import PlanError, WattuneError
from wattune.objective import Constraint, Objective, parse_constraint, parse_objective
from wattune.ranking import RankedTrial, Ranking
from wattune.ranking import rank as rank_results
from wattune.record.recorder import Output, Watcher
from wattune.record.recorder import record as record_command
from wattune.record.recording import Recording, load
from wattune.search.prune import Candidates, prune
from wattune.search.space import StudySpec, load_space
from wattune.search.strategy import make_strategy
from wattune.study import MeasuredFolder, StudyFolder, TrialFolder, storage_path, write_calibration
from wattune.tracking import Series, Tracker, default_uri, read_results
from wattune.trial import TrialResult, TrialSpec
from wattune.units import NS_PER_S

if TYPE_CHECKING:
    from wattune.orchestrate.run_study import Listener, TrialEvent
    from wattune.report.charts import Trace

_VERSIONED: Final = ("torch", "ray", "mlflow", "pyarrow", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyOutcome:
    """What a run of a study leaves behind."""

    study: StudyFolder
    candidates: Candidates
    ranking: Ranking
    report_path: Path
    tracking_uri: str
    tracking_problem: str
    """Why results were not sent to the tracking store; empty when all were."""
    finished: bool
    """False after Ctrl-C."""


def plan(space: str | Path) -> tuple[StudySpec, Candidates]:
    """Reads a search space and says what would be tried, and why the rest would not.

    Raises:
        SpaceError: The file is not a valid space; every problem is in the message.
    """
    study_spec = load_space(Path(space))
    return study_spec, prune(study_spec)


def num_trials(study_spec: StudySpec, candidates: Candidates) -> int:
    """Different specifications a study will try: all that are kept, or as many as its budget allows."""
    return min(study_spec.search.num_trials or len(candidates.kept), len(candidates.kept))


def catalog_json() -> dict[str, Any]:
    """Devices and models as plain data, with parameter counts."""
    models = [
        {**asdict(model), "num_parameters": model.num_parameters, "num_active_parameters": model.num_active_parameters}
        for model in MODELS.values()
    ]
    return {"devices": [asdict(device) for device in DEVICES.values()], "models": models}


def run_study(
    space: str | Path,
    *,
    storage: str | None = None,
    address: str | None = None,
    tracking_uri: str | None = None,
    listener: "Listener | None" = None,
) -> StudyOutcome:
    """Runs a study to its end, or to Ctrl-C, and ranks what it found.

    Called again for the same space it continues: finished trials are not run again.

    Args:
        space: The search space file.
        storage: Folder studies are kept in; see `wattune.study.storage_path`.
        address: Ray cluster to use; None is the environment's, else one of our own on this machine.
        tracking_uri: MLflow store; None is `mlflow.db` in the storage folder.
        listener: Told of every trial that starts or ends.

    Raises:
        SpaceError: The space is not valid, or the study's folder holds another space.
        NothingToTryError: Every candidate is rejected; nothing was written.
        PlanError: The study is being run already.
        EngineError: The Ray cluster cannot be reached, or is too small.
    """
    study_spec, candidates = plan(space)
    candidates.require_kept()
    strategy = make_strategy(study_spec.search.strategy, candidates.specs, seed=study_spec.search.seed)
    folder = storage_path(storage)
    study = StudyFolder.create(folder, study_spec.name, study_spec.document)
    uri = tracking_uri or default_uri(folder)

    # Ray and torch take seconds to import; commands that only read do without them.
    from wattune.orchestrate.cluster import connect
    from wattune.orchestrate.run_study import StudyRun
    from wattune.orchestrate.run_study import run_study as run_on_ray

    with study.running(), _Uploader(study, uri) as uploader:
        study.write_candidates(candidates.rows())
        run = StudyRun(
            measure=study_spec.measure,
            num_trials=num_trials(study_spec, candidates),
            seed=study_spec.search.seed,
            limits=study_spec.limits,
            tags=environment_tags(),
            finalists=lambda: [row.spec for row in rank(study).feasible],
        )

        def heard(event: "TrialEvent") -> None:
            if event.kind == "finished" and event.result is not None:
                uploader.send(event.spec, event.result)
            if listener is not None:
                listener(event)

        with connect(address) as cluster:
            for needed in study_spec.clusters:
                cluster.resources_per_rank(needed)
            finished = run_on_ray(study, strategy, run, cluster, heard)
        ranking = _conclude(study)
        uploader.conclude(ranking)
    return StudyOutcome(
        study=study,
        candidates=candidates,
        ranking=ranking,
        report_path=study.report_path,
        tracking_uri=uri,
        tracking_problem=uploader.problem,
        finished=finished,
    )


def load_study(name_or_path: str, *, storage: str | None = None) -> StudyFolder:
    """An existing study, by name under the storage or by its folder.

    Raises:
        PlanError: There is no study there.
    """
    return StudyFolder.open(name_or_path, storage_path(storage))


def rank(
    study: StudyFolder | str,
    *,
    storage: str | None = None,
    tracking_uri: str | None = None,
    objective: str | None = None,
    constraints: Sequence[str] | None = None,
    where: Sequence[str] = (),
) -> Ranking:
    """Ranks a study's trials under its own objective and constraints, or others.

    Args:
        study: A study, its name, or its folder.
        storage: Folder studies are kept in.
        tracking_uri: Read results from this MLflow store instead of the study folder; `study` is then a name.
        objective: Instead of the study's own, such as `minimize energy_per_token_j`; required with `tracking_uri`.
        constraints: Instead of the study's own.
        where: Only trials that hold all of these are ranked.

    Raises:
        PlanError: There is no such study.
        SpaceError: An objective or constraint cannot be used as written.
        TrackingError: The store cannot be reached or has no such study.
    """
    wheres = [parse_constraint(text) for text in where]
    if tracking_uri is not None and isinstance(study, str):
        if objective is None:
            raise PlanError("an MLflow store does not hold a study's objective; give --objective")
        results = read_results(tracking_uri, study)
        bounds = [parse_constraint(text) for text in constraints or ()]
        return rank_results(results, parse_objective(objective), bounds, where=wheres)
    folder = load_study(study, storage=storage) if isinstance(study, str) else study
    own_objective, own_constraints = _goals(folder)
    return rank_results(
        folder.results(),
        own_objective if objective is None else parse_objective(objective),
        own_constraints if constraints is None else [parse_constraint(text) for text in constraints],
        where=wheres,
    )


def report(study: StudyFolder, ranking: Ranking | None = None) -> Path:
    """Writes the study's `report.html` and says where it is."""
    # Plotting takes longer to import than most commands take to run.
    from wattune.report.page import render_report

    ranking = ranking or rank(study)
    shown = {
        row.trial_id: aligned
        for row in (*ranking.feasible[:1], *ranking.infeasible[:1])
        if (aligned := _aligned(study, row))
    }
    best = shown.get(ranking.best.trial_id) if ranking.best else None
    temperatures_c = mean_temperatures_c(best) if best else {}
    html = render_report(
        study.name,
        study.document(),
        ranking,
        study.candidates(),
        {trial_id: trace for trial_id, aligned in shown.items() if (trace := _highest_node(aligned))},
        {f"{node} {device}": temperature_c for (node, device), temperature_c in temperatures_c.items()},
    )
    return study.write_report(html)


def sync(study: StudyFolder, *, tracking_uri: str | None = None, on_trial: Callable[[bool], None] | None = None) -> int:
    """Sends every finished trial that the tracking store does not have yet.

    Args:
        study: What to send.
        tracking_uri: Where to; None is `mlflow.db` beside the study.
        on_trial: Told after each trial whether it was sent now.

    Returns:
        How many trials were sent now.

    Raises:
        TrackingError: The store cannot be reached or refuses; what was sent stays sent.
    """
    tracker = Tracker(tracking_uri or default_uri(study.path.parent), study.name)
    sent = 0
    for spec, result in study.results():
        folder = study.trial(result.trial_id, result.repeat)
        now = tracker.log_trial(spec, result, folder.path, chart_series(folder))
        sent += now
        if on_trial is not None:
            on_trial(now)
    tracker.log_study(
        study.document(), rank(study).to_json(), study.report_path if study.report_path.exists() else None
    )
    return sent


def analyze(folder: str | Path) -> Summary:
    """Recomputes metrics and quality of a trial or a recording from its folder alone.

    Raises:
        PlanError: There is no such folder, or nothing measured in it.
        TelemetryError: A table in it cannot be read.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise PlanError(f"{path} is no folder; give a trial's or a recording's")
    measured = load(path)
    if not measured.tables and measured.marks is None:
        raise PlanError(f"{path} holds neither telemetry nor marks; give a trial's or a recording's folder")
    spec = TrialFolder(path).spec() if (path / "spec.json").exists() else None
    return summarize(spec, measured.marks, measured.tables, measured.manifests, window=measured.window)


def record(
    command: Sequence[str] = (),
    *,
    storage: str | None = None,
    seconds: float | None = None,
    name: str | None = None,
    backends: Sequence[str] = (),
    output: Output = "own",
    watcher: Watcher | None = None,
) -> Recording:
    """Records a command, or this machine for some seconds, without Ray; see `wattune.record.recorder.record`.

    Args:
        command: The program and its arguments.
        storage: Folder recordings are kept in, under `recordings`; see `wattune.study.storage_path`.
        seconds: Longest to record.
        name: The recording's name.
        backends: What to read.
        output: Where the command writes.
        watcher: Looks on while it records.

    Raises:
        PlanError: There is nothing to record, the command cannot be run, or the name is taken.
        TelemetryError: A backend cannot be used, or what was sampled cannot be written or read.
    """
    return Recording.read(
        record_command(
            command,
            storage=storage_path(storage),
            seconds=seconds,
            name=name,
            backends=backends,
            output=output,
            watcher=watcher,
        )
    )


def calibrate(
    backend: str,
    *,
    storage: str | None = None,
    listener: CalibrationListener | None = None,
) -> list[tuple[Path, dict[str, Any]]]:
    """Calibrates every device of a backend, about two minutes each, and keeps what was found for later studies.

    Args:
        backend: `nvml` or `simulated`; see `wattune.calibration.calibrate`.
        storage: Folder it is kept in, under `calibration`; see `wattune.study.storage_path`.
        listener: Told what is going on and which share of it all is done.

    Returns:
        For each device where it was written, and what.

    Raises:
        TelemetryError: There are no such sensors or devices here, or the load or the sampler failed.
    """
    folder = storage_path(storage)
    found = measure_sensors(backend, listener=listener or (lambda _what, _done_frac: None))
    return [(write_calibration(folder, one), one) for one in found]


def chart_series(folder: MeasuredFolder) -> Series:
    """Node power over wall time for a tracking store's charts, by node; empty where no device power was recorded."""
    aligned = align(folder.telemetry(), folder.marks(), folder.manifests())
    if aligned is None:
        return {}
    return {
        f"{node}/node_device_power_w": (aligned.start_ns + (time_s * NS_PER_S).astype("int64"), power_w)
        for node, (time_s, power_w) in node_power_series(aligned).items()
    }


def environment_tags() -> dict[str, str]:
    """Versions of what a trial's figures depend on, and the commit of the code where it is a checkout."""
    tags = {"version.wattune": wattune.__version__}
    for name in _VERSIONED:
        try:
            tags[f"version.{name}"] = version(name)
        except PackageNotFoundError:
            continue
    commit = subprocess.run(
        ["git", "-C", str(Path(wattune.__file__).parent), "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
        timeout=10,
    )
    if commit.returncode == 0:
        tags["git_commit"] = commit.stdout.strip()
    return tags


def _goals(study: StudyFolder) -> tuple[Objective, list[Constraint]]:
    document = study.document()
    return parse_objective(document["objective"]), [parse_constraint(text) for text in document["constraints"]]


def _conclude(study: StudyFolder) -> Ranking:
    ranking = rank(study)
    study.write_ranking(ranking.to_table())
    report(study, ranking)
    return ranking


def _aligned(study: StudyFolder, row: RankedTrial) -> Aligned | None:
    """The first repeat of a trial on one time axis, None where it left no telemetry."""
    folder = study.trial(row.trial_id, row.counted[0].repeat)
    return align(folder.telemetry(), folder.marks(), folder.manifests())


def _highest_node(aligned: Aligned) -> "Trace | None":
    """Power of the node with the highest peak, None where no device power was recorded."""
    from wattune.report.charts import Trace

    series = node_power_series(aligned).values()
    if not series:
        return None
    time_s, power_w = max(series, key=lambda one: float(one[1].max()))
    return Trace(time_s=time_s, node_power_w=power_w)


class _Uploader:
    """Sends results to the tracking store beside the study: a slow or dead server never holds a trial up."""

    def __init__(self, study: StudyFolder, uri: str) -> None:
        self.problem = ""
        self._study = study
        self._tracker = Tracker(uri, study.name)
        self._queue: queue.SimpleQueue[tuple[TrialSpec, TrialResult] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name="tracking")

    def __enter__(self) -> "_Uploader":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def send(self, spec: TrialSpec, result: TrialResult) -> None:
        """Queues a result; returns at once."""
        self._queue.put((spec, result))

    def conclude(self, ranking: Ranking) -> None:
        """Waits for the queue, then sends what is known of the whole study."""
        self._stop()
        with self._noting():
            self._tracker.log_study(self._study.document(), ranking.to_json(), self._study.report_path)

    def _stop(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            spec, result = item
            folder = self._study.trial(result.trial_id, result.repeat)
            with self._noting():
                self._tracker.log_trial(spec, result, folder.path, chart_series(folder))

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except (WattuneError, OSError) as error:  # one result that cannot be sent must not hold back the others
            self.problem = str(error)
