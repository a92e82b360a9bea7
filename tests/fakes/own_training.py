"""A training program that knows nothing of wattune but three lines, and fails in the ways that programs do."""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from wattune import spans


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="good")
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--leave", help="a file that gets the id of a daemon that outlives this program")
    parser.add_argument("--tag", help="anything, so that a test finds its own processes")
    parser.add_argument("--deaf", action="store_true", help="ignore SIGTERM")
    parser.add_argument(
        "--die-once", help="a file; where it is not there yet, it is made, and SIGKILL ends this program"
    )
    chosen = parser.parse_args()
    if chosen.deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(f"mode {chosen.mode}, algorithm {os.environ.get('NCCL_ALGO', 'none')}", flush=True)  # noqa: T201
    if chosen.leave:
        daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        with open(chosen.leave, "w") as file:
            file.write(str(daemon.pid))
    if chosen.mode == "mute":
        time.sleep(1000)
    if chosen.mode == "out_of_memory":
        raise MemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    for number in range(3 if chosen.mode == "short" else 10_000_000):
        if chosen.mode == "silent":
            time.sleep(2.0)
            return
        with spans.step(tokens=100):
            time.sleep(chosen.step_s)
        if chosen.die_once and number == 3 and not Path(chosen.die_once).exists():
            with open(chosen.die_once, "w"):
                os.kill(os.getpid(), signal.SIGKILL)
        if chosen.mode == "crash" and number == 5:
            raise ValueError("the loss is no number")
        if chosen.mode == "hang" and number == 12:
            time.sleep(1000)


if __name__ == "__main__":
    main()
