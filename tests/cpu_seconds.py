"""Runs a command and says the CPU time of all it started, in one closing line, with a yardstick.

The same tests took 757 and 1,222 seconds on two days of one virtual machine, whose processors are shared with others.
So a fixed piece of Python is timed every 20 s beside the command: figures compare by its milliseconds.

A process counts at whoever waits for its end. What a test detaches, as Ray's servers and samplers are, has lost the one
who started it: here it falls to this process, as to a system's first, which waits for it too. What was started with its
end ignored is in nobody's count.
"""

import ctypes
import os
import resource
import signal
import statistics
import subprocess
import sys
import threading
import time

PR_SET_CHILD_SUBREAPER = 36
"""linux/prctl.h; without it, as on macOS, what is detached does not count."""

LEFT_FOR_S = 5.0
"""Longest to wait for what outlives the command."""


YARDSTICK_EVERY_S = 20.0


def yardstick_s() -> float:
    """Returns the CPU time of a fixed piece of Python in this thread."""
    begun_s, total = time.thread_time(), 0
    for number in range(500_000):
        total += number % 7
    return time.thread_time() - begun_s


def main() -> int:
    """Returns the exit code of the command."""
    adopts = sys.platform == "linux" and ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    command = subprocess.Popen(sys.argv[1:])
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: command.send_signal(number))
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda *_: None)  # a terminal sends it to the command too
    took_s, over = [], threading.Event()

    def measure() -> None:
        took_s.append(yardstick_s())
        while not over.wait(YARDSTICK_EVERY_S):
            took_s.append(yardstick_s())

    measuring = threading.Thread(target=measure)
    measuring.start()
    code, until_s = None, float("inf")
    while time.monotonic() < until_s:
        try:
            pid, status = os.waitpid(-1, 0 if code is None else os.WNOHANG)
        except ChildProcessError:
            break
        if pid == command.pid:
            code, until_s = os.waitstatus_to_exitcode(status), time.monotonic() + LEFT_FOR_S
        elif pid == 0:
            time.sleep(0.05)
    over.set()
    measuring.join()
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(each.ru_utime + each.ru_stime for each in used) - sum(took_s)
    beyond = "" if adopts else ", but for what they detached"
    sys.stdout.write(
        f"CPU seconds, children included{beyond}: {seconds:,.0f} (yardstick {1e3 * statistics.median(took_s):.0f} ms)\n"
    )
    return 128 - code if code is not None and code < 0 else code or 0


if __name__ == "__main__":
    sys.exit(main())
