"""Step files while they grow: torn ends are left for later, damage is named and never read as a step."""

import json
from pathlib import Path

import pytest

from wattune.steps.files import Step, StepFile
from wattune.steps.process.writer import FORMAT_VERSION, line_of

HEADER = {"version": FORMAT_VERSION, "source": "spans", "rank": 3, "pid": 7}


def written(path: Path, *bodies: str, header: dict[str, object] | None = HEADER) -> StepFile:
    lines = [] if header is None else [line_of(json.dumps(header))]
    path.write_bytes(b"".join([*lines, *(line_of(body) for body in bodies)]))
    file = StepFile(path)
    file.read_on()
    return file


def test_steps_and_events_read_back(tmp_path: Path) -> None:
    file = written(tmp_path / "a.steps", "0 10 20 128", '{"event": "peak", "host_bytes": 5}', "1 20 35 -")
    assert file.steps == [Step(0, 10, 20, 128), Step(1, 20, 35, None)]
    assert (file.rank, file.source) == (3, "spans")
    assert file.events == [{"event": "peak", "host_bytes": 5}] and not file.problems


def test_a_torn_last_line_is_read_once_it_is_whole(tmp_path: Path) -> None:
    file = written(tmp_path / "a.steps", "0 10 20 1")
    line = line_of("1 20 30 1")
    with file.path.open("ab") as out:
        out.write(line[:9])
        out.flush()
        file.read_on()
        assert len(file.steps) == 1 and not file.problems
        out.write(line[9:])
    file.read_on()
    assert file.steps[-1] == Step(1, 20, 30, 1)


@pytest.mark.parametrize("damage", [b"X", b" ", b"\xff"])
def test_a_damaged_line_is_named_and_left_out(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "a.steps"
    written(path, "0 10 20 1", "1 20 30 1", "2 30 40 1")
    data = bytearray(path.read_bytes())
    at = data.index(b"1 20 30")
    data[at : at + 1] = damage
    path.write_bytes(data)
    file = StepFile(path)
    file.read_on()
    assert [step.index for step in file.steps] == [0, 2]
    assert len(file.problems) == 1 and "a.steps, line 3" in file.problems[0]


@pytest.mark.parametrize("body", ["0 20 10 1", "0 10 20", "0 10 20 -4", "x 1 2 3", "[1]", '{"a": '])
def test_a_line_with_a_right_checksum_that_is_no_step_is_named(tmp_path: Path, body: str) -> None:
    file = written(tmp_path / "a.steps", body)
    assert not file.steps and "is not a step" in file.problems[0]


def test_a_file_of_another_version_or_without_a_header_gives_no_steps(tmp_path: Path) -> None:
    newer = written(tmp_path / "a.steps", "0 10 20 1", header={**HEADER, "version": 99})
    headless = written(tmp_path / "b.steps", "0 10 20 1", header=None)
    assert not newer.steps and "version 99" in newer.problems[0]
    assert not headless.steps and "no header" in headless.problems[0]


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    file = StepFile(tmp_path / "gone.steps")
    file.read_on()
    assert not file.steps and "cannot be read" in file.problems[0]


def test_tokens_that_no_step_has_are_left_out_and_named(tmp_path: Path) -> None:
    file = written(tmp_path / "a.steps", f"0 10 20 {'9' * 400}", "1 20 30 5")
    assert file.steps == [Step(0, 10, 20, None), Step(1, 20, 30, 5)]
    assert "line 2: has more tokens than a step can have" in file.problems[0]


@pytest.mark.parametrize("body", [f"0 10 {'9' * 400} 1", f"{'9' * 30} 10 20 1", f"0 10 20 {'9' * 5000}"])
def test_times_that_no_clock_has_are_no_step(tmp_path: Path, body: str) -> None:
    file = written(tmp_path / "a.steps", body, "1 20 30 5")
    assert file.steps == [Step(1, 20, 30, 5)] and "is not a step" in file.problems[0]


def test_a_header_with_a_rank_that_is_no_number_is_named(tmp_path: Path) -> None:
    file = written(tmp_path / "a.steps", "0 10 20 1", header={**HEADER, "rank": float("inf")})
    assert not file.steps and "is not a step" in file.problems[0]
