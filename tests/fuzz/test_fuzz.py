"""The fuzzers with fixed seeds, for two minutes; `make fuzz` runs them for an hour."""

import itertools
import os
import sys
import time
from pathlib import Path

import pytest
import tally
from folders import Study, fuzz_folder
from hypothesis import given, settings
from run import main, repeat
from spaces import PLAIN, fuzz_document, fuzz_expression, fuzz_space
from tally import Tally

from wattune.errors import PlanError

SECONDS = float(os.environ.get("FUZZ_SECONDS", "25"))
"""Most seconds of each fuzzer. A slow machine runs fewer cases of the same sequence."""

SEED = 1


def sound(tally: Tally) -> None:
    """Prints the counts, and makes sure that nothing happened that must never happen."""
    sys.stdout.write(tally.row() + "\n")
    assert tally.cases > 0
    assert tally.sound, tally.problems()


def raising(error: Exception) -> str:
    raise error


def test_every_outcome_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally, "SLOW_S", 0.2)
    one, two = Tally("spaces"), Tally("spaces")
    one.run("a", lambda: "accepted")
    one.run("b", lambda: raising(PlanError("no such axis")))
    one.run("c", lambda: "silent")
    one.run("d", lambda: raising(KeyError("tp")))
    one.run("e", lambda: str(sum(1 for _ in itertools.count())))  # never ends
    counts = [one.cases, one.refused, one.accepted, len(one.silent), one.tracebacks.total(), len(one.slow)]
    assert counts == [5, 1, 1, 1, 1, 1]
    assert not one.sound and 0.1 <= one.longest_s < 5  # two clocks: what ends it and what counts
    two.run("f", lambda: time.sleep(0.3) or "accepted")  # a busy machine makes no case slow
    assert two.sound
    assert one.problems().startswith("1 x KeyError in elsewhere: d: 'tp'") and "slow: e" in one.problems()


def test_a_run_prints_and_keeps_a_row_of_each_fuzzer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--spaces", "3", "--folders", "0", "--csv", str(tmp_path / "rows.csv")]
    monkeypatch.setattr(sys, "argv", ["run.py", *options])
    assert main() == 0
    heading, *rows = (tmp_path / "rows.csv").read_text().splitlines()
    assert heading == ",".join(tally.COLUMNS) and [row.split(",")[:3] for row in rows] == [
        ["seed 1", "search spaces", "3"], ["seed 1", "objectives and constraints", "3"],
    ]  # fmt: skip


@pytest.mark.parametrize("count", [250, pytest.param(3000, marks=pytest.mark.slow)])
def test_a_mutated_space_is_refused_in_words_or_planned(tmp_path: Path, count: int) -> None:
    found = Tally("search spaces")
    repeat(lambda number: fuzz_space(found, SEED, number, tmp_path), count, SECONDS)
    sound(found)


def test_a_mutated_objective_or_constraint_is_refused_in_words_or_taken() -> None:
    found = Tally("objectives and constraints")
    repeat(lambda number: fuzz_expression(found, SEED, number), 5000, SECONDS)
    sound(found)


def test_any_plain_data_is_no_space_or_one() -> None:
    found = Tally("plain data")

    @settings(max_examples=int(os.environ.get("EXAMPLES", "50")), deadline=None, derandomize=True, database=None)
    @given(data=PLAIN)
    def each(data: object) -> None:
        fuzz_document(found, data)

    each()
    sound(found)


@pytest.mark.parametrize("count", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_a_damaged_folder_costs_itself_alone(tmp_path: Path, count: int) -> None:
    found, study = Tally("study folders"), Study(tmp_path)
    repeat(lambda number: fuzz_folder(found, study, SEED, number), count, 2 * SECONDS)
    sound(found)
