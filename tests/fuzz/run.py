"""Runs the fuzzers and prints their table.

python tests/fuzz/run.py --seconds 3600 --seed 7       # as `make fuzz`
python tests/fuzz/run.py --spaces 50000 --folders 20000 --seed 7
python tests/fuzz/run.py --spaces 2500 --folders 500 --seed 7 --csv fuzz.csv
"""

import argparse
import csv
import sys
import time
from collections.abc import Callable
from pathlib import Path

from folders import Study, fuzz_folder
from spaces import fuzz_expression, fuzz_space, scratch
from tally import COLUMNS, HEADER, Tally


def repeat(case: Callable[[int], None], most: int, seconds: float) -> float:
    """Runs cases until there were enough, or the time is over. Returns the seconds it took."""
    start_s = time.monotonic()
    for number in range(most):
        if time.monotonic() > start_s + seconds:
            break
        case(number)
    return time.monotonic() - start_s


def fuzz(seed: int, *, spaces: int, expressions: int, folders: int, seconds: float) -> list[Tally]:
    """Runs all fuzzers, one after another.

    Args:
        seed: Of all mutations.
        spaces: Most search spaces.
        expressions: Most objectives and constraints.
        folders: Most study folders.
        seconds: Most seconds of each of the three.
    """
    found = [Tally("search spaces"), Tally("objectives and constraints"), Tally("study folders")]
    with scratch() as name:
        folder = Path(name)
        found[0].wall_s = repeat(lambda number: fuzz_space(found[0], seed, number, folder), spaces, seconds)
        found[1].wall_s = repeat(lambda number: fuzz_expression(found[1], seed, number), expressions, seconds)
        if folders:
            study = Study(folder / "storage")
            found[2].wall_s = repeat(lambda number: fuzz_folder(found[2], study, seed, number), folders, seconds)
    return found


def main() -> int:
    """Prints the table. Returns 1 where anything happened that must never happen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--spaces", type=int, default=10**9, help="search spaces, and as many expressions")
    parser.add_argument("--folders", type=int, default=10**9)
    parser.add_argument("--csv", type=Path, help="file for the rows")
    given = parser.parse_args()
    each = {"spaces": given.spaces, "expressions": given.spaces, "folders": given.folders}
    found = fuzz(given.seed, **each, seconds=given.seconds / 3)
    if given.csv is not None:
        with open(given.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(one.cells(given.seed) for one in found if one.cases)
    sys.stdout.write(
        "\n".join([HEADER, *(one.row() for one in found), *filter(None, (t.problems() for t in found))]) + "\n"
    )
    return 0 if all(one.sound for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
