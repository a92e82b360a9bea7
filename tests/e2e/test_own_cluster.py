"""A cluster of our own, as others on the network see it: not at all."""

import subprocess
import sys
from pathlib import Path

import pytest
from script_results import results

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

SCRIPT = """
import json, psutil, ray
from wattune.orchestrate.cluster import connect

with connect() as cluster:
    @ray.remote
    def where():
        return ray.util.get_node_ip_address()
    ray.get([where.remote() for _ in range(2)])
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    listening = {}
    for process in processes:
        for one in process.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN:
                listening.setdefault(one.laddr.ip, []).append(process.name())
    polls = {process.environ().get("REPORTER_UPDATE_INTERVAL_MS") for process in processes[1:]
             if "raylet" in process.name() and process.is_running()}
    print("RESULT " + json.dumps({"listening": listening, "polls": list(polls), "tags": dict(cluster.tags)}))
"""


def test_it_listens_on_loopback_only_and_is_set_as_its_tags_say(tmp_path: Path, environment: dict[str, str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=180, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (seen,) = results(done.stdout)
    names = {name for processes in seen["listening"].values() for name in processes}
    assert {"gcs_server", "raylet"} <= names  # they were looked at
    assert set(seen["listening"]) <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}, seen["listening"]
    assert seen["polls"] == ["3600000"]
    assert seen["tags"] == {
        "ray.auth_mode": "token",
        "ray.cluster": "own",
        "ray.dashboard": seen["tags"]["ray.dashboard"],
        "ray.gpu_poll_interval_s": "3600",
        "ray.usage_stats": "off",
    }
    assert seen["tags"]["ray.dashboard"].startswith("127.0.0.1:")
