"""The lanes of a study, seen from outside: the study makes them and gives them trials to drive."""

import contextlib
import logging
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from wattune.errors import TelemetryError
from wattune.orchestrate.ask import on_node
from wattune.orchestrate.attempt import Attempt
from wattune.orchestrate.cluster import Cluster, Node, is_answering, own_addresses
from wattune.orchestrate.events import TrialProgress
from wattune.orchestrate.lanes.actor import MOST_CALLS, Drive, LaneKeeper
from wattune.orchestrate.lanes.messages import GroupKey
from wattune.orchestrate.lanes.ray_errors import KEEPER_ENDED, KEEPER_REMEDY, ray_words
from wattune.orchestrate.ray_folder import scratch_place

_QUICK_S: Final = 2.0
_SETTLE_S: Final = 120.0
_CLOSE_S: Final = 45.0
STOPPED_S: Final = 6.0
"""Longest the lanes of a study that was stopped may take to end; then the cluster ends them or their actor's death."""
_KNOCK_EVERY_S: Final = 0.5
_log = logging.getLogger(__name__)


class Lanes:
    """Warm workers for trials, on as many sets of nodes as trials ask for. Can be sent to other processes."""

    def __init__(self, drive: Drive, storage: Path | None = None) -> None:
        """Starts the actor that holds them and drives their trials, on this node. It ends with this process.

        Workers keep compiled kernels in the storage; without one, in their machine's temporary files.
        """
        here = ray.get_runtime_context().get_node_id()
        options = on_node(LaneKeeper, here, max_restarts=-1, max_concurrency=MOST_CALLS)
        # The actor may be ended before it has cleaned up.
        self._scratch = tempfile.mkdtemp(prefix="wattune-train-", dir=scratch_place())
        self._keeper: ActorHandle = options.remote(self._scratch, storage, drive)
        self._addresses = own_addresses()
        self._closed = False

    def __enter__(self) -> Self:
        """Returns the lanes themselves."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends every lane; trials that run or wait there are answered."""
        self.close()

    def close(self, within_s: float = _CLOSE_S) -> None:
        """Ends every lane and the actor, within a time. The second call does nothing.

        Nobody waits for a cluster that is dead: its workers go with it.
        """
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(RayError, ConnectionError):
            if self._ends(within_s):
                ray.kill(self._keeper, no_restart=True)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _ends(self, within_s: float) -> bool:
        """Tells the actor to end the lanes and waits for it; returns whether the cluster is still there."""
        if not is_answering(self._addresses):  # Ray would ask it for minutes
            return False
        pending, end_s = self._keeper.close.remote(), time.monotonic() + within_s
        while (left_s := end_s - time.monotonic()) > 0:
            if ray.wait([pending], timeout=min(left_s, _KNOCK_EVERY_S))[0]:
                return True
            if not is_answering(self._addresses):
                return False
        return True

    def drive(self, attempt: Attempt, cluster: Cluster) -> Any:
        """Begins a trial on its nodes, or on any of a cluster; the reference ends as its nodes are free.

        Other nodes do not travel: five hundred of them take longer than all else of a call. It waits for an actor that
        is being restarted: the death of that actor costs the trials that ran, and not the next ones.
        """
        cluster = cluster.only(attempt.nodes) if attempt.nodes else cluster
        return self._keeper.drive.remote(attempt, cluster, self._keeper.ready.options(max_task_retries=-1).remote())

    def concluded(self, attempt: Attempt) -> Any:
        """Asks for the end of a trial that was driven: the reference ends when its result is stored."""
        return self._keeper.concluded.remote(attempt.name)

    def prepare(self, key: GroupKey, nodes: Sequence[Node], backends: Sequence[str]) -> None:
        """Starts workers and telemetry actors for a first trial on nodes, and waits for none of them."""
        self._keeper.prepare.remote(key, nodes, backends)

    def telemetry_actors(self, nodes: Sequence[Node], backends: Sequence[str]) -> list[ActorHandle]:
        """Returns the telemetry actors of nodes, and starts those that do not run yet.

        Raises `TelemetryError`: the actor that holds them died, or does not answer.
        """
        asks = self._keeper.telemetry.options(max_task_retries=-1)
        try:
            actors: list[ActorHandle] = ray.get(asks.remote(nodes, backends), timeout=_SETTLE_S)
        except GetTimeoutError as error:
            raise TelemetryError(
                f"the process that holds the lanes did not answer within {_SETTLE_S:.0f} s; is the study's node "
                "overloaded?"
            ) from error
        except RayActorError as error:
            raise TelemetryError(f"{KEEPER_ENDED} ({ray_words(error)}); {KEEPER_REMEDY}") from error
        return actors

    def progress(self) -> Mapping[str, TrialProgress]:
        """Progress of each running trial, by its folder's name; empty if nobody answers in time."""
        try:
            found: dict[str, TrialProgress] = ray.get(self._keeper.progress.remote(), timeout=_QUICK_S)
        except (RayError, ConnectionError):  # it is busy, or the study ends
            return {}
        return found

    def forget_nodes(self, nodes: Sequence[str]) -> None:
        """Ends the lanes on nodes that are gone, by Ray's ids."""
        self._keeper.forget_nodes.remote(tuple(nodes))
