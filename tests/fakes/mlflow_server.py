"""An MLflow tracking server of the tests' own."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path


def free_port() -> int:
    """A port that is free, and will be when a server that takes half a minute to start wants it.

    Not one the kernel gives out: any process beside the tests that connects to something may get that next.
    """
    for port in random.sample(range(20_000, 32_768), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("a hundred ports in a row are taken")


@contextlib.contextmanager
def mlflow_server(store: str, artifacts: Path, port: int) -> Iterator[str]:
    """`mlflow server` on this machine until the block ends."""
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", store, "--port", str(port)]
    command += ["--artifacts-destination", str(artifacts), "--workers", "1"]
    environment = os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true"}
    log = artifacts.with_suffix(".log")
    with open(log, "ab") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
        try:
            url, end_s = f"http://127.0.0.1:{port}", time.monotonic() + 120
            while True:
                try:
                    with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                        if answer.status == 200:
                            break
                except OSError:
                    assert server.poll() is None, log.read_text()[-3000:]
                    assert time.monotonic() < end_s, log.read_text()[-3000:]
                    time.sleep(0.3)
            yield url
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(server.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    server.wait(20)
