"""Studies of a command, on one cluster that stands: killed, tried again, on two nodes, searched."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from own_study import PROGRAM, commands, own_space, wait_gone
from raylet_cluster import Raylets

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600), pytest.mark.usefixtures("on_standing_cluster")]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def second_node(standing_cluster: Raylets) -> Iterator[None]:
    standing_cluster("add b")
    yield
    standing_cluster("kill b")


def flags_of(study: Path) -> dict[str, dict[str, Any]]:
    """The flags of every trial, by its folder's name."""
    specs = {path.parent.name: json.loads(path.read_text()) for path in study.glob("trials/*/spec.json")}
    return {name: dict(spec["program"]["flags"]) for name, spec in specs.items()}


def test_a_killed_study_leaves_no_command_and_ends_as_any_other(
    start_wattune, wattune, wattune_here, results, storage: Path, tmp_path: Path
) -> None:
    command = [sys.executable, str(PROGRAM), "--step-s={step_s}", "--deaf", f"--tag={tmp_path}"]
    space = own_space(
        tmp_path,
        "killed",
        command=command,
        flags={"step_s": [0.02, 0.06], "algorithm": ["Ring"]},
        constraints=["step_time_s <= 0.04"],
        search={"strategy": "grid", "order": "listed"},
    )
    study = storage / "killed"
    running = start_wattune("run", space)
    running.says(r"^\[1/2\].* measure [1-9]")
    (done_before,) = results(study)
    stamp_ns = (study / "trials" / done_before / "run.json").stat().st_mtime_ns
    assert len(commands(tmp_path)) == 2  # the program and its supervisor
    running.process.kill()
    running.ends(30)
    wait_gone(tmp_path, within_s=20)

    done = wattune("run", space, "--json")
    assert done.returncode == 0, done.stderr
    assert "1 trial(s) to run, 1 begun before among them" in done.stderr
    found, flags = results(study), flags_of(study)
    assert {one["status"] for one in found.values()} == {"completed"} and len(found) == 2
    assert (study / "trials" / done_before / "run.json").stat().st_mtime_ns == stamp_ns
    assert [
        one["numbers"].get("attempt", 1) for name, one in sorted(found.items(), key=lambda it: it[0] != done_before)
    ] == [1, 2]
    assert not commands(tmp_path)

    # A bound decides, and says by how much.
    ranking = json.loads(done.stdout)
    assert [row["flags"]["step_s"] for row in ranking["feasible"]] == [0.02]
    (broken,) = ranking["infeasible"]
    assert broken["flags"]["step_s"] == 0.06 and "step_time_s" in json.dumps(broken)
    # MLflow has a run of each, with the flags as parameters.
    from mlflow import MlflowClient  # loaded by the process that runs this, not by each that collects it

    client = MlflowClient(f"sqlite:///{storage / 'mlflow.db'}")
    (experiment,) = [one for one in client.search_experiments() if one.name == "killed"]
    runs = [one for one in client.search_runs([experiment.experiment_id]) if "flags.step_s" in one.data.params]
    assert sorted(one.data.params["flags.step_s"] for one in runs) == ["0.02", "0.06"]
    assert all(one.info.status == "FINISHED" and one.data.metrics["tokens_per_s"] > 0 for one in runs)
    assert all(one.data.params["flags.algorithm"] == "Ring" for one in runs)

    names = [f"killed:{name}" for name in sorted(found, key=lambda name: flags[name]["step_s"])]
    compared = wattune_here("compare", *names, "--json")
    assert compared.returncode == 0, compared.stderr
    assert "flags.step_s" in compared.stdout and "step_time_s" in compared.stdout
    page = (study / "report.html").read_text()
    assert "step_s=0.06" in page


@pytest.mark.slow
@pytest.mark.parametrize(("example", "samples"), [("plain_loop", 8), ("hf_trainer", 2)])
def test_a_shipped_example_runs_from_its_space(
    wattune, results, storage: Path, tmp_path: Path, example: str, samples: int
) -> None:
    folder = ROOT / "experiments" / "own_code"
    space = yaml.safe_load((folder / f"{example}.yaml").read_text())
    # The program and its command are the shipped ones; one trial of them is run, and not for long.
    space["command"] = space["command"].replace("experiments/own_code", str(folder))
    space["space"] = {"micro_batch_size": [2]}
    space["flags"] = {name: values[:1] for name, values in space["flags"].items()}
    space["measure"] |= {"warmup_steps": 3, "min_steps": 10, "min_seconds": 1, "repeats": 1}
    space["constraints"] = ["node_device_power_peak_100ms_w <= 3000"]  # so short a window decides none over 1 s
    path = tmp_path / "shipped.yaml"
    path.write_text(yaml.safe_dump(space))
    done = wattune("run", path, "--json")
    assert done.returncode == 0, done.stderr
    (result,) = results(storage / space["study"]).values()
    assert result["status"] == "completed" and result["tags"]["steps_source"].startswith(space["steps"])
    assert result["numbers"]["told_tokens_per_step"] == samples * 2 * 64, "samples of a step on each of two ranks"
    assert result["metrics"]["tokens_per_s"] > 0 and result["metrics"]["energy_per_token_j"] > 0
    program = str(folder / f"{example}.py")
    assert not [one for one in psutil.process_iter(["cmdline"]) if program in (one.info["cmdline"] or ())]


@pytest.mark.slow
def test_case_failures_goes_on_behind_five_that_ran_out_of_memory_and_stops_at_surroundings(
    wattune, results, storage: Path, tmp_path: Path
) -> None:
    case = ROOT / "tests" / "fixtures" / "cases" / "failures"
    document = yaml.safe_load((case / "space.yaml").read_text())
    document["command"] = [sys.executable, str(case / "fail.py"), "{case}"]  # the cluster stands in another folder
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(document))
    done = wattune("run", tmp_path / "space.yaml", "--json")
    study = storage / "other_peoples_failures"
    flags = flags_of(study)
    found = {flags[name]["case"]: one for name, one in results(study).items()}
    right = {"advice": "crashed", "ecc": "infra_failed", "fine": "completed"}
    assert {case: one["status"] for case, one in found.items()} == dict.fromkeys(found, "out_of_memory") | right
    assert found["advice"]["reason"] in done.stderr and "AssertionError: length 4096" in found["advice"]["reason"]
    assert found["ecc"]["tags"]["infra_cause"] == "device" and len(found) == 9

    full = "import sys; print(sys.argv[1]); raise OSError(28, 'No space left on device', '/data/out')"
    space = own_space(
        tmp_path,
        "surrounded",
        command=[sys.executable, "-c", full, "{lr}"],
        env={},
        flags={"lr": [1, 2, 3, 4]},
        constraints=[],
        measure={"reference_every": 0},
        search={"strategy": "grid", "order": "listed"},
    )
    done = wattune("run", space)
    assert done.returncode == 1 and len(results(storage / "surrounded")) == 2, done.stdout
    (told,) = [line for line in done.stdout.splitlines() if "stop, 2 are left" in line]
    assert "No space left on device" in told and "call the same command again" in told


@pytest.mark.slow
def test_what_somebody_killed_is_tried_again_and_what_failed_where_that_is_asked_for(
    wattune, results, storage: Path, tmp_path: Path
) -> None:
    killed = tmp_path / "was_killed"
    command = [sys.executable, str(PROGRAM), "--mode={how}", "--die-once", str(killed), f"--tag={tmp_path}"]
    space = own_space(
        tmp_path,
        "again",
        command=command,
        env={},
        flags={"how": ["good", "crash", "mute"]},
        measure={"warmup_steps": 5, "min_steps": 20, "min_seconds": 1, "timeout_s": 8, "reference_every": 0},
        search={"strategy": "grid", "order": "listed"},
    )
    done = wattune("run", space)
    assert done.returncode == 0, done.stdout + done.stderr
    study = storage / "again"

    def by_mode() -> dict[str, dict[str, Any]]:
        flags = flags_of(study)
        return {flags[name]["how"]: one for name, one in results(study).items()}

    found = by_mode()
    statuses = {mode: one["status"] for mode, one in found.items()}
    assert statuses == {"good": "completed", "crash": "crashed", "mute": "timed_out"}
    assert "longer than measure.timeout_s = 8" in found["mute"]["reason"]
    (attempt,) = study.glob("trials/*/attempts/1/run.json")
    first = json.loads(attempt.read_text())
    assert first["status"] == "infra_failed" and "ended by SIGKILL" in first["reason"]
    assert not commands(tmp_path)

    before = {mode: one["end_wall_ns"] for mode, one in found.items()}
    again = wattune("run", space, "--retry", "crashed")
    assert again.returncode == 0, again.stdout + again.stderr
    after = by_mode()
    assert {mode for mode, one in after.items() if one["end_wall_ns"] != before[mode]} == {"crash"}
    assert after["crash"]["numbers"]["attempt"] == 2 and after["crash"]["status"] == "crashed"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["model_guided", "tpe"])
def test_a_search_learns_from_trials_alone_and_says_so(
    wattune, results, storage: Path, tmp_path: Path, strategy: str
) -> None:
    space = own_space(
        tmp_path,
        "searched",
        flags={"step_s": [0.01, 0.02, 0.03, 0.04, 0.05, 0.06], "algorithm": ["Ring", "Tree"]},
        search={"strategy": strategy, "num_trials": 6, "seed": 3},
        measure={"warmup_steps": 3, "min_steps": 10, "min_seconds": 0.3, "timeout_s": 40, "reference_every": 0},
        constraints=[],
    )
    done = wattune("run", space, "--json")
    assert done.returncode == 0, done.stderr
    said = "a command has no analytic estimate, so model_guided learns from its trials alone" in done.stderr
    assert said == (strategy == "model_guided")
    found = results(storage / "searched")
    assert len(found) == 6 and {one["status"] for one in found.values()} == {"completed"}
    rows = json.loads(done.stdout)["feasible"]
    assert rows[0]["flags"]["step_s"] == min(row["flags"]["step_s"] for row in rows)
    if strategy == "model_guided":
        suggested = wattune("suggest", "searched", "--budget", "10m")
        assert suggested.returncode == 0, suggested.stdout + suggested.stderr
    refused = wattune("plan", space, "--estimate")
    assert refused.returncode == 2 and "Traceback" not in refused.stderr and "estimate" in refused.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("second_node")
def test_torchrun_spans_two_nodes(wattune, results, storage: Path, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node={devices_per_node}"]
    # As docs/own_code.md says: with c10d each launcher asks its host name whether it is the first.
    torchrun += ["--nnodes={num_nodes}", "--node-rank={node_rank}"]
    torchrun += ["--rdzv-backend=static", "--rdzv-endpoint={rendezvous}"]
    program = str(ROOT / "experiments" / "own_code" / "plain_loop.py")
    space = own_space(
        tmp_path,
        "torchrun",
        command=[*torchrun, program, "--micro-batch-size={micro_batch_size}", "--steps=100000"],
        env={"OMP_NUM_THREADS": "1"},
        flags={},
        space={"micro_batch_size": [2]},
        cluster={"device": "cpu", "num_nodes": 2, "devices_per_node": 1, "simulate_sensors_of": "h200_sxm"},
        measure={"warmup_steps": 5, "min_steps": 20, "min_seconds": 1, "timeout_s": 120, "reference_every": 0},
    )
    done = wattune("run", space, "--json")
    assert done.returncode == 0, done.stderr
    (result,) = results(storage / "torchrun").values()
    assert result["status"] == "completed" and result["numbers"]["told_tokens_per_step"] == 2 * 2 * 64
    left = [one for one in psutil.process_iter(["cmdline"]) if program in (one.info["cmdline"] or ())]
    assert not left
