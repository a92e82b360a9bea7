"""Cluster: silent nodes, and a study whose nodes are slow, fail, leave, freeze, or belong to another job for a while.

A node is a process here that listens as a raylet does and answers a trial with a figure after a moment, since eight
raylets with workers do not fit two processors. What is measured is what decides in a real study: its controller,
folder, knocks at nodes, and ranking. tests/e2e holds the same to Ray: test_autoscaling.py, test_two_nodes.py.
"""

import contextlib
import json
import math
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import ray

from at_scale_rows import Row, measures
from wattune.catalog.hardware import ClusterSpec
from wattune.objective import Question
from wattune.orchestrate import cluster as real
from wattune.orchestrate.attempt import Attempt
from wattune.orchestrate.cluster import Cluster, Node
from wattune.orchestrate.failures import Cause, Failure
from wattune.orchestrate.scheduling import controller as controlling
from wattune.orchestrate.scheduling.controller import StudyController
from wattune.orchestrate.scheduling.study_run import StudyRun
from wattune.plans.axes import Plan
from wattune.ranking.order import rank
from wattune.run import Run, RunStatus
from wattune.search.search_entry import Search
from wattune.search.strategy import make_strategy
from wattune.storage.study import StudyFolder
from wattune.trial import Measure, TrialSpec
from wattune.workload import Workload

from .lanes import MODEL

PLANS, REPEATS, STEP_S = 50, 4, 0.1
BEST, SECOND = 17, 31
SCATTER: Final = 0.004
"""Standard deviation of a figure from run to run, as a share of it."""
ROLES: Final = ("slow", "fails", "leaves", "freezes", "", "held", "held", "held")
"""Of eight nodes. Another job has the last three, and the one before until the study begins: half of them."""
HELD_S, LEAVES_S, FROZEN_S = 8.0, 6.0, (5.0, 9.0)

NODE: Final = """
import json, random, socketserver, sys, time
role, count = sys.argv[1], 0
class Trial(socketserver.StreamRequestHandler):
    def handle(self):
        global count
        line = self.rfile.readline()
        if not line:  # somebody knocked
            return
        count += 1
        asked, begun_s = json.loads(line), time.monotonic()
        time.sleep(asked["step_s"])
        value = asked["true"] * (1 + random.Random(asked["seed"]).gauss(0, asked["scatter"]))
        value *= 0.94 if role == "slow" else 1.0
        fails = role == "fails" and count % 3 == 0
        said = {"value": value, "fails": fails, "took_s": time.monotonic() - begun_s}
        self.wfile.write(json.dumps(said).encode() + b"\\n")
class Node(socketserver.ThreadingTCPServer):
    request_queue_size = 64
with Node(("127.0.0.1", 0), Trial) as server:
    print(server.server_address[1], flush=True)
    server.serve_forever()
"""


def truth(number: int) -> float:
    """Tokens per second of a plan: the best one leads by 3 %, less than the slow node takes."""
    return 1000.0 * (
        1.0 if number == BEST else 0.97 if number == SECOND else 0.6 + 0.3 * random.Random(number).random()
    )


def spec_of(number: int) -> TrialSpec:
    """A plan, told apart by its batch."""
    on = ClusterSpec(device="cpu", num_nodes=1, devices_per_node=1, simulate_sensors_of="h200_sxm")
    batch = Workload(seq_len=128, global_batch_size=number + 1)
    return TrialSpec(model=MODEL, cluster=on, engine="torch", workload=batch, plan=Plan(dtype="fp32"))


class Machine:
    """Nodes as processes, and another job; what a controller asks of a cluster."""

    def __init__(self) -> None:
        self.begun_s = time.monotonic()
        self.processes = [
            subprocess.Popen([sys.executable, "-c", NODE, role], stdout=subprocess.PIPE, text=True) for role in ROLES
        ]
        self.ports = [int(one.stdout.readline()) for one in self.processes if one.stdout is not None]
        self.nodes = [
            Node(node_id=f"{at}", name=f"n{at}", address="", num_cpus=1, num_gpus=0) for at in range(len(ROLES))
        ]
        self.entries = [
            {"NodeID": f"{at}", "Alive": True, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}
            for at, port in enumerate(self.ports)
        ]

    def at_s(self) -> float:
        """Seconds since the study began."""
        return time.monotonic() - self.begun_s

    def act(self) -> None:
        """Ends one node and freezes another when it is time."""
        for at, role in enumerate(ROLES):
            process, now_s = self.processes[at], self.at_s()
            if role == "leaves" and now_s > LEAVES_S and process.poll() is None:
                process.kill()
                process.wait()
            if role == "freezes" and process.poll() is None:
                frozen = FROZEN_S[0] < now_s < FROZEN_S[1]
                os.kill(process.pid, signal.SIGSTOP if frozen else signal.SIGCONT)

    def left(self, nodes: Sequence[Node]) -> list[Node]:
        """Knocks at nodes, as a study does."""
        return real.left(nodes)

    def alive(self) -> list[Node]:
        """Returns the nodes that Ray lists: a dead one for two seconds more."""
        gone = self.at_s() > LEAVES_S + 2
        return [node for node, role in zip(self.nodes, ROLES, strict=True) if not (role == "leaves" and gone)]

    def used_by_others(self) -> Mapping[str, Mapping[str, float]]:
        """Returns what the other job holds."""
        held = self.at_s() < HELD_S
        return {f"{at}": {"CPU": 1.0, "GPU": 0.0} for at, role in enumerate(ROLES) if held and role in ("held", "")}

    def want(self, _spec: ClusterSpec | None) -> bool:
        """Has no autoscaler."""
        return False

    def run(self, attempt: Attempt, study: StudyFolder) -> float:
        """Runs a trial on its node and leaves its result; returns the seconds that the node itself needed."""
        number, begun_ns = attempt.spec.workload.global_batch_size - 1, time.time_ns()
        seed = f"{attempt.trial_id}-{attempt.repeat}-{attempt.role}-{begun_ns}"
        asked = {"true": truth(number), "scatter": SCATTER, "step_s": STEP_S, "seed": seed}
        folder = study.trial(attempt.trial_id, attempt.repeat)
        said: dict[str, Any] = {}
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.ports[int(attempt.nodes[0].node_id)]), 60) as connection,
        ):
            connection.sendall(json.dumps(asked).encode() + b"\n")
            said = json.loads(connection.makefile().readline() or "{}")
        result = Run(
            trial_id=attempt.trial_id,
            repeat=attempt.repeat,
            status=RunStatus.COMPLETED if said else RunStatus.CRASHED,
            reason="" if said else "its workers ended",
            metrics={"tokens_per_s": said["value"]} if said else {},
            quality="publishable",
            tags=dict(attempt.tags),
            numbers=attempt.numbers,
            start_wall_ns=begun_ns,
            end_wall_ns=time.time_ns(),
        )
        if said.get("fails"):
            result = Failure(Cause.DEVICE, "a device was lost", (attempt.nodes[0].name,)).of(result)
        folder.write_result(result)
        return float(said.get("took_s", math.nan))

    def end(self) -> None:
        """Ends its processes."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()


def played(machine: Machine, study: StudyFolder) -> tuple[StudyController, list[tuple[Attempt, float, float]]]:
    """Runs the whole study; returns its controller, and of each trial what its result and its node say it took."""
    specs = [spec_of(number) for number in range(PLANS)]
    question = Question.of("maximize tokens_per_s")
    run = StudyRun(
        measure=Measure(repeats=REPEATS, reference_every=6),
        num_trials=PLANS,
        search=Search(order="listed"),
        question=question,
        limits={},
        tags={},
        finalists=list,
        clusters=(specs[0].cluster,),
        candidates=specs,
    )
    controller = StudyController(study, make_strategy("grid", specs, seed=0), run, lambda _event: None)
    controller.begin()
    nodes: Any = machine
    controller.open(Cluster(nodes=tuple(machine.nodes), driver_node_id="0"), nodes)
    ended: queue.SimpleQueue[tuple[str, Attempt, float]] = queue.SimpleQueue()
    took: list[tuple[Attempt, float, float]] = []
    num_started = num_running = 0
    while controller.ending is None or num_running:
        machine.act()
        while (attempt := controller.next(name := f"t{num_started}")) is not None:
            num_started, num_running = num_started + 1, num_running + 1

            def work(name: str = name, attempt: Attempt = attempt) -> None:
                ended.put((name, attempt, machine.run(attempt, study)))

            threading.Thread(target=work, daemon=True).start()
        with contextlib.suppress(queue.Empty):
            name, attempt, node_s = ended.get(timeout=0.05)
            num_running -= 1
            controller.finish(name, error=False)
            result = study.trial(attempt.trial_id, attempt.repeat).result()
            if result is not None and result.status is RunStatus.COMPLETED:
                took.append((attempt, (result.end_wall_ns - result.start_wall_ns) / 1e9, node_s))
    return controller, took


@measures(timeout_s=300)
def study() -> Iterator[Row]:
    """A study of 200 trials over eight nodes with all that may happen to them at once."""
    controlling.LOOK_EVERY_S = 0.2  # type: ignore[misc]  # its trials take a tenth of a second
    with tempfile.TemporaryDirectory() as scratch:
        folder, machine = StudyFolder(Path(scratch) / "study"), Machine()
        ray.nodes = lambda: machine.entries
        try:
            controller, took = played(machine, folder)
        finally:
            machine.end()
        results, _ = folder.finished()
    question = Question.of("maximize tokens_per_s")
    ranking = rank(results, question)
    best = ranking.feasible[0]
    runs = Counter((run.trial_id, run.repeat) for _, run in results)
    completed = [run for _, run in results if run.status is RunStatus.COMPLETED]
    trials = {(spec_of(number).trial_id, repeat) for number in range(PLANS) for repeat in range(REPEATS)}
    yield Row("study of 200 trials: completed", "trials", bar=200, at_least=True,
              value=len(trials & {(run.trial_id, run.repeat) for run in completed}))  # fmt: skip
    yield Row("study of 200 trials: the best plan leads", "", bar=1, at_least=True,
              value=float(best.spec.workload.global_batch_size - 1 == BEST))  # fmt: skip
    yield Row("study of 200 trials: P(best) of the best plan", "", value=best.best_probability or 0.0)
    wrong = [run for _, run in results if run.status is not RunStatus.COMPLETED]
    yield Row("study of 200 trials: plans blamed for their node", "trials", bar=0, value=len(wrong))
    again = len(took) - len({(one.trial_id, one.repeat) for one, _, _ in took}) + max(runs.values()) - 1
    yield Row("study of 200 trials: measured twice", "trials", bar=0, value=again)
    beside_s = [own_s - node_s for _, own_s, node_s in took]
    yield Row("study of 200 trials: most of a wait in a trial's time", "s", bar=HELD_S / 4, value=max(beside_s))
    waits_s = [run.numbers.node_wait_s for run in completed if run.numbers.node_wait_s]
    yield Row("study of 200 trials: waits for nodes beside trials", "s", bar=0.5, at_least=True, value=sum(waits_s))
    shift = [text for text in ranking.corrections if "n0" in text]
    yield Row("study of 200 trials: the slow node is named", "", bar=1, at_least=True, value=float(bool(shift)))
    yield Row("study of 200 trials: trials left", "trials", bar=0, value=controller.num_left)


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
        nodes = [Node(node_id=f"{at}", name=f"n{at}", address="", num_cpus=1, num_gpus=0) for at in range(128)]
        begun_s = time.perf_counter()
        found = real.left(nodes)
        took_s = time.perf_counter() - begun_s
        begun_s = time.perf_counter()
        alone = [node for node in nodes[-10:] if SimpleNamespace(node=real.left([node])).node]
        series_s = time.perf_counter() - begun_s
    assert [node.name for node in found] == [node.name for node in alone] == [f"n{at}" for at in range(118, 128)]
    yield Row("silent nodes, 10 of 128", "time-outs", bar=1.5, value=took_s / real.KNOCK_S)
    yield Row("silent nodes, 10 of 128, one after another", "time-outs", value=series_s / real.KNOCK_S)
