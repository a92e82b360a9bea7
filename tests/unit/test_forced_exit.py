"""A process that was asked to end is gone in time, also where its main thread waits for ever."""

import signal
import subprocess
import sys
import time

import pytest

from wattune.forced_exit import asked, ended_in_time, last_act

STUCK = """
import signal, sys, time
from wattune import forced_exit
from wattune.forced_exit import asked, ended_in_time, last_act

signal.signal(signal.SIGTERM, lambda *_: None)
signal.signal(signal.SIGHUP, lambda *_: None)
def fails(): raise OSError("no more")
def hangs(): time.sleep(600)
def last_word(number):
    print("ended by force", file=sys.stderr)
    return 100 + number
with last_act(lambda: print("first", flush=True)), last_act(fails), last_act(hangs, 0.3):
    with ended_in_time(last_word, within_s=0.5, to_the_end=AFTER):
        print("ready", flush=True)
        while not (AFTER and asked()):
            time.sleep(0.01)
    time.sleep(600)  # what a library does at the end
"""


@pytest.mark.parametrize(("number", "after"), [(signal.SIGTERM, False), (signal.SIGHUP, True)])
def test_a_process_that_hangs_is_ended_after_its_last_acts(number: signal.Signals, after: bool) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK.replace("AFTER", str(after))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        start_s = time.monotonic()
        process.send_signal(number)
        said, complaint = process.communicate(timeout=60)
        took_s = time.monotonic() - start_s
    finally:
        process.kill()
    assert (process.returncode, said, complaint) == (100 + number, "first\n", "ended by force\n")
    assert took_s >= 0.5


def test_a_process_that_ends_by_itself_or_was_not_asked_is_left_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    came: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: came.append(number))
    try:
        with ended_in_time(print, within_s=0.3):
            time.sleep(0.5)
            assert not asked()
            signal.raise_signal(signal.SIGTERM)
            deadline_s = time.monotonic() + 10
            while not asked() and time.monotonic() < deadline_s:
                time.sleep(0.01)
            assert asked() and came == [signal.SIGTERM]
        time.sleep(0.6)  # longer than it had: nothing ended this process
        assert not asked()
    finally:
        signal.signal(signal.SIGTERM, before)


SLOW = """
import signal, sys, time
from wattune.forced_exit import asked, ended_in_time

signal.signal(signal.SIGTERM, lambda *_: None)
with ended_in_time(lambda _: 9, within_s=1.5, most_s=MOST_S):
    print("ready", flush=True)
    while not asked():
        time.sleep(0.01)
END
sys.exit(5)
"""

STEPS = "    time.sleep(0.4)\n" * 12
"""An orderly end that takes long: each step is at a place of its own."""

AGAIN = "    for _ in range(12): time.sleep(0.4)"
"""A wait for what never comes."""


@pytest.mark.parametrize(("end", "most_s", "code"), [(STEPS, 60, 5), (STEPS, 3, 9), (AGAIN, 60, 9)])
def test_an_end_that_gets_further_is_waited_for(end: str, most_s: float, code: int) -> None:
    assert told_to_end(SLOW.replace("END", end).replace("MOST_S", str(most_s)))[0] == code


def told_to_end(script: str) -> tuple[int, str]:
    """Sends SIGTERM to a script once it is ready; its exit code, and what it prints from then on."""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[0]
        return process.returncode, said
    finally:
        process.kill()


HOLDS_THE_LOCK = """
import ctypes, signal, time
from wattune import forced_exit

forced_exit._LOCKED_S = 0.5
signal.signal(signal.SIGTERM, lambda *_: None)
with forced_exit.ended_in_time(print, within_s=1):
    print("ready", flush=True)
    while not forced_exit.asked():
        time.sleep(0.01)
    ctypes.PyDLL(None).sleep(600)  # a library that keeps the interpreter's lock
"""

LEAVES = """
import atexit, signal, time
from wattune.forced_exit import asked, end_now, ended_in_time

atexit.register(time.sleep, 600)  # as a library that asks a dead server
end_now(1)  # nobody asked
signal.signal(signal.SIGTERM, lambda *_: None)
with ended_in_time(print, within_s=60, to_the_end=True):
    print("ready", flush=True)
    while not asked():
        time.sleep(0.01)
print("last line")
end_now(5)
"""


@pytest.mark.parametrize(("script", "code", "said"), [(HOLDS_THE_LOCK, 1, ""), (LEAVES, 5, "last line\n")])
def test_neither_a_lock_that_is_held_nor_what_libraries_do_at_the_end_counts(script: str, code: int, said: str) -> None:
    assert told_to_end(script) == (code, said)


def test_a_last_act_that_is_over_is_not_called() -> None:
    with last_act(lambda: None):
        pass
    with pytest.raises(KeyError), last_act(lambda: None):
        raise KeyError
