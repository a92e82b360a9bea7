"""The environment of a command: that of the job, without what Ray and wattune put there for themselves."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import psutil

_OF_RAY: Final = ("RAY_", "WATTUNE_")
"""Beginnings of variables of the worker alone: addresses, tokens, settings of its own processes."""

_OF_RANKS: Final = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "ACCELERATE_TORCH_DEVICE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)
"""Variables of wattune's own ranks: a launcher sets them for the command's."""

_BY_RAY: Final = ("OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "MKL_NUM_THREADS")
"""Variables that Ray sets in a worker by its reserved processors, unless the node has them already."""


def command_environment(
    own: Mapping[str, str], given: Mapping[str, str], node: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Returns the environment of a trial's command, with variables of the space that are `given`, filled.

    The worker that starts it has its `own`, which is the job's (`runtime_env`) and Ray's. `node` is what Ray's
    processes of this node started with; None looks for it.
    """
    node = node_environment() if node is None else node
    kept = {
        name: value
        for name, value in own.items()
        if not name.startswith(_OF_RAY) and name not in _OF_RANKS and not (name in _BY_RAY and name not in node)
    }
    found = {**kept, **given}
    return {**found, "PATH": search_path(found.get("PATH"))}


def search_path(path: str | None) -> str:
    """Returns where programs are looked for: `PATH`, then beside this Python, which may be of a venv not activated."""
    return os.pathsep.join(filter(None, (path or os.defpath, str(Path(sys.executable).parent))))


def node_environment(pid: int | None = None) -> dict[str, str]:
    """Returns the environment that a process started with, by default this process's parent, which is Ray's raylet.

    None where it has ended or may not be asked.
    """
    try:
        return dict(psutil.Process(os.getppid() if pid is None else pid).environ())
    except psutil.Error:  # it is gone, or belongs to another user
        return {}
