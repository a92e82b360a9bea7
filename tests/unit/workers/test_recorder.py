from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from wattune.workers.phases import Span
from wattune.workers.recorder import HostRecorder, with_idle


@given(lengths=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=1, max_size=20))
def test_idle_fills_every_gap_before_the_optimizer_and_nothing_else(lengths: list[tuple[int, int]]) -> None:
    phases, now = [], 100
    for gap, length in lengths:
        phases.append(Span("forward", now + gap, now + gap + length))
        now += gap + length
    optimizer = Span("optimizer", now + 3, now + 5)
    step = Span("step", 100, now + 9)
    filled = with_idle((step, *phases, optimizer))
    waits = [span for span in filled if span.phase == "wait"]
    assert [span for span in filled if span.phase != "wait"] == [step, *phases, optimizer]
    assert [span.end_mono_ns - span.start_mono_ns for span in waits] == [gap for gap, _ in lengths if gap]
    for before, after in pairwise(filled[1:-1]):
        assert before.end_mono_ns == after.start_mono_ns


def test_memory_peak_never_falls() -> None:
    recorder = HostRecorder()
    start_bytes = recorder.memory_peak_bytes()
    with recorder.phase("forward"):
        ballast = bytearray(64 * 2**20)
        ballast[::4096] = b"x" * len(ballast[::4096])
    high_bytes = recorder.memory_peak_bytes()
    del ballast
    assert high_bytes >= start_bytes + 48 * 2**20
    assert recorder.memory_peak_bytes() >= high_bytes
    assert [span.phase for span in recorder.take()] == ["forward"]
