"""Forks the processes of a warm command from processes that have made their imports: two programs in one file.

`warm.py in HOME PYTHON ...` stands for the interpreter, which launcher and supervisor know: it passes signals on and
ends as its fork, or becomes the interpreter, which notes its imports. `warm.py serve FOLDER` makes them, and forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import json
import os
import resource
import runpy
import select
import signal
import socket
import sys
import sysconfig
import time
import warnings
from pathlib import Path

OF_A_RUN = {"WATTUNE_STEPS", "WATTUNE_WARM", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
OF_A_RUN |= {"PWD", "OLDPWD", "SHLVL", "_"}
"""Variables that differ in every run: ports, names of files, those of shells. Any other makes it another process."""

MOST_BEGINNINGS = 5
PASSED_ON = [getattr(signal, f"SIG{name}") for name in ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "CONT")]


def stand_in(home: Path, python: str, arguments: list[str]) -> None:
    """Runs a Python program in a fork, or becomes it; says which in `HOME/told`."""
    at = next((at for at, each in enumerate(arguments) if each == "-m" or each[:1] != "-"), len(arguments))
    program = arguments[at : at + (2 if arguments[at : at + 1] == ["-m"] else 1)]
    text = json.dumps([python, arguments[:at], program, str(Path.cwd()), _variables()])
    folder, server, pid = home / hashlib.sha256(text.encode()).hexdigest()[:16], socket.socket(socket.AF_UNIX), 0
    if not folder.exists() and (program[:1] == ["-m"] or (program and Path(program[0]).is_file())):
        folder.mkdir(0o700)
        (folder / "process").write_text(text)
        os.environ["WATTUNE_WARM"] = str(folder / "imports")
    heard = server.makefile("r")
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    with contextlib.suppress(OSError, ValueError):  # there is none, or it has ended
        server.connect(str(folder / "socket"))
        socket.send_fds(server, [b"-"], [0, 1, 2])
        server.sendall(json.dumps([arguments[at:], dict(os.environ), [*os.sched_getaffinity(0)]]).encode() + b"\n")
        pid = int(heard.readline())
    for each in PASSED_ON if pid else ():
        signal.signal(each, lambda number, _: _signal_group(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    with (home / "told").open("a") as file:
        file.write(f"{folder.name} {'fork' if pid else 'cold'}\n")
    if not pid:
        os.execv(python, [python, *arguments])  # noqa: S606 - no shell is the point
    code = os.waitstatus_to_exitcode(int(heard.readline() or signal.SIGKILL))  # where nobody says it was killed, too
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the fork left one, where it was to
    if -code in PASSED_ON:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)


def serve(folder: Path) -> list[str]:
    """Makes the imports that were noted, and forks for whoever asks. Returns in the fork, with its arguments."""
    program = json.loads((folder / "process").read_text())[2]
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path[0] = str(Path.cwd() if program[0] == "-m" else Path(program[0]).resolve().parent)
    sys.argv = program[-1:]
    if refused := _import_noted(folder):
        sys.exit(refused)
    libc, listener = ctypes.CDLL(None), socket.socket(socket.AF_UNIX)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener.bind(str(folder / "new"))
    listener.listen(64)
    (folder / "new").rename(folder / "socket")
    while True:
        asker, _ = listener.accept()
        if os.fork():
            asker.close()
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        listener.close()
        libc.prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG: each ends with whom it came of
        pid = os.fork()
        if not pid:
            libc.prctl(1, int(signal.SIGKILL), 0, 0, 0)
            return _become(asker)
        over = select.poll()
        over.register(asker, 0)  # its end alone: what it says is for the fork
        over.register(os.pidfd_open(pid), select.POLLIN)
        if asker.fileno() in dict(over.poll()):  # the stand-in was killed
            _signal_group(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            asker.sendall(b"%d\n" % os.waitpid(pid, 0)[1])
        os._exit(0)


def _become(asker: socket.socket) -> list[str]:
    """Makes this fork the process that was asked for; returns its arguments."""
    os.setsid()
    with asker, asker.makefile("rb") as heard:
        for target, descriptor in enumerate(socket.recv_fds(asker, 1, 3)[1]):
            os.dup2(descriptor, target)
            os.close(descriptor)
        arguments, variables, processors = json.loads(heard.readline())
        os.sched_setaffinity(0, processors)
        os.environ.update(variables)
        if "numpy.random" in sys.modules:  # Python takes a new seed in every fork; torch's is always the same
            sys.modules["numpy.random"].seed()
        if "_wattune_steps.writer" in sys.modules:
            sys.modules["_wattune_steps.writer"].note_loaded()
        asker.sendall(b"%d\n" % os.getpid())
    return list(arguments)


class ImportNotes:
    """A finder that finds nothing, and notes the imports of a program, with what they may read where that changed."""

    def __init__(self, path: str) -> None:
        self._file, self._name, self._around = open(path, "a", buffering=1), "", ""  # noqa: SIM115

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:  # noqa: ARG002
        """Notes the name before this one, if that was imported: programs also ask whether there is a module."""
        if not hasattr(sys.modules["__main__"], "__file__"):
            return  # the interpreter's own start, as Ubuntu's `sitecustomize`: `sys.path` is not whole yet
        around = json.dumps([_variables(), sys.path])
        self._file.write(f"{self._name}\n" * (self._name in sys.modules) + f"{around}\n" * (around != self._around))
        self._name, self._around = name, around


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in OF_A_RUN}


def _import_noted(folder: Path) -> str:
    """Makes the imports of a program's first run, but what a fork cannot have; returns why there are none."""
    left, made, set_here, variables = folder / "left", 0, "", {**_variables(), "WATTUNE_STEPS": str(folder)}
    leaves: list[list[str]] = json.loads(_read(left) or "[]")
    for line in _read(folder / "imports").splitlines():
        if line[0] == "[" and json.loads(line) != [_variables(), sys.path]:  # the rest it imports itself
            names = {name for name, _ in json.loads(line)[0].items() ^ _variables().items()} or {"sys.path"}
            set_here = f": it sets {', '.join(sorted(names))}, which an import may read"
            break
        top, before = line.partition(".")[0], {*sys.modules}
        if line[0] == "[" or line in before or any(each in (top, line) for group in leaves for each in group):
            continue
        origin = "built-in" if top in before else getattr(importlib.util.find_spec(top), "origin", "") or ""
        if not ("-packages/" in origin or origin.startswith((sysconfig.get_path("stdlib"), "built-in", "frozen"))):
            continue  # the program's own modules may act, and read its arguments
        with contextlib.suppress(Exception, SystemExit):  # the program meets the same, and says so
            importlib.import_module(line)
        if why := _unsafe():  # what is done cannot be undone: begins anew, without it and what it brought
            if len(leaves) == MOST_BEGINNINGS:
                return f"{line} {why}"
            brought = {name.partition(".")[0] for name in sys.modules} - before
            left.write_text(json.dumps([*leaves, [line, *brought]]))
            os.execve(sys.executable, sys.orig_argv, variables)  # noqa: S606 - no shell is the point
        made += 1
    return "" if made else f"no import of it can be kept{set_here}"


def _unsafe() -> str:
    """Says what the last import did that no fork may find done; empty where it did nothing of the kind."""
    opened = (os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd"))
    if found := next((each for each in opened if each.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri"))), ""):
        return f"opens {found}"
    with contextlib.suppress(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
        return "starts a process"
    until_s = 0.0
    while sum(_read(each / "comm") != "jemalloc_bg_thd\n" for each in Path("/proc/self/task").iterdir()) > 1:
        if until_s and time.monotonic() > until_s:
            return "starts a thread"
        if (
            not until_s
        ):  # libraries that prepare for forks, as OpenBLAS, end their threads at one; jemalloc goes without
            until_s = time.monotonic() + 1.0
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if not (pid := os.fork()):
                    os._exit(0)
            os.waitpid(pid, 0)
        time.sleep(0.01)
    return ""


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


if __name__ == "__main__":
    if sys.argv[1] == "in":
        stand_in(Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
    sys.argv = serve(Path(sys.argv[2]))
    if sys.argv[0] != "-m":
        runpy.run_path(sys.argv[0], run_name="__main__")
    elif module := sys.argv.pop(0) and sys.argv[0]:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
