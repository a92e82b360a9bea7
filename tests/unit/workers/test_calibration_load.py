"""Loads keep the times they span, and leave spans any recording can be read with."""

import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from warm_ranks import start_script

from wattune.schema import SPANS
from wattune.units import ns_to_s, s_to_ns
from wattune.workers import calibration_load
from wattune.workers.calibration_load import HostCopies, MatrixProducts, Work, square_wave, steady

PIECE_S = 0.007
LATE_S = 0.003


class Clock:
    """Stands in for `time`: shows what sleeping and working took, and wakes up late."""

    def __init__(self) -> None:
        self.now_ns = 5_000_000_000

    def monotonic_ns(self) -> int:
        return self.now_ns

    def spend(self, seconds: float) -> None:
        self.now_ns += s_to_ns(seconds)

    def sleep(self, seconds: float) -> None:
        if seconds:
            self.spend(seconds + LATE_S)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(calibration_load, "time", clock)
    return clock


class Pieces(Work):
    """Work that costs nothing but the time its clock shows."""

    def __init__(self, clock: Clock) -> None:
        super().__init__("cpu")
        self._clock = clock

    def _start(self) -> None:
        self._clock.spend(PIECE_S)


def test_a_wave_works_the_first_half_of_each_period(clock: Clock) -> None:
    first_ns = clock.now_ns
    spans = square_wave(Pieces(clock), 0.4, 4)
    assert [span.phase for span in spans] == ["step"] * 4
    for index, span in enumerate(spans):
        start_s = 0.4 * index + (LATE_S if index else 0)  # no lateness adds up
        assert ns_to_s(span.start_mono_ns - first_ns) == pytest.approx(start_s)
        assert 0.4 * index + 0.2 <= ns_to_s(span.end_mono_ns - first_ns) < 0.4 * index + 0.2 + PIECE_S
    assert ns_to_s(clock.now_ns - first_ns) == pytest.approx(4 * 0.4 + LATE_S), "the last one rests too"


def test_steady_steps_follow_each_other(clock: Clock) -> None:
    first_ns = clock.now_ns
    spans = steady(Pieces(clock), 0.5)
    assert all(before.end_mono_ns == after.start_mono_ns for before, after in pairwise(spans))
    assert {span.end_mono_ns - span.start_mono_ns for span in spans} == {s_to_ns(4 * PIECE_S)}, "some 30 ms each"
    assert 0.5 <= ns_to_s(spans[-1].end_mono_ns - spans[0].start_mono_ns) < 0.5 + 4 * PIECE_S
    assert clock.now_ns == spans[-1].end_mono_ns and spans[0].start_mono_ns - first_ns < s_to_ns(0.31)


def test_copies_go_both_ways_until_they_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration_load, "COPY_BYTES", 2**16)
    copies = HostCopies("cpu")
    for number, (_, source) in enumerate(copies._pairs, 1):
        source.fill_(number)
    copies.run(1)
    assert [int(target.unique()) for target, _ in copies._pairs] == [1, 2]
    spans = steady(copies, 0.3)
    assert ns_to_s(spans[-1].end_mono_ns - spans[0].start_mono_ns) >= 0.3


def test_events_are_of_the_device_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event of another device is done at once: pieces would be queued without end."""
    current = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)

    class Idle(Work):
        def _start(self) -> None: ...

    Idle("cpu")
    Idle("cuda:1")
    assert current == ["cuda:1"]


def test_work_until_a_time_gone_by_is_one_product() -> None:
    assert MatrixProducts("cpu").run_until(0) == 1


def test_the_process_says_ready_and_leaves_spans(tmp_path: Path) -> None:
    path = tmp_path / "spans.parquet"
    said, errors, options = (
        tmp_path / "said",
        tmp_path / "errors",
        ["--node", "n0", "--name", "gpu3", "--steady", "0.3"],
    )
    process = start_script(Path(calibration_load.__file__), path, *options, said=said, errors=errors)
    process.join(100)
    assert (process.exitcode, said.read_text()) == (0, "ready\n"), errors.read_text()
    spans = pq.read_table(path)
    assert spans.schema.remove_metadata().equals(SPANS.remove_metadata())
    assert spans["step"].to_pylist() == list(range(spans.num_rows))
    assert set(spans["device"].to_pylist()) == {"gpu3"}
    assert spans["start_wall_ns"][0].as_py() - spans["start_mono_ns"][0].as_py() == pytest.approx(
        time.time_ns() - time.monotonic_ns(), abs=1e9
    )
    assert spans["end_mono_ns"][-1].as_py() - spans["start_mono_ns"][0].as_py() >= s_to_ns(0.3)


def test_waves_are_kept_apart(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration_load, "MatrixProducts", lambda _device: Pieces(clock))
    for place, name in ((signal, "signal"), (torch, "set_num_threads")):  # this process keeps its own
        monkeypatch.setattr(place, name, lambda *_: None)
    path, begun_ns = tmp_path / "spans.parquet", clock.now_ns
    waves = ["--wave", "0.2", "3", "--wave", "0.4", "2"]
    assert calibration_load.main([str(path), "--node", "n0", "--name", "gpu3", *waves]) == 0
    spans = pq.read_table(path)
    start_ns, end_ns = (spans[f"{edge}_mono_ns"].to_pylist() for edge in ("start", "end"))
    assert [ns_to_s(one - start_ns[0]) for one in start_ns] == pytest.approx([0.0, 0.2, 0.4, 2.6, 3.0], abs=0.02)
    assert start_ns[0] - begun_ns >= s_to_ns(calibration_load.WARM_S + calibration_load.REST_S)
    assert clock.now_ns - end_ns[-1] >= s_to_ns(calibration_load.REST_S)


@pytest.mark.slow
def test_terminated_it_ends_at_once_without_spans(tmp_path: Path) -> None:
    path = tmp_path / "spans.parquet"
    command = [sys.executable, "-m", "wattune.workers.calibration_load", path, "--node", "n0", "--name", "gpu3"]
    with subprocess.Popen([*command, "--steady", "50"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(40) == 128 + signal.SIGTERM
    assert not path.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steady", "1", "--wave", "1", "1"], "not allowed with"),
        ([], "required"),
        (["--steady", "1", "--device", "cuda:0"], "sees no GPU"),
    ],
)
def test_what_cannot_run_is_refused(
    tmp_path: Path,
    options: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its handlers
    with pytest.raises(SystemExit) as ending:
        calibration_load.main([str(tmp_path / "m.parquet"), "--node", "n0", "--name", "gpu3", *options])
    assert ending.value.code == 2
    assert message in capsys.readouterr().err
