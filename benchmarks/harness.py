"""The frame of every benchmark: a claim with its bar, options, conditions, and rows with units.

A script declares one function. The harness reads its command line, runs it, prints conditions, claim, bar and rows as
Markdown, and ends with 1 where the bar is missed:

    @benchmark(claim="Ten thousand trials are ranked in two seconds.", bar="wall time <= 2 s")
    def main(given: Namespace) -> Found:
        rows = Rows("what", "wall_s")
        rows.add("rank", measured_s)
        return Found(rows, missed=[] if measured_s <= 2 else [f"{measured_s:.1f} s"])

    if __name__ == "__main__":
        main()

Every script has `--json` (one object on standard output) and `--csv FILE` (its rows).
"""

import argparse
import csv
import inspect
import json
import os
import platform
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

VERSIONS: Final = ("torch", "ray", "numpy", "pyarrow")
MOST_SHOWN: Final = 100
UNITS: Final = {
    "frac": "",
    "ratio": "",
    "s": "s",
    "ms": "ms",
    "w": "W",
    "j": "J",
    "k": "K",
    "mb": "MB",
    "gb": "GB",
    "gib": "GiB",
}
"""Units by the ending of a column: `wall_s` is shown as "wall [s]"."""


class Rows:
    """A table: columns named with units, as a CSV has them and Markdown shows them."""

    def __init__(self, *columns: str) -> None:
        self.columns = columns
        self.cells: list[tuple[Any, ...]] = []

    def add(self, *cells: object) -> None:
        """Adds a row, with a cell for every column."""
        if len(cells) != len(self.columns):
            raise ValueError(f"got {len(cells)} cells; the columns are {', '.join(self.columns)}")
        self.cells.append(cells)

    def markdown(self) -> str:
        """Returns the table as Markdown, numbers with four digits; of a long one its first rows."""
        shown = (map(_shown, row) for row in self.cells[:MOST_SHOWN])
        lines = [map(_heading, self.columns), ["---"] * len(self.columns), *shown]
        more = f"\n\n{len(self.cells) - MOST_SHOWN} rows more are in `--csv`." if len(self.cells) > MOST_SHOWN else ""
        return "\n".join(f"| {' | '.join(line)} |" for line in lines) + more

    def write(self, path: Path) -> None:
        """Writes the table as CSV."""
        with path.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(self.columns)
            writer.writerows([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row] for row in self.cells)

    def objects(self) -> list[dict[str, Any]]:
        """Returns the rows by column."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.cells]


@dataclass(frozen=True)
class Found:
    """The finding of a benchmark: a table, sentences under it, and in what it missed its bar."""

    rows: Rows
    notes: Sequence[str] = ()
    missed: Sequence[str] = ()


def conditions() -> str:
    """Says when, on what, and by which versions something was measured."""
    said = [f"{datetime.now(UTC):%Y-%m-%d}", f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}"]
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        driver = Path("/proc/driver/nvidia/version").read_text().split("\n")[0].split("Module")[-1].split()[0]
        said.append(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, driver {driver}")
    said.append(f"Python {platform.python_version()}")
    for name in VERSIONS:
        with suppress(PackageNotFoundError):
            said.append(f"{name} {version(name)}")
    return ", ".join(said)


def benchmark(
    claim: str, bar: str, options: Callable[[ArgumentParser], None] = lambda _: None
) -> Callable[[Callable[[Namespace], Found]], Callable[..., None]]:
    """Makes a script's command of a function that measures.

    Args:
        claim: What is claimed, a sentence.
        bar: The figure that decides it.
        options: Adds the script's own options.
    """

    def wrap(measure: Callable[[Namespace], Found]) -> Callable[..., None]:
        @wraps(measure)
        def main(arguments: Sequence[str] | None = None) -> None:
            text = inspect.getdoc(inspect.getmodule(measure)) or ""
            parser = ArgumentParser(
                description=f"{text}\n\nClaim: {claim}\nBar:   {bar}",
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
            options(parser)
            parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
            parser.add_argument("--csv", type=Path, help="file for the rows")
            given = parser.parse_args(arguments)
            where = conditions()
            found = measure(given)
            _report(given, found, (claim, bar, where))
            sys.exit(1 if found.missed else 0)

        return main

    return wrap


def _report(given: Namespace, found: Found, said: tuple[str, str, str]) -> None:
    claim, bar, where = said
    verdict = f"missed: {'; '.join(found.missed)}" if found.missed else "met"
    if given.csv:
        found.rows.write(given.csv)
    lines = [found.rows.markdown(), *found.notes]
    if given.json:
        one = {"claim": claim, "bar": bar, "missed": list(found.missed), "conditions": where}
        print(json.dumps(one | {"rows": found.rows.objects()}))
    else:
        print("\n".join([where, f"claim: {claim}", f"bar:   {bar}: {verdict}", "", *lines]))


def _heading(column: str) -> str:
    name, _, unit = column.rpartition("_")
    return f"{name.replace('_', ' ')} [{UNITS[unit]}]" if UNITS.get(unit) and name else column.replace("_", " ")


def _shown(cell: object) -> str:
    return "" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell)
