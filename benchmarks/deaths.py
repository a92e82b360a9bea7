"""Stops running studies in every order of deaths and measures the seconds until nothing of them is left.

A study runs on this machine's CPUs. In the middle of a trial the first process is killed, or nobody, and a second later
the command gets its signal, as from `timeout` or systemd. Exit code 1 where an end took longer than 15 s or left files.

    python benchmarks/deaths.py --repeats 3 --csv deaths.csv
"""

import os
import signal
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from itertools import product
from pathlib import Path
from typing import Any

from chaos_study import Place, find, in_own_namespace, own
from harness import Found, Rows, benchmark

from wattune.orchestrate.ray_folder import remove_left

MOST_S = 15.0
"""Longest that the command may take to end after its signal."""

START_S = 600.0
ORDERS = ("group", "group SIGHUP", "all", "driver", "gcs", "raylet", "worker", "lane actor", "result maker", "sampler")
"""Orders by name: the process group or every process gets the signal, or the driver does, after a kill of another."""

COLUMNS = ["order", "signal", "repeat", "driver_s", "all_s", "exit_code", "left", "left_after_next"]
"""`left` is what the command left, `left_after_next` what remains of it once a next call has cleaned up."""


def stop(order: str, repeat: int, folder: Path) -> tuple[Any, ...]:
    """Runs a study, stops it in the middle of a trial, and returns a row of the table."""
    number = signal.SIGHUP if "SIGHUP" in order else signal.SIGTERM
    place = Place(folder, f"death{ORDERS.index(order)}x{repeat}", (), measure={"min_seconds": 120})
    log = place.folder / "log.txt"
    process = place.start("run", str(place.space), log=log, start_new_session=True)
    try:
        started_s = time.monotonic()
        while not (find("worker", place.mark, process.pid) and find("sampler", place.mark, process.pid)):
            if time.monotonic() - started_s > START_S:
                sys.exit(f"the study did not start within {START_S:g} s: {log.read_text()[-2000:]}")
            if process.poll() is not None:  # Ray does not start on a machine that is too busy
                process = place.start("run", str(place.space), log=log, start_new_session=True)
            time.sleep(0.3)
        time.sleep(3 + repeat)
        if order in ("gcs", "raylet", "worker", "lane actor", "result maker", "sampler"):
            find(order, place.mark, process.pid)[0].kill()
            time.sleep(1)
        stopped_s = time.monotonic()
        if order.startswith("group"):
            os.killpg(process.pid, number)
        elif order == "all":
            for each in own(place.mark):
                each.send_signal(number)
        else:
            process.send_signal(number)
        code = process.wait(300)
        driver_s = time.monotonic() - stopped_s
        while own(place.mark) and time.monotonic() - stopped_s < 300:
            time.sleep(0.1)
        all_s = time.monotonic() - stopped_s
        left, said = place.left(), log.read_text().splitlines()
        remove_left(place.temporary / f"wattune-{os.getuid()}")  # as every call does before it starts Ray
        remains = place.left()
    finally:
        process.kill()
        process.communicate(timeout=60)
        place.close(keep=False)
    remaining = ["; ".join(one[:4]) or "none" for one in (left, remains)]
    row = (order, number.name, f"r{repeat}", round(driver_s, 1), round(all_s, 1), f"exit {code}", *remaining)
    print(dict(zip(COLUMNS, row, strict=True)), "said:", said[-1:], file=sys.stderr, flush=True)
    return row


def _options(parser: ArgumentParser) -> None:
    parser.add_argument("--orders", nargs="*", choices=ORDERS, default=list(ORDERS), metavar="ORDER")
    parser.add_argument("--repeats", type=int, default=1)


@benchmark(
    claim="A study that is stopped is gone, in whatever order its processes end.",
    bar=f"all gone within {MOST_S:g} s, and nothing left after the next call",
    options=_options,
)
def main(given: Namespace) -> Found:
    """Measures every order."""
    in_own_namespace()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started and mounted is ended all the same
    rows, missed = Rows(*COLUMNS), []
    with tempfile.TemporaryDirectory(prefix="deaths", ignore_cleanup_errors=True) as scratch:
        for repeat, order in product(range(given.repeats), given.orders):
            row = stop(order, repeat, Path(scratch))
            rows.add(*row)
            if max(row[3:5]) > MOST_S or row[-1] != "none":
                missed.append(f"{order} {max(row[3:5])} s, left {row[-1]}")
    return Found(rows, missed=missed)


if __name__ == "__main__":
    main()
