"""Time a call takes, apart from what else the machine does: bounds on it hold on a shared machine too."""

import time
from collections.abc import Callable
from typing import Any


def least_cpu_s(call: Callable[[], Any], *, tries: int = 3) -> float:
    """CPU seconds of this thread for one call, the least of several: what disturbs, even its own caches, only adds."""
    taken_s = []
    for _ in range(tries):
        start_s = time.thread_time()
        call()
        taken_s.append(time.thread_time() - start_s)
    return min(taken_s)
