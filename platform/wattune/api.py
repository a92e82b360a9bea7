"""What the command line and `experiments/*.py` call: plan a space, run a study, rank it, report it, send it on."""

import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import wattune
from wattune.calibration.run import Listener as CalibrationListener
from wattune.calibration.run import calibrate as measure_sensors
from wattune.catalog.hardware import DEVICES
from wattune.catalog.models import MODELS
from wattune.errors import SpaceError
from wattune.inspection import Analysis, inspect
from wattune.ranking.comparison import Comparison
from wattune.ranking.evidence import compare_trials
from wattune.ranking.order import Ranking
from wattune.ranking.sources import Source, collector_paused, rank_sources
from wattune.ranking.table import to_table
from wattune.record.recorder import Output, Watcher
from wattune.record.recorder import record as record_command
from wattune.record.recording import Recording
from wattune.report.write import write_figures, write_report
from wattune.search.prune import Candidates, prune
from wattune.search.space import StudySpec, load_space
from wattune.search.strategy import make_strategy
from wattune.storage.files import (
    CALIBRATIONS,
    Storage,
    find_storage,
    named_path,
    require_writable,
    storage_path,
    write_calibration,
)
from wattune.storage.remote import RemoteStorage
from wattune.storage.study import StudyFolder, check_study_name
from wattune.tracking.store import default_uri
from wattune.tracking.tracker import Tracker
from wattune.trial import TrialSpec
from wattune.upload import Delivery, send_all, to_storage, to_tracking

if TYPE_CHECKING:
    from wattune.orchestrate.events import Event, Listener
    from wattune.orchestrate.scheduling.controller import Ending

_VERSIONED: Final = ("torch", "megatron-core", "transformer-engine", "deepspeed", "ray", "mlflow", "pyarrow", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyOutcome:
    """What a run of a study leaves behind."""

    study: StudyFolder
    candidates: Candidates
    ranking: Ranking
    report_path: Path
    tracking_uri: str
    tracking_page: str
    """The study's page there, after the address of MLflow's UI; empty where the store could not be reached."""
    tracking_problem: str
    """Why results were not sent to the tracking store; empty when all were."""
    storage_problem: str
    """Why results were not sent to the storage's URL; empty when all were, or there is none."""
    ending: "Ending"
    """Why the call ended: `finished`, `interrupted` (Ctrl-C), `budget`, or `nodes` (missing for what is left)."""
    num_left: int
    """Trials, with repeats, that the same command would go on with, as far as it is known."""
    missing: tuple[str, ...]
    """What is left needs, and what the cluster has, where nodes are missing."""

    @property
    def finished(self) -> bool:
        """Whether the study ran to its end."""
        return self.ending == "finished"


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
    max_hours: float | None = None,
    max_trials: int | None = None,
    listener: "Listener | None" = None,
) -> StudyOutcome:
    """Runs a study to its end, or to Ctrl-C, and ranks what it found.

    Called again for the same space it continues: finished trials are not run again.

    Args:
        space: The search space file.
        storage: Where studies are kept, a folder or a URL; see `wattune.storage.files.find_storage`.
        address: Ray cluster to use; None is the environment's, else one of our own on this machine.
        tracking_uri: MLflow store; None is `mlflow.db` in the storage folder.
        max_hours: Hours of this call on the wall clock: no trial starts that is expected to end later.
        max_trials: Trials this call starts at most, repeats and references counted; 0 only says what would be done.
        listener: Told what is going to happen, and of every trial that starts or ends.

    Raises:
        SpaceError: The space is not valid, names a reference trial it does not have, or the study's folder holds
            another space.
        NothingToTryError: Every candidate is rejected; nothing was written.
        PlanError: The study is being run already.
        EngineError: The Ray cluster cannot be reached, or is too small, or an engine's library is not installed here.
    """
    study_spec, candidates = plan(space)
    candidates.require_kept()
    reference = _reference(study_spec, candidates)
    strategy = make_strategy(study_spec.search.strategy, candidates.specs, seed=study_spec.search.seed)
    place = find_storage(storage)
    remote = RemoteStorage(place.url) if place.url else None
    study = StudyFolder.create(place.folder, study_spec.name, study_spec.document)
    uri = tracking_uri or default_uri(place.folder)

    # Ray and torch take seconds to import; commands that only read do without them.
    from wattune.orchestrate.cluster import connect
    from wattune.orchestrate.events import TrialEvent
    from wattune.orchestrate.run_study import require_libraries
    from wattune.orchestrate.run_study import run_study as run_on_ray
    from wattune.orchestrate.scheduling.budget import Budget
    from wattune.orchestrate.scheduling.controller import StudyController, will_repeat
    from wattune.orchestrate.scheduling.trial_queue import StudyRun

    with study.running(), Delivery(study, Tracker(uri, study.name, document=study.document()), remote) as delivery:
        study.write_candidates(candidates.rows())
        run = StudyRun(
            measure=study_spec.measure,
            num_trials=num_trials(study_spec, candidates),
            seed=study_spec.search.seed,
            limits=study_spec.limits,
            tags=environment_tags(),
            finalists=lambda: [row.spec for row in rank(study).feasible],
            clusters=study_spec.clusters,
            isolation=study_spec.isolation,
            order=study_spec.search.order,
            reference=reference,
            budget=Budget(max_hours=max_hours, max_trials=max_trials),
        )

        def heard(event: "Event") -> None:
            if isinstance(event, TrialEvent) and event.result is not None and not will_repeat(event.result):
                send = delivery.send_again if event.kind == "skipped" else delivery.send
                send(event.spec, event.result)
            if listener is not None:
                listener(event)

        ledger = StudyController(study, strategy, run, heard)
        needed = ledger.begin().load_s
        if needed and max_trials != 0:  # a study that is done needs no cluster
            try:
                with connect(address) as cluster:
                    lacking = [spec for spec in needed if len(cluster.fitting(spec)) < spec.num_nodes]
                    if len(lacking) == len(needed):  # else what can run runs, and the rest waits for its nodes
                        cluster.resources_per_rank(lacking[0])
                    require_libraries(candidates.specs, cluster)
                    run_on_ray(study, ledger, run, cluster)
            except KeyboardInterrupt:  # while Ray started or ended: what was done is ranked and reported all the same
                ledger.interrupt()
        ranking = _conclude(study)
        delivery.conclude(ranking)
    ending = ledger.ending or ("budget" if needed else "finished")
    return StudyOutcome(
        study=study,
        candidates=candidates,
        ranking=ranking,
        report_path=study.report_path,
        tracking_uri=uri,
        tracking_page=delivery.tracking_page(),
        tracking_problem=delivery.tracking_problem,
        storage_problem=delivery.storage_problem,
        ending=ending,
        num_left=0 if ending == "finished" else ledger.num_left,
        missing=tuple(ledger.missing),
    )


def _reference(study_spec: StudySpec, candidates: Candidates) -> TrialSpec | None:
    """The trial that `search.reference` names."""
    wanted = study_spec.search.reference
    if wanted is None:
        return None
    for kept in candidates.kept:
        if kept.trial_id == wanted:
            return kept.spec
    count = len(candidates.kept)
    raise SpaceError(
        f"search.reference: {wanted} is none of the {count} trials of the space; `wattune plan` lists them"
    )


def load_study(name_or_path: str, *, storage: str | None = None, whole: bool = False) -> StudyFolder:
    """An existing study, by name under the storage, by its folder, or by its URL.

    Args:
        name_or_path: Its name, its folder, or its URL: then the storage is what the URL lies in.
        storage: Where studies are kept; see `wattune.storage.files.find_storage`. From a URL the local folder gets what
            it lacks, unless the study is being run from there at this moment.
        whole: Spans and telemetry are wanted too, not only results.

    Raises:
        PlanError: There is no study there.
        SpaceError: The local folder holds another study of this name.
        TrackingError: The storage's URL cannot be reached.
    """
    name = name_or_path
    if "://" in name_or_path:
        url, _, name = name_or_path.rstrip("/").rpartition("/")
        place = Storage(find_storage(storage).folder, url)
    else:
        place = find_storage(storage)
    if not place.url or (named_path(name) / "study.yaml").is_file():
        return StudyFolder.open(name, place.folder)
    remote = RemoteStorage(place.url)
    local = StudyFolder(place.folder / check_study_name(name))
    if not local.path.is_dir():
        return remote.fetch_study(name, place.folder, whole=whole)
    with local.if_idle() as idle:
        return remote.fetch_study(name, place.folder, whole=whole) if idle else local


def rank(
    study: StudyFolder | str | Sequence[StudyFolder | str],
    *,
    storage: str | None = None,
    tracking_uri: str | None = None,
    objective: str | None = None,
    constraints: Sequence[str] | None = None,
    where: Sequence[str] = (),
    least_quality: str = "",
) -> Ranking:
    """Ranks trials of one study, or of several together, under their own objective and constraints, or others.

    Args:
        study: A study, its name, or its folder; or several.
        storage: Where studies are kept.
        tracking_uri: Read results from this MLflow store instead of study folders; studies are then names.
        objective: Instead of the studies' own, such as `minimize energy_per_token_j`; several need it where theirs
            differ.
        constraints: Instead of the studies' own.
        where: Only trials that hold all of these are ranked.
        least_quality: `indicative` or `publishable`: trials of a lower quality are left out.

    Raises:
        PlanError: There is no such study.
        SpaceError: An objective or constraint cannot be used as written.
        TrackingError: The store cannot be reached or has no such study.
    """
    wanted = [study] if isinstance(study, StudyFolder | str) else study
    with collector_paused():
        sources = [
            Source.of_store(tracking_uri, one)
            if tracking_uri is not None and isinstance(one, str)
            else Source.of_folder(load_study(one, storage=storage) if isinstance(one, str) else one)
            for one in wanted
        ]
        return rank_sources(
            sources, objective=objective, constraints=constraints, where=where, least_quality=least_quality
        )


def report(study: StudyFolder, ranking: Ranking | None = None) -> Path:
    """Writes the study's `report.html` and says where it is."""
    return write_report(study, ranking or rank(study))


def figures(study: StudyFolder, folder: str | Path) -> list[Path]:
    """Writes every figure of the study's report as PNG and SVG, and says where.

    Raises:
        WattuneError: The plotting library's exporter, or the browser it draws with, is not installed.
    """
    return write_figures(study, rank(study), named_path(folder))


def compare(a: str, b: str, *, storage: str | None = None) -> Comparison:
    """Two trials side by side: what differs, and where time and energy of a step went.

    Args:
        a: The one, as `STUDY:TRIAL_ID` or the path of its folder; the first digits of the id are enough.
        b: The other, of the same study or of another one.
        storage: Where studies are kept.

    Raises:
        PlanError: There is no such study or trial.
        TelemetryError: A trial's telemetry cannot be read.
    """
    return compare_trials(a, b, lambda name: load_study(name, storage=storage, whole=True))


def sync(
    study: StudyFolder,
    *,
    storage: str | None = None,
    tracking_uri: str | None = None,
    on_trial: Callable[[bool], None] | None = None,
) -> dict[str, int]:
    """Sends every finished trial that the tracking store, and the storage's URL, do not have yet.

    Args:
        study: What to send.
        storage: Where studies are kept; a URL is sent to as well.
        tracking_uri: The tracking store; None is `mlflow.db` beside the study.
        on_trial: Told after each trial whether it was sent now.

    Returns:
        How many trials were sent now: `sent` to the tracking store and, with a URL, `stored` there.

    Raises:
        TrackingError: One of the two cannot be reached or refuses; what was sent stays sent, to the other one too.
        PlanError: A trial cannot be read; all others were sent.
    """
    url = find_storage(storage).url
    remote = RemoteStorage(url) if url else None
    tracker = Tracker(tracking_uri or default_uri(study.path.parent), study.name, document=study.document())
    ranking = rank(study).to_json()
    report_path = study.report_path if study.report_path.exists() else None
    senders = {
        "sent": (
            to_tracking(study, tracker),
            lambda: tracker.log_study(study.document(), ranking, report_path, study.results()),
        ),
    }
    if remote is not None:
        senders["stored"] = (to_storage(study, remote), lambda: remote.send_study(study))
    return send_all(study, senders, on_trial)


def analyze(folder: str | Path) -> Analysis:
    """Recomputes metrics, quality and detail of a trial or a recording from its folder alone.

    Args:
        folder: The folder, or its URL.

    Raises:
        PlanError: There is no such folder, or nothing measured in it.
        TelemetryError: A table or manifest in it cannot be read.
    """
    if "://" in str(folder):
        with tempfile.TemporaryDirectory(prefix="wattune-") as scratch:
            RemoteStorage(str(folder)).fetch_folder("", Path(scratch))
            return analyze(scratch)
    return inspect(named_path(folder))


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
        storage: Folder recordings are kept in, under `recordings`; see `wattune.storage.files.find_storage`.
        seconds: Longest to record.
        name: The recording's name.
        backends: What to read.
        output: Where the command writes.
        watcher: Looks on while it records.

    Raises:
        PlanError: There is nothing to record, the command cannot be run, the name is taken, or the storage cannot be
            used.
        TelemetryError: A backend cannot be used, or what was sampled cannot be written or read.
    """
    place = find_storage(storage)
    if place.url:
        RemoteStorage(place.url)  # a URL nothing can be sent to is said before the command runs, not after
    return Recording.read(
        record_command(
            command,
            storage=place.folder,
            seconds=seconds,
            name=name,
            backends=backends,
            output=output,
            watcher=watcher,
        )
    )


def send_recording(recording: Recording, *, storage: str | None = None) -> bool:
    """Sends a recording to the storage's URL.

    Args:
        recording: What was recorded.
        storage: Where recordings are kept; see `wattune.storage.files.find_storage`.

    Returns:
        Whether there is a URL.

    Raises:
        TrackingError: The URL cannot be reached or refuses; the recording is safe in the local folder.
    """
    url = find_storage(storage).url
    if url:
        RemoteStorage(url).send_recording(recording.path)
    return bool(url)


def calibrate(
    backend: str,
    *,
    storage: str | None = None,
    listener: CalibrationListener | None = None,
) -> list[tuple[Path, dict[str, Any]]]:
    """Calibrates every device of a backend, about two minutes each, and keeps what was found for later studies.

    Args:
        backend: `nvml` or `simulated`; see `wattune.calibration.run.calibrate`.
        storage: Folder it is kept in, under `calibration`; see `wattune.storage.files.find_storage`.
        listener: Told what is going on and which share of it all is done.

    Returns:
        For each device where it was written, and what.

    Raises:
        PlanError: Nothing can be written in the storage.
        TelemetryError: There are no such sensors or devices here, or the load or the sampler failed.
    """
    folder = storage_path(storage)
    require_writable(folder / CALIBRATIONS)  # said now, not after minutes of load
    found = measure_sensors(backend, listener=listener or (lambda _what, _done_frac: None))
    return [(write_calibration(folder, one), one) for one in found]


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


def _conclude(study: StudyFolder) -> Ranking:
    ranking = rank(study)
    study.write_ranking(to_table(ranking))
    report(study, ranking)
    return ranking
