"""Watch over a running trial: orders, hangs, and an engine that counts its steps and reports its failure at once.

The measuring loop does not know of it. Another thread reads the count, and sees a hang that this one, held in a
collective, cannot see.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal

from wattune.errors import EngineError
from wattune.trial import TrialSpec
from wattune.units import ns_to_s, s_to_ns
from wattune.workers.engine import Engine, ExpertTokens, Ranks, StepSpans
from wattune.workers.phases import Span

Progress = Callable[..., None]
"""Called with the part that begins (`build`, `warmup`, `measure`, `profile`), steps done and steps to do; never inside
measured steps. A fourth argument is the time since it began, in seconds. From `profile` on a failure is one of the
profile: the measured result stands."""

STALL_STEPS: Final = 10
"""A trial hangs when a step takes longer than this many times its longest recent step, and than `measure.stall_s`."""

FIRST_STEP_STALLS: Final = 10
"""The first step may take this many times `measure.stall_s`: compilers work in it."""

RECENT_STEPS: Final = 20

SHOWN_S: Final = 4.0
"""Age of the spans a running trial can show: its last step, and every other one that ended since then."""


@dataclass(frozen=True, slots=True)
class Order:
    """An order to the ranks of a trial, or to the nodes of a command."""

    kind: Literal["free", "dump", "finish"]
    """`free`: leave the trial. `dump`: only report the stacks of all threads; the process is ended then. `finish`: the
    leading node of a command has measured enough."""
    reason: str


def stall(waited_s: float, recent_s: Sequence[float], stall_s: float) -> str:
    """Returns the reason a trial counts as hung, empty while it does not.

    It waits since its last step ended, or since it was built; `recent_s` are times of its last `RECENT_STEPS` steps on
    any rank, and `stall_s` the least that counts (`Measure.stall_s`).
    """
    longest_s = max(recent_s, default=0.0)
    if waited_s <= (max(stall_s, STALL_STEPS * longest_s) if recent_s else FIRST_STEP_STALLS * stall_s):
        return ""
    steps = f"its longest recent step took {longest_s:.3g} s" if recent_s else "not one was"
    return f"no step finished for {waited_s:.0f} s ({steps}; measure.stall_s = {stall_s:g})"


class TrialStoppedError(EngineError):
    """A trial that was ordered to stop, at the beginning of its next step."""


class WatchedEngine:
    """An engine with a counter around its steps."""

    def __init__(self, engine: Engine, on_failure: Callable[[BaseException], None]) -> None:
        """Watches an engine from before its build.

        `on_failure` is called with the error of `build` or `step`, before any other handler and before anything is
        closed: the other ranks may be waiting for this one.
        """
        self._engine, self._on_failure = engine, on_failure
        self._recent_ns: deque[int] = deque(maxlen=RECENT_STEPS)
        self._shown: deque[tuple[int, int, StepSpans]] = deque()
        self._waiting_since_ns: int | None = None
        self._stop_reason: str | None = None
        self.num_steps = 0
        self.before_close: Callable[[], None] | None = None
        """Called once before the engine is closed, to free ranks or collectives that closing would wait for."""

    def build(self, spec: TrialSpec, ranks: Ranks, *, seed: int) -> None:
        """See `Engine.build`."""
        with self._reporting():
            self._engine.build(spec, ranks, seed=seed)
        self._waiting_since_ns = time.monotonic_ns()

    def step(self) -> StepSpans:
        """See `Engine.step`. Raises `TrialStoppedError`: `stop` was called."""
        start_ns = time.monotonic_ns()
        with self._reporting():
            if self._stop_reason is not None:
                raise TrialStoppedError(self._stop_reason)
            result = self._engine.step()
        self._waiting_since_ns = end_ns = time.monotonic_ns()
        self._recent_ns.append(end_ns - start_ns)
        self._shown.append((end_ns, self.num_steps, result))
        while self._shown[0][0] < end_ns - s_to_ns(SHOWN_S):
            self._shown.popleft()
        self.num_steps += 1
        return result

    def rest(self, until: Callable[[], None]) -> None:
        """Lets a wait pass which is no step's, and in which nothing hangs."""
        self._waiting_since_ns = None
        until()
        self._waiting_since_ns = time.monotonic_ns()

    def memory_peak_bytes(self) -> int:
        """See `Engine.memory_peak_bytes`."""
        return self._engine.memory_peak_bytes()

    def facts(self) -> Mapping[str, str]:
        """See `Engine.facts`."""
        return self._engine.facts()

    def expert_tokens(self) -> ExpertTokens:
        """See `Engine.expert_tokens`."""
        return self._engine.expert_tokens()

    def close(self) -> None:
        """See `Engine.close`."""
        self._waiting_since_ns = None
        before, self.before_close = self.before_close, None
        if before is not None:
            before()
        self._engine.close()

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # reported and raised on: a rank that is interrupted keeps others waiting too
            self._on_failure(error)
            raise

    def stop(self, reason: str) -> None:
        """Has the next step raise; may be called from any thread."""
        self._stop_reason = reason

    def recent_spans(self) -> list[tuple[int, tuple[Span, ...]]]:
        """Returns the steps of the last `SHOWN_S` with their spans, numbered from 0; may be called from any thread."""
        return [(number, result.spans) for _, number, result in list(self._shown)]

    def stall(self, stall_s: float) -> str | None:
        """Returns the reason the trial counts as hung, None while it does not; may be called from any thread."""
        since_ns = self._waiting_since_ns
        if since_ns is None:
            return None
        recent_s = [ns_to_s(each) for each in list(self._recent_ns)]  # a copy: another thread appends
        return stall(ns_to_s(time.monotonic_ns() - since_ns), recent_s, stall_s) or None
