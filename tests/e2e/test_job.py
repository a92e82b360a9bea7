"""`ray job submit` on a head that has wattune's dependencies and not wattune; and `ray job stop`."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
PORT = 26379
DASHBOARD_PORT = 28265
AGENT_PORT = 28267
"""Its default belongs to one Ray at a time: beside another cluster no job is taken."""


@pytest.fixture
def dependencies(tmp_path: Path) -> Path:
    """An environment with everything this one has installed but wattune."""
    folder = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    (site,) = folder.glob("lib/python*/site-packages")
    here = [path for path in sys.path if path.endswith("site-packages")]
    # Named in a .pth file: what .pth files in there add, the checkout among it, is not added.
    (site / "dependencies.pth").write_text("\n".join(here))
    ray = folder / "bin" / "ray"
    ray.write_text(f"#!{folder}/bin/python\nfrom ray.scripts.scripts import main\nmain()\n")
    ray.chmod(0o755)
    missing = subprocess.run([folder / "bin" / "python", "-c", "import ray, torch, wattune"], capture_output=True)
    assert b"No module named 'wattune'" in missing.stderr
    return folder


@pytest.fixture
def cluster(tmp_path: Path, dependencies: Path, environment: dict[str, str]):
    """A head started in an activated environment, ended by its own pid. Yields a client's environment."""
    settings = {name: value for name, value in environment.items() if name != "PYTHONPATH"} | {
        "PATH": f"{dependencies / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    }
    folder = tempfile.mkdtemp(prefix="ray-")  # short: it holds sockets, whose paths have 107 bytes
    command = [
        dependencies / "bin" / "ray", "start", "--head", "--block", f"--port={PORT}",
        f"--dashboard-port={DASHBOARD_PORT}", f"--dashboard-agent-listen-port={AGENT_PORT}",
        "--ray-client-server-port=28266", "--num-cpus=4", f"--temp-dir={folder}",
    ]  # fmt: skip
    with open(tmp_path / "head.log", "w") as log:
        head = subprocess.Popen(command, cwd="/", env=settings, stdout=log, stderr=subprocess.STDOUT)
    yield settings | {"RAY_ADDRESS": f"http://127.0.0.1:{DASHBOARD_PORT}"}
    tree = psutil.Process(head.pid).children(recursive=True)
    head.terminate()
    head.wait(60)
    _, alive = psutil.wait_procs(tree, timeout=20)
    for child in alive:
        child.kill()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def project(tmp_path: Path, tiny_model: dict[str, Any]) -> Path:
    """A checkout of the user's own, with a small space and one that takes long."""
    folder = tmp_path / "project"
    for part in ("experiments", "search_spaces", "platform"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    document = {
        "study": "short",
        "model": tiny_model,
        "cluster": {"device": "cpu", "num_nodes": 1, "devices_per_node": 2, "simulate_sensors_of": "h200_sxm"},
        "engine": "torch",
        "workload": {"mode": "pretrain", "seq_len": 32, "global_batch_size": 4},
        "space": {"micro_batch_size": [1]},
        "measure": {"warmup_steps": 2, "min_steps": 4, "min_seconds": 1},
        "objective": "maximize tokens_per_s",
        "constraints": [],
        "search": {"strategy": "grid"},
    }
    (folder / "search_spaces" / "short.yaml").write_text(yaml.safe_dump(document))
    document |= {"study": "long", "measure": {"warmup_steps": 2, "min_steps": 4, "min_seconds": 200}}
    (folder / "search_spaces" / "long.yaml").write_text(yaml.safe_dump(document))
    return folder


def _wait_for(condition: Callable[[], object], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "not within the time it should take"
        time.sleep(0.2)


def _ray(settings: dict[str, str], cwd: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs a command of Ray's, again where the head does not answer yet."""
    command = ["ray", *map(str, arguments)]
    deadline_s = time.monotonic() + 120
    while True:
        done = subprocess.run(
            command, cwd=cwd, env=settings, executable=shutil.which("ray", path=settings["PATH"]),
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        refused = any(text in done.stderr for text in ("Failed to connect", "ConnectionError", "try again later"))
        if not refused or time.monotonic() > deadline_s:
            return done
        time.sleep(2)


def _listed(settings: dict[str, str], cwd: Path, kind: str) -> list[dict[str, Any]]:
    """What Ray's own state listing shows."""
    done = _ray(
        settings, cwd, "list", kind, "--address", settings["RAY_ADDRESS"], "--format", "json", "--limit", "1000"
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout[done.stdout.index("[") :])
    return found


def _samplers(user_folder: str) -> list[int]:
    """Samplers of this test: their spool folders lie under its temporary folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        text = " ".join(process.info["cmdline"] or [])
        if "wattune.telemetry.sampler" in text and user_folder in text:
            found.append(process.pid)
    return found


def test_the_package_travels_with_the_job_and_results_stay_outside_it(
    cluster: dict[str, str], results, tmp_path: Path, project: Path, storage: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = _ray(
        cluster, elsewhere, "job", "submit", "--working-dir", project, "--",
        "experiments/moe_ep.py", "search_spaces/short.yaml", "--storage", storage,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = results(storage / "short").values()
    assert result["status"] == "completed", result["reason"]
    assert "report.html" in done.stdout
    # How this cluster was set is with the result.
    settings = {name: value for name, value in result["tags"].items() if name.startswith("ray.")}
    assert settings == {
        "ray.auth_mode": "disabled",
        "ray.cluster": "joined",
        "ray.dashboard": f"127.0.0.1:{DASHBOARD_PORT}",
        "ray.gpu_poll_interval_s": "5",
        "ray.usage_stats": "off",
    }


@pytest.mark.slow
@pytest.mark.parametrize("wait_s", [3, 60])
def test_a_stopped_job_leaves_its_study_in_order_and_nothing_behind(
    cluster: dict[str, str], results, tmp_path: Path, project: Path, storage: Path, wait_s: int
) -> None:
    runtime_env = json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(wait_s), "TMPDIR": str(tmp_path)}})
    done = _ray(
        cluster, tmp_path, "job", "submit", "--no-wait", "--submission-id", "mine", "--runtime-env-json", runtime_env,
        "--working-dir", project, "--", "experiments/moe_ep.py", "search_spaces/long.yaml", "--storage", storage,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    _wait_for(lambda: len(_samplers(str(tmp_path))) == 1, 120)
    _wait_for(
        lambda: [one for one in _listed(cluster, tmp_path, "actors") if "RayTrainWorker" in one["class_name"]], 120
    )
    time.sleep(5)  # into the measured steps
    stopped = _ray(cluster, tmp_path, "job", "stop", "mine")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    (result,) = results(storage / "long").values()
    assert result["status"] == "interrupted" and result["reason"]
    logs = _ray(cluster, tmp_path, "job", "logs", "mine")
    assert "Traceback" not in logs.stdout, logs.stdout

    # The job's own supervisor stays for a moment; a sampler's lease is 10 s.
    deadline_s = time.monotonic() + 60
    while (left := _left(cluster, tmp_path)) and time.monotonic() < deadline_s:
        time.sleep(1)
    assert not left
    if wait_s >= 60:
        assert (storage / "long" / "report.html").exists()


def _left(settings: dict[str, str], tmp_path: Path) -> list[Any]:
    """Actors, placement groups and samplers that are still there; Ray keeps two kinds of actors of its own."""
    rays = ("JobSupervisor", "_AutoscalingCoordinatorActor")
    actors = [
        one["class_name"] for one in _listed(settings, tmp_path, "actors")
        if one["state"] != "DEAD" and not any(name in one["class_name"] for name in rays)
    ]  # fmt: skip
    groups = [one for one in _listed(settings, tmp_path, "placement-groups") if one["state"] != "REMOVED"]
    return [*actors, *groups, *_samplers(str(tmp_path))]
