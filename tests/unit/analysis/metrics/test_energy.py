"""Energy of known waves, what series cover, and counters that fail."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import constant, run_data

from wattune.analysis.figures import figures
from wattune.analysis.metrics.energy import counter_span, integral_error_frac, powers, total_energy_j
from wattune.analysis.signals.align import align
from wattune.analysis.signals.readings import Readings
from wattune.analysis.signals.series import series
from wattune.metrics import METRICS

GPU = ("n0", "gpu0")
TWIN = ("n0", "gpu1")


def aligned_ring(bench, waves, manifests=None, *, more=None, **ring):
    tables = {"ring": bench.ring(waves, **ring), **(more or {})}
    return align(tables, bench.steps(list(waves)), manifests or {})


def test_a_constant_of_400_w_for_20_s_is_8_kj(bench):
    aligned = aligned_ring(bench, {GPU: constant(400)})
    found = powers(aligned)
    assert found.usable
    assert total_energy_j(found, aligned.duration_s) == pytest.approx(8000.0)
    assert found.traces[0].sensor_period_s == pytest.approx(0.02)


def test_the_longest_hold_is_odd_where_it_is_long_and_readings_are_above_and_below_it(bench):
    def wave(level, length_s):
        def watts(time_s):
            other = np.where(np.round(time_s / 0.02).astype(int) % 2, 399.0, 401.0)
            return np.where((time_s > 5 - 1e-9) & (time_s < 5 + length_s + 1e-9), level, other)

        return watts

    for level, length_s, is_odd in (
        (400, 3.0, True),
        (400, 0.7, True),
        (400, 0.5, False),
        (450, 3, False),
        (350, 3, False),
    ):
        (trace,) = powers(aligned_ring(bench, {GPU: wave(level, length_s)})).traces
        assert trace.hold == pytest.approx((5.0, 5.0 + length_s, level, round(length_s / 0.02) + 1))
        assert trace.hold_is_odd is is_odd, (level, length_s)
    (trace,) = powers(aligned_ring(bench, {GPU: constant(400)})).traces
    assert trace.hold[2:] == (400.0, 1001) and not trace.hold_is_odd, "nothing beside it"
    (trace,) = powers(aligned_ring(bench, {GPU: lambda time_s: np.where(time_s < 0.5, 300 + time_s, 400.0)})).traces
    assert trace.hold[2] == 400.0 and not trace.hold_is_odd, "too little beside it"


def test_energy_per_step_and_token(bench):
    ring = {"ring": bench.ring({GPU: constant(300), TWIN: constant(100)})}
    data = run_data(None, bench.steps([GPU, TWIN]), ring, {}, told_tokens_per_step=200.0)
    names = [name for name, metric in METRICS.items() if metric.group == "energy"]
    assert figures(data.examined, names) == pytest.approx(
        {"energy_per_step_j": 400, "energy_per_token_j": 2, "tokens_per_j": 0.5, "energy_delay_product_js": 400}
    )


def test_missing_samples_lower_coverage_and_show_as_a_gap(bench):
    aligned = aligned_ring(bench, {GPU: constant(400)}, keep=lambda t: (t < 5.0) | (t > 6.0))
    (trace,) = powers(aligned).traces
    assert trace.coverage_frac == pytest.approx(1 - 1.0 / 20, abs=2e-3)
    assert trace.largest_gap_s == pytest.approx(1.0, abs=0.05)
    assert powers(aligned).usable


@pytest.mark.parametrize("ends", [{"start_s": 4.0}, {"end_s": 16.0}])
def test_a_series_that_misses_a_fifth_of_the_window_gives_no_energy(bench, ends):
    aligned = aligned_ring(bench, {GPU: constant(400)}, **ends)
    found = powers(aligned)
    assert found.traces[0].coverage_frac == pytest.approx(0.8, abs=2e-3)
    assert not found.usable
    data = run_data(None, bench.steps([GPU]), {"ring": bench.ring({GPU: constant(400)}, **ends)}, {})
    assert not any(METRICS[name].group == "energy" for name in figures(data.examined))


def test_devices_of_one_power_domain_are_counted_once(bench):
    manifests = {"n0": {"devices": {"gpu0": {"power_domain": "pkg0"}, "gpu1": {"power_domain": "pkg0"}}}}
    nothing = lambda time_s: np.full(len(time_s), np.nan)  # noqa: E731
    for waves in ({GPU: constant(500), TWIN: constant(500)}, {GPU: nothing, TWIN: constant(500)}):
        aligned = aligned_ring(bench, waves, manifests)
        found = powers(aligned)
        assert found.usable
        assert total_energy_j(found, 20.0) == pytest.approx(10_000.0)
        assert found.traces[0].share == 2


def test_instant_power_stands_in_where_there_is_no_ring_at_the_period_it_changes(bench):
    time_s = np.arange(-1.0, 21.0, 0.05)
    stepping = np.floor(time_s / 0.1)  # a new value every second reading
    fast = bench.tier("fast", {GPU: {"time_s": time_s, "power_instant_w": 300 + stepping % 7}})
    (trace,) = powers(align({"fast": fast}, bench.steps([GPU]), {})).traces
    assert not trace.from_ring
    assert trace.spacing_s == pytest.approx(0.05)
    assert trace.sensor_period_s == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("end_s", "source"), [(18.5, "ring"), (17.5, "fast"), (-0.5, "fast")], ids=["covers", "falls_short", "outside"]
)
def test_instant_power_stands_in_for_a_ring_that_misses_a_tenth_of_the_window(bench, end_s, source):
    time_s = np.arange(-1.0, 21.0, 0.05)
    fast = bench.tier("fast", {GPU: {"time_s": time_s, "power_instant_w": 300 + np.floor(time_s / 0.1) % 7}})
    seen = []
    aligned = aligned_ring(bench, {GPU: constant(400)}, more={"fast": fast}, end_s=end_s)
    found = powers(aligned, lambda trace, _series: seen.append(trace.from_ring) or trace)
    assert found.usable and found.traces[0].from_ring == (source == "ring")
    assert found.traces[0].coverage_frac == pytest.approx(1.0 if source == "fast" else 0.925, abs=2e-3)
    assert found.traces[0].stands_in == (source == "fast")
    assert seen == [source == "ring"], "one series of a sensor is looked at"


def counter(values, times=None):
    values = np.asarray(values, float)
    return Readings(np.arange(len(values), dtype=float) if times is None else np.asarray(times, float), {"c": values})


def test_a_counter_is_read_over_its_own_span_inside_the_window():
    assert counter_span(counter([0, 10, 20, 30, 40]), "c", 0.5, 3.5) == (1.0, 3.0, 20.0)


def test_a_counter_that_is_set_back_is_read_over_its_longest_stretch():
    assert counter_span(counter([100, 110, 0, 10, 20, 30]), "c", 0, 9) == (2.0, 5.0, 30.0)
    assert counter_span(counter([2**32 - 5, 2**32 - 1, 3]), "c", 0, 9) == (0.0, 1.0, 4.0)


def test_a_counter_with_nulls_or_one_reading(bench):
    assert counter_span(counter([0, np.nan, 20]), "c", 0, 9) == (0.0, 2.0, 20.0)
    assert counter_span(counter([0, np.nan, np.nan]), "c", 0, 9) is None
    assert counter_span(counter([5, 3, 1]), "c", 0, 9) is None
    assert counter_span(counter([1, 2]), "missing", 0, 9) is None


def slow(bench, waves, end_s=20.5):
    time_s = np.arange(0.25, end_s, 1.0)
    return {"slow": bench.tier("slow", {d: {"time_s": time_s, "energy_j": w * time_s} for d, w in waves.items()})}


def test_integral_and_counter_are_compared_over_the_counters_span(bench):
    waves = {GPU: constant(400), TWIN: constant(200)}
    aligned = aligned_ring(bench, waves, more=slow(bench, {GPU: 404.0, TWIN: 202.0}))
    assert integral_error_frac(powers(aligned)) == pytest.approx(1 - 1 / 1.01, rel=1e-3)


def test_the_comparison_needs_every_counter_and_time(bench):
    aligned = aligned_ring(bench, {GPU: constant(400), TWIN: constant(200)}, more=slow(bench, {GPU: 400.0}))
    assert integral_error_frac(powers(aligned)) is None
    aligned = aligned_ring(bench, {GPU: constant(400)}, more=slow(bench, {GPU: 400.0}, end_s=4.0))
    assert integral_error_frac(powers(aligned)) is None


@given(
    st.lists(st.floats(0, 1000), min_size=3, max_size=40),
    st.lists(st.floats(0.005, 0.05), min_size=40, max_size=40),
    st.floats(0.05, 0.95),
)
def test_energy_is_additive_over_windows(watts, widths_s, cut):
    time_s = np.cumsum(np.array(widths_s[: len(watts)]))
    whole = series(time_s, np.array(watts))
    middle = time_s[0] + cut * whole.span_s
    parts = [whole.clip(time_s[0], middle), whole.clip(middle, time_s[-1])]
    assert sum(part.integral() for part in parts) == pytest.approx(whole.integral(), rel=1e-9, abs=1e-9)
    assert whole.cumulative(time_s)[-1] == pytest.approx(whole.integral(), rel=1e-9, abs=1e-9)
