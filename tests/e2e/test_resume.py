"""Finished trials, and the study itself, survive when the processes of a study are killed."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from raylet_cluster import Raylets, raylet_cluster

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]


def in_flight(study: Path) -> set[str]:
    """Trials that were begun and have no result."""
    return {path.parent.name for path in study.glob("trials/*/spec.json") if not (path.parent / "run.json").exists()}


def second_measures(start_wattune: Callable[..., Any], space: Path) -> Any:
    """Runs a study of two trials; its command, once one is done and the other measures."""
    running = start_wattune("run", space)
    running.says(r"^\[1/2\].* measure [1-9]")
    return running


@pytest.mark.usefixtures("in_foreground")
def test_ctrl_c_and_a_killed_driver_lose_nothing_that_was_finished(
    start_wattune, wattune, write_two_trials, results, storage: Path, go_on_standing_cluster
) -> None:
    """One study is told to end, continued by the same command, killed, and continued again until it is done.

    A cluster of its own ends with it, and the later calls are on another one.
    """
    space, study = write_two_trials("stopped", min_seconds=6, num_ranks=1), storage / "stopped"
    running = second_measures(start_wattune, space)
    running.process.send_signal(signal.SIGINT)
    assert running.ends(90) == 130, running.text
    assert "stopping: running trials end" in running.text
    assert "Traceback" not in running.text
    assert "1 interrupted: run again by the same command" in running.text and "failed" not in running.text
    assert sorted(one["status"] for one in results(study).values()) == ["completed", "interrupted"]
    assert (study / "report.html").exists() and (storage / "mlflow.db").exists()
    (finished,) = (name for name, one in results(study).items() if one["status"] == "completed")
    written_ns = (study / "trials" / finished / "run.json").stat().st_mtime_ns

    go_on_standing_cluster()
    running = second_measures(start_wattune, space)
    (cut_off,) = in_flight(study)
    running.process.kill()
    running.ends(30)

    done = wattune("run", space, "--json")
    assert done.returncode == 0, done.stderr
    assert "1 skipped, done before: 1 completed" in done.stderr
    assert "1 trial(s) to run, 1 begun before among them" in done.stderr
    outcome = json.loads(done.stdout)
    assert (outcome["finished"], outcome["ending"], len(outcome["feasible"])) == (True, "finished", 2)
    assert results(study).keys() == {finished, cut_off}
    assert (study / "trials" / finished / "run.json").stat().st_mtime_ns == written_ns
    again = results(study)[cut_off]
    assert again["status"] == "completed" and again["numbers"]["attempt"] == 3
    attempts = [
        json.loads((study / "trials" / cut_off / "attempts" / number / "run.json").read_text()) for number in "12"
    ]
    assert [attempt["status"] for attempt in attempts] == ["interrupted", "interrupted"]
    assert "the study's process ended while it ran" in attempts[1]["reason"]
    assert "the study's process ended while it ran" not in attempts[0]["reason"]

    # What is done needs no cluster: nothing is started, and it takes a moment.
    last = wattune("run", space, "--json", timeout_s=100)
    assert last.returncode == 0 and json.loads(last.stdout)["finished"]
    assert "0 trial(s) to run" in last.stderr


@pytest.fixture
def raylets(tmp_path: Path, environment: dict[str, str]) -> Iterator[Raylets]:
    with raylet_cluster(tmp_path, environment) as found:
        yield found


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_node_killed_in_mid_trial_costs_one_repetition_and_what_needs_it_waits(
    raylets: Raylets, start_wattune, wattune, write_space, results, storage: Path, environment: dict[str, str]
) -> None:
    environment["RAY_AUTH_MODE"] = "disabled"
    for name in ("a", "b"):
        raylets(f"add {name}")
    one = {"device": "cpu", "num_nodes": 1, "devices_per_node": 1, "simulate_sensors_of": "h200_sxm"}
    space = write_space(
        "killed_node",
        cluster=[one, one | {"num_nodes": 2}],
        space={"micro_batch_size": [1, 2]},
        measure={"warmup_steps": 2, "min_steps": 4, "min_seconds": 10},
        search={"strategy": "grid", "order": "listed"},
    )
    study = storage / "killed_node"
    running = start_wattune("run", space, "--address", raylets.address)
    for size in (1, 2):
        running.says(rf"^\[0/4\].* mbs{size} .* measure [1-9]")
    raylets("kill b")
    assert running.ends(250) == 1, running.text
    output = running.text
    assert "Traceback" not in output
    assert "not run: 2x1 cpu simulating h200_sxm needs 2 node(s) with 1 device(s) cpu each; the cluster has" in output
    assert "2 trial(s) wait for nodes; start them, the same command continues" in output
    found = results(study)
    assert sorted(one["status"] for one in found.values()) == ["completed", "completed"]
    (attempt,) = study.glob("trials/*/attempts/1/run.json")
    lost = json.loads(attempt.read_text())
    assert lost["status"] == "infra_failed" and "left the cluster" in lost["reason"]
    assert found[attempt.parents[2].name]["numbers"]["attempt"] == 2

    raylets("add c")
    done = wattune("run", space, "--address", raylets.address, "--json", timeout_s=300)
    assert done.returncode == 0, done.stderr
    statuses = [one["status"] for one in results(study).values()]
    assert statuses == ["completed"] * 4
    assert "2 skipped, done before: 2 completed" in done.stderr


def soon(look: Callable[[], Any], within_s: float = 300) -> Any:
    """Looks until there is something."""
    end_s = time.monotonic() + within_s
    while not (found := look()):
        assert time.monotonic() < end_s
        time.sleep(0.05)
    return found


def of_study(running: Any, name: str) -> list[psutil.Process]:
    """Processes of a study's own cluster whose names begin so."""
    tree = psutil.Process(running.process.pid).children(recursive=True)
    return [one for one in tree if one.is_running() and one.name().startswith(name)]


def held(running: Any, study: Path, num_results: int) -> psutil.Process:
    """Holds the process that makes results once there are so many; one more is to be made then, and a trial begins."""
    soon(lambda: len(list(study.glob("trials/*/run.json"))) >= num_results)
    (maker,) = soon(lambda: of_study(running, "ray::Aside"))
    maker.suspend()
    soon(lambda: len(in_flight(study)) == 2)
    return maker


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_post_killed_while_ranks_train_costs_nothing_and_one_killed_with_their_spans_a_repetition(
    raylets: Raylets, start_wattune, write_two_trials, results, storage: Path, environment: dict[str, str]
) -> None:
    environment["RAY_AUTH_MODE"] = "disabled"
    raylets("add a")  # ranks are on a node beside the study's
    study = storage / "killed_post"
    space = write_two_trials("killed_post", min_seconds=4, num_ranks=1, repeats=2)
    running = start_wattune("run", space, "--address", raylets.address)
    running.says(r"^\[0/4\].* measure [1-9]")
    (post,) = of_study(raylets, "ray::Post")
    post.kill()
    maker = held(raylets, study, 1)
    assert [one["status"] for one in results(study).values()] == ["completed"] and not [
        *study.glob("trials/*/attempts")
    ]
    (again,) = soon(lambda: of_study(raylets, "ray::Post"))
    assert again.pid != post.pid
    again.kill()  # spans that no result has been made of are there
    maker.resume()
    assert running.ends(250) == 0, running.text
    assert "Traceback" not in running.text
    assert [one["status"] for one in results(study).values()] == ["completed"] * 4
    (attempt,) = study.glob("trials/*/attempts/1/run.json")
    lost = json.loads(attempt.read_text())
    assert lost["status"] == "infra_failed" and lost["reason"].startswith("the post of a node ended")


@pytest.mark.slow
def test_a_kill_while_a_result_is_made_loses_no_result_and_measures_none_twice(
    start_wattune, write_two_trials, results, storage: Path
) -> None:
    """First of the whole study, then of the process that drives all its trials: one is measured, one begins."""
    space, study = write_two_trials("concluded", min_seconds=4, num_ranks=1, repeats=3), storage / "concluded"
    running = start_wattune("run", space)
    maker = held(running, study, 1)
    running.process.kill()
    maker.resume()
    running.ends(30)
    cut_off = in_flight(study)
    stored_ns = {name: (study / "trials" / name / "run.json").stat().st_mtime_ns for name in results(study)}
    assert stored_ns

    running = start_wattune("run", space)
    maker, hit = held(running, study, len(stored_ns) + 1), in_flight(study)
    (keeper,) = of_study(running, "ray::LaneKeeper")
    keeper.kill()
    maker.resume()  # it may end what it makes, though nobody waits for it any more
    running.says("the process that drives the trials ended; Ray starts it again; tried again")
    assert running.ends(300) == 0, running.text
    found = results(study)
    assert len(found) == 6 and {one["status"] for one in found.values()} == {"completed"}
    kept = {name: (study / "trials" / name / "run.json").stat().st_mtime_ns for name in stored_ns}
    assert kept == stored_ns, "what was acknowledged is not measured again"
    again = {name: one["numbers"]["attempt"] for name, one in found.items() if "attempt" in one["numbers"]}
    assert again.keys() <= cut_off | hit and max(again.values()) <= 3
    for name in again:
        attempts = [json.loads(path.read_text()) for path in (study / "trials" / name / "attempts").glob("*/run.json")]
        assert {one["status"] for one in attempts} <= {"interrupted", "infra_failed"} and attempts
        assert {one["tags"]["infra_cause"] for one in attempts if one["status"] == "infra_failed"} <= {"head"}
