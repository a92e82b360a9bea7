"""An engine with a counter: what it passes on, when it says that it hangs, how it is stopped."""

import time
from typing import Any

import pytest

from wattune.errors import EngineError
from wattune.workers import watchdog
from wattune.workers.engine import ExpertTokens, StepSpans
from wattune.workers.phases import Span
from wattune.workers.watchdog import TrialStoppedError, WatchedEngine

SPANS = StepSpans(spans=(Span("step", 0, 1),), loss=1.0, grad_norm=1.0)


class Engine:
    """Sleeps as long as it is told."""

    def __init__(self, *steps: float | Exception) -> None:
        self.steps, self.log = list(steps), []

    def build(self, *_: Any, seed: int) -> None:
        self.log.append(f"build {seed}")

    def step(self) -> StepSpans:
        step = self.steps.pop(0)
        if isinstance(step, Exception):
            raise step
        time.sleep(step)
        return SPANS

    def memory_peak_bytes(self) -> int:
        return 5

    def facts(self) -> dict[str, str]:
        return {"compiler": "none"}

    def expert_tokens(self) -> ExpertTokens:
        return ((3, 5),)

    def close(self) -> None:
        self.log.append("close")


def watched(*steps: float | Exception) -> tuple[WatchedEngine, Engine, list[BaseException]]:
    engine, heard = Engine(*steps), []
    return WatchedEngine(engine, heard.append), engine, heard  # type: ignore[arg-type]


def test_the_steps_of_the_last_seconds_can_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, _ = watched(*[0.0] * 5, 0.3)
    engine.build(None, None, seed=0)  # type: ignore[arg-type]
    assert engine.recent_spans() == []
    for _ in range(5):
        engine.step()
    assert engine.recent_spans() == [(number, SPANS.spans) for number in range(5)]
    monkeypatch.setattr(watchdog, "SHOWN_S", 0.2)
    engine.step()
    assert engine.recent_spans() == [(5, SPANS.spans)], "the others ended before the one that is not over yet"


def test_it_is_the_engine_in_everything_else() -> None:
    engine, inner, heard = watched(0, 0)
    engine.build(None, None, seed=3)  # type: ignore[arg-type]
    assert engine.step() is SPANS and engine.step() is SPANS and engine.num_steps == 2
    assert engine.memory_peak_bytes() == 5 and engine.facts() == {"compiler": "none"} and not heard
    before: list[str] = []
    engine.before_close = lambda: before.extend(inner.log)
    engine.close()
    engine.close()
    assert before == ["build 3"] and inner.log == ["build 3", "close", "close"]


def test_a_failure_is_told_before_anything_is_closed() -> None:
    engine, inner, heard = watched(ValueError("x"))
    with pytest.raises(ValueError, match="x"):
        engine.step()
    assert [str(error) for error in heard] == ["x"] and inner.log == [] and engine.num_steps == 0


def test_a_stop_is_obeyed_at_the_next_step() -> None:
    engine, _, heard = watched(0, 0)
    engine.step()
    engine.stop("3000 W")
    with pytest.raises(TrialStoppedError, match="3000 W"):
        engine.step()
    assert isinstance(heard[0], EngineError) and engine.num_steps == 1


def test_a_hang_is_told_by_how_long_steps_take(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 0
    monkeypatch.setattr(watchdog.time, "monotonic_ns", lambda: now_ns)
    engine, inner, _ = watched()

    def step(seconds: float) -> None:
        def take() -> StepSpans:
            nonlocal now_ns
            now_ns += round(seconds * 1e9)
            return SPANS

        inner.step = take  # type: ignore[method-assign]
        engine.step()

    now_ns += 10**12
    assert engine.stall(1) is None, "before it is built only measure.timeout_s counts"
    engine.build(None, None, seed=0)  # type: ignore[arg-type]
    now_ns += round(watchdog.FIRST_STEP_STALLS * 1e9) - 1
    assert engine.stall(1) is None, "compilers work in the first step"
    now_ns += 10**9
    assert "no step finished for 11 s (not one was; measure.stall_s = 1)" in str(engine.stall(1))

    step(0.5)
    now_ns += round(5 * 1e9) - 1
    assert engine.stall(1) is None, "ten of its steps"
    now_ns += 10**9
    assert "its longest recent step took 0.5 s" in str(engine.stall(1))
    assert engine.stall(60) is None
    for _ in range(30):
        step(0.01)
    now_ns += 2 * 10**9
    assert engine.stall(1) is not None, "a slow first step is forgotten"
    engine.close()
    now_ns += 10**12
    assert engine.stall(1) is None


def test_nothing_hangs_while_it_waits_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _, _ = watched(0.0, 0.0)
    now_ns = [0]
    monkeypatch.setattr(watchdog.time, "monotonic_ns", lambda: now_ns[0])
    engine.build(None, None, seed=0)  # type: ignore[arg-type]
    engine.step()

    def long_wait() -> None:
        now_ns[0] = 10**12
        assert engine.stall(1.0) is None

    engine.rest(long_wait)
    assert engine.stall(1.0) is None, "the next step begins now"
    now_ns[0] += 2 * 10**9
    assert engine.stall(1.0)
