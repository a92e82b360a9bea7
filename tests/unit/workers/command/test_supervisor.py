"""Processes below one: those that run, and none that waits for its parent alone."""

import os
import subprocess
import time

from wattune.workers.command import supervisor


def test_descendants_are_those_that_run():
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert child.pid in supervisor.descendants(os.getpid())
    finally:
        child.kill()
    time.sleep(0.1)
    assert child.pid not in supervisor.descendants(os.getpid())  # it waits for its parent, and runs no more
    child.wait()
