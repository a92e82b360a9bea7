"""The telemetry actor of a node, killed while its sampler runs."""

import subprocess
import sys
from pathlib import Path

import pytest
from script_results import results

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

SCRIPT = """
import json, os, signal, sys, time
import ray
from wattune.orchestrate.cluster import connect
from wattune.orchestrate.telemetry_actor import telemetry_actor

num_kills, seconds = int(sys.argv[1]), float(sys.argv[2])
with connect() as cluster:
    node = cluster.driver_node
    actor = telemetry_actor(node, ["host"])
    ray.get(actor.start.remote("killed"))
    begun = time.monotonic()
    for _ in range(num_kills):
        time.sleep(seconds / num_kills)
        os.kill(ray.get(actor.__ray_call__.remote(lambda self: os.getpid())), signal.SIGKILL)
    recorded = ray.get(actor.stop.remote("killed"), timeout=60)
    elapsed = time.monotonic() - begun
    stamps = sorted(recorded.tables["host"]["mono_ns"].to_pylist())
    gap = max(late - early for early, late in zip(stamps, stamps[1:])) / 1e9
    said = {"closed": recorded.manifest["closed"], "ended": recorded.manifest["ended"]}
    said |= {"losses": len(recorded.losses), "rows": len(stamps), "gap_s": gap, "elapsed_s": elapsed}
    print("RESULT " + json.dumps(said))
    ray.get(actor.forget.remote("killed"))
    spool = ray.get(actor.__ray_call__.remote(lambda self: self._spool))
    assert not (spool / "killed").exists()
"""


def test_a_killed_actor_comes_back_to_its_sampler(tmp_path: Path, environment: dict[str, str]) -> None:
    # Longer than a lease: without the restarted actor's care the sampler would have ended by itself.
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), "3", "16"], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (said,) = results(done.stdout)
    assert (said["closed"], said["ended"], said["losses"]) == (True, "SIGTERM", 0)
    assert said["elapsed_s"] > 16 and said["rows"] >= said["elapsed_s"] * 0.7  # the host tier is read once a second
    assert said["gap_s"] < 4
