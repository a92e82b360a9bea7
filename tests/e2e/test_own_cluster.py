"""A cluster of our own: what others on the network see of it, and a telemetry actor that is killed in it."""

import os
import subprocess
import sys
from typing import Any

import pytest
from script_results import results

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

SCRIPT = """
import json, os, psutil, ray, signal, tempfile, time, traceback
from pathlib import Path
from wattune.orchestrate.cluster import connect
from wattune.orchestrate.ray_settings import dashboard
from wattune.orchestrate.telemetry_actor import telemetry_actor
from wattune.storage.study import TrialFolder

def hygiene(cluster):
    @ray.remote
    def where():
        return ray.util.get_node_ip_address()
    ray.get([where.remote() for _ in range(2)])
    while dashboard() == "off":  # it starts beside; the test's time-out ends this
        time.sleep(0.1)
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    listening = {}
    for process in processes:
        for one in process.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN:
                listening.setdefault(one.laddr.ip, []).append(process.name())
    polls = {process.environ().get("REPORTER_UPDATE_INTERVAL_MS") for process in processes[1:]
             if "raylet" in process.name() and process.is_running()}
    return {"listening": listening, "polls": list(polls), "tags": dict(cluster.tags),
            "dashboard": dashboard()}

def killed_actor(cluster, num_kills=3, seconds=16.0):
    actor = telemetry_actor(cluster.nodes[0], ["host"])
    ray.get(actor.start.remote("killed"))
    begun = time.monotonic()
    for _ in range(num_kills):
        time.sleep(seconds / num_kills)
        os.kill(ray.get(actor.__ray_call__.remote(lambda self: os.getpid())), signal.SIGKILL)
    ray.get(actor.stop.remote("killed"), timeout=60)
    trial = TrialFolder(Path(tempfile.mkdtemp()))
    (trial.path / ".seen").touch()
    recorded = ray.get(actor.recording.remote("killed", trial.path / ".seen"), timeout=60)
    elapsed = time.monotonic() - begun
    stamps = sorted(trial.telemetry()["host"]["mono_ns"].to_pylist())
    gap = max(late - early for early, late in zip(stamps, stamps[1:])) / 1e9
    said = {"closed": recorded.manifest["closed"], "ended": recorded.manifest["ended"]}
    said |= {"losses": len(recorded.losses), "rows": len(stamps), "gap_s": gap, "elapsed_s": elapsed}
    ray.get(actor.forget.remote("killed"))
    spool = ray.get(actor.__ray_call__.remote(lambda self: self._spool))
    return said | {"left": (spool / "killed").exists()}

with connect() as cluster:
    for part in (hygiene, killed_actor):
        try:
            said = part(cluster)
        except Exception:  # the other part is told apart from it
            said = {"error": traceback.format_exc()}
        print("RESULT " + json.dumps({"part": part.__name__} | said), flush=True)
"""


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory, users_environment: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Answers of the parts of the script, which share one cluster."""
    folder = tmp_path_factory.mktemp("own_cluster")
    script = folder / "script.py"
    script.write_text(SCRIPT)
    settings = users_environment | {"WATTUNE_STORAGE": str(folder / "storage"), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], env=settings, capture_output=True, text=True, timeout=500, cwd=folder
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {one["part"]: one for one in results(done.stdout)}


@pytest.mark.slow
def test_it_listens_on_loopback_only_and_is_set_as_its_tags_say(parts: dict[str, dict[str, Any]]) -> None:
    seen = parts["hygiene"]
    assert "error" not in seen, seen["error"]
    names = {name for processes in seen["listening"].values() for name in processes}
    assert {"gcs_server", "raylet"} <= names  # they were looked at
    assert set(seen["listening"]) <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}, seen["listening"]
    assert seen["polls"] == ["3600000"]
    assert seen["tags"] == {
        "ray.auth_mode": "token",
        "ray.cluster": "own",
        "ray.dashboard": "starting",
        "ray.gpu_poll_interval_s": "3600",
        "ray.usage_stats": "off",
        "ray.worker_niceness": str(os.getpriority(os.PRIO_PROCESS, 0)),
    }
    assert seen["dashboard"].startswith("127.0.0.1:")


@pytest.mark.slow
def test_a_killed_actor_comes_back_to_its_sampler(parts: dict[str, dict[str, Any]]) -> None:
    # Longer than a lease: without the restarted actor's care the sampler would have ended by itself.
    said = parts["killed_actor"]
    assert "error" not in said, said["error"]
    assert (said["closed"], said["ended"], said["losses"]) == (True, "SIGTERM", 0)
    assert said["elapsed_s"] > 16 and said["rows"] >= said["elapsed_s"] * 0.7  # the host tier is read once a second
    assert said["gap_s"] < 4
    assert not said["left"]
