"""Commands that are forks of a process which has loaded what `wattune run` does: that takes each seconds of processor.

The process is this file run as a program, one per process of tests. It has one thread when it forks: a lock that
another held would stay closed in the fork.
"""

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Final, TextIO

LIBRARIES: Final = (
    "wattune.cli.study",
    "wattune.cli.results",
    "wattune.cli.machine",
    "wattune.api.runs",
    "wattune.api.results",
    "wattune.orchestrate.run_study",
    "wattune.tracking.artifacts",
    "wattune.report.page",
    "mlflow.store.tracking.sqlalchemy_store",
    "alembic.command",
    "pyarrow.dataset",
)
THREADS_SAFE_AT_FORKS: Final = {"jemalloc_bg_thd"}
"""Threads of libraries that close their own locks before a fork, and open them after it."""

READ_AT_START: Final = ("RAY_", "PYTHON", "OMP_")
"""Beginnings of variables that Python and libraries read when they are loaded: a command cannot have others."""

TERMINALS_SIGNALS: Final = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)


class Command:
    """A command that runs: of `subprocess.Popen` as much as tests use."""

    def __init__(self, pid: int, ending: "Connection[Any, Any]", arguments: Sequence[str]) -> None:
        self.pid, self.args = pid, arguments
        self.returncode: int | None = None
        self.stdout: TextIO | None = None
        self._ending = ending

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not self._ending.poll(timeout):
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = self._ending.recv()
            self._ending.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class WarmCommands:
    """The warm process, asked for commands."""

    def __init__(self, control: socket.socket, environment: Mapping[str, str], log: Path) -> None:
        self._control, self._environment, self._log = control, _read_at_start(environment), log

    def start(
        self, arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str], stdout: int, stderr: int, **more: Any
    ) -> Command:
        """Starts `python -m wattune ARGUMENTS`.

        Args:
            arguments: Of the command line.
            cwd: Working directory.
            env: The whole environment.
            stdout: Number of the file that becomes standard output.
            stderr: The same of standard error.
            more: Of what `_become` takes.
        """
        assert _read_at_start(env) == self._environment, "loaded with other settings of Ray or Python"
        ignored = [number for number in TERMINALS_SIGNALS if signal.getsignal(number) is signal.SIG_IGN]
        order = {"arguments": arguments, "cwd": str(cwd), "environment": dict(env), "ignored": ignored} | more
        ours, theirs = Pipe(duplex=False)
        try:
            with theirs:
                socket.send_fds(self._control, [json.dumps(order).encode()], [stdout, stderr, theirs.fileno()])
            return Command(ours.recv(), ours, arguments)
        except (OSError, EOFError) as error:
            raise AssertionError(f"the process that starts commands has ended: {self._log.read_text()}") from error

    def open(self, arguments: Sequence[str], **settings: Any) -> Command:
        """Starts a command with both streams as one pipe."""
        reader, writer = os.pipe()
        try:
            command = self.start(arguments, stdout=writer, stderr=writer, **settings)
        finally:
            os.close(writer)
        command.stdout = open(reader)  # noqa: SIM115 - its reader waits for the end
        return command

    def run(self, arguments: Sequence[str], *, timeout_s: float, **settings: Any) -> "subprocess.CompletedProcess[str]":
        """Runs a command to its end."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            command = self.start(arguments, stdout=out.fileno(), stderr=err.fileno(), **settings)
            try:
                command.wait(timeout_s)
            finally:
                command.kill()
            texts = [file.read() for file in (out, err) if file.seek(0) == 0]
        return subprocess.CompletedProcess(arguments, command.wait(), *texts)


@contextmanager
def warm_commands(folder: Path, environment: Mapping[str, str]) -> Iterator[WarmCommands]:
    """Starts the warm process, which ends with the block.

    Args:
        folder: Gets its log.
        environment: Of the process; a command has its own, but for what is read at the start.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    log = folder / "commands.log"
    with ours, theirs, log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            env={**environment, "OPENBLAS_NUM_THREADS": "1"},  # more would be threads
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=file,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        yield WarmCommands(ours, environment, log)
    process.wait(30)


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_AT_START)}


def _main() -> None:
    """Loads the libraries and forks until nobody asks any more. Returns in each fork, at the end of its command."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is for the commands
    gc.disable()
    from wattune.tracking import store

    os.environ |= store._ENVIRONMENT  # MLflow reads them when it is loaded
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait
    control = socket.socket(fileno=int(sys.argv[1]))
    while True:
        order, numbers, _, _ = socket.recv_fds(control, 1 << 20, 3)
        if not order:
            sys.exit()
        names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
        assert len([name for name in names if name not in THREADS_SAFE_AT_FORKS]) == 1, f"threads: {names}"
        if os.fork() == 0:
            control.close()
            _wait_for_command(*numbers, **json.loads(order))
            return
        for number in numbers:
            os.close(number)


def _wait_for_command(stdout: int, stderr: int, told: int, **order: Any) -> None:
    """Forks once more, waits for the command and tells its ending, since whoever asked for it is not its parent."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with Connection(told, readable=False) as telling:
        if pid := os.fork():
            os.close(stdout)
            os.close(stderr)
            telling.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            os._exit(0)
        for number, copy in ((stdout, 1), (stderr, 2)):
            os.dup2(number, copy)
            os.close(number)
        _become(**order)
        telling.send(os.getpid())
    runpy.run_module("wattune", run_name="__main__", alter_sys=True)


def _become(
    arguments: list[str], cwd: str, environment: dict[str, str], ignored: list[int], tell_every_s: float | None = None
) -> None:
    """Makes this process what a new `python -m wattune` would be; one that tells so often how far a trial is."""
    for number in TERMINALS_SIGNALS:
        ordinary = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in ignored else ordinary)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv[1:], sys.path[0] = arguments, cwd
    if tell_every_s is not None:
        from wattune.terminal import progress

        progress.TELL_EVERY_S = tell_every_s


if __name__ == "__main__":
    _main()
