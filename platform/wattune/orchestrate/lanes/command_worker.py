"""The loop of a lane's worker that runs commands: one worker a node, which trains nothing itself.

It joins no process group and touches no device. It starts each trial's command, watches it, and ends all of it.
"""

import contextlib
import os
import random
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import ray
from ray import cloudpickle
from ray.actor import ActorHandle
from ray.train import get_context

from wattune.clock import ClockAnchor
from wattune.errors import NodeError, WattuneError
from wattune.masking import masked_arguments, masked_environment
from wattune.orchestrate.failures import is_of_the_machine
from wattune.orchestrate.lanes.messages import (
    FINISH,
    Assignment,
    Place,
    RankAssignment,
    Report,
    WorkerPlace,
    device_name,
    received,
)
from wattune.orchestrate.ray_settings import normal_priority
from wattune.orchestrate.telemetry_actor import leave_to_sampler
from wattune.plans.program import RUN_TIME, Program, filled, filled_arguments, values_of
from wattune.run import RunStatus
from wattune.steps.source import parse_source
from wattune.steps.table import spans_of
from wattune.trial import TrialSpec
from wattune.version import __version__
from wattune.workers.command.environment import command_environment
from wattune.workers.command.measured_run import MeasuredRun
from wattune.workers.command.program_run import ProgramOutcome, StepsByRank
from wattune.workers.command.warm_starts import WarmStarts
from wattune.workers.outcome import RankOutcome
from wattune.workers.provenance import SETTINGS, driver_version
from wattune.workers.watchdog import Order

SHOWN_S: Final = 4.0
"""Age of the steps that a running trial shows."""


PORTS: Final = (*range(20_000, 30_000), *range(61_000, 65_536))
"""Ports where the processes of a command may meet, less those that the kernel gives out.

They lie between Ray's ports of workers (10,002 to 19,999) and Kubernetes' ports of nodes (30,000 to 32,767), and above
the range that Linux gives out (32,768 to 60,999). All three are defaults.
"""

GIVEN_OUT: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""First and last port that the kernel gives to those who ask for any."""

_TRIES: Final = 100


def held_port() -> socket.socket:
    """Returns a socket that holds a free port for a command; nobody listens on it.

    Between its release and the command's own use of it lie the seconds that the command takes to start, a minute on a
    busy machine. The kernel must give the port to nobody else then: it once did, and `torchrun` took a stranger's
    server for its own. So the port is outside of the kernel's range, where one is free.
    """
    try:
        first, last = (int(one) for one in GIVEN_OUT.read_text().split())
    except (OSError, ValueError):  # not Linux
        first, last = 0, 65_535
    own = [port for port in PORTS if not first <= port <= last]
    for port in (*random.sample(own, min(_TRIES, len(own))), 0):  # the last is any port that the kernel chooses
        held = socket.socket()  # without SO_REUSEADDR, with which two may hold the same port
        with contextlib.suppress(OSError):
            held.bind(("", port))
            return held
        held.close()
    raise NodeError("this node has no free port where the processes of a command can meet; end what uses its ports")


def serve_commands(config: dict[str, Any]) -> None:
    """Runs commands until the lane has no trial left: `wattune.orchestrate.lanes.worker.serve` for commands."""
    normal_priority()
    worker = _CommandWorker(config["keeper"], config["lane"], config["run"])
    report = worker.report()
    with contextlib.closing(worker.warm):
        while (assigned := worker.next_trial(report)) is not None:
            if assigned.assignment is not None:
                worker.run(assigned, assigned.assignment)
            report = replace(worker.report(), after=assigned.number)


class _CommandWorker:
    """The worker of one node."""

    def __init__(self, keeper: ActorHandle, lane: str, run: int) -> None:
        self._keeper, self._lane = keeper, lane
        self._node_id = ray.get_runtime_context().get_node_id()
        self._address = ray.util.get_node_ip_address()
        self._meeting: socket.socket | None = None
        self.warm = WarmStarts()
        here = WorkerPlace(
            number=get_context().get_world_rank(),
            node_id=self._node_id,
            device_index=0,
            device_uuid=None,
            pid=os.getpid(),
            actor=cloudpickle.dumps(ray.get_runtime_context().current_actor),
        )
        self._number = here.number
        self._group: int = ray.get(keeper.call.remote(lane, "join", run, here))

    def report(self) -> Report:
        """Returns what the lane has to know before the next trial: where its processes may meet."""
        if self._meeting is None:
            self._meeting = held_port()  # until the command starts
        return Report(problem=None, rendezvous=f"{self._address}:{self._meeting.getsockname()[1]}")

    def next_trial(self, report: Report) -> RankAssignment | None:
        """Waits for a trial of the lane; None tells this worker to end."""
        call = self._keeper.call.remote(self._lane, "next_trial", self._group, self._number, report)
        return received(ray.get(call))

    def run(self, assigned: RankAssignment, assignment: Assignment) -> None:
        """Runs this node's part of a trial, and delivers what became of it."""
        begun_s = time.monotonic()
        folder = Path(tempfile.mkdtemp(prefix="wattune-command-"))  # for this user alone
        places: tuple[Place, ...] = ()
        try:
            outcome, places = self._measured(assigned, assignment, folder)
        except Exception as error:  # of any class: the lane waits for an answer
            outcome = _failed(assigned.rank, error)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        parts_s = {} if outcome.command is None else outcome.command.parts_s
        start_s = max(time.monotonic() - begun_s - sum(parts_s.values()), 0.0)
        outcome = replace(outcome, parts_s={"start": start_s, **parts_s})
        ray.get(self._keeper.call.remote(self._lane, "deliver", self._group, assigned.number, outcome, places))

    def _measured(
        self, assigned: RankAssignment, assignment: Assignment, folder: Path
    ) -> tuple[RankOutcome, tuple[Place, ...]]:
        spec = assignment.spec
        assert spec.program is not None, "a command has a program"
        node = assignment.node_names[self._node_id]
        sensed = assignment.sensed[node]
        devices = _devices(spec, assigned.rank, sensed.device_names)
        leave_to_sampler(sensed.cpus)
        for name in ("steps", "output"):
            (folder / name).mkdir(mode=0o700)
        values = {**values_of(spec, spec.program.flags), **self._run_time(assigned, assignment, folder / "output")}
        arguments = filled_arguments(spec.program.command, values)
        environment = command_environment(os.environ, _variables(spec.program, values))
        if spec.program.warm:
            arguments, environment = self.warm.prepared(arguments, environment)
        anchor = ClockAnchor.now()
        calls = _Calls(self._keeper, (self._lane, self._group, assigned.number), assigned, assignment)
        if self._meeting is not None:  # the command's own processes listen there from now on
            self._meeting.close()
            self._meeting = None
        found = MeasuredRun(
            arguments,
            environment,
            steps_folder=folder / "steps",
            source=parse_source(spec.program.steps),
            measure=assignment.attempt.measure,
            leads=assigned.rank == 0,
            stop_above_s=assignment.attempt.stop_above_s,
            orders=calls.order,
            progress=calls.progress,
            finishing=calls.finishing,
            show=lambda steps: calls.show(steps, node, devices, anchor),
            others=self.warm.pids,
        ).until_over()
        devices = found.devices(devices, sensed.device_names)
        places = tuple(
            Place(
                rank=rank,
                node=node,
                slot=index,
                device=device,
                device_uuid=None,
                pid=int(found.headers.get(rank, {}).get("pid", os.getpid())),
                other_pids=found.pids,
            )
            for index, (rank, device) in enumerate(sorted(devices.items()))
        )
        # Names in place of what is of this run alone: a port, a folder.
        shown = filled_arguments(spec.program.command, {**values, **{name: f"{{{name}}}" for name in RUN_TIME}})
        provenance = _provenance(environment, shown) | ({"warm": self.warm.told()} if spec.program.warm else {})
        return _outcome(assigned.rank, found, provenance), places

    def _run_time(self, assigned: RankAssignment, assignment: Assignment, output: Path) -> dict[str, Any]:
        """Returns the values that only a running trial has."""
        where = assigned.rendezvous
        if assignment.spec.cluster.num_nodes == 1:
            where = f"127.0.0.1:{where.rpartition(':')[2]}"
        names = (assigned.rank, where, str(output), assignment.attempt.name)
        return dict(zip(("node_rank", "rendezvous", "output_dir", "trial"), names, strict=True))


class _Calls:
    """Calls of a running command's watch to the lane."""

    def __init__(
        self, keeper: ActorHandle, key: tuple[str, int, int], assigned: RankAssignment, assignment: Assignment
    ) -> None:
        self._keeper, self._key, self._assigned, self._assignment = keeper, key, assigned, assignment
        self._pending = self._call("stop_order")
        self._over = False

    def _call(self, name: str, *arguments: Any) -> Any:
        lane, group, number = self._key
        return self._keeper.call.remote(lane, name, group, number, *arguments)

    def order(self, timeout_s: float) -> Order | None:
        """Waits for an order. A lane that is gone ends the trial."""
        if self._over:
            time.sleep(timeout_s)
            return None
        ready, _ = ray.wait([self._pending], timeout=timeout_s)
        if not ready:
            return None
        self._over = True
        return ray.get(self._pending) or Order("free", "its lane has ended")

    def progress(self, part: str, done: int, total: int) -> None:
        """Tells the lane how far the leading node is."""
        if self._assigned.rank == 0:
            self._call("report", part, done, total)

    def finishing(self) -> None:
        """Tells the other nodes that enough was measured."""
        if self._assignment.spec.cluster.num_nodes > 1:
            self._over = True
            ray.get(self._call("report", FINISH, 0, 0))

    def show(self, steps: StepsByRank, node: str, devices: Mapping[int, str], anchor: ClockAnchor) -> None:
        """Sends the last seconds of every rank, where a limit on simulated power is watched."""
        if not self._assignment.shows_spans or not any(steps.values()):
            return
        since_ns = time.monotonic_ns() - int(SHOWN_S * 1e9)
        recent = {rank: [step for step in each if step.end_mono_ns >= since_ns] for rank, each in steps.items()}
        for rank, device in devices.items():
            own = recent if recent.get(rank) else {rank: next((each for each in recent.values() if each), [])}
            spans = spans_of(own, node=node, devices={rank: device}, anchor=anchor)
            if spans.num_rows:
                self._call("show", rank, spans)


def _variables(program: Program, values: Mapping[str, Any]) -> dict[str, str]:
    return {name: filled(template, values) for name, template in program.environment}


def _devices(spec: TrialSpec, node_rank: int, names: Mapping[str, str]) -> dict[int, str]:
    """Returns telemetry's name of the device of each rank on a node, by the order in which the command sees them.

    Raises `NodeError` where telemetry does not see a device that Ray gave the command.
    """
    count = spec.cluster.devices_per_node
    ranks = range(node_rank * count, (node_rank + 1) * count)
    vendor = spec.cluster.rank_device.vendor
    seen = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    if vendor != "nvidia" or not seen:
        return {rank: device_name(spec, slot) for slot, rank in enumerate(ranks)}
    found = [names.get(one, f"gpu{one}" if one.isdigit() else "") for one in seen[:count]]
    missing = [one for one, name in zip(seen, found, strict=False) if name not in names.values()]
    if len(found) < count or missing:
        raise NodeError(
            f"telemetry does not see device {', '.join(missing) or 'of every rank'}, which the command drives; it sees "
            f"{', '.join(sorted(names.values())) or 'none'}; let the sampler's container see all devices of its node, "
            "and turn MIG off"
        )
    return dict(zip(ranks, found, strict=True))


def _provenance(environment: Mapping[str, str], arguments: Sequence[str]) -> dict[str, str]:
    """Returns what a command runs with, as far as anybody knows from outside."""
    found = {"version.wattune": __version__, "command": " ".join(masked_arguments(arguments))}
    shown = masked_environment({name: value for name, value in environment.items() if name.startswith(SETTINGS)})
    found |= {f"env.{name}": value for name, value in sorted(shown.items())}
    driver = driver_version()
    return found | ({"version.driver": driver} if driver else {})


def _outcome(rank: int, found: ProgramOutcome, provenance: Mapping[str, str]) -> RankOutcome:
    facts = {"steps_source": found.source}
    if found.problems:
        facts["steps_problems"] = "; ".join(found.problems)[:1000]
    return RankOutcome(
        rank=rank,
        status=found.status,
        reason=found.reason,
        num_warmup_steps=found.first_index,
        steady=found.steady,
        stopped_early=found.stopped_early,
        build_time_s=found.startup_s or 0.0,
        memory_peak_bytes=max(found.peaks.values(), default=0),
        facts=facts,
        provenance=provenance,
        end_mono_ns=found.over_mono_ns,
        command=found,
    )


def _failed(rank: int, error: Exception) -> RankOutcome:
    status = RunStatus.INFRA_FAILED if is_of_the_machine(error) else RunStatus.CRASHED
    words = str(error) if isinstance(error, WattuneError) else f"{type(error).__name__}: {error}"
    reason = f"node {rank}: {' '.join(words.split())}"
    return RankOutcome(rank=rank, status=status, reason=reason, end_mono_ns=time.monotonic_ns())
