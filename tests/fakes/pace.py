"""Time a call takes, apart from what else the machine does and how fast it is: bounds on it hold on any machine."""

import time
from collections.abc import Callable
from typing import Any

REFERENCE_S = 0.026
"""Duration of `_reference` on the machine that the bounds were set on."""


def least_cpu_s(call: Callable[[], Any], *, tries: int = 3) -> float:
    """CPU seconds of this thread for one call, the least of several: what disturbs, even its own caches, only adds.

    On a slower machine, or one whose memory and cores others wear out, they are fewer by as much as plain Python is
    slower there.
    """
    return _least_s(call, tries) / max(1.0, _least_s(_reference, tries) / REFERENCE_S)


def _least_s(call: Callable[[], Any], tries: int) -> float:
    taken_s = []
    for _ in range(tries):
        start_s = time.thread_time()
        call()
        taken_s.append(time.thread_time() - start_s)
    return min(taken_s)


def _reference() -> None:
    by_name = {str(number): (number % 97, number) for number in range(50_000)}
    sorted(by_name, key=by_name.__getitem__)
    sum(len(name) for name in by_name if name.endswith("7"))


def wait_for(condition: Callable[[], object], timeout_s: float) -> None:
    """Waits until a condition holds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "not within the time it should take"
        time.sleep(0.2)
