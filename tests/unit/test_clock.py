"""The two clocks of a node, read together."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.clock import ClockAnchor

NS = st.integers(0, 2**62)


@given(mono_ns=NS, wall_ns=NS, later_ns=st.integers(-(2**62), 2**62))
def test_wall_time_runs_as_the_monotonic_clock_does(mono_ns: int, wall_ns: int, later_ns: int) -> None:
    anchor = ClockAnchor(mono_ns=mono_ns, wall_ns=wall_ns)
    assert anchor.to_wall_ns(mono_ns) == wall_ns
    assert anchor.to_wall_ns(mono_ns + later_ns) - wall_ns == later_ns


def test_the_wall_clock_is_read_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    monotonic_ns = iter([1_000, 1_101])
    monkeypatch.setattr(time, "monotonic_ns", lambda: next(monotonic_ns))
    monkeypatch.setattr(time, "time_ns", lambda: 7_000)
    assert ClockAnchor.now() == ClockAnchor(mono_ns=1_050, wall_ns=7_000)


def test_a_reading_lies_between_those_around_it() -> None:
    before_ns = time.monotonic_ns()
    anchor = ClockAnchor.now()
    assert before_ns <= anchor.mono_ns <= time.monotonic_ns()
