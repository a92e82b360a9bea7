"""Studies that are killed, stopped and starved at random lose nothing, and end in time."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = [pytest.mark.slow, pytest.mark.ray]


def run(script: str, *arguments: object, timeout_s: float) -> "subprocess.CompletedProcess[str]":
    """Runs a benchmark; its Ray, disks and processes are its own."""
    command = [sys.executable, str(BENCHMARKS / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)


@pytest.mark.timeout(4000)
def test_twenty_hazards_lose_and_leave_nothing(tmp_path: Path) -> None:
    table = tmp_path / "chaos.csv"
    done = run("chaos.py", "--kills", 20, "--seed", 20261122, "--csv", table, "--out", tmp_path, timeout_s=3900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    with table.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) >= 15, done.stdout[-4000:]  # a study may be finished before the last hazard has its time
    assert {row["finished"] for row in rows} == {"yes"} and {row["breaches"] for row in rows} == {"none"}


@pytest.mark.timeout(2000)
def test_a_stopped_study_is_gone_within_15_s_in_every_order_of_deaths(tmp_path: Path) -> None:
    orders = ("group", "driver", "gcs", "raylet", "worker")
    done = run("chaos.py", "--csv", tmp_path / "deaths.csv", "--deaths", *orders, timeout_s=1900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    with (tmp_path / "deaths.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [row["order"] for row in rows] == list(orders)
    assert all(float(row["all_s"]) <= 15 for row in rows), rows
