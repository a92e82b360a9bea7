"""The processes with the imports of a worker's warm commands: one for each process of a command, by its variables."""

import json
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import psutil

from wattune.steps.process import warm
from wattune.steps.process.writer import FOLDER_VARIABLE
from wattune.workers.command.process import SupervisedProcess


class WarmStarts:
    """Puts forks in the place of a command's interpreters. Use it in one thread that outlives it."""

    def __init__(self) -> None:
        """Holds nothing yet."""
        self._home = Path(tempfile.mkdtemp(prefix="wattune-warm-"))  # for this user alone
        self._servers: dict[str, SupervisedProcess] = {}
        self._said: dict[str, str] = {}
        (self._home / "told").touch()

    def prepared(self, arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        """Returns `python ...` or `torchrun ...` so that it starts in forks, once the imports known so far are made."""
        path = shutil.which(arguments[0], path=environment["PATH"])
        own = [path] if path and path.endswith("torchrun") else []
        head = Path(own[0]).read_text() if own else ""  # a script names it; pip writes a long path behind `exec`
        named = re.match(r"#!(?:/bin/sh\n\W*exec' |/usr/bin/env )?\"?([^\"\n ]+)", head)
        python = shutil.which(named[1], path=environment["PATH"]) if named else path
        if not python:
            return [*arguments], dict(environment)  # the supervisor says that it does not run here
        wanted = {name: value for name, value in environment.items() if name not in {*warm.OF_A_RUN, "PYTHONPATH"}}
        for folder in (each.parent for each in self._home.glob("*/process")):
            kind, options, _, cwd, variables = json.loads((folder / "process").read_text())
            known = folder.name in self._servers or not wanted.items() <= variables.items()
            if not known and psutil.virtual_memory().percent < 75.0:  # of the node's memory in use
                self._servers[folder.name] = SupervisedProcess(
                    [kind, *options, warm.__file__, "serve", str(folder)],
                    environment=variables | {FOLDER_VARIABLE: str(folder)},
                    on_line=partial(self._hear, folder.name),
                    mark=f"{FOLDER_VARIABLE}={folder}",
                    cwd=cwd,
                    grace_s=1.0,
                )
        until_s = time.monotonic() + 300.0
        for name, server in self._servers.items():
            while not (server.has_ended or (self._home / name / "socket").exists()) and time.monotonic() < until_s:
                time.sleep(0.02)
        stand_in = self._home / "python"
        inner = shlex.join([sys.executable, "-I", "-S", warm.__file__, "in", str(self._home), python])
        stand_in.write_text(f'#!/bin/sh\nexec {inner} "$@"\n')
        stand_in.chmod(0o700)
        return [str(stand_in), *own, *arguments[1:]], {"PYTHON_EXEC": str(stand_in)} | dict(environment)

    def _hear(self, name: str, line: str, _: int) -> None:
        self._said[name] = line

    def pids(self) -> list[int]:
        """Returns the forks, and all that came of them."""
        return [pid for server in self._servers.values() for pid in server.pids() if pid != server.command_pid]

    def told(self) -> str:
        """Says how the processes of the command that ran last started, and begins anew."""
        lines = [line.split() for line in (self._home / "told").read_text().splitlines()]
        (self._home / "told").write_text("")
        ends = {name: server.exit_code for name, server in self._servers.items()}  # 1: it says why
        why = {name: self._said[name] if code == 1 else "its process ended" for name, code in ends.items()}
        cold = Counter(why.get(name, "the first of its kind") for name, kind in lines if kind == "cold")
        said = [f"; {count} cold: {reason}" for reason, count in cold.items()]
        return f"{len(lines) - cold.total()} of {len(lines)} processes are forks{''.join(said)}"

    def close(self) -> None:
        """Ends all of them."""
        for server in self._servers.values():
            server.close()
        shutil.rmtree(self._home, ignore_errors=True)
