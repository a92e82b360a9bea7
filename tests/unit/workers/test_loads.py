"""Loads keep the times they mark, and leave marks any recording can be read with."""

import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from wattune.schema import MARKS
from wattune.units import ns_to_s
from wattune.workers import loads
from wattune.workers.loads import HostCopies, MatrixProducts, Work, square_wave, steady

LATE_S = 0.1
"""An edge may be so late on a busy test machine."""


@pytest.fixture(scope="module")
def products() -> MatrixProducts:
    products = MatrixProducts("cpu")
    products.run(2)
    return products


def test_a_wave_works_the_first_half_of_each_period(products: MatrixProducts) -> None:
    before_ns = time.monotonic_ns()
    marks = square_wave(products, 0.4, 4)
    assert [mark.phase for mark in marks] == ["step"] * 4
    assert 4 * 0.4 <= ns_to_s(time.monotonic_ns() - before_ns) < 4 * 0.4 + 2 * LATE_S
    for index, mark in enumerate(marks):
        start_s = ns_to_s(mark.start_mono_ns - before_ns)
        assert 0.4 * index <= start_s < 0.4 * index + LATE_S
        assert 0.4 * index + 0.2 <= ns_to_s(mark.end_mono_ns - before_ns) < 0.4 * index + 0.2 + 2 * LATE_S


def test_steady_steps_follow_each_other(products: MatrixProducts) -> None:
    marks = steady(products, 0.5)
    assert ns_to_s(marks[-1].end_mono_ns - marks[0].start_mono_ns) >= 0.5
    pauses_s = [ns_to_s(b.start_mono_ns - a.end_mono_ns) for a, b in pairwise(marks)]
    assert all(pause_s >= 0 for pause_s in pauses_s)
    assert sum(pauses_s) < 0.1


def test_copies_go_both_ways_until_they_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "COPY_BYTES", 2**16)
    copies = HostCopies("cpu")
    for number, (_, source) in enumerate(copies._pairs, 1):
        source.fill_(number)
    copies.run(1)
    assert [int(target.unique()) for target, _ in copies._pairs] == [1, 2]
    marks = steady(copies, 0.3)
    assert ns_to_s(marks[-1].end_mono_ns - marks[0].start_mono_ns) >= 0.3


def test_events_are_of_the_device_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event of another device is done at once: pieces would be queued without end."""
    current = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)

    class Idle(Work):
        def _start(self) -> None: ...

    Idle("cpu")
    Idle("cuda:1")
    assert current == ["cuda:1"]


def test_work_until_a_time_gone_by_is_one_product(products: MatrixProducts) -> None:
    assert products.run_until(0) == 1


def command(marks: Path, *options: str) -> list[str]:
    base = [sys.executable, "-m", "wattune.workers.loads", str(marks), "--node", "n0", "--name", "gpu3"]
    return [*base, *options]


@pytest.mark.timeout(60)
def test_the_process_says_ready_and_leaves_marks(tmp_path: Path) -> None:
    path = tmp_path / "marks.parquet"
    done = subprocess.run(
        command(path, "--wave", "0.2", "3", "--wave", "0.4", "2"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "ready\n"), done.stderr
    marks = pq.read_table(path)
    assert marks.schema.remove_metadata().equals(MARKS.remove_metadata())
    assert marks["step"].to_pylist() == list(range(5))
    assert set(marks["device"].to_pylist()) == {"gpu3"}
    assert marks["start_wall_ns"][0].as_py() - marks["start_mono_ns"][0].as_py() == pytest.approx(
        time.time_ns() - time.monotonic_ns(), abs=1e9
    )
    gap_s = ns_to_s(marks["start_mono_ns"][3].as_py() - marks["end_mono_ns"][2].as_py())
    assert gap_s >= 2.0, "waves are kept apart"


@pytest.mark.timeout(60)
def test_terminated_it_ends_at_once_without_marks(tmp_path: Path) -> None:
    path = tmp_path / "marks.parquet"
    with subprocess.Popen(command(path, "--steady", "50"), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(10) == 128 + signal.SIGTERM
    assert not path.exists()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steady", "1", "--wave", "1", "1"], "not allowed with"),
        ([], "required"),
        (["--steady", "1", "--device", "cuda:0"], "sees no GPU"),
    ],
)
def test_what_cannot_run_is_refused(tmp_path: Path, options: list[str], message: str) -> None:
    done = subprocess.run(
        command(tmp_path / "m.parquet", *options),
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert message in done.stderr
