"""A study whose joined cluster's head dies, and one on a full disk: one line each, and the same call goes on."""

import json
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from raylet_cluster import Raylets, raylet_cluster

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def joined(tmp_path: Path, environment: dict[str, str]) -> Iterator[Raylets]:
    """A cluster of the test's own, whose head runs trials."""
    (tmp_path / "cluster").mkdir()
    with raylet_cluster(tmp_path / "cluster", environment, head_cpus=2) as found:
        environment |= {"RAY_AUTH_MODE": "disabled"}
        yield found


def test_a_dead_head_is_one_line_and_the_same_space_goes_on_elsewhere(
    joined: Raylets, start_wattune: Any, wattune: Any, write_space: Callable[..., Path], results: Any, storage: Path
) -> None:
    measure = {"warmup_steps": 2, "min_steps": 4, "min_seconds": 60, "timeout_s": 200}
    long = {"space": {"micro_batch_size": [1, 2]}, "measure": measure}
    running = start_wattune("run", write_space("headless", **long), "--address", joined.address)
    running.says(r"^\[0/2\].* runs for ([2-9]\d s|\d+:\d+ min) +measure [1-9]")
    (head,) = [one for one in psutil.Process(joined.process.pid).children(recursive=True) if one.name() == "gcs_server"]
    head.kill()
    assert running.ends(180) == 1
    (line,) = [line for line in running.text.splitlines() if line.startswith("error:")]
    assert "the cluster's head is dead" in line and "run the same command to continue" in line
    assert "Traceback" not in running.text
    ended = {one["status"] for one in results(storage / "headless").values()}
    assert ended <= {"interrupted"}, "what was cut off is marked now, or by the next call"
    short = write_space("headless", **long | {"measure": measure | {"min_seconds": 1}})
    done = wattune("run", short, "--json", timeout_s=300)
    assert json.loads(done.stdout)["finished"], done.stderr
    assert [one["status"] for one in results(storage / "headless").values()] == ["completed"] * 2


def test_a_full_disk_is_one_line_and_the_same_space_goes_on_once_there_is_room(
    environment: dict[str, str], wattune: Any, write_space: Callable[..., Path], results: Any, storage: Path
) -> None:
    """No file can become longer than 100 kB, as without room: the tracking store is the first to need more."""
    space = write_space("full")
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY)); "
    call = f"from wattune.__main__ import main; {limit} main()"
    assert resource.RLIM_INFINITY == -1
    done = subprocess.run(
        [sys.executable, "-c", call, "run", str(space)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("error:")]) == 1, done.stderr
    done = wattune("run", space, "--json", timeout_s=300)
    assert json.loads(done.stdout)["finished"], done.stderr
    (result,) = results(storage / "full").values()
    assert result["status"] == "completed"
