"""Stops running studies in every order of deaths and measures the seconds until nothing of them is left.

A study runs on this machine's CPUs. In the middle of a trial the first process is killed, or nobody, and a second later
the command gets its signal, as from `timeout` or systemd. Exit code 1 where an end took longer than 15 s or left files.

    python benchmarks/deaths.py --repeats 3 --csv deaths.csv
"""

import argparse
import csv
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from chaos_study import Place, find, in_own_namespace, own
from harness import header

from wattune.orchestrate.ray_folder import remove_left

MOST_S = 15.0
"""Longest that the command may take to end after its signal."""

START_S = 600.0
ORDERS = ("group", "group SIGHUP", "all", "driver", "gcs", "raylet", "worker", "lane actor", "trial driver", "sampler")
"""Orders by name: the process group or every process gets the signal, or the driver does, after a kill of another."""

COLUMNS = ["order", "signal", "repeat", "driver_s", "all_s", "exit_code", "left", "left_after_next"]
"""`left` is what the command left, `left_after_next` what remains of it once a next call has cleaned up."""


def stop(order: str, repeat: int, folder: Path) -> dict[str, Any]:
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
        if order in ("gcs", "raylet", "worker", "lane actor", "trial driver", "sampler"):
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
    row = [order, number.name, f"r{repeat}", round(driver_s, 1), round(all_s, 1), f"exit {code}"]
    row += ["; ".join(one[:4]) or "none" for one in (left, remains)]
    print(dict(zip(COLUMNS, row, strict=True)), "said:", said[-1:], flush=True)
    return dict(zip(COLUMNS, row, strict=True))


def main() -> int:
    """Measures every order; writes and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--orders", nargs="*", choices=ORDERS, default=list(ORDERS), metavar="ORDER")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--csv", type=Path, required=True)
    options = parser.parse_args()
    header("A study that is stopped is gone, in whatever order its processes end.", f"all gone within {MOST_S:g} s")
    in_own_namespace()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started and mounted is ended all the same
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="deaths", ignore_cleanup_errors=True) as scratch,
        open(options.csv, "w", newline="") as file,
    ):
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for repeat in range(options.repeats):
            for order in options.orders:
                rows.append(stop(order, repeat, Path(scratch)))
                writer.writerow(rows[-1])
                file.flush()
    print("| order | repeats | driver gone within, s | all gone within, s | left after the next call |")
    print("|---|---|---|---|---|")
    for order in options.orders:
        mine = [row for row in rows if row["order"] == order]
        driver_s, all_s = (max(row[name] for row in mine) for name in ("driver_s", "all_s"))
        remains = sum(row["left_after_next"] != "none" for row in mine)
        print(f"| {order} | {len(mine)} | {driver_s} | {all_s} | {remains} |")
    late = [
        row for row in rows if row["driver_s"] > MOST_S or row["all_s"] > MOST_S or row["left_after_next"] != "none"
    ]
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
