"""Sweeps of this machine's processors: a table, a bound on time, and Ctrl-C that keeps what there is."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from wattune.calibration.links import calibrate_links
from wattune.cost.sweep import COLLECTIVES, COLUMNS, TABLE
from wattune.errors import SensorChoiceError

SMALL = ("--sizes", "4096", "65536", "--kinds", *COLLECTIVES)


@pytest.mark.slow
def test_two_ranks_leave_every_collective_in_a_table(tmp_path: Path) -> None:
    heard: list[tuple[str, float]] = []
    found = calibrate_links("cpu", out=str(tmp_path), minutes=2, options=SMALL, listener=lambda *one: heard.append(one))
    assert found.ended == ""
    table = pq.read_table(found.path)
    assert table.schema.equals(COLUMNS)
    rows = table.to_pylist()
    assert {(row["kind"], row["size_bytes"]) for row in rows} == {(k, s) for k in COLLECTIVES for s in (4096, 65536)}
    assert all(row["time_low_s"] <= row["time_s"] <= row["time_high_s"] and row["time_s"] > 0 for row in rows)
    assert all(row["group_size"] == 2 and row["num_nodes"] == 1 for row in rows)
    assert any("all_reduce" in what for what, _ in heard)


@pytest.mark.slow
def test_interrupted_it_keeps_what_it_has(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "wattune", "calibrate", "--links", "--backend", "cpu", "--out", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        _wait_for_rows(process.pid)
        os.kill(process.pid, signal.SIGINT)
        said, problems = process.communicate(timeout=60)
    assert process.returncode == 130, problems.decode()
    assert b"interrupted" in said
    assert pq.read_table(tmp_path / TABLE).num_rows > 0


def _wait_for_rows(pid: int) -> None:
    """Waits until the ranks of a sweep have written a first row."""
    import psutil

    deadline_s = time.monotonic() + 90
    while time.monotonic() < deadline_s:
        for child in psutil.Process(pid).children(recursive=True):
            try:
                words = child.cmdline()
            except psutil.Error:
                continue
            if "wattune.workers.link_load" in words:
                folder = Path(words[words.index("wattune.workers.link_load") + 1])
                rows = folder / "rows.jsonl"
                if rows.exists() and rows.read_text().count("\n") > 1:
                    return
        time.sleep(0.2)
    raise AssertionError("no row within 90 s")


def test_sensors_without_collectives_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SensorChoiceError, match="simulated"):
        calibrate_links("simulated", out=str(tmp_path))
