"""A call that must come back: what it waits for may never answer, and what it reads may never end."""

import errno
import os
import queue
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

_T = TypeVar("_T")

MOST_READ_S: Final = 10.0
"""Longest time that a file, a pipe or a device is read."""


def within(longest_s: float, operation: Callable[[], _T], *, name: str) -> _T:
    """Calls an operation in a thread of its own, and waits for it only so long.

    A time-out of each request does not suffice: a server that sends a byte now and then keeps to it for ever. An
    operation that is late goes on in its thread, which holds up nothing, also not the end of the program. Raises
    `TimeoutError`: it has not returned within that time, `Exception`: whatever the operation raises.
    """
    outcome: queue.SimpleQueue[tuple[_T | None, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((operation(), None))
        except Exception as error:  # every library has errors of its own
            outcome.put((None, error))

    threading.Thread(target=run, daemon=True, name=name).start()
    try:
        value, error = outcome.get(timeout=longest_s)
    except queue.Empty:
        raise TimeoutError(f"no answer within {longest_s:.0f} s") from None
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


def read_bounded(path: Path | str, most_bytes: int, *, longest_s: float = MOST_READ_S) -> bytes:
    """Reads a file, or a pipe to its end. A device, or a pipe nobody writes to, ends it too.

    Raises `OSError`: it cannot be read, or sends no end within that time, `ValueError`: it is larger than `most_bytes`.
    """
    end_s, found = time.monotonic() + longest_s, bytearray()
    # Without O_NONBLOCK the opening of a pipe waits for somebody who writes.
    with open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        ready = select.poll()
        ready.register(file, select.POLLIN)
        while len(found) <= most_bytes:
            left_s = end_s - time.monotonic()
            if left_s <= 0 or not ready.poll(1000 * left_s):
                raise TimeoutError(errno.ETIMEDOUT, f"no end within {longest_s:g} s", str(path))
            part = file.read(min(2**20, most_bytes + 1 - len(found)))
            if part == b"":
                return bytes(found)
            found += part or b""
    raise ValueError(f"larger than {most_bytes:,} bytes")
