"""Decisions from results: rank, compare, analyse a folder again; and sending results and recordings on."""

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Unpack

from wattune.api.studies import Study, find_measured, find_recording, find_study
from wattune.errors import PlanError, SpaceError, TrackingError
from wattune.inspection import Analysis, inspect
from wattune.objective import Constraint
from wattune.ranking.comparison import Comparison
from wattune.ranking.comparison import compare as compare_sides
from wattune.ranking.conditions import parse_where
from wattune.ranking.evidence import Compared, recorded_side, split_reference
from wattune.ranking.order import Ranking
from wattune.ranking.sources import Asked, Source, collector_paused, rank_sources
from wattune.recording.recording import run_of
from wattune.run import Run
from wattune.storage.files import find_storage
from wattune.storage.measured import MeasuredFolder
from wattune.storage.remote import RemoteStorage
from wattune.storage.study import StudyFolder
from wattune.tracking.destinations import StudyTracker, trackers_of
from wattune.tracking.store import default_uri
from wattune.tracking.tracker import Tracker
from wattune.trial import recorded_spec
from wattune.upload import SendTrial, charts_of, conclude_study, send_all, to_storage, to_tracking

AnyStudy = Study | StudyFolder | str | Path
"""A study, its name, or its folder."""


@collector_paused()
def rank(
    study: AnyStudy | Sequence[AnyStudy],
    *,
    storage: str | None = None,
    tracking_uri: str | None = None,
    **asked: Unpack[Asked],
) -> Ranking:
    """Ranks the trials of one study, or of several together; or recordings, and says what those do not share.

    The objective of recordings is the least energy of a token unless given, of a step without tokens, of the whole
    command without steps.

    Args:
        study: A study, its name, or its folder; or several of them. Or names or folders of recordings.
        storage: The place studies are kept in.
        tracking_uri: Read results from this MLflow store instead of study folders; studies are then names.
        **asked: `objective`, `constraints`, `where`, `least_quality` and `risk`, where the study's own objective
            and constraints are not what is asked; see `wattune.ranking.sources.Asked`.

    Raises:
        PlanError: There is no such study, or recordings are named beside studies.
        SpaceError: An objective or constraint cannot be used as written.
        TelemetryError: A recording cannot be read.
        TrackingError: The store cannot be reached or has no such study.
    """
    wanted = [study] if isinstance(study, AnyStudy) else study
    recordings = [] if tracking_uri else _recordings(wanted, storage, asked.get("where", ()))
    if recordings:
        return rank_sources([Source.of_recordings([run_of(path) for path in recordings])], **asked)
    sources = [
        Source.of_store(tracking_uri, one)
        if tracking_uri is not None and isinstance(one, str)
        else Source.of_folder(folder_of(one, storage=storage))
        for one in wanted
    ]
    return rank_sources(sources, **asked)


def _recordings(wanted: Sequence[AnyStudy], storage: str | None, where: Sequence[str]) -> list[Path]:
    """Returns the folders of recordings; none where studies are named. Both together are refused."""
    named = [one for one in wanted if isinstance(one, str | Path)]
    found = {str(one): path for one in named if (path := find_recording(one, storage=storage)) is not None}
    if found and any(str(one) not in found for one in wanted):
        raise PlanError(
            f"{', '.join(found)}: a recording has no configuration, so it is not ranked among trials; rank "
            "recordings alone, or `wattune compare` one with a trial"
        )
    fields = [text for text in where if found and not isinstance(parse_where(text), Constraint)]
    if fields:
        raise SpaceError(f'"{fields[0]}": a recording has no configuration; name a metric, as in "window_s > 60"')
    return [found[str(one)] for one in named] if found else []


def folder_of(study: AnyStudy, *, storage: str | None = None) -> StudyFolder:
    """Returns a study's folder, however the study is given."""
    if isinstance(study, Study):
        return study.folder
    return study if isinstance(study, StudyFolder) else find_study(str(study), storage=storage)


def compare(a: str, b: str, *, storage: str | None = None) -> Comparison:
    """Compares two trials: what differs, and where time and energy of a step went. Recordings compare as well.

    Args:
        a: The one, as `STUDY:TRIAL_ID` or the path of its folder; the first digits of the id are enough. Or a
            recording, by its name or folder.
        b: The other, of the same study or of another one, or a recording.
        storage: The place studies are kept in.

    Raises:
        PlanError: There is no such study or trial.
        TelemetryError: A trial's telemetry cannot be read.
    """
    studies: dict[Path, Compared] = {}
    sides = []
    for text in (a, b):
        if (path := find_recording(text, storage=storage)) is not None:
            sides.append(recorded_side(run_of(path)))
            continue
        name, trial = split_reference(text)
        study = find_study(name, storage=storage, whole=True)
        sides.append(studies.setdefault(study.path.resolve(), Compared(study)).side(trial))
    return compare_sides(*sides)


def sync(
    study: Study | StudyFolder,
    *,
    storage: str | None = None,
    tracking_uri: str | None = None,
    wandb: str | None = None,
    tensorboard: str | None = None,
) -> dict[str, int]:
    """Sends every finished trial that the tracking store, and the storage's URL, do not have yet.

    Returns how many trials were sent now: `sent` to the tracking store, with a URL `stored` there, and `wandb` and
    `tensorboard` where they are asked for. Raises `TrackingError`: one of them cannot be reached or refuses; what was
    sent stays sent, to the others too, `PlanError`: a trial cannot be read; all others were sent.

    Args:
        study: The study to send.
        storage: The place studies are kept in; a URL is sent to as well.
        tracking_uri: The tracking store; None is `mlflow.db` beside the study.
        wandb: Project of Weights & Biases to send to as well.
        tensorboard: Folder to write to for TensorBoard as well.
    """
    local = folder_of(study)
    url = find_storage(storage)[1]
    remote = RemoteStorage(url) if url else None
    tracker: StudyTracker = Tracker(
        tracking_uri or default_uri(local.path.parent), local.name, document=local.document()
    )
    ranking = rank(local)
    trackers = {"sent": tracker, **trackers_of(local.name, local.path.parent, wandb, tensorboard)}
    senders: dict[str, tuple[SendTrial, Callable[[], object]]] = {
        name: (to_tracking(local, one), partial(conclude_study, local, one, ranking)) for name, one in trackers.items()
    }
    if remote is not None:
        senders["stored"] = (to_storage(local, remote), partial(remote.send_study, local))
    return send_all(local, senders)


def analyze(folder: str | Path, *, storage: str | None = None, accept: bool = False) -> Analysis:
    """Recomputes metrics, quality and detail of a trial or a recording from its folder alone.

    Raises `PlanError`: there is no such folder, or nothing measured in it, `TelemetryError`: a table or manifest in it
    cannot be read.

    Args:
        folder: The folder, or its URL; also `STUDY:TRIAL_ID`, or a recording's name
            (`wattune.api.studies.find_measured`).
        storage: The place studies and recordings are kept in.
        accept: Takes files that were edited on purpose as they are now. The quality says so from then on.
    """
    if "://" in str(folder):
        if accept:
            raise PlanError(f"{folder} is at a URL; accept a folder on this machine, and send it")
        with tempfile.TemporaryDirectory(prefix="wattune-") as scratch:
            RemoteStorage(str(folder)).fetch_folder("", Path(scratch))
            return analyze(scratch)
    return inspect(find_measured(folder, storage=storage), accept=accept)


def send_recording(
    recording: Run, *, storage: str | None = None, wandb: str | None = None, tensorboard: str | None = None
) -> bool:
    """Sends a recording to the storage's URL, and to the trackers that are asked for.

    Returns true where the storage has a URL. Raises `PlanError`: the library of a tracker is not installed,
    `TrackingError`: a place cannot be reached or refuses; the others have it, and it is safe in the local folder.

    Args:
        recording: The recording.
        storage: The place recordings are kept in; see `wattune.storage.files.find_storage`.
        wandb: Project of Weights & Biases, where it is a run of the group `recordings`.
        tensorboard: Folder that it is written to for TensorBoard, below `recordings`.
    """
    folder, url = find_storage(storage)
    if recording.recorded is None:
        return bool(url)
    place, spec, problems = Path(recording.recorded.place), recorded_spec(recording.recorded), list[str]()
    trackers = trackers_of("recordings", folder, wandb, tensorboard).values()
    series = charts_of(MeasuredFolder(place), spec, recording)[0] if trackers else {}
    senders: list[Callable[[], object]] = [partial(one.log_trial, spec, recording, place, series) for one in trackers]
    if url:
        senders.append(partial(RemoteStorage(url).send_recording, place))
    for send in senders:
        try:
            send()
        except TrackingError as error:
            problems.append(str(error))
    if problems:
        raise TrackingError("\n".join(problems))
    return bool(url)
