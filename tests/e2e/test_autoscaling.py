"""A study on a cluster without workers: its autoscaler sees what the study wants, and no trial counts the wait."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from mlflow_server import free_port
from pace import wait_for
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID, FAKE_HEAD_NODE_TYPE

from wattune.units import NS_PER_S

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
"""The one of `ray.cluster_utils.AutoscalingCluster`, which itself calls `ray stop`: that ends every Ray here."""


@pytest.fixture
def autoscaling(tmp_path: Path, environment: dict[str, str]) -> Iterator[str]:
    """A head that starts up to two nodes where somebody wants them; its address. Ended by its own process ids."""
    host, port = ray.util.get_node_ip_address(), free_port()
    provider: Mapping[str, Any] = {"type": "external", "module": PROVIDER, "gcs_address": f"{host}:{port}"}
    worker = {"resources": {"CPU": 2, "object_store_memory": 80_000_000}, "labels": {"wattune.io/device": "cpu"}}
    kinds = {
        FAKE_HEAD_NODE_TYPE: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
        "worker": {**worker, "node_config": {}, "min_workers": 0, "max_workers": 2},
    }
    of_no_use = ("setup_commands", "head_setup_commands", "worker_setup_commands", "initialization_commands")
    of_no_use += ("head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files", "rsync_exclude")
    config = {name: [] for name in (*of_no_use, "rsync_filter")} | {
        "file_mounts": {}, "file_mounts_sync_continuously": False,
        "cluster_name": "zero", "max_workers": 2, "idle_timeout_minutes": 5, "upscaling_speed": 10.0,
        "provider": {**provider, "launch_multiple": True, "head_node_id": FAKE_HEAD_NODE_ID}, "auth": {},
        "head_node_type": FAKE_HEAD_NODE_TYPE, "available_node_types": kinds,
    }  # fmt: skip
    (tmp_path / "cluster.json").write_text(json.dumps(config))
    environment |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    own = {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1", "RAY_enable_autoscaler_v2": "1"}
    own |= {"RAY_NODE_TYPE_NAME": FAKE_HEAD_NODE_TYPE, "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID}
    own |= {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID}
    folder = tempfile.mkdtemp(prefix="ray-")  # short: it holds sockets, whose paths have 107 bytes
    options = ["--head", "--block", f"--port={port}", f"--dashboard-port={free_port()}", f"--temp-dir={folder}"]
    options += [f"--dashboard-agent-listen-port={free_port()}", "--num-cpus=0", f"--node-ip-address={host}"]
    options += [f"--autoscaling-config={tmp_path / 'cluster.json'}", "--object-store-memory=100000000"]
    log = tmp_path / "head.log"
    with log.open("w") as output:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options]
        head = subprocess.Popen(
            command, cwd="/", env=os.environ | environment | own, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        wait_for(lambda: "Ray runtime started" in log.read_text(), 120)
        yield f"{host}:{port}"
    finally:
        tree = psutil.Process(head.pid).children(recursive=True) if head.poll() is None else []
        head.terminate()
        head.wait(60)
        _, alive = psutil.wait_procs(tree, timeout=20)
        for child in alive:
            child.kill()
        shutil.rmtree(folder, ignore_errors=True)


def test_from_zero_workers_two_nodes_come_and_the_wait_is_in_no_trials_time(
    autoscaling: str, wattune: Callable[..., Any], write_space: Callable[..., Path], results: Any, storage: Path
) -> None:
    cluster = {"device": "cpu", "num_nodes": 2, "devices_per_node": 1, "simulate_sensors_of": "h200_sxm"}
    space = write_space("zero", cluster=cluster)
    done = wattune("run", space, "--address", autoscaling, "--json", timeout_s=400)
    assert done.returncode == 0, done.stderr
    assert "waits for 2 nodes x 1 cpu" in done.stderr
    (result,) = results(storage / "zero").values()
    numbers, length_s = result["numbers"], (result["end_wall_ns"] - result["start_wall_ns"]) / NS_PER_S
    assert result["status"] == "completed" and numbers["node_wait_s"] > 2
    parts_s = sum(value for name, value in numbers.items() if name.endswith("_time_s") and name != "wait_time_s")
    assert parts_s <= length_s + 1 and numbers["wait_time_s"] < 5, "its nodes had nothing to do since they came"

    cluster |= {"num_nodes": 4}
    done = wattune("run", write_space("many", cluster=cluster), "--address", autoscaling, "--wait-nodes", "4s")
    assert done.returncode == 1 and "needs 4 node(s)" in done.stderr and "Traceback" not in done.stderr
