"""Ranks that are forks of a process which has loaded torch and its engine: loading them takes each rank seconds.

The process is `multiprocessing`'s fork server, one per process of tests; it starts with the first rank and ends with
the tests.
"""

import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Callable
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import torch.multiprocessing as mp

LIBRARIES: Final = ("torch", "wattune.engines.torch.engine", "functorch.compile", "torch._inductor.compile_fx")
"""With what torch loads when it compiles for the first time."""


@cache
def forks() -> ForkServerContext:
    """The context of processes that have the libraries, and as many threads as each of several ranks should."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(LIBRARIES))
    # It looks for modules where a new Python would, and not where this process does (python/cpython#126631).
    settings = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in settings}
    os.environ |= settings
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
    return context


def store_of_two(rank: int, folder: Path) -> Any:
    """The store that two ranks meet in, as those of a lane have it."""
    from wattune.workers.process_groups import open_store, take_store

    told = folder / "port"
    if rank == 0:
        open_store("127.0.0.1", 0, holds=True, num_ranks=2)
        (folder / "port.part").write_text(str(take_store().port))  # type: ignore[attr-defined]
        (folder / "port.part").rename(told)
    else:
        while not told.exists():
            time.sleep(0.01)
        open_store("127.0.0.1", int(told.read_text()), holds=False, num_ranks=2)
    return take_store()


def run_ranks(rank: Callable[..., None], *arguments: Any, count: int = 2) -> None:
    """Runs `rank(number, *arguments)` in so many processes.

    Raises:
        torch.multiprocessing.ProcessException: One of them failed; the others are ended.
    """
    forks()
    mp.start_processes(rank, arguments, nprocs=count, start_method="forkserver")


def start_script(script: Path, *arguments: object, errors: Path, said: Path | None = None) -> BaseProcess:
    """Starts a script as `python SCRIPT ARGUMENTS` does, in a session of its own.

    Its errors go to a file, and what it says to another where one is given.
    """
    streams = {2: errors} | ({1: said} if said else {})
    process = forks().Process(target=_run_script, args=(str(script), [*map(str, arguments)], streams))
    process.start()
    return process


def _run_script(script: str, arguments: list[str], streams: dict[int, Path]) -> None:
    os.setsid()
    for number, path in streams.items():
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), number)
    sys.path.insert(0, str(Path(script).parent))
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
