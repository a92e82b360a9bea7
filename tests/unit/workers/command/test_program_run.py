"""Outcome of a program: its devices, its steps and spans, and the lines that outlive who heard them."""

from dataclasses import replace
from pathlib import Path

import pytest

from wattune.clock import ClockAnchor
from wattune.steps.files import Step
from wattune.steps.source import parse_source
from wattune.workers.command.program_run import ProgramOutcome, ProgramRun

NAMES = {"GPU-0": "gpu0", "GPU-1": "gpu1", "GPU-2": "gpu2"}
STEPS = [Step(at, (10 + at) * 10**9, (11 + at) * 10**9, 6) for at in range(8)]
RAN = ProgramOutcome(start_mono_ns=9 * 10**9, over_mono_ns=29 * 10**9, steps={0: STEPS, 1: []})


def test_devices_that_every_rank_told_are_believed():
    expected = {0: "gpu0", 1: "gpu1"}
    told = replace(RAN, headers={0: {"device_uuid": "1"}, 1: {"device_uuid": "GPU-0"}, 5: {"device_uuid": "2"}})
    assert told.told_devices(NAMES) == {0: "gpu1", 1: "gpu0", 5: "gpu2"}
    assert told.devices(expected, NAMES) == {0: "gpu1", 1: "gpu0"}
    for some in ({0: {"device_uuid": "1"}, 1: {}}, {0: {"device_uuid": "0"}, 1: {"device_uuid": "0"}}):
        assert replace(RAN, headers=some).devices(expected, NAMES) == expected


def test_steps_before_and_after_those_that_count_are_in_no_figure():
    counted = replace(RAN, first_index=2, end_index=6)
    assert (counted.num_measured, counted.startup_s, counted.measured_s, counted.run_s) == (4, 1.0, 4.0, 20.0)
    assert counted.overhead_frac == 0.8 and RAN.overhead_frac is None
    assert (RAN.num_measured, RAN.measured_s, RAN.tokens_per_step) == (0, 0.0, 6.0)
    spans = counted.spans(node="n", devices={0: "gpu0", 1: "gpu1"}, anchor=ClockAnchor(mono_ns=0, wall_ns=5))
    numbers = {rank: [row["step"] for row in spans.to_pylist() if row["rank"] == rank] for rank in (0, 1)}
    assert numbers[0] == numbers[1] == list(range(-2, 4))


def test_parts_of_a_programs_time_sum_to_its_run():
    counted = replace(RAN, first_index=2, end_index=6)
    assert counted.parts_s == {"build": 1.0, "compile": 1.0, "warmup": 1.0, "measure": 4.0, "close": 13.0}
    assert sum(counted.parts_s.values()) == counted.run_s
    silent = replace(RAN, steps={}, end_mono_ns=25 * 10**9)
    assert silent.parts_s == {"measure": 16.0, "close": 4.0}, "without steps its window is its run"
    failed = replace(RAN, steps={0: STEPS[:1]})
    assert failed.parts_s == {"build": 1.0, "compile": 1.0, "close": 18.0}


def test_the_time_to_import_is_that_of_the_lowest_rank_that_told():
    told = replace(RAN, headers={1: {"loaded_mono_ns": 10 * 10**9}, 0: {"loaded_mono_ns": None}})
    assert told.import_s == 1.0 and RAN.import_s is None
    assert replace(RAN, headers={0: {"loaded_mono_ns": 5}}).import_s is None, "of another clock"


@pytest.mark.parametrize("whole", [True, False])
def test_lines_that_tell_steps_outlive_who_heard_them(tmp_path: Path, whole: bool):
    source = parse_source("pattern/ms:took ([0-9.]+) ms")
    heard = ProgramRun(tmp_path, source, keeps_lines=True)
    for at in range(1, 10):
        heard.hear(f"took 100.0 ms, number {at}", at * 10**8)
        heard.hear("", at * 10**8)
        heard.hear("loss 3.0", at * 10**8)
    (kept,) = tmp_path.iterdir()
    if not whole:
        kept.write_bytes(kept.read_bytes()[:-5])
    again = ProgramRun(tmp_path, source)
    again.hear_kept()
    assert len(again.steps()[0]) == len(heard.steps()[0]) - (not whole) > 0
    assert heard.outcome(heard.steps()).output.count("\n\n") == 9
    heard.discard()
    assert not tmp_path.exists()
