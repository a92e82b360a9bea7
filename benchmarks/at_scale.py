"""Measures how the platform's work grows with ranks, nodes, trials and lanes, beside a bar for each figure.

    python benchmarks/at_scale.py [--only NAME ...] [--out DIR] [--again]

Figures come from the modules of `benchmarks/at_scale_rows`. NAME is a module (`lanes`) or one of its functions
(`lanes.ranks`). Each function runs in a process of its own, with a time-out, and its rows are kept in DIR as it gives
them: the same command goes on where it was cut, and `--again` measures anew. It prints every figure with bar and
spread, growth as exponents with the sizes they were fitted to, writes them to DIR/at_scale.csv, and ends with 1 where
a bar is missed or a function did not end.
"""

import json
import os
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Final

from at_scale_rows import TIMEOUTS_S, Measure, Row
from harness import Rows, conditions

MODULES: Final = sorted(
    path.stem for path in (Path(__file__).parent / "at_scale_rows").glob("*.py") if path.stem != "__init__"
)


def declared(modules: list[str]) -> dict[str, Measure]:
    """Loads modules; returns their functions by name, such as `lanes.ranks`."""
    for name in modules:
        import_module(f"at_scale_rows.{name}")
    return {f"{one.__module__.removeprefix('at_scale_rows.')}.{one.__name__}": one for one in TIMEOUTS_S}


def measure(name: str, file: Path) -> str:
    """Runs one function in a process of its own, which writes its rows; returns why it did not end, or nothing."""
    file.with_suffix(".done").unlink(missing_ok=True)
    command = [sys.executable, __file__, "--rows-of", name, "--out", str(file.parent)]
    limit_s = TIMEOUTS_S[declared([name.split(".")[0]])[name]]
    with file.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:  # also at a Ctrl-C: it is to end what it started, and has ten seconds for it
                os.killpg(process.pid, signal.SIGINT)
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
    if code is None:
        return f"{name} took longer than {limit_s:g} s"
    return "" if code == 0 else f"{name} ended with {code}; see {file.with_suffix('.log')}"


def write_rows(name: str, file: Path) -> None:
    """Measures the rows of one function, and appends each to a file as it comes."""
    with file.open("w") as out:
        for row in declared([name.split(".")[0]])[name]():
            out.write(json.dumps(asdict(row)) + "\n")
            out.flush()
    file.with_suffix(".done").touch()


def read_rows(file: Path) -> list[Row]:
    """Returns the rows that a function gave so far."""
    return [Row(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def table(found: dict[str, list[Row]]) -> Rows:
    """Lays out rows; numbers of several units stand in one column, so their unit has a column of its own."""
    rows = Rows("measured_by", "figure", "unit", "num_value", "num_spread", "bound", "num_bar", "met")
    for name, several in found.items():
        for row in several:
            bound = "" if row.bar is None else "at least" if row.at_least else "at most"
            met = "" if row.bar is None else "yes" if row.is_met else "no"
            rows.add(name, row.figure, row.unit, row.value, row.spread, bound, row.bar, met)
    return rows


def main() -> int:
    """Measures what was asked for; returns 1 where a bar is missed."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=MODULES, metavar="NAME", help="a module, or one of its functions")
    parser.add_argument("--out", type=Path, default=Path("at_scale"), metavar="DIR", help="folder for rows and table")
    parser.add_argument("--again", action="store_true", help="measure again what DIR has")
    parser.add_argument("--rows-of", metavar="NAME", help="measure one function in this process")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what runs ends with this process
    if given.rows_of:
        write_rows(given.rows_of, given.out / f"{given.rows_of}.jsonl")
        return 0
    known = declared(sorted({name.split(".")[0] for name in given.only} & set(MODULES)))
    names = [name for name in known if {name, name.split(".")[0]} & set(given.only)]
    if unknown := [one for one in given.only if not any(one in (name, name.split(".")[0]) for name in names)]:
        parser.error(f"no figures of the name {', '.join(unknown)}; known are {', '.join([*MODULES, *known])}")
    print(conditions(), file=sys.stderr)
    missed: list[str] = []
    found: dict[str, list[Row]] = {}
    for number, name in enumerate(names, 1):
        file, begun_s = given.out / f"{name}.jsonl", time.monotonic()
        done = file.with_suffix(".done").exists() and not given.again
        if not done:
            print(f"{number}/{len(names)} {name}, {TIMEOUTS_S[known[name]]:g} s at most", file=sys.stderr, flush=True)
            missed += filter(None, [measure(name, file)])
            print(f"    {time.monotonic() - begun_s:.0f} s", file=sys.stderr, flush=True)
        found[name] = read_rows(file)
    missed += [f"{row.figure}: {row.value:.4g} {row.unit}" for rows in found.values() for row in rows if not row.is_met]
    result = table(found)
    result.write(given.out / "at_scale.csv")
    print(result.markdown())
    print("missed: " + "; ".join(missed) if missed else "every bar is kept")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
