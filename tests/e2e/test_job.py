"""`ray job submit` against a local head, from a client whose own folder is elsewhere."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
PORT = 26379
DASHBOARD_PORT = 28265
RAY = Path(sys.executable).with_name("ray")


@pytest.fixture
def head(tmp_path: Path, environment: dict[str, str]):
    """A head started in an activated environment, as a user starts it; ended by its own pid."""
    settings = environment | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    }
    ray_folder = tempfile.mkdtemp(prefix="ray-")  # short: it holds sockets, whose paths have 107 bytes
    command = [
        RAY, "start", "--head", "--block", f"--port={PORT}", f"--dashboard-port={DASHBOARD_PORT}",
        "--ray-client-server-port=28266", "--num-cpus=4", f"--temp-dir={ray_folder}",
    ]  # fmt: skip
    with open(tmp_path / "head.log", "w") as log:
        process = subprocess.Popen(command, cwd="/", env=settings, stdout=log, stderr=subprocess.STDOUT)
    yield settings | {"RAY_ADDRESS": f"http://127.0.0.1:{DASHBOARD_PORT}"}
    tree = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    process.wait(60)
    _, alive = psutil.wait_procs(tree, timeout=20)
    for child in alive:
        child.kill()
    shutil.rmtree(ray_folder, ignore_errors=True)


def test_the_experiment_runs_as_a_job_and_stores_outside_it(
    head: dict[str, str], results, tmp_path: Path, storage: Path
) -> None:
    project = tmp_path / "project"
    for part in ("experiments", "search_spaces", "platform"):
        shutil.copytree(ROOT / part, project / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = [
        RAY, "job", "submit", "--working-dir", project, "--",
        "experiments/moe_ep.py", "--storage", storage,
    ]  # fmt: skip
    done = _submit([str(part) for part in command], elsewhere, head)
    assert done.returncode == 0, done.stdout + done.stderr
    finished = results(storage / "moe_ep_cpu")
    assert finished and {one["status"] for one in finished.values()} == {"completed"}
    assert "report.html" in done.stdout


def _submit(command: list[str], cwd: Path, settings: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Submits as soon as the head answers."""
    deadline_s = time.monotonic() + 60
    while True:
        done = subprocess.run(command, cwd=cwd, env=settings, capture_output=True, text=True, timeout=300)
        refused = "Failed to connect" in done.stderr or "ConnectionError" in done.stderr
        if not refused or time.monotonic() > deadline_s:
            return done
        time.sleep(2)
