"""Settings of Ray's side activities, made where Ray allows it and recorded with every result.

Ray's dashboard agent reads every GPU through NVML every five seconds, as a sampler does. Ray reports its use to its
makers, and it listens on all interfaces. `docs/security.md` lists the ports and how they were found.
"""

import logging
import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Final

import ray
from ray._private import ray_constants
from ray._private.ray_constants import DASHBOARD_ADDRESS, KV_NAMESPACE_DASHBOARD
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]
from ray.experimental import internal_kv

from wattune.orchestrate.ask import ask_all, on_node

_log = logging.getLogger(__name__)

POLL_VARIABLE: Final = "REPORTER_UPDATE_INTERVAL_MS"
"""Variable with the milliseconds between readings of a node's GPUs by Ray's agent.

`ray.dashboard.modules.reporter.reporter_consts` of Ray 2.60 reads it.
"""

RAYS_POLL_INTERVAL_MS: Final = 5000
"""Ray's default for it."""

NICENESS_VARIABLE: Final = "RAY_worker_niceness"
"""Variable with what Ray adds to a node's niceness for its workers, when it starts one; a job's own counts too."""

ANSWER_WITHIN_S: Final = 60.0
"""Longest a node may take to report its settings."""

DASHBOARD: Final = "ray.dashboard"
"""Tag with the address of Ray's dashboard."""

STARTING: Final = "starting"
"""Its value in a cluster of our own, whose dashboard starts beside the first trial."""

JOB_SETTINGS: Final = {
    # A process beside every group of workers that asks every 5 s which nodes are about to leave, for training that then
    # writes a checkpoint. No trial does: wattune acts when a node has left. With it Train would take no notice of a
    # lost worker until the node's deadline.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    # The study folder holds the results.
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "3600",
    # The listeners of the study show its progress.
    "RAY_AIR_NEW_OUTPUT": "0",
    # A user's command runs where the job does, and not in the folder that Ray makes for a trial.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    # wattune handles Ctrl-C: it brings the study folder in order before Ray ends.
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    # Ray Train gives all workers of a node CUDA_VISIBLE_DEVICES of all its devices, and Ray each worker one device in
    # HIP_VISIBLE_DEVICES: together they name devices that are not there (ray#49260). HIP honours the former alone.
    "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES": "1",
    # Ray starts workers at niceness 15: any other process of the node would take the processors from what is measured.
    NICENESS_VARIABLE: "0",
}
"""Environment of the study's driver and of every worker; a variable that the user has set stays."""

_LOCAL_SETTINGS: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # One reader of the GPUs is enough. Ray's first reading, at the start, cannot be turned off.
    POLL_VARIABLE: "3600000",
}
"""Environment of a cluster that wattune starts; a variable that the user has set stays."""


def apply(settings: Mapping[str, str]) -> None:
    """Puts settings into this process's environment, unless the user has set them."""
    for name, value in settings.items():
        os.environ.setdefault(name, value)


@contextmanager
def local_cluster() -> Iterator[None]:
    """Makes a cluster that starts inside it quiet, closed to others, and reachable on loopback only."""
    apply(_LOCAL_SETTINGS)
    if "RAY_AUTH_MODE" not in os.environ:
        # Without a token of wattune's, Ray writes one to the home folder, which turns authentication on for every later
        # `ray start` there. Open mode would let anyone who reaches the ports run code.
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        # Ray read both when it was imported. The calls that make it read them again are not public (as of 2.60).
        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()
    if sys.platform == "linux":
        # Else Gloo listens on the interface of the host's name.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    name = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    if name in os.environ:
        yield
        return
    # Ray keeps to 127.0.0.1 this way on macOS and Windows. The variable is for its processes; this process has read it
    # already, so the constant is set too.
    before = ray_constants.ENABLE_RAY_CLUSTER
    os.environ[name], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        del os.environ[name]


def ray_tags(node_ids: Sequence[str], *, ours: bool) -> dict[str, str]:
    """Collects Ray's settings as tags of a result. A cluster that is `ours` has this process's, others are asked."""
    found = [_node_settings(int(os.environ.get(NICENESS_VARIABLE, 0)))] if ours else _ask(node_ids)
    intervals_s = [int(one["poll_ms"]) / 1000 for one in found]
    usage = {one["usage_stats"] for one in found}
    tags = {
        "ray.auth_mode": _auth_mode(),
        "ray.cluster": "own" if ours else "joined",
        DASHBOARD: STARTING if ours else dashboard(),
        "ray.usage_stats": "on" if "on" in usage else "off" if usage == {"off"} else "unknown",
        "ray.gpu_poll_interval_s": f"{min(intervals_s):g}" if intervals_s else "unknown",
        "ray.worker_niceness": str(max(int(one["niceness"]) for one in found)) if found else "unknown",
    }
    if not ours and tags["ray.worker_niceness"] not in ("0", "unknown"):
        _log.warning(
            "Ray's workers run at niceness %s, where other processes of a node slow them; start Ray with %s=0",
            tags["ray.worker_niceness"],
            NICENESS_VARIABLE,
        )
    if len(found) < (1 if ours else len(node_ids)):
        tags["ray.silent_nodes"] = str(len(node_ids) - len(found))
    return tags


def normal_priority() -> None:
    """Gives this worker the priority of the raylet that started it, where the system allows that.

    In a connection that a caller made, workers have what Ray adds.
    """
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, os.getppid()))


def _node_settings(niceness: int | None = None) -> dict[str, str]:
    """Settings of the node this runs on. Its processes have the environment its Ray was started with.

    `niceness` is what workers get beside this process's.
    """
    if niceness is None:  # this is a worker
        normal_priority()
    from ray._common.usage.usage_lib import usage_stats_enabled

    return {
        "poll_ms": os.environ.get(POLL_VARIABLE, str(RAYS_POLL_INTERVAL_MS)),
        "usage_stats": "on" if usage_stats_enabled() else "off",
        "niceness": str(os.getpriority(os.PRIO_PROCESS, 0) + (niceness or 0)),
    }


def _ask(node_ids: Sequence[str]) -> list[dict[str, str]]:
    """The settings of every node that answers."""
    asked = {node_id: on_node(_node_settings, node_id).remote() for node_id in node_ids}
    answers, silent = ask_all(asked, ANSWER_WITHIN_S)
    for node_id in silent:
        ray.cancel(asked[node_id], force=True)
    return list(answers.values())


def _auth_mode() -> str:
    from ray._private.authentication.authentication_utils import get_authentication_mode_name
    from ray._raylet import get_authentication_mode  # type: ignore[attr-defined]

    return str(get_authentication_mode_name(get_authentication_mode()))


def dashboard() -> str:
    """Address of Ray's dashboard; `off` if there is none."""
    found = internal_kv._internal_kv_get(DASHBOARD_ADDRESS, namespace=KV_NAMESPACE_DASHBOARD)
    return found.decode() if found else "off"
