"""`ray job submit` on nodes that have wattune's dependencies and not wattune; `ray job stop`; and another job."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from pace import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PORT = 26379
DASHBOARD_PORT = 28265
AGENT_PORT = 28267
"""Each node on a machine needs one of its own: beside another that has the default no agent starts, and no job."""


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
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    finds = "from importlib.util import find_spec\nprint(*filter(find_spec, ('ray', 'torch', 'wattune')))"
    found = subprocess.run(
        [folder / "bin" / "python", "-c", finds], capture_output=True, text=True, env=own, check=True
    )
    assert found.stdout.split() == ["ray", "torch"]
    return folder


@pytest.fixture
def settings(dependencies: Path, environment: dict[str, str]) -> dict[str, str]:
    """Environment of every process of this cluster: an activated one, without a path to wattune."""
    return {name: value for name, value in environment.items() if name != "PYTHONPATH"} | {
        "PATH": f"{dependencies / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    }


@contextmanager
def _started(settings: dict[str, str], log: Path, *options: str) -> Iterator[None]:
    """A node of Ray's, ended by its own pid.

    Its temporary folder is its own: of nodes that share one, each deletes a job's files once it needs them no more.
    """
    folder = tempfile.mkdtemp(prefix="ray-")  # short: it holds sockets, whose paths have 107 bytes
    command = ["ray", "start", "--block", f"--temp-dir={folder}", *options]
    with open(log, "w") as output:
        node = subprocess.Popen(
            command, cwd="/", env=settings, executable=shutil.which("ray", path=settings["PATH"]),
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        yield
    finally:
        tree = psutil.Process(node.pid).children(recursive=True)
        node.terminate()
        node.wait(60)
        _, alive = psutil.wait_procs(tree, timeout=20)
        for child in alive:
            child.kill()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def num_head_cpus() -> int:
    return 4


@pytest.fixture
def cluster(tmp_path: Path, settings: dict[str, str], num_head_cpus: int) -> Iterator[dict[str, str]]:
    """A head. Yields a client's environment."""
    options = (
        "--head", f"--port={PORT}", f"--dashboard-port={DASHBOARD_PORT}", f"--dashboard-agent-listen-port={AGENT_PORT}",
        "--ray-client-server-port=28266", f"--num-cpus={num_head_cpus}",
    )  # fmt: skip
    with _started(settings, tmp_path / "head.log", *options):
        yield settings | {"RAY_ADDRESS": f"http://127.0.0.1:{DASHBOARD_PORT}"}


@pytest.fixture
def two_more_nodes(cluster: dict[str, str], settings: dict[str, str], tmp_path: Path) -> Iterator[None]:
    """Two nodes that joined the head, with a power domain each."""
    wait_for(lambda: "node_id" in _listing(cluster, tmp_path, "nodes").stdout, 120)  # a head that is up
    with ExitStack() as held:
        for number, name in enumerate(("a", "b"), start=1):
            options = (
                f"--address=127.0.0.1:{PORT}", "--num-cpus=2", f"--dashboard-agent-listen-port={AGENT_PORT + number}",
                f"--labels=wattune.io/domain={name}", "--min-worker-port=0", "--max-worker-port=0",
            )  # fmt: skip
            held.enter_context(_started(settings, tmp_path / f"node-{name}.log", *options))
            # One after another: of two raylets that start on a machine at the same moment one may not come up.
            wait_for(lambda there=number: len(_listed(cluster, tmp_path, "nodes")) > there, 120)
        yield


@pytest.fixture
def project(tmp_path: Path, tiny_model: dict[str, Any]) -> Path:
    """A checkout of the user's own, with a small space, one that takes long, and one for two nodes."""
    folder = tmp_path / "project"
    for part in ("experiments", "search_spaces", "platform"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    progress = folder / "platform" / "wattune" / "terminal" / "progress.py"
    often = progress.read_text().replace("TELL_EVERY_S: Final = 60.0", "TELL_EVERY_S: Final = 0.5")
    assert often != progress.read_text()  # a log is told every minute how far a trial is; these take seconds
    progress.write_text(often)
    document = {
        "study": "short",
        "model": tiny_model,
        "cluster": {"device": "cpu", "num_nodes": 1, "devices_per_node": 2, "simulate_sensors_of": "h200_sxm"},
        "engine": "torch",
        "workload": {"mode": "pretrain", "seq_len": 32, "global_batch_size": 4},
        "space": {"micro_batch_size": [1]},
        "measure": {"warmup_steps": 2, "min_steps": 4, "min_seconds": 2},
        "objective": "maximize tokens_per_s",
        "constraints": [],
        "search": {"strategy": "grid"},
    }
    one = document["cluster"] | {"devices_per_node": 1}
    # Of this one only that it runs is looked at: a rank and a second are enough.
    short = {"cluster": one, "measure": document["measure"] | {"min_seconds": 1}}
    (folder / "search_spaces" / "short.yaml").write_text(yaml.safe_dump(document | short))
    long = {"study": "long", "space": {"micro_batch_size": [1, 2]}, "search": {"strategy": "grid", "order": "listed"}}
    long["measure"] = {"warmup_steps": 2, "min_steps": 4, "min_seconds": 20}
    (folder / "search_spaces" / "long.yaml").write_text(yaml.safe_dump(document | long))
    on_nodes = {"study": "on_nodes", "space": {"micro_batch_size": [1, 2]}}
    on_nodes["cluster"] = [one, one | {"num_nodes": 2}]
    (folder / "search_spaces" / "on_nodes.yaml").write_text(yaml.safe_dump(document | on_nodes))
    return folder


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


def _listing(settings: dict[str, str], cwd: Path, kind: str) -> subprocess.CompletedProcess[str]:
    return _ray(
        settings, cwd, "list", kind, "--address", settings["RAY_ADDRESS"], "--format", "json", "--limit", "1000"
    )


def _listed(settings: dict[str, str], cwd: Path, kind: str) -> list[dict[str, Any]]:
    """Returns what Ray's own state listing shows."""
    done = _listing(settings, cwd, kind)
    assert done.returncode == 0 and "[" in done.stdout, done.stdout + done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout[done.stdout.index("[") :])
    return found


def _samplers(user_folder: str) -> list[int]:
    """Samplers of this test: their spool folders lie under its temporary folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        text = " ".join(process.info["cmdline"] or [])
        if "wattune.telemetry.sampler.process" in text and user_folder in text:
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
        "ray.worker_niceness": str(os.getpriority(os.PRIO_PROCESS, 0)),
    }


@pytest.mark.slow
@pytest.mark.parametrize("wait_s", [3, 60])
def test_a_stopped_job_leaves_its_study_in_order_and_the_same_job_goes_on(
    cluster: dict[str, str], results, wattune, tmp_path: Path, project: Path, storage: Path, wait_s: int
) -> None:
    """Three seconds are Ray's default: not enough for a report, but for all that must not wait."""
    runtime_env = json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(wait_s), "TMPDIR": str(tmp_path)}})
    submit = (
        "job", "submit", "--no-wait", "--runtime-env-json", runtime_env, "--working-dir", project,
        "--submission-id",
    )  # fmt: skip
    entrypoint = ("--", "experiments/moe_ep.py", "search_spaces/long.yaml", "--storage", storage)
    study = storage / "long"
    done = _ray(cluster, tmp_path, *submit, "first", *entrypoint)
    assert done.returncode == 0, done.stdout + done.stderr
    measures = re.compile(r"^\[1/2\].* measure [1-9]", re.MULTILINE)
    wait_for(lambda: measures.search(_ray(cluster, tmp_path, "job", "logs", "first").stdout), 240)
    assert len(_samplers(str(tmp_path))) == 1
    stopped = _ray(cluster, tmp_path, "job", "stop", "first")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    found = {one["status"]: one["reason"] for one in results(study).values()}
    assert found == {"completed": "", "interrupted": "stopped by the user; the same command runs it again"}
    logs = _ray(cluster, tmp_path, "job", "logs", "first").stdout
    assert "interrupted: stopped by the user" in logs
    assert "Traceback" not in logs and "SIGTERM" not in logs, logs

    # The job's own supervisor stays for a moment; a sampler's lease is 10 s, where nobody had the time to end it.
    deadline_s = time.monotonic() + 60
    while (left := _left(cluster, tmp_path)) and time.monotonic() < deadline_s:
        time.sleep(1)
    assert not left

    if wait_s >= 60:
        assert "stopped before the end; the same command continues" in logs
        assert (study / "report.html").exists() and (study / "ranking.parquet").exists()
        again = _ray(cluster, tmp_path, *submit[:2], *submit[3:], "second", *entrypoint)
        assert again.returncode == 0, again.stdout + again.stderr
        assert "1 trial(s) to run, 1 begun before among them" in again.stdout
        assert "1 skipped, done before: 1 completed" in again.stdout
        assert [one["status"] for one in results(study).values()] == ["completed"] * 2
    else:  # whatever comes next makes the report
        for verb in (("report", "long"), ("run", project / "search_spaces" / "long.yaml", "--max-hours", "0")):
            (study / "report.html").unlink(missing_ok=True)
            made = wattune(*verb, "--storage", storage, timeout_s=120)
            assert made.returncode == 0, made.stdout + made.stderr
            assert (study / "report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("num_head_cpus", [0])
def test_a_job_runs_on_the_nodes_of_a_cluster_that_have_the_dependencies_alone(
    cluster: dict[str, str], two_more_nodes: None, results, tmp_path: Path, project: Path, storage: Path
) -> None:
    done = _ray(
        cluster, project, "job", "submit", "--working-dir", ".", "--",
        "experiments/moe_ep.py", "search_spaces/on_nodes.yaml", "--storage", storage,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 at once on" in done.stdout  # one on each node
    found = results(storage / "on_nodes")
    assert [one["status"] for one in found.values()] == ["completed"] * 4, found
    used = sorted((one["tags"]["nodes"].split(",") for one in found.values()), key=len)
    both = used[-1]
    assert len(both) == 2 and used[2] == both and sorted(used[:2]) == [[name] for name in both]
    for name, one in found.items():
        sampled = {path.name for path in (storage / "on_nodes" / "trials" / name / "telemetry").iterdir()}
        assert sampled == set(one["tags"]["nodes"].split(","))


OTHER_JOB = """
import sys, time, ray
ray.init(log_to_driver=False)
@ray.remote(num_cpus=2)
class Hold:
    def ready(self): return True
held = Hold.remote()
print("asks", flush=True)
ray.get(held.ready.remote())
print("holds", flush=True)
sys.stdin.readline()
"""
"""Takes the node as soon as it is free, until it is told to end."""


@pytest.mark.slow
@pytest.mark.usefixtures("on_standing_cluster")
def test_a_node_that_another_job_takes_before_a_trials_workers_is_waited_for_in_no_trials_time(
    start, start_wattune, write_space, results, environment: dict[str, str], storage: Path
) -> None:
    held_s, space = 12, write_space("taken", space={"micro_batch_size": [1, 2]}, isolation="fresh")
    running = start_wattune("run", space)
    running.says(r"^\[0/2\].* (start|build|compile|warmup|measure)\b")  # it has its processors from then on
    other = start([sys.executable, "-c", OTHER_JOB], env=environment, stdin=subprocess.PIPE)
    other.says("holds")
    wait_for(lambda: len(list(storage.glob("taken/trials/*"))) == 2 or "which other jobs use" in running.text, 240)
    time.sleep(held_s)
    other.process.stdin.write("end\n")
    other.process.stdin.flush()
    assert other.ends(60) == 0, other.text
    assert running.ends(400) == 0, running.text
    found = sorted(results(storage / "taken").values(), key=lambda one: one["start_wall_ns"])
    assert [one["status"] for one in found] == ["completed"] * 2, found
    assert "node_wait_s" not in found[0]["numbers"] and found[1]["numbers"]["node_wait_s"] > held_s - 4, found[1]
    length_s = (found[1]["end_wall_ns"] - found[1]["start_wall_ns"]) / 1e9
    parts_s = [found[1]["numbers"][f"{part}_time_s"] for part in ("start", "build", "warmup", "measure", "close")]
    assert sum(parts_s) <= length_s + 1, "the wait is in no trial's time"


def _left(settings: dict[str, str], tmp_path: Path) -> list[Any]:
    """Actors, placement groups and samplers that are still there; Ray keeps two kinds of actors of its own."""
    rays = ("JobSupervisor", "_AutoscalingCoordinatorActor")
    actors = [
        one["class_name"] for one in _listed(settings, tmp_path, "actors")
        if one["state"] != "DEAD" and not any(name in one["class_name"] for name in rays)
    ]  # fmt: skip
    groups = [one for one in _listed(settings, tmp_path, "placement-groups") if one["state"] != "REMOVED"]
    return [*actors, *groups, *_samplers(str(tmp_path))]
