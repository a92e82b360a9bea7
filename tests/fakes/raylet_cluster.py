"""A Ray cluster of a test's own whose nodes come and go as the test says."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
from mlflow_server import free_port

ROOT = Path(__file__).parents[2]
RAYLETS = ROOT / "tests" / "e2e" / "raylets.py"


class Raylets:
    """The cluster, told what to do: `add NAME` or `kill NAME`."""

    def __init__(self, process: "subprocess.Popen[str]", address: str) -> None:
        self.process, self.address = process, address

    def __call__(self, order: str) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{order}\n")
        self.process.stdin.flush()
        while (line := self.process.stdout.readline().strip()) != "done":
            assert line or self.process.poll() is None, "the cluster's process ended"


@contextmanager
def raylet_cluster(folder: Path, environment: Mapping[str, str], head_cpus: int = 0) -> Iterator[Raylets]:
    """Starts a head; everything of it is gone at the end of the block.

    Args:
        folder: Its working directory, which gets its log.
        environment: Of all its processes, to which the settings of Ray are added.
        head_cpus: Processors of the head; without any no trial runs there.
    """
    settings = {**environment, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    settings |= {"RAY_agent_register_timeout_ms": "120000"}  # on a busy machine its agent starts late
    settings["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "platform"), settings.get("PYTHONPATH", "")]))
    with open(folder / "raylets.log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, str(RAYLETS), str(free_port()), str(head_cpus)],
            cwd=folder,
            env=settings,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert process.stdout is not None and process.stdin is not None
    address = ""
    for line in process.stdout:
        if line.startswith("address "):
            address = line.split()[1]
            break
    assert address, (folder / "raylets.log").read_text()
    try:
        yield Raylets(process, address)
    finally:
        tree = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.stdin.close()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
        _, left = psutil.wait_procs(tree, timeout=20)
        for one in left:
            one.kill()
