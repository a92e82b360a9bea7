"""What a lane's worker does without Ray: it keeps off the sampler's processor with every thread it has."""

import subprocess
import sys

CODE = """
import os, threading
from wattune.orchestrate.lanes.worker import _leave_to_sampler

allowed = sorted(os.sched_getaffinity(0))
wait = threading.Event()
thread = threading.Thread(target=wait.wait)
thread.start()
_leave_to_sampler(())
assert os.sched_getaffinity(thread.native_id) == set(allowed)
_leave_to_sampler(tuple(allowed))  # nothing would be left: nothing is changed
assert os.sched_getaffinity(thread.native_id) == set(allowed)
if len(allowed) > 1:
    _leave_to_sampler((allowed[-1],))
    for task in (thread.native_id, threading.get_native_id()):
        assert os.sched_getaffinity(task) == set(allowed[:-1]), task
wait.set()
print("done")
"""


def test_every_thread_keeps_off_the_samplers_processor() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "done"
