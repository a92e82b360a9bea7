"""Measuring without a study: record a command, analyse a folder again, calibrate sensors."""

import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from wattune.api.studies import find_measured
from wattune.calibration.links import Sweep, sweep_links
from wattune.calibration.run import CalibrationListener
from wattune.calibration.run import calibrate as measure_sensors
from wattune.errors import PlanError, TrackingError
from wattune.fitting.store import LINKS
from wattune.foreign.recording import import_logs as read_foreign
from wattune.inspection import Analysis, inspect
from wattune.recording.recorder import OutputPlace, Watcher
from wattune.recording.recorder import record as record_command
from wattune.recording.recording import run_of
from wattune.recording.window import STEADY
from wattune.run import Run
from wattune.steps.files import MOST_TOKENS
from wattune.steps.source import parse_source
from wattune.storage.files import (
    CALIBRATIONS,
    find_storage,
    require_writable,
    storage_path,
    write_calibration,
)
from wattune.storage.measured import MeasuredFolder, RecordingFolder
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


def record(
    command: Sequence[str] = (),
    *,
    storage: str | None = None,
    seconds: float | None = None,
    name: str | None = None,
    backends: Sequence[str] = (),
    output: OutputPlace = "own",
    watcher: Watcher | None = None,
    steps: str = "auto",
    window: str = "steady",
    tokens_per_step: float | None = None,
    devices: str | None = None,
    attach: int | None = None,
) -> Run:
    """Records a command, or this machine for some seconds, without Ray; see `wattune.recording.recorder.record`.

    Args:
        command: The program and its arguments, and `NAME=VALUE` before it; empty records the machine.
        storage: Folder recordings are kept in, under `recordings`; see `wattune.storage.files.find_storage`.
        seconds: Longest to record.
        name: The recording's name; None is made of the time and the program.
        backends: Sensors to read; empty is every one this machine has.
        output: The place the command writes to.
        watcher: Looks on while it records.
        steps: How the command's steps are found: `auto`, `spans`, `transformers`, `lightning`, `optimizer`, a preset
            such as `megatron`, `pattern/ms:REGULAR_EXPRESSION` over its output, or `none`.
        window: The part that the figures are of: `steady`, `command`, a time such as `10s:50s`, or steps such as
            `steps:20:100` (`wattune.recording.window.parse_window`).
        tokens_per_step: Tokens of a step over all ranks, for a program that does not tell them.
        devices: Devices that count: positions as nvidia-smi has them, UUIDs or their unique beginnings, `all`, `none`.
            None is those that the command's variables name, else those its processes use.
        attach: Number of a process that runs already, in the place of a command. It is recorded until it ends.

    Raises:
        SpaceError: The source of steps cannot be read.
        PlanError: There is nothing to record, the command cannot be run, the process cannot be attached to, the name is
            taken, or the storage cannot be used.
        TelemetryError: A chosen device is not there, a backend cannot be used, or what was sampled cannot be written or
            read.
    """
    if tokens_per_step is not None and not 0 < tokens_per_step < MOST_TOKENS:
        raise PlanError(
            f"--tokens-per-step: got {tokens_per_step:g}, allowed: above 0; give those of all ranks together"
        )
    of_a_command = {
        "--steps": steps not in ("auto", "none"),
        "--window": window not in ("steady", "command"),
        "--tokens-per-step": tokens_per_step is not None,
    }
    if attach is not None and command:
        raise PlanError("--attach: got a command or variables too; a job that runs has its own. Give one of the two")
    if not command and any(of_a_command.values()):
        named = ", ".join(name for name, given in of_a_command.items() if given)
        if attach is not None:
            raise PlanError(f"{named}: of a job that runs already no step is told; start it with `record -- COMMAND`")
        raise PlanError(f"{named}: a recording of the machine alone has no steps and is whole; give a command after --")
    source = parse_source(steps)
    folder, url = find_storage(storage)
    if url:
        RemoteStorage(url)  # a URL nothing can be sent to is said before the command runs, not after
    return run_of(
        record_command(
            command,
            storage=folder,
            seconds=seconds,
            name=name,
            backends=backends,
            output=output,
            watcher=watcher,
            steps=source,
            window=window,
            tokens_per_step=tokens_per_step,
            devices=devices,
            attach=attach,
        )
    )


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


def import_logs(
    files: Sequence[Path],
    *,
    storage: str | None = None,
    name: str | None = None,
    nodes: Sequence[str] = (),
    timezone: str | None = None,
    interval_s: float | None = None,
    steps: Path | None = None,
    window: str = STEADY,
    tokens_per_step: float | None = None,
) -> tuple[Run, dict[str, Any]]:
    """Makes a recording of logs that other tools wrote; see `wattune.foreign.recording.import_logs`.

    Returns the recording, and what was read of the logs: `imported`, a file each, and `energies`, what the logs say of
    energy by themselves. Raises `PlanError`: a file cannot be read, is of no known format or contradicts another, or
    the name is taken.

    Args:
        files: The logs of one run.
        storage: Folder recordings are kept in, under `recordings`; see `wattune.storage.files.find_storage`.
        name: The recording's name; None is that of the first file.
        nodes: Node of the logs that name none, one for all or one a file.
        timezone: Zone of times that name none; None is UTC.
        interval_s: Time between the readings of logs that have no times.
        steps: The log of the training run, with times, or a CSV of step and time.
        window: The part that the figures are of, as for `record`.
        tokens_per_step: Tokens of a step over all ranks.
    """
    folder = read_foreign(
        files,
        storage=storage_path(storage),
        name=name,
        nodes=nodes,
        zone=timezone,
        interval_s=interval_s,
        steps=steps,
        window=window,
        tokens_per_step=tokens_per_step,
    )
    facts = RecordingFolder(folder).facts()
    return run_of(folder), {key: facts[key] for key in ("imported", "energies")}


def calibrate(
    backend: str,
    *,
    storage: str | None = None,
    listener: CalibrationListener | None = None,
) -> list[tuple[Path, dict[str, Any]]]:
    """Calibrates every device of a backend, about two minutes each, and keeps what was found for later studies.

    Returns for each device the file that was written, and its content. Raises `PlanError`: nothing can be written in
    the storage, `TelemetryError`: there are no such sensors or devices here, or the load or the sampler failed.

    Args:
        backend: `nvml` or `simulated`; see `wattune.calibration.run.calibrate`.
        storage: Folder it is kept in, under `calibration`; see `wattune.storage.files.find_storage`.
        listener: Called with what is going on and the share of it all that is done.
    """
    folder = storage_path(storage)
    require_writable(folder / CALIBRATIONS)  # said now, not after minutes of load
    found = measure_sensors(backend, listener=listener or (lambda _what, _done_frac: None))
    return [(write_calibration(folder, one), one) for one in found]


def calibrate_links(
    backend: str,
    *,
    storage: str | None = None,
    out: str | None = None,
    minutes: float = 5.0,
    listener: CalibrationListener | None = None,
) -> Sweep:
    """Measures collectives and kernels on all devices of this node, and keeps the table for `fit`.

    Raises `PlanError`: nothing can be written there, `TelemetryError`: there are no devices, or nothing was measured.

    Args:
        backend: `nvml`, or `cpu` for processors.
        storage: The place that `fit` looks in; the table goes to its folder `links`.
        out: Another folder for the table.
        minutes: Longest time.
        listener: Called with the case that runs and the share of the time that is used.
    """
    folder = Path(out) if out else storage_path(storage) / LINKS / datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    require_writable(folder)
    quiet = listener or (lambda _what, _used_frac: None)
    return sweep_links(backend, folder, minutes=minutes, listener=quiet)
