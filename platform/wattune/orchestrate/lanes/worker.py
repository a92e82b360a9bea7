"""The loop of a lane's worker: trial after trial, each in its own process group, with a memory check after it."""

import contextlib
import faulthandler
import gc
import logging
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import ray
from ray import cloudpickle
from ray.actor import ActorHandle
from ray.train import get_context
from ray.train.torch import get_device

from wattune.clock import ClockAnchor
from wattune.engines import ahead
from wattune.engines.registry import load_engine
from wattune.errors import NodeError, WattuneError
from wattune.orchestrate.failures import is_of_the_machine
from wattune.orchestrate.lanes.messages import Place, RankAssignment, Report, WorkerPlace, device_name, received
from wattune.orchestrate.lanes.post import nearest
from wattune.orchestrate.ray_settings import normal_priority
from wattune.orchestrate.telemetry_actor import leave_to_sampler
from wattune.run import RunStatus
from wattune.trial import TrialSpec
from wattune.workers.device import device_uuid
from wattune.workers.engine import Ranks
from wattune.workers.last_words import kept
from wattune.workers.loop import measure_trial
from wattune.workers.memory_check import clean_up, leak, leftovers
from wattune.workers.out_of_memory import first_line, is_out_of_memory
from wattune.workers.outcome import RankOutcome
from wattune.workers.phases import spans_table
from wattune.workers.process_groups import abort_groups, begun, join_groups, leave_groups, meet, take_store
from wattune.workers.provenance import provenance
from wattune.workers.watchdog import Order, WatchedEngine

_log = logging.getLogger(__name__)

COLLECTIVE_TIMEOUT_S: Final = 180
"""Longest a collective may wait for a rank. Torch's default of half an hour is longer than most trials."""

PROBE_TIMEOUT_S: Final = 30
"""Longest ranks may take to find each other after a trial that failed."""

WATCH_S: Final = 1.0
"""Seconds between two checks that a trial still makes progress."""


def await_turn(config: dict[str, Any]) -> bool:
    """Loads the engine, and waits until this worker may claim its device; returns whether it is wanted."""
    with contextlib.suppress(WattuneError):  # it is not there: the trial says so
        load_engine(config["engine"])
    return bool(ray.get(nearest(config).call.remote(config["lane"], "turn", config["run"])))


def serve(config: dict[str, Any]) -> None:
    """Runs trials until the lane has none left. Every Ray Train worker of a lane calls it.

    It is told the `keeper`, which holds the lane, its node (`head`), the lane's name there, and the number of the run.
    """
    normal_priority()
    with kept():
        worker = _Worker(nearest(config), config["lane"], config["run"])
        report: Report | None = None
        while (assigned := worker.next_trial(report)) is not None:
            after = worker.probe(assigned) if assigned.assignment is None else worker.run(assigned)
            report = replace(after, after=assigned.number)
        leave_groups()


class _Worker:
    """One worker of a group."""

    def __init__(self, keeper: ActorHandle, lane: str, run: int) -> None:
        self._keeper, self._lane = keeper, lane
        self._store = take_store()
        context = get_context()
        own = get_device()
        self._device = "cpu" if own.type == "cpu" else f"cuda:{own.index or 0}"
        self._node_id = ray.get_runtime_context().get_node_id()
        self._here = WorkerPlace(
            number=context.get_world_rank(),
            node_id=self._node_id,
            device_index=context.get_local_rank() if own.type == "cpu" else own.index or 0,
            device_uuid=device_uuid(self._device),
            pid=os.getpid(),
            actor=cloudpickle.dumps(ray.get_runtime_context().current_actor),
        )
        clean_up(self._device)
        gc.freeze()
        ahead.hold(signal.SIGCONT)  # an earlier worker may have died in a window
        self._before = leftovers(self._device)
        self._has_run = False
        self._group: int = ray.get(keeper.call.remote(lane, "join", run, self._here))

    def next_trial(self, report: Report | None) -> RankAssignment | None:
        """Waits for a trial of the lane; None tells this worker to end."""
        call = self._keeper.call.remote(self._lane, "next_trial", self._group, self._here.number, report)
        return received(ray.get(call))

    def probe(self, assigned: RankAssignment) -> Report:
        """Tests that the ranks still find each other."""
        try:
            self._join(assigned, PROBE_TIMEOUT_S)
            meet(self._device)
            leave_groups()
        except Exception as error:  # of any class: the processes are then replaced
            return Report(problem=f"the ranks did not find each other again: {first_line(error)}")
        return Report(problem=None)

    def run(self, assigned: RankAssignment) -> Report:
        """Runs one trial, from joining its process group until its memory is free again."""
        assert assigned.assignment is not None
        watch = _Watch(self._keeper, self._lane, self._group, assigned, self._device)
        outcome, place = self._measure(assigned, watch)
        cpu_s, failed = ahead.taken()
        outcome = replace(outcome, parts_s=watch.parts_s(), ahead_cpu_s=cpu_s, ahead_failed=failed)
        outcome = replace(outcome, provenance=provenance(self._device))
        if place is not None:  # compilers that began meanwhile are no strangers on the device either
            place = replace(place, other_pids=tuple({*place.other_pids, *ahead.pids()}))
        ray.get(self._keeper.call.remote(self._lane, "deliver", self._group, assigned.number, outcome, place))
        stays = watch.in_order and outcome.status is RunStatus.COMPLETED
        del outcome
        return self._settle(stays=stays)

    def _measure(self, assigned: RankAssignment, watch: "_Watch") -> tuple[RankOutcome, Place | None]:
        assignment = assigned.assignment
        assert assignment is not None
        attempt, place = assignment.attempt, None
        try:
            if attempt.alone:
                ahead.end()
            place = self._place(assigned)
            leave_to_sampler(assignment.sensed[place.node].cpus)
            engine = watch.over(load_engine(attempt.spec.engine), place)
            ranks = Ranks(
                rank=assigned.rank, world_size=assigned.world_size, local_rank=assigned.local_rank, device=self._device
            )
            self._join(assigned, COLLECTIVE_TIMEOUT_S)
            outcome = measure_trial(
                engine,
                attempt.spec,
                attempt.measure,
                ranks,
                node=place.node,
                device=place.device,
                seed=attempt.seed,
                stop_above_s=attempt.stop_above_s,
                progress=watch.progress,
                await_window=watch.await_window,
            )
        except Exception as error:
            outcome = watch.outcome(error)
            traceback.clear_frames(error.__traceback__)  # its frames hold the engine, and with it memory and groups
            watch.close_engine()
        watch.close()
        return outcome, place

    def _place(self, assigned: RankAssignment) -> Place:
        assignment = assigned.assignment
        assert assignment is not None
        node = assignment.node_names[self._node_id]
        name = sensed_name(
            assignment.spec, assigned.slot.device, self._here.device_uuid, assignment.sensed[node].device_names
        )
        return Place(
            rank=assigned.rank,
            node=node,
            slot=assigned.slot.device,
            device=name,
            device_uuid=self._here.device_uuid,
            pid=os.getpid(),
            other_pids=ahead.pids(),
        )

    def _join(self, assigned: RankAssignment, timeout_s: float) -> None:
        # Engines and their libraries read their rank here too. Ray Train has put its own numbers of workers there.
        os.environ |= {
            "RANK": str(assigned.rank),
            "LOCAL_RANK": str(assigned.local_rank),
            "WORLD_SIZE": str(assigned.world_size),
            "NODE_RANK": str(assigned.slot.node),
        }
        join_groups(
            self._store,
            assigned.meeting,
            rank=assigned.rank,
            world_size=assigned.world_size,
            device=self._device,
            timeout_s=timeout_s,
        )

    def _settle(self, *, stays: bool) -> Report:
        """Cleans up, and reports whether memory came back. The rank stays in its groups, or leaves them."""
        try:
            if not stays:
                leave_groups()
            clean_up(self._device)
            after = leftovers(self._device)
        except Exception as error:  # a device that no longer answers, a group that cannot be ended
            return Report(problem=f"the worker cannot be cleaned up: {first_line(error)}")
        problem = leak(self._before, after, is_first=not self._has_run)
        # What is left now belongs to libraries and compiled graphs. Freezing keeps it out of later collections, several
        # a trial, which then take milliseconds instead of a fifth of a second.
        gc.freeze()
        if not self._has_run:  # the first trial loads libraries; after it the process has no reason to grow
            self._has_run, self._before = True, {**after, "tensors": 0}
        return Report(problem=problem and f"pid {os.getpid()}: {problem}")


class _Watch:
    """The watchdog of one trial on one rank: a thread that goes on when the trial hangs."""

    def __init__(self, keeper: ActorHandle, lane: str, group: int, assigned: RankAssignment, device: str) -> None:
        assert assigned.assignment is not None
        self._keeper, self._device = keeper, device
        self._lane, self._trial = lane, (group, assigned.number)
        self._rank, self._measure = assigned.rank, assigned.assignment.attempt.measure
        self._engine: WatchedEngine | None = None
        self._part: tuple[str, int] = ("start", 0)
        self._part_began_at = 0
        self._begun_s = self._part_since_s = time.monotonic()
        self._parts_s: dict[str, float] = {}
        self._stop_reason: str | None = None
        self.in_order = True
        """False after an error, also one that leaves the result as it is: other ranks may wait for this one."""
        self._shows_spans = assigned.assignment.shows_spans
        self._place: Place | None = None
        self._anchor = ClockAnchor.now()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._look_after, daemon=True, name="watch").start()

    def _call(self, name: str, *arguments: Any, **more: Any) -> Any:
        return self._keeper.call.remote(self._lane, name, *self._trial, *arguments, **more)

    def over(self, engine: Any, place: Place) -> WatchedEngine:
        """Wraps the engine in its watch; its spans carry the place."""
        self._place = place
        self._engine = WatchedEngine(engine, self._failing)
        if self._stop_reason is not None:
            self._engine.stop(self._stop_reason)
        return self._engine

    def progress(self, part: str, done: int, total: int, ago_s: float = 0.0) -> None:
        """Notes the part that the measuring loop begins, or began a time ago."""
        if part == "close":  # nothing is measured any more
            ahead.hold(signal.SIGCONT)
        parts_s = self.parts_s()
        parts_s[self._part[0]] -= ago_s
        self._parts_s, self._part_since_s = parts_s, time.monotonic() - ago_s
        self._part, self._part_began_at = (part, total), (self._engine.num_steps if self._engine else 0) - done

    def parts_s(self) -> dict[str, float]:
        """Returns the seconds of every part so far, by its name."""
        part, own_s = self._part[0], time.monotonic() - self._part_since_s
        return {**self._parts_s, part: self._parts_s.get(part, 0.0) + own_s}

    def await_window(self) -> None:
        """Waits until the lane lets the measured steps begin."""
        assert self._engine is not None
        ahead.hold()
        self._engine.rest(lambda: ray.get(self._call("await_window")))

    def outcome(self, error: BaseException) -> RankOutcome:
        """Turns an error into the outcome that the lane gets."""
        self.in_order = False
        if self._stop_reason is not None:
            status, reason = RunStatus.ABORTED, f"rank {self._rank} was stopped: {self._stop_reason}"
            return RankOutcome(rank=self._rank, status=status, reason=reason, end_mono_ns=time.monotonic_ns())
        self._report_failing(error)
        return failed(self._rank, error)

    def close_engine(self) -> None:
        """Closes the engine after an error. Without one the measuring loop does it."""
        if self._engine is not None:
            try:
                self._engine.close()
            except Exception:  # The trial has failed already, and its groups may be gone.
                # What is left, the memory check finds.
                _log.warning("the engine of a trial that failed could not be closed", exc_info=True)

    def close(self) -> None:
        """Ends the watch."""
        ahead.hold(signal.SIGCONT)
        with self._lock:
            self._closed.set()
        self._engine = None

    def _failing(self, error: BaseException) -> None:
        """Tells the lane of an error before anything is closed: closing may wait for ranks that wait for this one."""
        self.in_order = False
        if self._stop_reason is None:
            self._report_failing(error)
        if self._engine is not None:
            self._engine.before_close = abort_groups

    def _report_failing(self, error: BaseException) -> None:
        keeps_group = is_out_of_memory(error) or isinstance(error, WattuneError)
        outcome = failed(self._rank, error)
        if "profile" in self.parts_s():  # what was measured before stands
            outcome = replace(outcome, status=RunStatus.COMPLETED)
        ray.get(self._call("failing", outcome, keeps_group=keeps_group))

    def _look_after(self) -> None:
        order = self._call("stop_order")
        while not self._closed.is_set():
            ready, _ = ray.wait([order], timeout=WATCH_S)
            if ready:
                self._obey(ray.get(order))
                return
            reason = self._hung()
            if reason is not None and not self._closed.is_set():
                outcome = RankOutcome(
                    rank=self._rank, status=RunStatus.TIMED_OUT, reason=reason, end_mono_ns=time.monotonic_ns()
                )
                ray.get(self._call("hung", replace(outcome, parts_s=self.parts_s()), _stacks()))
                return  # the lane ends this process
            if self._rank == 0:
                (part, total), engine = self._part, self._engine
                done = max(engine.num_steps - self._part_began_at, 0) if engine is not None else 0
                self._call("report", part, done, total)
            if self._shows_spans:
                self._show_spans()

    def _show_spans(self) -> None:
        engine, place = self._engine, self._place
        steps = engine.recent_spans() if engine is not None else []
        if steps and place is not None:
            spans = spans_table(steps, node=place.node, device=place.device, rank=place.rank, anchor=self._anchor)
            self._call("show", place.rank, spans)

    def _hung(self) -> str | None:
        if time.monotonic() - self._begun_s > self._measure.timeout_s:
            return f"rank {self._rank}: longer than measure.timeout_s = {self._measure.timeout_s:g}"
        engine = self._engine
        stall = engine.stall(self._measure.stall_s) if engine is not None else None
        return stall and f"rank {self._rank}: {stall}"

    def _obey(self, order: Order | None) -> None:
        if order is None:
            return
        if order.kind == "dump":
            self._call("report_stacks", self._rank, _stacks())
            return
        with self._lock:  # the groups of a later trial must not be aborted
            if not self._closed.is_set():
                self._stop_reason = order.reason
                if self._engine is not None:
                    self._engine.stop(order.reason)
                abort_groups()


def _stacks() -> str:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read() + begun()


def failed(rank: int, error: BaseException) -> RankOutcome:
    """The outcome of a rank whose engine raised."""
    if is_out_of_memory(error):
        status = RunStatus.OUT_OF_MEMORY
    else:
        status = RunStatus.INFRA_FAILED if is_of_the_machine(error) else RunStatus.CRASHED
    reason = f"rank {rank}: {type(error).__name__}: {first_line(error)}"
    return RankOutcome(rank=rank, status=status, reason=reason, end_mono_ns=time.monotonic_ns())


def sensed_name(spec: TrialSpec, slot: int, uuid: str | None, names: Mapping[str, str]) -> str:
    """The name telemetry gives the device that a rank really drives, however `CUDA_VISIBLE_DEVICES` maps the slot.

    Only NVIDIA's tools agree about uuids (checked on H200); elsewhere it is the slot's. Raises `NodeError`: telemetry
    does not see the device, so its readings would be those of another one.
    """
    if spec.cluster.rank_device.vendor != "nvidia":
        return device_name(spec, slot)
    if uuid is None or uuid not in names:
        seen = ", ".join(f"{name} {known}" for known, name in sorted(names.items(), key=lambda item: item[1])) or "none"
        raise NodeError(
            f"telemetry does not see device {uuid}, which this rank drives; it sees {seen}; let the sampler's "
            "container see all devices of its node, and turn MIG off"
        )
    return names[uuid]
