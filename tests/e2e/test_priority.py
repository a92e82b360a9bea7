"""Ray's workers run at the priority of what started Ray, not fifteen below it."""

import os
import subprocess
import sys

import pytest
from script_results import results

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300), pytest.mark.usefixtures("on_standing_cluster")]

SCRIPT = """
import json, os, ray, sys
from wattune.orchestrate import ray_settings
from wattune.orchestrate.cluster import connect

@ray.remote(num_cpus=0)
def priorities():
    return os.getpriority(os.PRIO_PROCESS, 0), os.getpriority(os.PRIO_PROCESS, os.getppid())

if sys.argv[1] == "callers":  # a script that connected by itself, as Ray's workers are by default
    ray.init(log_to_driver=False)
    before, _ = ray.get(priorities.remote())
with connect() as cluster:
    workers, raylets = ray.get(priorities.remote())  # the worker that told its node's settings
    if sys.argv[1] == "ours":
        before = workers
    print("RESULT " + json.dumps({"before": before > raylets, "after": workers > raylets,
                                  "tag": int(cluster.tags["ray.worker_niceness"]) > raylets}))
"""


# Of a connection of ours, test_job.py sees the tag.
@pytest.mark.parametrize(
    ("connection", "rays"), [pytest.param("ours", False, marks=pytest.mark.slow), ("callers", True)]
)
def test_a_worker_has_its_raylets_priority(environment: dict[str, str], connection: str, rays: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, connection], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (found,) = results(done.stdout)
    stays = rays and os.geteuid() != 0
    assert found == {"before": rays, "after": stays, "tag": stays}
