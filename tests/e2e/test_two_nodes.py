"""A trial on two nodes: telemetry of both on one time axis, and one node lost in the middle of it.

Where this may be done, the nodes are in network, host name and time namespaces of their own: another address, another
name, and another monotonic clock. Elsewhere they are two raylets of one machine.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
from pace import wait_for

from wattune.analysis.signals.align import align
from wattune.storage.study import TrialFolder
from wattune.units import NS_PER_S

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

RAY = [sys.executable, "-m", "ray.scripts.scripts"]
PORT = 36379
CLOCK_AHEAD_S = 5000
NAMESPACE = "wattune-test-"


@dataclass
class Nodes:
    """A cluster of two nodes, as processes."""

    address: str
    here: list[str]
    """Words before a command that make it run on the first node."""
    processes: list[subprocess.Popen[bytes]]
    apart: bool
    """True where they are in namespaces of their own."""

    def lose(self, index: int) -> None:
        """Ends every process of a node at once, as a power cut does."""
        tree = [*psutil.Process(self.processes[index].pid).children(recursive=True), self.processes[index]]
        for process in tree:
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.processes[index].wait(30)


def _ip(*arguments: str) -> bool:
    ip = shutil.which("ip") or "/usr/sbin/ip"
    try:
        return subprocess.run([ip, *arguments], capture_output=True, timeout=30).returncode == 0
    except FileNotFoundError:
        return False


def _can_separate() -> bool:
    """Says whether this user may make the namespaces, on a kernel that has them."""
    try:
        clock = subprocess.run(["unshare", "--time", "--uts", "--fork", "true"], capture_output=True, timeout=30)
    except FileNotFoundError:
        return False
    name = f"{NAMESPACE}probe"
    made = clock.returncode == 0 and _ip("netns", "add", name)
    if made:
        _ip("netns", "del", name)
    return made


def _separate() -> None:
    names = [f"{NAMESPACE}{index}" for index in (0, 1)]
    for name in names:
        assert _ip("netns", "add", name)
        assert _ip("-n", name, "link", "set", "lo", "up")
    assert _ip("-n", names[0], "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", names[1])
    for index, name in enumerate(names):
        assert _ip("-n", name, "addr", "add", f"10.77.9.{index + 1}/24", "dev", "eth0")
        assert _ip("-n", name, "link", "set", "eth0", "up")
        assert _ip("-n", name, "route", "add", "default", "via", f"10.77.9.{2 - index}")


def _prefix(index: int, *, separated: bool) -> list[str]:
    if not separated:
        return []
    ip = shutil.which("ip") or "/usr/sbin/ip"
    ahead_s = str(index * CLOCK_AHEAD_S)
    own = ["unshare", "--uts", "--time", "--monotonic", ahead_s, "--boottime", ahead_s, "--fork"]
    return [
        ip, "netns", "exec", f"{NAMESPACE}{index}", *own,
        "/bin/sh", "-c", f'hostname node{index}; exec "$@"', "sh",
    ]  # fmt: skip


@pytest.fixture
def nodes(tmp_path: Path, environment: dict[str, str]):
    """Two nodes with two processors each, the first one the head; ended by their own process ids."""
    separated = _can_separate()
    if separated:
        for index in (0, 1):
            _ip("netns", "del", f"{NAMESPACE}{index}")  # of a test that was killed
        _separate()
    addresses = ["10.77.9.1", "10.77.9.2"] if separated else ["127.0.0.1", "127.0.0.1"]
    environment |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    environment |= {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
    if separated:
        environment |= {"GLOO_SOCKET_IFNAME": "eth0"}  # the host names resolve to nothing
    scratch = tempfile.mkdtemp(prefix="ray-")  # short: it holds sockets, whose paths have 107 bytes
    started: list[subprocess.Popen[bytes]] = []
    try:
        for index, kind in enumerate((["--head", f"--port={PORT}"], [f"--address={addresses[0]}:{PORT}"])):
            options = ["start", "--block", "--num-cpus=2", "--object-store-memory=100000000", *kind]
            options += [f"--node-ip-address={addresses[index]}"] if separated else []
            options += [f"--temp-dir={scratch}", "--dashboard-port=38265"] if index == 0 else []
            with open(tmp_path / f"node{index}.log", "w") as log:
                command = [*_prefix(index, separated=separated), *RAY, *options]
                started.append(
                    subprocess.Popen(command, cwd="/", env=environment, stdout=log, stderr=subprocess.STDOUT)
                )
            wait_for(lambda index=index: "Ray runtime started" in (tmp_path / f"node{index}.log").read_text(), 300)
        yield Nodes(f"{addresses[0]}:{PORT}", _prefix(0, separated=separated), started, separated)
    finally:
        trees = [psutil.Process(one.pid).children(recursive=True) for one in started if one.poll() is None]
        for one in started:
            if one.poll() is None:
                for child in psutil.Process(one.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                        if "ray.scripts.scripts" in " ".join(child.cmdline()):
                            child.terminate()
                one.terminate()
                one.wait(60)
        _, alive = psutil.wait_procs([child for tree in trees for child in tree], timeout=20)
        for child in alive:
            child.kill()
        shutil.rmtree(scratch, ignore_errors=True)
        if separated:
            for index in (0, 1):
                _ip("netns", "del", f"{NAMESPACE}{index}")


def _two_node_space(write_space: Callable[..., Path], name: str, **changes: Any) -> Path:
    cluster = {"device": "cpu", "num_nodes": 2, "devices_per_node": 1, "simulate_sensors_of": "h200_sxm"}
    return write_space(name, cluster=cluster, **changes)


def _folder(study: Path) -> TrialFolder:
    (path,) = (result.parent for result in study.glob("trials/*/run.json"))
    return TrialFolder(path)


def _span_ns(times_ns: Sequence[int]) -> tuple[int, int]:
    return min(times_ns), max(times_ns)


def test_both_nodes_are_on_one_time_axis(nodes, environment, write_space, tmp_path: Path, storage: Path) -> None:
    space = _two_node_space(write_space, "two")
    command = [*nodes.here, sys.executable, "-m", "wattune", "run", space, "--address", nodes.address, "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["feasible"]) == 1
    folder = _folder(storage / "two")
    names = folder.nodes()
    assert len(names) == 2 and (not nodes.apart or names == ["node0", "node1"])
    manifests = folder.manifests()
    offsets = [manifests[name]["clock_offset_ns"] for name in names]
    uncertainties = [manifests[name]["clock_offset_uncertainty_ns"] for name in names]
    # One is the reference; both are on one machine, whose wall clock is one.
    assert min(uncertainties) == 0 < sorted(uncertainties)[1] < 0.5 * NS_PER_S
    assert all(abs(offset) <= max(uncertainties) for offset in offsets)

    spans = folder.spans()
    assert spans is not None and set(spans["node"].to_pylist()) == set(names)
    hosts = {name: pq.read_table(folder.path / "telemetry" / name / "host.parquet") for name in names}
    walls = {name: _span_ns(table["wall_ns"].to_pylist()) for name, table in hosts.items()}
    overlap_ns = min(end for _, end in walls.values()) - max(start for start, _ in walls.values())
    assert overlap_ns > NS_PER_S
    if nodes.apart:
        first, second = (min(hosts[name]["mono_ns"].to_pylist()) for name in names)
        assert (second - first) / NS_PER_S == pytest.approx(CLOCK_AHEAD_S, abs=60)
    aligned = align(folder.telemetry(), spans, manifests)
    assert aligned is not None and {name for name, _ in aligned.devices} == set(names) and not aligned.missing
    # Every rank's measured steps lie in the window, whatever its own node's monotonic clock says.
    metrics = json.loads((folder.path / "run.json").read_text())["metrics"]
    assert metrics["cluster_device_power_peak_1s_w"] > metrics["node_device_power_peak_1s_w"] > 0


def test_what_one_node_measured_is_kept_when_the_other_is_lost(
    nodes, start_wattune, write_space, results, storage: Path
) -> None:
    measure = {"warmup_steps": 2, "min_steps": 4, "min_seconds": 60, "timeout_s": 120}
    space = _two_node_space(write_space, "lost", measure=measure)
    running = start_wattune("run", space, "--address", nodes.address, before=nodes.here)
    running.says(r"^\[0/1\].* runs for ([2-9]\d s|\d+:\d+ min) +measure [1-9]")
    nodes.lose(1)
    assert running.ends(240) == 1 and "Traceback" not in running.text, running.text
    (result,) = results(storage / "lost").values()
    assert result["status"] == "infra_failed" and "left the cluster" in result["reason"], running.text
    folder = _folder(storage / "lost")
    (kept,) = folder.nodes()
    host = pq.read_table(folder.path / "telemetry" / kept / "host.parquet")
    start_ns, end_ns = _span_ns(host["wall_ns"].to_pylist())
    assert end_ns - start_ns > 8 * NS_PER_S
    assert folder.manifests()[kept]["closed"] is True
