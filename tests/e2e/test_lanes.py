"""Lanes with real Ray, real workers and engines that fail in every way: what a trial costs the next one."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from script_results import results

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

FAKES = Path(__file__).parents[1] / "fakes"
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

HEAD = """
import json, os, signal, sys, threading, time
from dataclasses import replace
from pathlib import Path
import psutil, ray
from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import ModelSpec
from wattune.orchestrate.attempt import Attempt
from wattune.orchestrate.cluster import connect
from wattune.orchestrate.lanes.client import Lanes
from wattune.orchestrate.run_trial import drive
from wattune.plans.axes import Plan
from wattune.trial import Measure, TrialSpec
from wattune.workload import Workload
from trial_overhead import run_trial
from faulty_engine import GOOD, HANGS, LEAKS, OUT_OF_MEMORY, PROFILE_OUT_OF_MEMORY, RAISES

ROOT = Path(sys.argv[1])
MODEL = ModelSpec(name="tiny", num_layers=2, hidden_size=64, ffn_hidden_size=128, num_heads=4, num_kv_heads=2,
                  vocab_size=256, source="made up")
CLUSTER = ClusterSpec(device="cpu", devices_per_node=2, simulate_sensors_of="h200_sxm")

def request(number, isolation="warm", fault=0, engine="faulty_engine:Faulty", then="", **measure):
    spec = TrialSpec(model=MODEL, cluster=CLUSTER, engine=engine, plan=Plan(dtype="fp32"),
                     workload=Workload(seq_len=32, global_batch_size=4))
    how = Measure(**{"warmup_steps": 2, "min_steps": 4, "min_seconds": 0.3, "timeout_s": 90, **measure})
    folder = ROOT / "study" / "trials" / f"{spec.trial_id}-{number}"
    return Attempt(spec=spec, repeat=number, measure=how, seed=fault, folder=folder, isolation=isolation,
                   then=replace(spec, engine=then) if then else None)

def say(label, result, **more):
    print("RESULT " + json.dumps({"label": label, "status": result.status.value, "reason": result.reason,
                                  "tags": dict(result.tags), "metrics": dict(result.metrics),
                                  "numbers": result.numbers.known, **more}), flush=True)

async def heard(workers, attempt, cluster, free):
    # It keeps the losses of the steps too.
    run = type(workers).run

    async def hear(*given):
        answer = await run(workers, *given)
        ranks = answer.outcomes
        losses = {rank.num_warmup_steps + step: loss for rank in ranks for step, loss in enumerate(rank.losses)}
        (attempt.folder / "losses.json").write_text(json.dumps(losses))
        return answer

    workers.run = hear
    await drive(workers, attempt, cluster, free)

def run(label, lanes, cluster, number, **options):
    asked = request(number, **options)
    result = run_trial(asked, cluster, lanes)
    losses = asked.folder / "losses.json"
    say(label, result, folder=str(asked.folder), losses=json.loads(losses.read_text()) if losses.exists() else {})

def own(text):
    for process in psutil.Process().children(recursive=True):
        try:
            if text in process.name() or text in " ".join(process.cmdline()):
                yield process
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            pass
"""


@pytest.fixture
def script(tmp_path: Path, environment: dict[str, str]) -> Callable[..., dict[str, dict[str, Any]]]:
    """Runs a script in a Ray cluster of its own; gives what it said of each trial, by label."""

    def run(body: str, timeout_s: float = 380) -> dict[str, dict[str, Any]]:
        path = tmp_path / "script.py"
        path.write_text(HEAD + body)
        done = subprocess.run(
            [sys.executable, str(path), str(tmp_path)],
            env=environment
            | {"PYTHONPATH": os.pathsep.join([str(FAKES), str(BENCHMARKS), environment.get("PYTHONPATH", "")])},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return {one["label"]: one for one in results(done.stdout)}

    return run


KILLS = """
def kill_during(label, number, find, lanes, cluster, **options):
    def kill():
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            time.sleep(0.2)
            part = [one.part for one in lanes.progress().values()]
            if part == ["measure"]:
                victim = find()
                if victim is not None:
                    os.kill(victim, signal.SIGKILL)
                    killed.append(victim)
                    return
    killed = []
    thread = threading.Thread(target=kill)
    thread.start()
    run(label, lanes, cluster, number, min_seconds=6, **options)
    thread.join()
    assert killed, "there was nothing to kill"

def worker(): return next((p.pid for p in own("RayTrainWorker")), None)
def keeper(): return next((p.pid for p in own("LaneKeeper")), None)
"""


def test_failures_cost_a_group_at_most_and_never_the_next_trial(script) -> None:
    found = script(
        KILLS
        + """
with connect() as cluster, Lanes(drive) as lanes:
    run("first", lanes, cluster, 0)
    run("large", lanes, cluster, 1, fault=OUT_OF_MEMORY)
    run("profiled", lanes, cluster, 2, fault=PROFILE_OUT_OF_MEMORY, profile_steps=2)
    kill_during("killed", 3, worker, lanes, cluster)
    run("after killed", lanes, cluster, 4)
"""
    )
    assert {label: one["status"] for label, one in found.items()} == {
        "first": "completed",
        "large": "out_of_memory",
        "profiled": "completed",
        "killed": "infra_failed",
        "after killed": "completed",
    }
    assert found["killed"]["tags"]["infra_cause"] == "worker_killed", found["killed"]
    assert found["large"]["reason"].startswith("rank 1 in ")
    assert "4,503,599,627,370,496 bytes asked for" in found["large"]["reason"]
    assert "group_lost" not in found["large"]["tags"] and found["profiled"]["numbers"]["lane_trial"] > 2
    assert "the profiled pass failed: out of memory, rank 1 in profile" in found["profiled"]["tags"]["profile"]
    assert "group_lost" not in found["profiled"]["tags"] and found["profiled"]["metrics"]["step_time_s"] > 0
    assert "ended without reporting" in found["killed"]["reason"]
    assert found["after killed"]["numbers"]["lane_trial"] == 1 and "group_restart_s" in found["after killed"]["numbers"]
    ranks = json.loads((Path(found["first"]["folder"]) / "ranks.json").read_text())["ranks"]
    assert [(one["rank"], one["device"], one["slot"]) for one in ranks] == [(0, "cpu0", 0), (1, "cpu1", 1)]
    assert len({one["pid"] for one in ranks}) == 2


@pytest.mark.slow
def test_a_hang_says_where_it_hangs_and_a_leak_costs_the_workers(script) -> None:
    found = script("""
with connect() as cluster, Lanes(drive) as lanes:
    run("hangs", lanes, cluster, 0, fault=HANGS, stall_s=5)
    run("after hangs", lanes, cluster, 1)
    run("leaks", lanes, cluster, 2, fault=LEAKS)
    run("after leaks", lanes, cluster, 3)
    run("raises", lanes, cluster, 4, fault=RAISES)
    run("after raises", lanes, cluster, 5)
    run("too long", lanes, cluster, 6, min_seconds=40, timeout_s=8)
    run("after too long", lanes, cluster, 7)
""")
    assert found["hangs"]["status"] == "timed_out" and "no step finished for" in found["hangs"]["reason"]
    stacks = {path.name: path.read_text() for path in (Path(found["hangs"]["folder"]) / "stacks").iterdir()}
    assert stacks.keys() == {"rank0.txt", "rank1.txt"}
    assert "in _fail" in stacks["rank1.txt"] and "barrier" in stacks["rank1.txt"]
    assert found["leaks"]["status"] == "completed"
    assert "host tensors more than before" in found["leaks"]["tags"]["group_lost"]
    assert found["raises"]["status"] == "crashed"
    assert found["raises"]["reason"].endswith("rank 1: ValueError: a broken engine")
    assert "ValueError" in found["raises"]["tags"]["group_lost"]
    assert found["too long"]["status"] == "timed_out" and "measure.timeout_s = 8" in found["too long"]["reason"]
    for label in ("after hangs", "after leaks", "after raises", "after too long"):
        assert found[label]["status"] == "completed", found[label]
        assert found[label]["numbers"]["lane_trial"] == 1 and "group_restart_s" in found[label]["numbers"]


@pytest.mark.slow
def test_a_keeper_killed_while_workers_start_takes_no_place_with_it(script) -> None:
    """Ray keeps the placement group of an actor that is killed and started again."""
    found = script(
        KILLS
        + """
from ray.util.placement_group import placement_group_table

def kill_at_start():
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if any(group["state"] == "CREATED" for group in placement_group_table().values()):
            os.kill(keeper(), signal.SIGKILL)
            return
        time.sleep(0.02)

with connect() as cluster, Lanes(drive) as lanes:
    thread = threading.Thread(target=kill_at_start)
    thread.start()
    run("killed", lanes, cluster, 0)
    thread.join()
    run("next", lanes, cluster, 1)
    (left,) = [group for group in placement_group_table().values() if group["state"] != "REMOVED"]
"""
    )
    assert [found[label]["status"] for label in ("killed", "next")] == ["infra_failed", "completed"]
    assert "the process that holds the lanes ended" in found["killed"]["reason"]
    assert found["next"]["numbers"]["lane_trial"] == 1 and found["next"]["numbers"]["group_start_s"] < 60


@pytest.mark.slow
def test_only_what_an_earlier_process_of_the_actor_left_is_removed(script) -> None:
    script("""
from concurrent.futures import ThreadPoolExecutor
from ray.util.placement_group import placement_group, placement_group_table
from wattune.orchestrate.lanes.actor import remove_orphans

def make(label):
    group = placement_group([{"CPU": 0.1}], name=label)
    assert group.wait(30)

@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class Maker:
    def make(self, label):
        with ThreadPoolExecutor(1) as pool:  # as workers are started
            pool.submit(make, label).result()
    def remove(self):
        return remove_orphans()
    def pid(self):
        return os.getpid()

with connect():
    make("driver")
    actors = {"killed": Maker.remote(), "other": Maker.remote()}
    ray.get([actor.make.remote(label) for label, actor in actors.items()])
    before = ray.get(actors["killed"].pid.remote())
    ray.kill(actors["killed"], no_restart=False)
    while ray.get(actors["killed"].pid.remote(), timeout=30) == before:  # it takes calls until it has ended
        time.sleep(0.1)
    assert ray.get(actors["killed"].remove.remote()) == 1
    deadline = time.monotonic() + 30
    states = {"REMOVED": set()}
    while not states["REMOVED"]:
        assert time.monotonic() < deadline, states
        time.sleep(0.2)
        states = {"REMOVED": set(), "CREATED": set()}
        for group in placement_group_table().values():
            states[group["state"]].add(group["name"])
    assert states == {"REMOVED": {"killed"}, "CREATED": {"other", "driver"}}, states
    assert ray.get(actors["killed"].remove.remote()) == 0
""")


@pytest.mark.slow
def test_warm_and_fresh_workers_measure_the_same(script) -> None:
    found = script(
        """
with connect() as cluster, Lanes(heard) as lanes:
    for number in range(5):
        run(f"warm {number}", lanes, cluster, number, min_seconds=2, min_steps=20)
    for number in range(3):
        run(f"fresh {number}", lanes, cluster, 10 + number, isolation="fresh", min_seconds=2, min_steps=20)
    run("last", lanes, cluster, 20, then="torch", min_seconds=40)
    run("next", lanes, cluster, 21, engine="torch")
"""
    )
    start_s = {label: found[label]["numbers"]["group_start_s"] for label in ("last", "next")}
    assert start_s["next"] < start_s["last"] / 3, "its workers started beside the last trial"
    for label in start_s:
        assert found.pop(label)["status"] == "completed"
    assert {one["status"] for one in found.values()} == {"completed"}
    kinds = {
        kind: [one["metrics"]["step_time_s"] for label, one in found.items() if label.startswith(kind)]
        for kind in ("warm", "fresh")
    }
    # Intervals of the two kinds overlap, widened by what one kind differs from itself.
    spread = max(max(times) - min(times) for times in kinds.values())
    assert max(kinds["warm"]) + spread >= min(kinds["fresh"]) and max(kinds["fresh"]) + spread >= min(kinds["warm"])
    # Of every step that more than one trial measured, the loss is the same to the bit.
    losses: dict[str, set[float]] = {}
    for one in found.values():
        for step, loss in one["losses"].items():
            losses.setdefault(step, set()).add(loss)
    assert len(losses) > 20 and {len(different) for different in losses.values()} == {1}
    assert [found[f"fresh {number}"]["numbers"]["lane_trial"] for number in range(3)] == [1] * 3
    assert found["warm 4"]["numbers"]["lane_trial"] == 5
