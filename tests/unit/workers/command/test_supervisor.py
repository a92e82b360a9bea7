"""The supervisor as a program: it needs the standard library alone, and tells what happened on its status pipe."""

import json
import os
import subprocess
import sys
import time

import pytest

from wattune.workers.command import supervisor

pytestmark = pytest.mark.timeout(60)


def run(*command, stdin=subprocess.PIPE, grace_s=0.5, send=b""):
    status, telling = os.pipe()
    arguments = [sys.executable, "-I", "-S", supervisor.__file__, str(telling), str(grace_s), *command]
    process = subprocess.Popen(arguments, stdin=stdin, pass_fds=(telling,), start_new_session=True)
    os.close(telling)
    if send:
        time.sleep(0.3)
        process.stdin.write(send)
        process.stdin.flush()
    facts = {}
    with os.fdopen(status, "rb") as stream:
        for line in stream:
            facts |= json.loads(line)
    assert process.wait(20) == 0
    if process.stdin:
        process.stdin.close()
    return facts


def test_it_tells_start_end_and_that_nothing_is_left():
    facts = run(sys.executable, "-c", "import sys; sys.exit(5)")
    assert facts["exit"] == 5 and facts["over"] == 0 and facts["pid"] > 1
    assert facts["mono_ns"] <= time.monotonic_ns()


def test_the_end_of_its_input_ends_the_command():
    begun_s = time.monotonic()
    facts = run("sleep", "600", stdin=subprocess.DEVNULL)
    assert facts["exit"] == -15 and time.monotonic() - begun_s < 20


def test_it_stops_when_told():
    assert run("sleep", "600", send=b"stop\n")["exit"] == -15


def test_a_program_that_is_not_there_has_its_error():
    assert run("/no/such/program")["failed"] == 2


def test_descendants_are_those_that_run():
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert child.pid in supervisor.descendants(os.getpid())
    finally:
        child.kill()
    time.sleep(0.1)
    assert child.pid not in supervisor.descendants(os.getpid())  # it waits for its parent, and runs no more
    child.wait()
