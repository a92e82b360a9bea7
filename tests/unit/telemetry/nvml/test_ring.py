"""The driver's ring of power samples, joined from drain to drain."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from fake_nvml import RING_DEPTH, FakeNvml, drain, opened, square_wave
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wattune.telemetry.nvml.ring import RingJoin, Sample


def test_the_ring_is_joined_without_gap_or_duplicate_although_its_stamps_move(driver: FakeNvml) -> None:
    driver.gpus[0].power_w = square_wave(0.5)
    backend = opened(driver)
    start_ns = driver.now_ns
    samples = drain(backend)
    for _ in range(60):
        driver.sleep(1.0)
        samples += drain(backend)
    assert len(samples) == RING_DEPTH + 60 * 50
    steps_ns = np.diff([time_ns for time_ns, _ in samples])
    assert steps_ns.min() > 19.8e6 and steps_ns.max() < 20.2e6
    true_w = [square_wave(0.5)((start_ns // 20_000_000 - RING_DEPTH + 1 + i) * 0.02) for i in range(len(samples))]
    assert [power_w for _, power_w in samples] == true_w
    ring = backend.facts("gpu0")["ring"]
    assert (ring["gaps"], ring["drains"], ring["samples"], ring["depth"]) == (0, 61, len(samples), RING_DEPTH)


def test_a_ring_that_has_turned_over_is_a_gap_and_counted(driver: FakeNvml) -> None:
    driver.gpus[0].power_w = lambda time_s: 100 + time_s
    backend = opened(driver)
    assert "ring" not in backend.facts("gpu0")  # what a killed sampler would leave: unknown, and no count of 0
    drain(backend)
    driver.sleep(5.0)
    assert len(drain(backend)) == RING_DEPTH
    ring = backend.facts("gpu0")["ring"]
    assert ring["gaps"] == 1 and ring["gap_s"] == pytest.approx(5.0 - 2.36, abs=0.02)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(
    waits_s=st.lists(st.floats(0.0, 2.2), min_size=1, max_size=12),
    steps_s=st.dictionaries(st.integers(0, 11), st.floats(-100, 100), max_size=3),
    period_s=st.sampled_from((0.06, 0.2, 0.5, 4.0)),
)
def test_any_drains_and_clock_steps_give_every_sample_once(
    waits_s: Sequence[float], steps_s: Mapping[int, float], period_s: float
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        driver = FakeNvml().install(patch)
        wave = square_wave(period_s)
        # A load is never twice the same to the milliwatt: that is what places are told apart by.
        driver.gpus[0].power_w = lambda time_s: wave(time_s) + (time_s * 7919 * 2**0.5 % 1)
        backend = opened(driver)
        powers = [power_w for _, power_w in drain(backend)]
        first_ns = driver.now_ns
        for index, wait_s in enumerate(waits_s):
            if index in steps_s:
                driver.step_clock(steps_s[index])
            driver.sleep(wait_s)
            powers += [power_w for _, power_w in drain(backend)]
        first, last = first_ns // 20_000_000 - RING_DEPTH + 1, driver.now_ns // 20_000_000
        expected = [round(driver.gpus[0].power_w(i * 20_000_000 / 1e9) * 1000) / 1000 for i in range(first, last + 1)]
        assert powers == expected
        assert backend.facts("gpu0")["ring"]["gaps"] == 0


def test_a_constant_power_is_joined_by_its_stamps(driver: FakeNvml) -> None:
    driver.gpus[0].power_w = lambda _: 78.907
    backend = opened(driver)
    counts = [len(drain(backend))]
    for _ in range(20):
        driver.sleep(1.0)
        counts.append(len(drain(backend)))
    assert counts == [RING_DEPTH, *[50] * 20]
    driver.step_clock(-3600.0)
    total = 0
    for _ in range(10):
        driver.sleep(1.0)
        total += len(drain(backend))
    assert abs(total - 500) <= 1  # between equal powers only the monotonic clock tells places apart
    assert backend.facts("gpu0")["ring"]["gaps"] == 0


def test_stamps_that_all_move_alike_make_no_sample_new() -> None:
    join = RingJoin()
    ring = [Sample(20_000 * index, 100 + index) for index in range(10)]
    assert list(join.join(ring, 0)) == ring
    moved = [Sample(sample.time_us - 3_600_000_000, sample.power_mw) for sample in ring]
    assert list(join.join([*moved[5:], Sample(moved[-1].time_us + 20_000, 7)], 20_000_000)) == [
        Sample(moved[-1].time_us + 20_000, 7)
    ]
    assert join.facts()["gaps"] == 0


def test_an_empty_ring_is_a_drain_without_samples_and_no_gap() -> None:
    join = RingJoin()
    assert list(join.join([], 0)) == []
    assert join.facts() == {"drains": 1, "samples": 0, "depth": 0, "gaps": 0, "gap_s": 0.0}
