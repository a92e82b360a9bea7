"""Deadlines and how well they were kept, without a clock."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wattune.telemetry.files.pacing import Histogram, Schedule
from wattune.units import NS_PER_S

START_NS = 5_000_000_000


@settings(deadline=None)
@given(rate_hz=st.floats(0.1, 1000), delays_ns=st.lists(st.integers(0, 3 * NS_PER_S), min_size=1, max_size=50))
def test_every_deadline_is_served_once_or_counted_as_missed(rate_hz: float, delays_ns: list[int]) -> None:
    schedule = Schedule(rate_hz, START_NS)
    now_ns, indices = START_NS, []
    for delay_ns in delays_ns:
        now_ns = max(now_ns, schedule.next_ns) + delay_ns
        lateness_ns = schedule.take(now_ns)
        assert 0 <= lateness_ns < schedule.period_ns
        index, off_ns = divmod(now_ns - lateness_ns - START_NS, schedule.period_ns)
        assert off_ns == 0
        indices.append(index)
        assert schedule.next_ns > now_ns  # nothing is made up
    assert indices == sorted(set(indices))
    assert schedule.taken == len(indices)
    assert schedule.taken + schedule.missed == indices[-1] + 1


def test_lateness_of_one_tick_does_not_delay_the_next() -> None:
    schedule = Schedule(10, 0)
    assert schedule.take(99_000_000) == 99_000_000
    assert schedule.next_ns == 100_000_000


@settings(deadline=None)
@given(st.lists(st.integers(1_000, 10 * NS_PER_S), min_size=1, max_size=200), st.floats(0.01, 1))
def test_quantiles_are_at_most_a_bin_too_long(durations_ns: list[int], fraction: float) -> None:
    histogram = Histogram()
    for duration_ns in durations_ns:
        histogram.add_ns(duration_ns)
    true_s = float(np.quantile(np.array(durations_ns) / 1e9, fraction, method="inverted_cdf"))
    found_s = histogram.quantile_s(fraction)
    assert found_s is not None
    assert true_s * (1 - 1e-9) <= found_s <= true_s * 10**0.1 * (1 + 1e-9)
    assert found_s <= max(durations_ns) / 1e9


def test_bins_hold_every_duration_below_their_edge() -> None:
    histogram = Histogram()
    for duration_ns in (0, 999, 1_000, 1_001, 50_000_000):
        histogram.add_ns(duration_ns)
    data = histogram.to_json()
    assert [count for _, count in data["bins"]] == [3, 1, 1]
    assert data["bins"][0][0] == pytest.approx(1e-6)
    assert data["max_s"] == 0.05


def test_an_empty_histogram_has_no_quantiles() -> None:
    assert Histogram().quantile_s(0.5) is None
    assert Histogram().to_json() == {"bins": []}
