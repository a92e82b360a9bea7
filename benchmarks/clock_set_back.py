#!/usr/bin/env python
"""Measures for how long Ray places no workers after the wall clock was set back.

    python benchmarks/clock_set_back.py --steps 10 20 40    # prints a row for each step; needs g++

For each step a cluster of its own is started with a wall clock of its own (`chaos_clock.cpp`, preloaded). A placement
group is given back and asked for again, as after the death of a worker: first with the clock as it is, which is the
peer, then right after the step.
"""

import argparse
import os
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from chaos_study import CLOCK

LONGEST_S = 300.0
"""Longest wait for a placement group."""

SETTLE_S = 3.0
"""Time in which the head learns of what was placed or given back."""


def set_clock(offset_s: int) -> None:
    """Moves the wall clock of this process and of those it started to the machine's plus this."""
    with open(os.environ[CLOCK], "r+b") as file:
        file.write(struct.pack("q", offset_s))


def replaced_after_s(step_s: int) -> float:
    """Sets the clock back, then gives a placement group away and asks for another; returns the seconds that takes."""
    from ray.util.placement_group import placement_group, remove_placement_group

    def placed() -> Any:
        group = placement_group([{"CPU": 1}] * 2)  # all that the cluster has
        if not group.wait(LONGEST_S):
            raise SystemExit(f"no placement group within {LONGEST_S:g} s")
        return group

    first = placed()
    time.sleep(SETTLE_S)
    set_clock(-step_s)
    start_s = time.monotonic()
    remove_placement_group(first)
    second = placed()
    took_s = time.monotonic() - start_s
    remove_placement_group(second)
    time.sleep(SETTLE_S)
    return took_s


def measure(step_s: int) -> None:
    """Prints one row, in a process whose clock can be moved."""
    import ray

    from wattune.orchestrate.cluster import connect

    with connect():
        if ray.cluster_resources()["CPU"] != 2:
            raise SystemExit("written for two processors")
        before_s, after_s = replaced_after_s(0), replaced_after_s(step_s)
    print(f"| {step_s} | {before_s:.2f} | {after_s:.1f} | {after_s / step_s:.2f} |", flush=True)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[10, 20, 40], help="seconds, up to 60")
    given = parser.parse_args()
    if CLOCK in os.environ:
        measure(*given.steps)
        return
    print("| set back by, s | placed again before, s | after, s | after over step |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        library, clock = Path(temporary) / "chaos_clock.so", Path(temporary) / "clock"
        source = Path(__file__).with_name("chaos_clock.cpp")
        subprocess.run(["g++", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        for step_s in given.steps:
            clock.write_bytes(struct.pack("q", 0))
            own = {CLOCK: str(clock), "LD_PRELOAD": str(library)}
            command = [sys.executable, __file__, "--steps", str(step_s)]
            subprocess.run(command, env=os.environ | own, check=True)


if __name__ == "__main__":
    main()
