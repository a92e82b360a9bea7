"""Decisions from results: rank, compare; and sending results on."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Unpack

from wattune.api.studies import Study, find_recording, find_study
from wattune.errors import PlanError, SpaceError
from wattune.inspection import recorded
from wattune.objective import RISK, Constraint, Question, parse_constraint, parse_objective
from wattune.ranking.comparison import Comparison, Recorded
from wattune.ranking.conditions import parse_where
from wattune.ranking.evidence import compare_trials
from wattune.ranking.order import Ranking
from wattune.ranking.recordings import RecordingRanking, usual_objective
from wattune.ranking.recordings import rank_recordings as rank_all
from wattune.ranking.sources import Asked, Source, collector_paused, rank_sources
from wattune.storage.files import find_storage
from wattune.storage.remote import RemoteStorage
from wattune.storage.study import StudyFolder
from wattune.tracking.store import default_uri
from wattune.tracking.tracker import Tracker
from wattune.upload import send_all, to_storage, to_tracking

AnyStudy = Study | StudyFolder | str | Path
"""A study, its name, or its folder."""


def rank(
    study: AnyStudy | Sequence[AnyStudy],
    *,
    storage: str | None = None,
    tracking_uri: str | None = None,
    **asked: Unpack[Asked],
) -> Ranking:
    """Ranks the trials of one study, or of several together.

    Args:
        study: A study, its name, or its folder; or several of them.
        storage: The place studies are kept in.
        tracking_uri: Read results from this MLflow store instead of study folders; studies are then names.
        **asked: `objective`, `constraints`, `where`, `least_quality` and `risk`, where the study's own objective
            and constraints are not what is asked; see `wattune.ranking.sources.Asked`.

    Raises:
        PlanError: There is no such study.
        SpaceError: An objective or constraint cannot be used as written.
        TrackingError: The store cannot be reached or has no such study.
    """
    wanted = [study] if isinstance(study, AnyStudy) else study
    with collector_paused():
        sources = [
            Source.of_store(tracking_uri, one)
            if tracking_uri is not None and isinstance(one, str)
            else Source.of_folder(folder_of(one, storage=storage))
            for one in wanted
        ]
        return rank_sources(sources, **asked)


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

    def recording(name: str) -> Recorded | None:
        path = find_recording(name, storage=storage)
        return None if path is None else recorded(path)

    return compare_trials(a, b, lambda name: find_study(name, storage=storage, whole=True), recording)


def rank_recordings(
    names: Sequence[str | Path],
    *,
    storage: str | None = None,
    **asked: Unpack[Asked],
) -> RecordingRanking:
    """Ranks recordings like trials, and says what they do not share: nobody knows what their commands do.

    Args:
        names: Names or folders of recordings.
        storage: The place recordings are kept in, under `recordings`.
        **asked: See `wattune.ranking.sources.Asked`. The objective is the least energy of a token unless
            given, of a step without tokens, of the whole command without steps. There are no bounds unless given;
            `where` has bounds on metrics.

    Raises:
        PlanError: There is no such recording, or it is named twice.
        SpaceError: An objective, a bound or a condition cannot be used as written.
        TelemetryError: A recording cannot be read.
    """
    objective = asked.get("objective")
    where = [parse_where(text) for text in asked.get("where", ())]
    bounds = [one for one in where if isinstance(one, Constraint)]
    fields = [str(one) for one in where if not isinstance(one, Constraint)]
    if fields:
        raise SpaceError(f'"{fields[0]}": a recording has no configuration; name a metric, as in "window_s > 60"')
    found = []
    for name in names:
        path = find_recording(name, storage=storage)
        if path is None:
            raise PlanError(f"{name} is no recording in {find_storage(storage).folder}; rank recordings or studies")
        found.append(recorded(path))
    return rank_all(
        found,
        Question(
            objective=usual_objective(found) if objective is None else parse_objective(objective),
            constraints=tuple(map(parse_constraint, asked.get("constraints") or ())),
            risk=asked.get("risk", RISK),
        ),
        where=bounds,
        least_quality=asked.get("least_quality", ""),
    )


def sync(
    study: Study | StudyFolder,
    *,
    storage: str | None = None,
    tracking_uri: str | None = None,
    on_trial: Callable[[bool], None] | None = None,
) -> dict[str, int]:
    """Sends every finished trial that the tracking store, and the storage's URL, do not have yet.

    Args:
        study: The study to send.
        storage: The place studies are kept in; a URL is sent to as well.
        tracking_uri: The tracking store; None is `mlflow.db` beside the study.
        on_trial: Called after each trial with true where it was sent now.

    Returns:
        How many trials were sent now: `sent` to the tracking store and, with a URL, `stored` there.

    Raises:
        TrackingError: One of the two cannot be reached or refuses; what was sent stays sent, to the other one too.
        PlanError: A trial cannot be read; all others were sent.
    """
    local = folder_of(study)
    url = find_storage(storage).url
    remote = RemoteStorage(url) if url else None
    tracker = Tracker(tracking_uri or default_uri(local.path.parent), local.name, document=local.document())
    ranking = rank(local).to_json()
    report_path = local.report_path if local.report_path.exists() else None
    senders = {
        "sent": (
            to_tracking(local, tracker),
            lambda: tracker.log_study(local.document(), ranking, report_path, local.results()),
        ),
    }
    if remote is not None:
        senders["stored"] = (to_storage(local, remote), lambda: remote.send_study(local))
    return send_all(local, senders, on_trial)
