"""A call that must come back: what it waits for may never answer."""

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


def within(longest_s: float, operation: Callable[[], _T], *, name: str) -> _T:
    """Calls an operation in a thread of its own, and waits for it only so long.

    A time-out of each request does not suffice: a server that sends a byte now and then keeps to it for ever. An
    operation that is late goes on in its thread, which holds up nothing, also not the end of the program.

    Raises:
        TimeoutError: It has not returned within that time.
        Exception: Whatever the operation raises.
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
