"""The source that counts, and what else a command's processes tell."""

import json
from pathlib import Path
from typing import Any

import pytest

from wattune.steps.process.writer import FORMAT_VERSION, line_of
from wattune.steps.reader import StepReader
from wattune.steps.source import NONE, parse_source

LINE = "iteration {step}/ 50 | consumed samples: 1 | elapsed time per iteration (ms): 100.0 |"


def write(
    folder: Path, rank: int, source: str, num_steps: int, *events: dict[str, Any], pid: int = 1, begin: int = 0
) -> Path:
    path = folder / f"{rank}-{pid}-{source}.steps"
    header = {"version": FORMAT_VERSION, "source": source, "rank": rank, "pid": pid, "local_rank": rank}
    bodies = [json.dumps(header), *(f"{at} {begin + 10 * at} {begin + 10 * at + 9} 7" for at in range(num_steps))]
    path.write_bytes(b"".join(line_of(body) for body in [*bodies, *map(json.dumps, events)]))
    return path


def test_the_best_source_counts_and_is_named(tmp_path: Path) -> None:
    reader = StepReader(tmp_path, parse_source("auto"))
    assert reader.poll() == {} and reader.source == "none"
    for step in (1, 2, 3):
        reader.feed(LINE.format(step=step), step * 10**9)
    assert len(reader.poll()[0]) == 3 and reader.source.startswith("pattern megatron")
    for best, source in enumerate(("optimizer", "lightning", "transformers", "spans"), start=4):
        write(tmp_path, 0, source, best)
        write(tmp_path, 1, source, best)
        steps = reader.poll()
        assert {rank: len(each) for rank, each in steps.items()} == {0: best, 1: best}
        assert reader.source.startswith(source)


def test_only_the_source_that_was_asked_for_counts(tmp_path: Path) -> None:
    write(tmp_path, 0, "spans", 5)
    write(tmp_path, 0, "optimizer", 4)
    assert len(StepReader(tmp_path, parse_source("optimizer")).poll()[0]) == 4
    assert StepReader(tmp_path, parse_source("lightning")).poll() == {}
    assert StepReader(tmp_path, NONE).poll() == {}
    pattern = StepReader(tmp_path, parse_source("tqdm"))
    for state in (1, 2):
        pattern.feed(f"{state}/9 [00:01<00:02\r", 10**9)
    assert pattern.poll() == {}  # both at one moment, as of a bar that nobody flushed
    pattern.feed("3/9 [00:03<00:02\r", 2 * 10**9)
    assert [step.duration_ns for step in pattern.poll()[0]] == [10**9]


def test_files_are_read_on_while_they_grow(tmp_path: Path) -> None:
    path = write(tmp_path, 0, "spans", 2)
    reader = StepReader(tmp_path, parse_source("auto"))
    assert len(reader.poll()[0]) == 2
    with path.open("ab") as out:
        out.write(line_of("2 20 29 7"))
    assert len(reader.poll()[0]) == 3


def test_of_two_processes_of_one_rank_the_one_with_most_steps_counts(tmp_path: Path) -> None:
    write(tmp_path, 0, "optimizer", 3, pid=1)
    write(tmp_path, 0, "optimizer", 9, pid=2)
    reader = StepReader(tmp_path, parse_source("auto"))
    assert len(reader.poll()[0]) == 9
    assert "2 processes told steps" in reader.problems[0] and "0-1-optimizer.steps" in reader.problems[0]


def test_steps_of_two_runs_of_a_command_are_not_put_together(tmp_path: Path) -> None:
    for rank, pid, num_steps, begin in (
        (0, 8, 40, 0),
        (1, 9, 40, 0),
        (2, 10, 40, 0),
        (0, 11, 41, 1000),
        (1, 12, 39, 1000),
    ):
        write(tmp_path, rank, "spans", num_steps, pid=pid, begin=begin)
    steps = StepReader(tmp_path, parse_source("auto")).poll()
    assert {rank: (len(each), each[0].start_mono_ns) for rank, each in steps.items()} == {0: (41, 1000), 1: (39, 1000)}


def test_peaks_of_the_device_come_before_those_of_the_host(tmp_path: Path) -> None:
    write(tmp_path, 0, "spans", 1, {"event": "peak", "host_bytes": 9, "device_bytes": 5})
    write(tmp_path, 1, "spans", 1, {"event": "peak", "host_bytes": 9}, {"event": "peak", "host_bytes": 8})
    reader = StepReader(tmp_path, parse_source("auto"))
    reader.poll()
    assert reader.peaks() == {0: 5, 1: 9}


def test_peaks_are_those_of_the_processes_whose_steps_count(tmp_path: Path) -> None:
    write(tmp_path, 0, "spans", 9, {"event": "peak", "host_bytes": 90, "device_bytes": 5}, pid=1)
    write(tmp_path, 0, "spans", 3, {"event": "peak", "host_bytes": 90, "device_bytes": 8}, pid=2, begin=1000)
    write(tmp_path, 1, "optimizer", 9, {"event": "peak", "host_bytes": 90}, pid=3)
    write(tmp_path, 1, "optimizer", 9, {"event": "peak", "host_bytes": 9, "device_bytes": 6}, pid=4)
    reader = StepReader(tmp_path, parse_source("auto"))
    reader.poll()
    assert reader.peaks() == {0: 5, 1: 6}


def test_the_first_exception_of_each_rank_and_who_failed_first(tmp_path: Path) -> None:
    later = {"event": "error", "mono_ns": 30, "text": "RuntimeError: NCCL"}
    first = {"event": "error", "mono_ns": 20, "text": "OutOfMemoryError: 3 GiB"}
    write(tmp_path, 0, "process", 0, later)
    write(tmp_path, 1, "process", 0, {**later, "mono_ns": 40}, pid=2)
    write(tmp_path, 1, "process", 0, first, pid=3)
    reader = StepReader(tmp_path, parse_source("auto"))
    reader.poll()
    assert reader.errors() == {0: "RuntimeError: NCCL", 1: "OutOfMemoryError: 3 GiB"}
    assert next(iter(reader.errors())) == 1


def test_problems_that_processes_tell_and_damage_are_said(tmp_path: Path) -> None:
    path = write(tmp_path, 0, "process", 0, {"event": "problem", "text": "the hook failed"})
    with path.open("ab") as out:
        out.write(b"nonsense\n")
    reader = StepReader(tmp_path, parse_source("auto"))
    reader.poll()
    assert len(reader.problems) == 2 and any("the hook failed" in one for one in reader.problems)


def test_a_folder_that_is_gone_is_no_steps(tmp_path: Path) -> None:
    assert StepReader(tmp_path / "gone", parse_source("auto")).poll() == {}


@pytest.mark.parametrize("prefix", ["[rank{}]:", "[default{}]: "])
def test_of_lines_that_begin_with_a_rank_those_of_the_lowest_one_count(tmp_path: Path, prefix: str) -> None:
    """Each of four ranks prints each step, without its number."""
    reader = StepReader(tmp_path, parse_source({"pattern": "took ([0-9.]+) ms of (?:[0-9]+) tokens", "unit": "ms"}))
    for step in range(1, 21):
        for at, rank in enumerate((3, 1, 0, 2)):
            reader.feed(f"{prefix.format(rank)}took 100.0 ms of 8 tokens", step * 10**8 + at * 10**6)
    (steps,) = reader.poll().values()
    assert len(steps) == 20 and not reader.problems
    assert {step.duration_ns for step in steps} == {10**8}


def test_lines_that_tell_more_time_than_passed_are_said(tmp_path: Path) -> None:
    """Two ranks print each step, and nothing tells them apart."""
    reader = StepReader(tmp_path, parse_source({"pattern": "took ([0-9.]+) ms", "unit": "ms"}))
    for step in range(1, 21):
        for rank in (0, 1):
            reader.feed("took 100.0 ms", step * 10**8 + rank * 10**6)
    assert len(reader.poll()[0]) > 20
    assert [said for said in reader.problems if "tell 2.1 times the time that passed" in said]
    alone = StepReader(tmp_path, parse_source({"pattern": "took ([0-9.]+) ms", "unit": "ms"}))
    for step in range(1, 41):
        alone.feed("took 100.0 ms", step * 10**8 + (step % 3) * 2 * 10**7)
    assert len(alone.poll()[0]) == 40 and not alone.problems


@pytest.mark.parametrize(("each", "confidence"), [(1, "high"), (2, "low")])
def test_steps_of_optimizers_are_held_against_the_output(tmp_path: Path, each: int, confidence: str) -> None:
    """Two optimizers that step in turn make two steps of one."""
    reader = StepReader(tmp_path, parse_source("auto"))
    for step in range(1, 21):
        reader.feed(f"step {step} loss 2.1", step * each * 10**8)
    header = json.dumps({"version": FORMAT_VERSION, "source": "optimizer", "rank": 0, "pid": 1})
    bodies = [header, *(f"{at} {at * 10**8} {(at + 1) * 10**8} -" for at in range(20 * each))]
    (tmp_path / "0-1-optimizer.steps").write_bytes(b"".join(map(line_of, bodies)))
    assert len(reader.poll()[0]) == 20 * each and reader.source.startswith("optimizer")
    assert reader.confidence == confidence and bool(reader.problems) == (confidence == "low")
