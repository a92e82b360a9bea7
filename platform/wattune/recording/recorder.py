"""Recording a command: the sampler begins before it and ends after it, so that every sensor's readings enclose it."""

import contextlib
import itertools
import os
import re
import shlex
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, Self

from wattune.errors import PlanError
from wattune.masking import masked_arguments, masked_environment
from wattune.plans.program import shell_problem
from wattune.recording.attach import AttachedProcess
from wattune.recording.devices import OTHERS, Choice, apart
from wattune.recording.recording import measured_run, run_of, sampled
from wattune.recording.sensors import HOST, default_backends, split_simulated
from wattune.recording.signals import SignalRelay
from wattune.recording.steps import FOLDER, told_steps, uuids_of
from wattune.recording.window import parse_window
from wattune.run import Run
from wattune.steps.files import MOST_TOKENS
from wattune.steps.source import parse_source
from wattune.storage.files import find_storage, with_calibrations
from wattune.storage.measured import MeasuredFolder, RecordingFolder
from wattune.storage.remote import RemoteStorage
from wattune.storage.study import TrialFolder
from wattune.telemetry.devices import without_own_processes
from wattune.telemetry.sampler.process import SamplerProcess
from wattune.units import ns_to_s, s_to_ns
from wattune.version import __version__
from wattune.workers.command.environment import node_environment
from wattune.workers.command.process import TerminalProcess
from wattune.workers.command.program_run import ProgramRun

LEAD_S: Final = 1.1
"""From the sampler's start to the command's: every tier, read once a second or more often, has been read by then."""
TAIL_S: Final = 1.2
"""From the command's end to the sampler's: the ring, drained once a second, has given the last of the command."""
TICK_S: Final = 0.5
"""Between two renewals of the lease, and two calls of the watcher."""
STOP_TIMEOUT_S: Final = 30.0

SIMULATED_RATES_HZ: Final = {HOST: 5.0}
"""Finer than by default where the processors' activity is all that simulated sensors have to go by."""

LOG: Final = "command.log"
"""The file in the recording's folder that holds what the command wrote, where it was sent there."""

_STDERR_FD: Final = 2

ASSIGNMENT: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
"""Beginning of a word that sets a variable."""

_Process = TerminalProcess | AttachedProcess
"""The process that is recorded."""

OutputPlace = Literal["own", "stderr", "log"]
"""Destination of a command's output: the inherited streams, both to standard error, or both to `LOG`."""

Watcher = Callable[[Path, int], None]
"""Called with the sampler's folder, and the window's start on the monotonic clock."""


def _remedy(command: Sequence[str]) -> str:
    """Says what to write in the place of a command that cannot be executed."""
    if problem := shell_problem(command):
        return f"it {problem}. As in: record -- bash -c {shlex.join(command[:1])}"
    split = command[0].split()
    return (
        f"write its words apart, as in: record -- {command[0]}"
        if len(split) > 1
        else "check the name, or give its path"
    )


def default_name(command: Sequence[str]) -> str:
    """The local time and the program, such as `20261121-065500-python`."""
    program = Path(command[0]).name if command else "machine"
    plain = "".join(char if char.isascii() and (char.isalnum() or char in "._-") else "-" for char in program)
    return f"{datetime.now().astimezone():%Y%m%d-%H%M%S}-{plain}"[:100]


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
    """Records a command from start to end, or this machine for some seconds, without Ray.

    A signal that would end this process goes to the command instead. The recording ends with the command, however that
    ends, and is then closed. Only SIGKILL of this process leaves it open: the sampler then ends by its lease, and what
    it wrote can be read.

    Args:
        command: The program and its arguments, and `NAME=VALUE` before it; empty records the machine.
        storage: Folder recordings are kept in, under `recordings`; see `wattune.storage.files.find_storage`.
        seconds: Longest to record; a command that still runs then is sent SIGTERM.
        name: The recording's name; None is `default_name`, with a number behind it where that is taken.
        backends: Sensors to read, as `wattune.telemetry.registry.load_backend` takes it, or `simulated[:DEVICE]`; empty
            is every one this machine has.
        output: The place the command writes to.
        watcher: Looks on twice a second, until it fails.
        steps: How the command's steps are found: `auto`, `spans`, `transformers`, `lightning`, `optimizer`, a preset
            such as `megatron`, `pattern/ms:REGULAR_EXPRESSION` over its output, or `none`.
        window: The part that the figures are of: `steady`, `command`, a time such as `10s:50s`, or steps such as
            `steps:20:100` (`wattune.recording.window.parse_window`).
        tokens_per_step: Tokens of a step over all ranks, for a program that does not tell them.
        devices: Devices that count: positions as nvidia-smi has them, UUIDs or their unique beginnings, `all`, `none`.
            None is those that the command's variables name, else those its processes use.
        attach: Number of a process that runs already, in the place of a command. It is recorded until it ends or a
            signal comes; it gets no signal.

    Raises:
        SpaceError: The source of steps cannot be read.
        PlanError: There is nothing to record, the command cannot be run, the process cannot be attached to, the name is
            taken, or the storage cannot be used; nothing was written.
        TelemetryError: A chosen device is not there, a backend or a device's calibration cannot be used, or what was
            sampled cannot be written or read.
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
    place, url = find_storage(storage)
    if url:
        RemoteStorage(url)  # a URL nothing can be sent to is said before the command runs, not after
    attached = None if attach is None else AttachedProcess(attach)
    variables = list(itertools.takewhile(ASSIGNMENT.match, command))
    environment = dict(word.split("=", 1) for word in variables)
    command = command[len(variables) :] if attached is None else attached.command
    if not command and (environment or seconds is None):
        what = "variables and no program" if environment else "neither a command nor seconds"
        raise PlanError(f"nothing to record: got {what}; give one, as in `record -- COMMAND`")
    if command and attached is None and shutil.which(command[0], path=environment.get("PATH")) is None:
        raise PlanError(f"{command[0]} cannot be executed; {_remedy(command)}")
    parse_window(window)
    backends = list(backends) or default_backends()
    read, simulated = split_simulated(backends)
    node = socket.gethostname()
    # Nodes of a job may begin the same program in one second, and would have one name.
    folder = RecordingFolder.create(place, name or default_name(command), number=0 if name else 1)
    facts: dict[str, Any] = {
        "kind": "recording",
        "command": masked_arguments(command),
        "backends": backends,
        "simulated_device": simulated,
        "node": node,
        "recorded": datetime.now(UTC).isoformat(timespec="seconds"),
        "wattune": __version__,
        "closed": False,
        **({"environment": masked_environment(environment)} if environment else {}),
        **({} if attached is None else {"attached_pid": attached.pid}),
    }
    all_set = {**os.environ, **environment} if attached is None else node_environment(attached.pid)
    choice = Choice(devices, all_set if command else None, simulated, ran_before=attached is not None)
    run = None
    if command and attached is None:
        facts["steps_asked"] = {"source": source.text, "window": window, "tokens_per_step": tokens_per_step}
        run = ProgramRun(folder.path / FOLDER, source, keeps_lines=True)
    with SignalRelay() as relay:
        try:
            folder.write_facts(facts)
            if run is not None and source.kind != "none":
                (folder.path / FOLDER).mkdir(mode=0o700)
            rates_hz = SIMULATED_RATES_HZ if simulated else {}
            sampler = SamplerProcess.start(
                folder.node_folder(node), node=node, backends=read, rates_hz=rates_hz, choice=choice.for_sampler
            )
        except BaseException:  # such as a full disk: nothing was recorded, so nothing stays
            shutil.rmtree(folder.path)
            raise
        try:
            with_calibrations(place, sampler.manifest())  # a broken one is an error now and not after hours
            facts["devices"] = choice.counted(sampler.manifest())
            with _Renewal(sampler) as renewal:
                session = _Session(folder, facts, renewal, relay, watcher, run or attached, choice, environment)
                session.run(command, seconds, output)
        finally:
            sampler.stop(STOP_TIMEOUT_S)
            if "window" in facts:
                _close(folder, facts, run, choice)
            else:
                shutil.rmtree(folder.path)
    return run_of(folder.path)


class _Renewal:
    """A thread that renews the sampler's lease while entered.

    It does nothing else. What the watcher shows goes to a terminal, which Ctrl-S stops for as long as somebody likes.
    """

    def __init__(self, sampler: SamplerProcess) -> None:
        self.sampler = sampler
        self._failure: Exception | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="lease")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._over.wait(TICK_S):
                self.sampler.renew()
        except Exception as error:  # raised where the recording goes on
            self._failure = error


class _Session:
    """The time between a sampler's start and its end."""

    def __init__(
        self,
        folder: RecordingFolder,
        facts: dict[str, Any],
        renewal: _Renewal,
        relay: SignalRelay,
        watcher: Watcher | None,
        run: ProgramRun | AttachedProcess | None,
        choice: Choice,
        environment: Mapping[str, str],
    ) -> None:
        self._folder, self._facts, self._run = folder, facts, run
        self._choice, self._environment = choice, environment
        self._renewal, self._relay, self._watcher = renewal, relay, watcher
        self._unseen: Exception | None = None

    def run(self, command: Sequence[str], seconds: float | None, output: OutputPlace) -> None:
        """Runs the command, or waits; the facts then hold window and exit code, also where the watcher failed."""
        self._linger(LEAD_S, until_signal=True)
        with contextlib.ExitStack() as held:
            started = self._start(command, output, held) if command and self._relay.received is None else None
            start_ns = time.monotonic_ns() if started is None else started.start_mono_ns
            self._facts["window"] = {"start_mono_ns": start_ns}
            self._folder.write_facts(self._facts)
            self._follow(started, start_ns, None if seconds is None else start_ns + s_to_ns(seconds))
        exit_code: int | None
        if started is None:
            end_ns, received = time.monotonic_ns(), self._relay.received
            exit_code = 0 if received is None else 128 + received
        else:
            end_ns, exit_code = started.end_mono_ns, started.exit_code
            self._unseen = self._unseen or started.unheard
        self._facts |= {"window": {"start_mono_ns": start_ns, "end_mono_ns": end_ns}, "exit_code": exit_code}
        self._linger(TAIL_S, until_signal=False)
        if self._unseen is not None:
            raise self._unseen

    def _start(self, command: Sequence[str], output: OutputPlace, held: contextlib.ExitStack) -> _Process:
        assert self._run is not None, "there is a command"
        if isinstance(self._run, AttachedProcess):
            self._run.start_mono_ns = time.monotonic_ns()
            self._choice.begin(self._run.pid)
            return self._run
        stdout = stderr = None
        if output == "log":
            stdout = stderr = os.open(self._folder.path / LOG, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            held.callback(os.close, stdout)
        elif output == "stderr":
            stdout = _STDERR_FD
        try:
            started = self._run.in_terminal(command, self._environment, stdout=stdout, stderr=stderr)
        except OSError as error:
            raise PlanError(f"{command[0]} cannot be started: {error}; see that it runs alone") from error
        held.callback(started.ended_within, None)  # whatever fails beside it, the command runs to its end
        self._relay.attach(started)
        self._choice.begin(started.pid)
        return started

    def _follow(self, started: _Process | None, start_ns: int, deadline_ns: int | None) -> None:
        while not self._ended(started, deadline_ns):
            self._look_for_devices()
            if isinstance(started, TerminalProcess) and deadline_ns is not None and time.monotonic_ns() >= deadline_ns:
                started.send(signal.SIGTERM)
                deadline_ns = None
            self._renewal.check()
            if self._watcher is not None:
                try:
                    self._watcher(self._renewal.sampler.folder, start_ns)
                except Exception as error:  # raised at the end: a terminal that is gone must not cost the recording
                    self._watcher, self._unseen = None, error

    def _look_for_devices(self) -> None:
        """Writes down which devices count as soon as it changes: for the live view, and for when this process dies."""
        if self._choice.look():
            found = self._choice.counted(self._renewal.sampler.manifest())
            if found != self._facts["devices"]:
                self._facts["devices"] = found
                self._folder.write_facts(self._facts)

    def _ended(self, started: _Process | None, deadline_ns: int | None) -> bool:
        """Waits a tick at most, and says whether the recording is over."""
        left_s = TICK_S if deadline_ns is None else min(TICK_S, max(ns_to_s(deadline_ns - time.monotonic_ns()), 0.0))
        left_s = min(left_s, self._choice.rest_s)
        if not isinstance(started, TerminalProcess) and (self._relay.received is not None or left_s == 0.0):
            return True
        if started is not None:
            return started.ended_within(left_s)
        time.sleep(left_s)
        return False

    def _linger(self, duration_s: float, *, until_signal: bool) -> None:
        """Lets the sampler go on for a while."""
        deadline_s = time.monotonic() + duration_s
        while (left_s := deadline_s - time.monotonic()) > 0 and not (until_signal and self._relay.received):
            self._renewal.check()
            time.sleep(min(left_s, TICK_S))


def _close(folder: RecordingFolder, facts: dict[str, Any], run: ProgramRun | None, choice: Choice) -> None:
    """Turns the sampler's files into Parquet, and deletes them once everything else is in place.

    Where it did not end well its log stays and says why.
    """
    sampler_folder = folder.node_folder(facts["node"])
    tables, manifest = sampled(sampler_folder, simulated_device=facts["simulated_device"])
    manifest = with_calibrations(folder.storage, manifest)
    manifest = without_own_processes(manifest, choice.own_processes(manifest.get("devices", {})), warm=False)
    told = {} if run is None else run.outcome(run.steps()).told_devices(uuids_of(manifest.get("devices", {})))
    facts["devices"] = choice.counted(manifest, told.values())
    (tables, manifest), others = apart(tables, manifest, facts)
    folder.write_telemetry(facts["node"], tables, manifest)
    if others[0]:
        MeasuredFolder(folder.path / OTHERS).write_telemetry(facts["node"], *others)
    if run is not None and "end_mono_ns" in facts["window"]:
        spans, found = told_steps(run, facts, manifest)
        facts |= found
        if spans is not None:
            folder.write_spans(spans)
        run.discard()
    folder.write_facts({**facts, "closed": True})
    TrialFolder(folder.path).write_result(measured_run(folder.path))
    kept = {".parquet", ".json"} if manifest["closed"] else {".parquet", ".json", ".log"}
    for path in sampler_folder.iterdir():
        if path.suffix not in kept:
            path.unlink()
