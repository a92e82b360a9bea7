"""Cluster: silent nodes, and a study whose nodes are slow, fail, leave, freeze, or belong to another job for a while.

The study runs on eight raylets of this machine. What is real: Ray's nodes and their ends, Ray Tune, Ray Train and its
workers' processes, their places, the other job, the process that drives the trials, its lanes, simulated sensors,
analysis, folder and ranking. What is made up: a rank's steps, whose times a worker makes from its plan and its node,
and waits for; samplers, which read nothing. Real ranks of eight nodes do not fit two processors.
"""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import psutil
import ray
from fake_ranks import Host, _Sensors
from trial_overhead import MODEL

from at_scale_rows import Row, measures
from wattune.catalog.hardware import ClusterSpec
from wattune.objective import Question
from wattune.orchestrate import cluster as real
from wattune.orchestrate.ask import on_node
from wattune.orchestrate.cluster import Node, connect
from wattune.orchestrate.lanes import client, train_runs
from wattune.orchestrate.lanes.actor import LaneKeeper
from wattune.orchestrate.run_study import run_study
from wattune.orchestrate.scheduling.controller import StudyController
from wattune.orchestrate.scheduling.study_run import StudyRun
from wattune.plans.axes import Plan
from wattune.ranking.order import rank
from wattune.run import RunStatus
from wattune.search.search_entry import Search
from wattune.search.strategy import Problem, make_strategy
from wattune.storage.study import StudyFolder
from wattune.trial import Measure, TrialSpec
from wattune.units import NS_PER_S
from wattune.workload import Workload

PLANS, REPEATS = 50, 4
BEST, SECOND = 17, 31
ROLES: Final = ("slow", "fails", "leaves", "freezes", "held0", "held1", "held2", "held3")
"""Nodes by name. Another job has the last four when the study begins, and takes the one that fails when it can."""
LEAVES_AT, FROZEN_AT, FREED_AT = 40, 70, 25
"""Results after which a node leaves, one is stopped for `FROZEN_S`, and the other job frees its four nodes."""
FROZEN_S, TAKEN_S = 10.0, 12.0

OTHER_JOB: Final = """
import sys, time, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
ray.init(log_to_driver=False, logging_level="ERROR")
@ray.remote(num_cpus=2)
class Hold:  # a task that waits for an object would lend its processors meanwhile
    def since(self): return time.time()
ids = {one["Labels"]["wattune.io/domain"]: one["NodeID"] for one in ray.nodes()}
def hold(name): return Hold.options(scheduling_strategy=NodeAffinitySchedulingStrategy(ids[name], soft=False)).remote()
held = {name: hold(name) for name in ids if name.startswith("held")}
since = {name: ray.get(one.since.remote()) for name, one in held.items()}
print("holds", flush=True)
sys.stdin.readline()
for name, one in held.items():
    ray.kill(one)
    print(name, since[name], time.time(), flush=True)
taken = hold("fails")
since = ray.get(taken.since.remote())
time.sleep(float(sys.argv[1]))
print("fails", since, time.time(), flush=True)
"""
"""Holds nodes until it is told to free them, and then another one for some seconds, as soon as it can have it."""


def truth(number: int) -> float:
    """Tokens per second of a plan, in thousands: the best one leads by 3 %, less than the slow node takes."""
    return 25.0 * (1.0 if number == BEST else 0.97 if number == SECOND else 0.6 + 0.3 * random.Random(number).random())


TRUTH: Final = {number + 1: truth(number) for number in range(PLANS)}
"""By a plan's batch, which tells it apart."""


def spec_of(number: int) -> TrialSpec:
    """A plan, told apart by its batch."""
    on = ClusterSpec(device="cpu", num_nodes=1, devices_per_node=1, simulate_sensors_of="h200_sxm")
    batch = Workload(seq_len=128, global_batch_size=number + 1)
    return TrialSpec(model=MODEL, cluster=on, engine="torch", workload=batch, plan=Plan(dtype="fp32"))


def made_up_rank(true: dict[int, float]) -> Callable[[dict[str, Any]], None]:
    """Returns what a worker of Ray Train runs in the place of an engine's ranks; it loads no torch."""

    def serve(config: dict[str, Any]) -> None:
        import os
        import random
        import time

        import ray

        from wattune.clock import ClockAnchor
        from wattune.orchestrate.lanes.messages import Place, Report, WorkerPlace, received
        from wattune.orchestrate.lanes.post import nearest
        from wattune.run import RunStatus
        from wattune.workers.outcome import RankOutcome
        from wattune.workers.phases import Span, spans_table

        lane, own = config["lane"], ray.get_runtime_context()
        post = nearest(config)

        def call(name: str, *given: Any) -> Any:
            return ray.get(post.call.remote(lane, name, *given))

        node_id, pid = own.get_node_id(), os.getpid()
        (role,) = (one["Labels"]["wattune.io/domain"] for one in ray.nodes() if one["NodeID"] == node_id)
        me = ray.cloudpickle.dumps(own.current_actor)
        here = WorkerPlace(number=0, node_id=node_id, device_index=0, device_uuid=None, pid=pid, actor=me)
        group, report, count = call("join", config["run"], here), None, 0
        while (part := received(call("next_trial", group, 0, report))) is not None:
            report = Report(problem=None, after=part.number)
            if part.assignment is None:
                continue
            attempt, count = part.assignment.attempt, count + 1
            batch = attempt.spec.workload.global_batch_size
            dice = random.Random(f"{attempt.name}-{attempt.role}-{time.time_ns()}")
            rate = 1000 * true[batch] * dice.gauss(1, 0.004) * (0.94 if role == "slow" else 1.0)
            step_s = 128 * batch / rate
            call("await_window", group, part.number)
            if role == "fails" and count % 3 == 0:
                os.kill(pid, signal.SIGKILL)
            anchor, begun_s, steps, start_ns = ClockAnchor.now(), time.monotonic(), [], time.monotonic_ns()
            for step in range(-2, 12):
                took_s, asked_s = step_s * dice.gauss(1, 0.002), time.monotonic()
                time.sleep(took_s)
                late_s = time.monotonic() - asked_s - took_s
                took_s += late_s if late_s > 4 else 0.0  # it was frozen; a busy machine is not that late
                ends = [start_ns + int(took_s * 1e9 * share) for share in (0.0, 0.3, 0.9, 1.0)]
                phases = zip(("forward", "backward", "optimizer"), ends, ends[1:], strict=False)
                spans = [Span("step", ends[0], ends[3]), *(Span(*each) for each in phases)]
                steps.append((step, spans))
                start_ns = ends[3]
            node = part.assignment.node_names[node_id]
            outcome = RankOutcome(
                rank=0, status=RunStatus.COMPLETED, num_warmup_steps=2, steady=True, build_time_s=0.01,
                spans=spans_table(steps, node=node, device="cpu0", rank=0, anchor=anchor), losses=(1.0,) * 12,
                parts_s={"start": 0.0, "build": 0.01, "measure": time.monotonic() - begun_s},
                end_mono_ns=time.monotonic_ns(),
            )  # fmt: skip
            place = Place(rank=0, node=node, slot=0, device="cpu0", device_uuid=None, pid=pid)
            call("deliver", group, part.number, outcome, place)

    return serve


class MadeUpKeeper(LaneKeeper):
    """The process that drives the trials, whose workers have made-up ranks."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        rank = made_up_rank(TRUTH)
        train_runs._of_ranks = lambda *_: partial(train_runs._Trainer, rank)
        self._sensors = on_node(Host, self._node_id, max_concurrency=1000).remote()  # not on a node that leaves

    def telemetry_actors(self, nodes: Sequence[Node], backends: Sequence[str]) -> list[Any]:  # noqa: ARG002
        """Sensors that read nothing."""
        return [_Sensors(self._sensors, node.name) for node in nodes]


def of_raylet(node_id: str) -> list[psutil.Process]:
    """The processes of one node: its raylet, which listens at its port, and those that it started."""
    (port,) = (one["NodeManagerPort"] for one in ray.nodes() if one["NodeID"] == node_id)
    (pid,) = {one.pid for one in psutil.net_connections("tcp") if one.laddr.port == port and one.status == "LISTEN"}
    assert pid is not None
    raylet = psutil.Process(pid)
    return [raylet, *raylet.children(recursive=True)]


class Fate(threading.Thread):
    """Does to the nodes what is to be done to them, when so many results are there."""

    def __init__(self, raylets: Any, study: StudyFolder, ids: dict[str, str], job: "subprocess.Popen[str]") -> None:
        super().__init__(daemon=True)
        self.raylets, self.study, self.ids, self.job = raylets, study, ids, job
        self.frozen: list[psutil.Process] = []
        self.done: list[str] = []
        self.over = threading.Event()

    def after(self, num_results: int) -> bool:
        """Waits for so many results; returns whether the study goes on."""
        while len(list(self.study.path.glob("trials/*/run.json"))) < num_results:
            if self.over.wait(0.2):
                return False
        return True

    def run(self) -> None:
        """Frees the nodes that the other job holds, ends a node, and freezes one."""
        if self.after(FREED_AT):
            assert self.job.stdin is not None
            self.job.stdin.write("go on\n")
            self.job.stdin.flush()
            self.done.append("freed")
        if self.after(LEAVES_AT):
            self.raylets("kill leaves")
            self.done.append("left")
        if self.after(FROZEN_AT):
            self.frozen = of_raylet(self.ids["freezes"])
            for process in self.frozen:
                process.suspend()
            self.over.wait(FROZEN_S)
            self.thaw()
            self.done.append("frozen")

    def thaw(self) -> None:
        """Lets the frozen node go on."""
        for process in self.frozen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def played(folder: StudyFolder, scratch: Path) -> tuple[StudyController, dict[str, str], str]:
    """Runs the whole study; returns its controller, names of nodes by role, and what the other job says it held."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "fakes"))
    from raylet_cluster import raylet_cluster

    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    specs = [spec_of(number) for number in range(PLANS)]
    run = StudyRun(
        measure=Measure(repeats=REPEATS, reference_every=6, profile_steps=0),
        num_trials=PLANS,
        search=Search(order="listed"),
        question=Question.of("maximize tokens_per_s"),
        limits={},
        tags={},
        finalists=list,
        clusters=(specs[0].cluster,),
        candidates=specs,
    )
    with contextlib.ExitStack() as held:
        raylets = held.enter_context(raylet_cluster(scratch, environment))
        for role in ROLES:
            raylets(f"add {role}")
        os.environ |= {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": environment["PYTHONPATH"]}
        held.enter_context(patch.object(client, "LaneKeeper", MadeUpKeeper))
        cluster = held.enter_context(connect(raylets.address))
        # Ray's own niceness of workers would keep that job from its nodes on a busy machine.
        other = {"RAY_ADDRESS": raylets.address, "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
        job = held.enter_context(
            subprocess.Popen([sys.executable, "-c", OTHER_JOB, str(TAKEN_S)], stdin=subprocess.PIPE, text=True,
                             stdout=subprocess.PIPE, env=environment | other)
        )  # fmt: skip
        held.callback(job.kill)
        assert job.stdout is not None and job.stdout.readline() == "holds\n"
        names = {node.domain: node.name for node in cluster.nodes}
        controller = StudyController(folder, make_strategy("grid", Problem(specs=specs, seed=0)), run, print_event)
        controller.begin()
        fate = Fate(raylets, folder, {node.domain: node.node_id for node in cluster.nodes}, job)
        fate.start()
        try:
            ending = run_study(folder, controller, cluster)
        finally:
            fate.over.set()
            fate.thaw()
        assert ending == "finished" and fate.done == ["freed", "left", "frozen"], (ending, fate.done)
        return controller, names, job.stdout.read()


def print_event(event: Any) -> None:
    """Says how far the study is, in the log of the row."""
    if getattr(event, "kind", "") == "finished":
        result, nodes = event.result, ",".join(event.nodes)
        print(time.strftime("%T"), event.num_left, nodes, result.status, result.reason[:100], flush=True)
    elif waits := getattr(event, "waits_for", ""):
        print(time.strftime("%T"), "waits for", waits, flush=True)


@measures(timeout_s=2400)
def study() -> Iterator[Row]:
    """A study of 200 trials over eight raylets with all that may happen to them at once."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = StudyFolder(Path(scratch) / "study")
        controller, names, said = played(folder, Path(scratch))
        results, unreadable = folder.finished()
        attempts = [one for trial in folder.trials() for one in trial.attempts()]
    ranking = rank(results, Question.of("maximize tokens_per_s"))
    best, runs = ranking.feasible[0], [run for _, run in results]
    completed = [run for run in runs if run.status is RunStatus.COMPLETED]
    trials = {(spec_of(number).trial_id, repeat) for number in range(PLANS) for repeat in range(REPEATS)}
    yield Row("study of 200 trials: completed", "trials", bar=200, at_least=True,
              value=len(trials & {(run.trial_id, run.repeat) for run in completed}))  # fmt: skip
    yield Row("study of 200 trials: the best plan leads", "", bar=1, at_least=True,
              value=float(best.spec.workload.global_batch_size - 1 == BEST))  # fmt: skip
    yield Row("study of 200 trials: P(best) of the best plan", "", value=best.best_probability or 0.0)
    wrong = len(runs) - len(completed) + len(unreadable)
    yield Row("study of 200 trials: plans blamed for their node", "trials", bar=0, value=wrong)
    twice = [one for one in attempts if one.status is RunStatus.COMPLETED]
    again = len(twice) + len(runs) - len({(run.trial_id, run.repeat) for run in runs})
    yield Row("study of 200 trials: measured twice", "trials", bar=0, value=again)
    failed = Counter(one.tags.get("infra_nodes") or one.tags["nodes"] for one in attempts)
    print("attempts that failed, by node at fault:", failed, "of", names, said, flush=True)
    at_fault = {names["fails"], names["leaves"]}
    yield Row("study of 200 trials: attempts that failed", "attempts", value=len(attempts))
    yield Row("study of 200 trials: of them told of a sound node", "attempts", bar=0,
              value=sum(count for nodes, count in failed.items() if nodes not in at_fault))  # fmt: skip
    yield Row("study of 200 trials: most of a wait in a trial's time", "s", bar=1,
              value=max(in_hold_s(run, names, said) for run in completed))  # fmt: skip
    waits_s = [run.numbers.node_wait_s for run in (*completed, *attempts) if run.numbers.node_wait_s]
    yield Row("study of 200 trials: waits for nodes beside trials", "s", bar=TAKEN_S / 2, at_least=True,
              value=sum(waits_s))  # fmt: skip
    shift = [text for text in ranking.corrections if names["slow"] in text]
    print("corrections:", ranking.corrections, flush=True)
    yield Row("study of 200 trials: the slow node is named", "", bar=1, at_least=True, value=float(bool(shift)))
    yield Row("study of 200 trials: trials left", "trials", bar=0, value=controller.num_left)


def in_hold_s(run: Any, names: dict[str, str], said: str) -> float:
    """Seconds of a run's own time in which another job held its node."""
    told = [line.split() for line in said.splitlines() if line.partition(" ")[0] in ROLES]  # Ray speaks there too
    held = [(names[name], float(begun), float(ended)) for name, begun, ended in told]
    start_s, end_s = run.start_wall_ns / NS_PER_S, run.end_wall_ns / NS_PER_S
    return max(
        (max(0.0, min(end_s, ended) - max(start_s, begun)) for name, begun, ended in held if name == run.tags["nodes"]),
        default=0.0,
    )


@measures(timeout_s=120)
def silent() -> Iterator[Row]:
    """Ten nodes of 128 that take no connection: time-outs until they are known."""
    with contextlib.ExitStack() as held:
        loud = [held.enter_context(socket.create_server(("127.0.0.1", 0), backlog=16)) for _ in range(118)]
        mute = [held.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0)) for _ in range(10)]
        for server in mute:  # with its queue full a connection waits for nobody
            for _ in range(3):
                caller = held.enter_context(socket.socket())
                caller.setblocking(False)
                caller.connect_ex(server.getsockname())
        ports = [server.getsockname()[1] for server in (*loud, *mute)]
        entries = [
            {"NodeID": f"{at}", "Alive": True, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}
            for at, port in enumerate(ports)
        ]
        ray.nodes = lambda: entries
        nodes = [Node(node_id=f"{at}", name=f"n{at}", num_cpus=1, num_gpus=0) for at in range(128)]
        begun_s = time.perf_counter()
        found = real.left(nodes)
        took_s = time.perf_counter() - begun_s
        begun_s = time.perf_counter()
        alone = [node for node in nodes[-10:] if SimpleNamespace(node=real.left([node])).node]
        series_s = time.perf_counter() - begun_s
    assert [node.name for node in found] == [node.name for node in alone] == [f"n{at}" for at in range(118, 128)]
    yield Row("silent nodes, 10 of 128", "time-outs", bar=1.5, value=took_s / real.KNOCK_S)
    yield Row("silent nodes, 10 of 128, one after another", "time-outs", value=series_s / real.KNOCK_S)
