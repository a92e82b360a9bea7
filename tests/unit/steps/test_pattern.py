"""Steps from lines of output: the lines that the programs named really print, and their times."""

import re
from itertools import pairwise

import pytest

from wattune.steps.lines import OutputLines, plain
from wattune.steps.pattern import PatternSteps
from wattune.steps.source import PRESETS, StepSource, parse_source
from wattune.steps.table import tokens_per_step

S = 10**9

MEGATRON = (
    " [2025-08-01 07:19:{second:02d}] iteration {step:8d}/    5000 | consumed samples:          256 | elapsed time per "
    "iteration (ms): {ms:.1f} | throughput per GPU (TFLOP/s/GPU): 118.7 | learning rate: 1.395349E-07 |"
)
TORCHTITAN = (
    "[rank0]:[titan] 2026-11-22 10:00:{second:02d},123 - root - INFO - \x1b[31mstep: {step:2}  \x1b[32mloss:  7.9921  "
    "\x1b[38;2;180;60;0mgrad_norm:  1.4011  \x1b[39mmemory:  3.21GiB(4.02%)  \x1b[34mtps: 12,345  \x1b[36mtflops: 1.02"
)
NEMO_2 = (
    "Training epoch 0, iteration {step}/249 | lr: 3.922e-06 | global_batch_size: 8 | global_step: {step} | "
    "reduced_train_loss: 1.653 | train_step_timing in s: 2.505 | consumed_samples: 16"
)
NEMO_1 = (
    "Epoch 0: : 100%|##########| 100/100 [10:48<00:00, reduced_train_loss=0.0172, global_step={step}.00, "
    "consumed_samples=25600.0, train_step_timing in s=2.505]"
)
TQDM = " {step}%|#         | {step}/100 [00:14<01:48,  1.20s/it]"


def feed(steps: PatternSteps, line: str, mono_ns: int) -> None:
    if found := re.search(steps.source.pattern, plain(line)):
        steps.take(found, mono_ns)


def fed(source: StepSource, lines: list[tuple[str, float]]) -> PatternSteps:
    steps = PatternSteps(source)
    for line, seconds in lines:
        feed(steps, line, round(seconds * S))
    return steps


def test_megatron_tells_the_mean_of_the_iterations_since_its_last_line() -> None:
    lines = [(MEGATRON.format(second=at, step=10 * at, ms=100.0 + at), 100.0 + at) for at in (1, 2, 3)]
    steps = fed(PRESETS["megatron"], lines).steps
    assert len(steps) == 30 and [step.index for step in steps] == list(range(30))
    assert [step.duration_ns for step in steps[:10]] == [101_000_000] * 10  # as many as the second line ends
    assert [step.duration_ns for step in steps[10:20]] == pytest.approx([0.102e9] * 10, rel=0.03)
    assert steps[-1].end_mono_ns == 103 * S
    assert all(before.end_mono_ns <= after.start_mono_ns for before, after in pairwise(steps))


def test_torchtitan_tells_no_time_so_that_of_arrival_counts() -> None:
    lines = [(TORCHTITAN.format(second=at, step=step), 10.0 + at) for at, step in ((0, 1), (9, 10), (19, 20))]
    lines.insert(2, ("INFO - validate step: 10  loss:  7.1", 19.5))
    steps = fed(PRESETS["torchtitan"], lines).steps
    assert len(steps) == 19 and [step.duration_ns for step in steps] == [S] * 19
    assert [step.index for step in steps] == list(range(19))


@pytest.mark.parametrize("line", [NEMO_1, NEMO_2])
def test_nemo_tells_its_step_time(line: str) -> None:
    steps = fed(PRESETS["nemo"], [(line.format(step=step), 10 + 3 * step) for step in range(4)]).steps
    assert [step.duration_ns for step in steps] == [2_505_000_000] * 4


def test_a_progress_bar_repeats_a_step() -> None:
    lines = [(TQDM.format(step=step), at) for at, step in ((0, 1), (1, 2), (1.5, 2), (2, 3))]
    assert [step.duration_ns for step in fed(PRESETS["tqdm"], lines).steps] == [S, S]


def test_a_counter_that_begins_anew_is_no_step() -> None:
    lines = [(TQDM.format(step=step), at) for at, step in enumerate((8, 9, 0, 1))]
    assert len(fed(PRESETS["tqdm"], lines).steps) == 2


def test_an_own_pattern_with_time_and_tokens() -> None:
    source = parse_source({"pattern": r"took (?P<time>\S+) ms for (?P<tokens>[\d,]+) tokens", "unit": "ms"})
    (step,) = fed(source, [("it took 250 ms for 4,096 tokens", 9.0)]).steps
    assert (step.start_mono_ns, step.end_mono_ns, step.tokens) == (8.75 * S, 9 * S, 4096)


def test_a_pattern_without_groups_marks_the_end_of_a_step() -> None:
    source = parse_source({"pattern": "^done$"})
    assert [each.duration_ns for each in fed(source, [("done", 1), ("not done", 1.5), ("done", 2)]).steps] == [S]


@pytest.mark.parametrize("text", ["nan", "inf", "-3", "abc", "1.2.3", ""])
def test_what_is_no_number_is_no_step(text: str) -> None:
    source = parse_source({"pattern": r"time: (\S*)"})
    assert not fed(source, [(f"time: {text}", 5.0), (f"time: {text}", 6.0)]).steps


def test_late_lines_never_make_steps_overlap() -> None:
    source = parse_source({"pattern": r"(\S+) s"})
    steps = fed(source, [("1.0 s", 10.0), ("1.0 s", 10.2), ("1.0 s", 11.0)]).steps
    assert [(step.start_mono_ns / S, step.end_mono_ns / S) for step in steps] == [(9, 10), (10, 10.2), (10.2, 11)]


@pytest.mark.parametrize(
    ("pattern", "unknown"), [(r"step (?P<step>\d+)", 4), (r"(?P<step>\d+) took (?P<time>\S+) s", 3)]
)
def test_lines_that_a_buffer_held_back_end_their_steps_too(pattern: str, unknown: int) -> None:
    lines = [(f"step {4 * flush + line} took 1.0 s", 10.0 + 4 * flush) for flush in range(5) for line in range(4)]
    steps = fed(parse_source({"pattern": pattern}), lines).steps
    assert [step.duration_ns for step in steps] == [S] * (20 - unknown)
    assert (steps[0].start_mono_ns, steps[-1].end_mono_ns) == ((6 + unknown) * S, 26 * S)
    assert [step.index for step in steps] == list(range(20 - unknown))


def test_steps_held_back_for_longer_than_they_took_do_not_overlap() -> None:
    lines = [("1.0 s", 10.0), ("3.0 s", 12.0), ("1.0 s", 12.0)]
    steps = fed(parse_source({"pattern": r"(\S+) s"}), lines).steps
    assert [(step.start_mono_ns / S, step.end_mono_ns / S) for step in steps] == [(9, 10), (10, 11.5), (11.5, 12)]


def test_times_that_arrive_together_follow_each_other() -> None:
    source = parse_source({"pattern": r"(\S+) s"})
    steps = fed(source, [("1.0 s", 10.0), ("1.0 s", 13.0), ("0.5 s", 13.0), ("2.0 s", 14.0), ("1.0 s", 14.0)]).steps
    assert [(step.start_mono_ns / S, step.end_mono_ns / S) for step in steps[:3]] == [(9, 10), (11.5, 12.5), (12.5, 13)]
    # Told are three seconds where there is room for one: their ratio stays.
    assert [step.duration_ns / S for step in steps[3:]] == pytest.approx([2 / 3, 1 / 3])
    assert steps[3].start_mono_ns >= 13 * S and steps[-1].end_mono_ns == 14 * S


def test_a_bar_that_never_ends_its_line_tells_steps_as_they_come() -> None:
    lines, steps = OutputLines(65536), PatternSteps(PRESETS["tqdm"])
    for at in range(1, 6):
        for line, mono_ns in lines.take(f"\r{TQDM.format(step=at)}".encode(), at * S):
            feed(steps, line.rstrip("\r"), mono_ns)
    assert [(step.start_mono_ns / S, step.end_mono_ns / S) for step in steps.steps] == [(1, 2), (2, 3), (3, 4)]


def test_lines_of_a_progress_bar_end_with_a_carriage_return_and_arrived_before_it() -> None:
    lines = OutputLines(100)
    assert lines.take(b"\r 1/9 [00:01<", 1) == [("\r", 1)]
    assert lines.take(b"\r 2/9 [00:02<", 2) == [(" 1/9 [00:01<\r", 1)]
    assert lines.take(b"\n", 9) == [(" 2/9 [00:02<", 2)]
    assert lines.take(b"one\r\ntw", 10) == [("one\r", 10), ("", 10)]
    assert lines.take(b"o\n", 11) == [("two", 11)]
    assert lines.take(b"end", 12) == [] and lines.take(b"", 13) == [("end", 12)] and lines.take(b"", 14) == []
    assert lines.take(b"x" * 101, 15) == [("x" * 101, 15)]


HUGE = ("1e999", "1e305", "9" * 400, "1" + ",000" * 60, "nan")


@pytest.mark.parametrize("huge", HUGE)
def test_a_time_that_no_step_takes_ends_nothing_and_its_line_is_none(huge: str) -> None:
    source = parse_source({"pattern": r"took (?P<time>\S+) s"})
    found = fed(source, [("took 1 s", 1.0), (f"took {huge} s", 2.0), ("took 1 s", 3.0)]).steps
    assert [step.end_mono_ns for step in found] == [S, 3 * S]


@pytest.mark.parametrize("huge", HUGE)
def test_tokens_that_no_step_has_are_unknown(huge: str) -> None:
    source = parse_source({"pattern": r"took (?P<time>\S+) s of (?P<tokens>\S+)"})
    found = fed(source, [("took 1 s of 64", 1.0), (f"took 1 s of {huge}", 2.0), ("took 1 s of 32", 3.0)]).steps
    assert [step.tokens for step in found] == [64, None, 32]
    assert tokens_per_step({0: found}) == pytest.approx(48.0)


@pytest.mark.parametrize("huge", HUGE)
def test_a_number_that_no_step_has_ends_no_steps(huge: str) -> None:
    source = parse_source({"pattern": r"step (?P<step>\S+)"})
    found = fed(source, [("step 1", 1.0), (f"step {huge}", 2.0), ("step 2", 3.0), ("step 3", 4.0)]).steps
    assert [step.end_mono_ns for step in found][-1] == 4 * S and len(found) <= 3
