"""Measuring without a study: analyse a folder again, send a recording."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from wattune.api.studies import find_measured
from wattune.errors import PlanError, TrackingError
from wattune.inspection import Analysis, inspect
from wattune.run import Run
from wattune.storage.files import (
    find_storage,
)
from wattune.storage.measured import MeasuredFolder
from wattune.storage.remote import RemoteStorage
from wattune.tracking.destinations import trackers_of
from wattune.trial import recorded_spec
from wattune.upload import charts_of


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
