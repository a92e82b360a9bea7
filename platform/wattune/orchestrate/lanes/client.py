"""The lanes of a study, seen from outside: the study's driver makes them, and drivers of trials use them."""

import contextlib
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import pyarrow as pa
import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from wattune.errors import TelemetryError
from wattune.orchestrate.cluster import Node, is_answering, own_addresses
from wattune.orchestrate.events import TrialProgress
from wattune.orchestrate.failures import Cause
from wattune.orchestrate.lanes.actor import KEEPER_ENDED, KEEPER_REMEDY, MOST_CALLS, LaneKeeper, ray_words
from wattune.orchestrate.lanes.messages import Answer, Assignment, GroupKey
from wattune.orchestrate.ray_folder import scratch_place
from wattune.plans.program import is_command
from wattune.telemetry.sampler.lease import FileLock, lock_holder

_LOOK_S: Final = 1.0
"""Seconds between two checks of a trial's limit by its driver."""
_QUICK_S: Final = 2.0
_SETTLE_S: Final = 120.0
_CLOSE_S: Final = 45.0
STOPPED_S: Final = 6.0
"""Longest the lanes of a study that was stopped may take to end; then the cluster ends them or their actor's death."""
_KNOCK_EVERY_S: Final = 0.5
_CONCLUDING: Final = ".concluding"
_CONCLUDED_S: Final = 60.0
"""Longest a trial waits before its measured steps while others are concluded: a disk may hang."""
_CONCLUDED_LOOK_S: Final = 0.01

_log = logging.getLogger(__name__)


class Lanes:
    """Warm workers for trials, on as many sets of nodes as trials ask for. Can be sent to other processes."""

    def __init__(self, storage: Path | None = None) -> None:
        """Starts the actor that holds them, on this node. It ends with this process.

        Workers keep compiled kernels in the storage; without one, in their machine's temporary files.
        """
        remote_class = ray.remote(LaneKeeper)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options = remote_class.options(
            num_cpus=0, max_restarts=-1, max_concurrency=MOST_CALLS, scheduling_strategy=here
        )
        # The actor may be ended before it has cleaned up.
        self._scratch = tempfile.mkdtemp(prefix="wattune-train-", dir=scratch_place())
        self._keeper: ActorHandle = options.remote(self._scratch, storage)
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

    def run(
        self,
        assignment: Assignment,
        over_limit: Callable[[], str | None] = lambda: None,
        await_sensors: Callable[[], None] = lambda: None,
    ) -> Answer:
        """Runs one trial; without outcomes if the actor that holds the lanes died meanwhile.

        Its measured steps begin once `await_sensors` has returned and the trials are concluded that are being concluded
        now. Nobody can hold the steps of a command: it begins then. `over_limit` is called once a second while it runs.
        A reason it returns ends the trial as `aborted`.

        Raises:
            TelemetryError: `await_sensors` raised it; the trial has left its workers.
        """
        is_held = not is_command(assignment.spec)
        if not is_held:
            await_sensors()
            self._wait_for_conclusions()
        pending = self._keeper.run.remote(assignment)
        try:
            if is_held:
                self._await_beside(pending, assignment, await_sensors)
                self._wait_for_conclusions()
            self._keeper.open_window.remote(tuple(assignment.node_names), assignment.window)
            while not ray.wait([pending], timeout=_LOOK_S)[0]:
                reason = over_limit()
                if reason is not None and self.stop_trial(assignment.attempt.name, reason):
                    break
            answer: Answer = ray.get(pending)
        except RayActorError as error:
            return Answer(failure=_no_answer(error), infra=Cause.WORKERS_LOST)
        return answer

    def _await_beside(self, pending: Any, assignment: Assignment, await_sensors: Callable[[], None]) -> None:
        """Waits for a trial's sensors while its workers begin; without sensors they are to leave it."""
        try:
            await_sensors()
        except TelemetryError as error:
            while not ray.wait([pending], timeout=_LOOK_S)[0]:
                self.stop_trial(assignment.attempt.name, str(error))
            raise

    @contextlib.contextmanager
    def concluding(self, name: str) -> Iterator[None]:
        """Says while its body runs that a trial's result is made: no other's measured steps begin meanwhile.

        A lock says it, which ends with this process however that ends.
        """
        path = Path(self._scratch) / f"{name}{_CONCLUDING}"
        lock = FileLock.take(path)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            if lock is not None:
                lock.release()

    def _wait_for_conclusions(self) -> None:
        end_s = time.monotonic() + _CONCLUDED_S
        for path in Path(self._scratch).glob(f"*{_CONCLUDING}"):
            while lock_holder(path) is not None:
                if time.monotonic() > end_s:
                    _log.warning("%s takes longer than %.0f s; trials are measured beside it", path.stem, _CONCLUDED_S)
                    return
                time.sleep(_CONCLUDED_LOOK_S)

    def prepare(self, key: GroupKey, nodes: Sequence[Node], backends: Sequence[str]) -> None:
        """Starts workers and telemetry actors for a first trial on nodes, and waits for none of them."""
        self._keeper.prepare.remote(key, nodes, backends)

    def telemetry_actors(self, nodes: Sequence[Node], backends: Sequence[str]) -> list[ActorHandle]:
        """Returns the telemetry actors of nodes, and starts those that do not run yet.

        Raises:
            TelemetryError: The actor that holds them died, or does not answer.
        """
        # A trial asks for this first. It waits for an actor that is being restarted: the death of that actor costs the
        # trial that ran, and not the next one.
        asks = self._keeper.telemetry.options(max_task_retries=-1)
        try:
            actors: list[ActorHandle] = ray.get(asks.remote(nodes, backends), timeout=_SETTLE_S)
        except (RayActorError, GetTimeoutError) as error:
            raise TelemetryError(_no_answer(error)) from error
        return actors

    def settle(self, assignment: Assignment) -> str:
        """Waits until a trial's workers are clean; returns the reason it cost them, empty if it did not."""
        try:
            text: str = ray.get(self._keeper.settle.remote(tuple(assignment.node_names)), timeout=_SETTLE_S)
        except (RayActorError, GetTimeoutError) as error:
            return _no_answer(error)
        return text

    def stop_trial(self, name: str, reason: str) -> bool:
        """Ends a running trial as `aborted`; returns whether it was running."""
        try:
            stopped: bool = ray.get(self._keeper.stop_trial.remote(name, reason), timeout=_QUICK_S)
        except (RayActorError, GetTimeoutError):
            return False
        return stopped

    def spans(self, name: str) -> Mapping[int, pa.Table]:
        """The last seconds of a running trial's ranks, by rank; empty unless its assignment has `shows_spans`."""
        try:
            found: dict[int, pa.Table] = ray.get(self._keeper.spans.remote(name), timeout=_QUICK_S)
        except (RayActorError, GetTimeoutError):
            return {}
        return found

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


def _no_answer(error: RayActorError | GetTimeoutError) -> str:
    """Says why the process that holds the lanes did not answer, and what to do."""
    if isinstance(error, GetTimeoutError):
        return (
            f"the process that holds the lanes did not answer within {_SETTLE_S:.0f} s; is the study's node overloaded?"
        )
    return f"{KEEPER_ENDED} ({ray_words(error)}); {KEEPER_REMEDY}"
