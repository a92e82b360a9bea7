"""The fuzzers with fixed seeds, for two minutes; `make fuzz` runs them for an hour."""

import os
import sys
from pathlib import Path

from folders import Study, fuzz_folder
from hypothesis import given, settings
from run import repeat
from spaces import PLAIN, fuzz_document, fuzz_expression, fuzz_space
from tally import Tally

SECONDS = float(os.environ.get("FUZZ_SECONDS", "25"))
"""Most seconds of each fuzzer. A slow machine runs fewer cases of the same sequence."""

SEED = 1


def sound(tally: Tally) -> None:
    """Prints the counts, and makes sure that nothing happened that must never happen."""
    sys.stdout.write(tally.row() + "\n")
    assert tally.cases > 0
    assert tally.sound, tally.problems()


def test_a_mutated_space_is_refused_in_words_or_planned(tmp_path: Path) -> None:
    tally = Tally("search spaces")
    repeat(lambda number: fuzz_space(tally, SEED, number, tmp_path), 3000, SECONDS)
    sound(tally)


def test_a_mutated_objective_or_constraint_is_refused_in_words_or_taken() -> None:
    tally = Tally("objectives and constraints")
    repeat(lambda number: fuzz_expression(tally, SEED, number), 5000, SECONDS)
    sound(tally)


def test_any_plain_data_is_no_space_or_one() -> None:
    tally = Tally("plain data")

    @settings(max_examples=100, deadline=None, derandomize=True, database=None)
    @given(data=PLAIN)
    def each(data: object) -> None:
        fuzz_document(tally, data)

    each()
    sound(tally)


def test_a_damaged_folder_costs_itself_alone(tmp_path: Path) -> None:
    tally, study = Tally("study folders"), Study(tmp_path)
    repeat(lambda number: fuzz_folder(tally, study, SEED, number), 200, 2 * SECONDS)
    sound(tally)
