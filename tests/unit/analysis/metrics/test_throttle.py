"""Clock lost for a cause, and raw counters that say something else."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.analysis.metrics.energy import powers
from wattune.analysis.metrics.phases import segments
from wattune.analysis.metrics.throttle import (
    CAP_WINDOW_S,
    NEAR_CAP_FRAC,
    device_throttle,
    near_cap,
    throttle_metrics,
    with_cap_causes,
)
from wattune.analysis.run_data import clocks_and_temperatures
from wattune.analysis.signals.align import align
from wattune.analysis.signals.readings import Readings
from wattune.analysis.signals.series import Series

GPU = ("n0", "gpu0")
TIME_S = np.arange(-1.0, 21.0, 0.05)
POWER_CAP, HW_SLOWDOWN, THERMAL, IDLE = 0x4, 0x8, 0x20, 0x1
FACTS = {"sm_clock_max_mhz": 2000.0, "power_limit_w": 700.0}
MANIFEST = {"n0": {"devices": {"gpu0": FACTS, "gpu1": FACTS}}}


def at_the_cap(time_s):
    return np.full(len(time_s), 695.0)


def fast(bench, watts=at_the_cap, **devices):
    return {
        "ring": bench.ring({("n0", name): watts for name in devices}),
        "fast": bench.tier(
            "fast",
            {
                ("n0", name): {
                    "time_s": TIME_S,
                    "sm_clock_mhz": np.broadcast_to(clock, len(TIME_S)),
                    "event_reasons": np.broadcast_to(np.asarray(reasons, np.uint64), len(TIME_S)),
                }
                for name, (clock, reasons) in devices.items()
            },
        ),
    }


def metrics_of(bench, tables, devices=(GPU,), manifests=MANIFEST, clock_max_mhz=None):
    aligned = align(tables, bench.steps(list(devices)), manifests)
    return throttle_metrics(aligned, clocks_and_temperatures(aligned, clock_max_mhz, powers(aligned))[1])


@pytest.mark.parametrize(("clock_mhz", "cause"), [(1965, POWER_CAP), (1000, IDLE)])
def test_a_cause_without_lost_clock_and_lost_clock_without_a_cause_are_no_throttling(bench, clock_mhz, cause):
    metrics = metrics_of(bench, fast(bench, gpu0=(clock_mhz, cause)))
    assert metrics["throttle_frac"] == metrics["throttle_loss_frac"] == 0.0
    assert metrics["clock_deficit_frac"] == pytest.approx(1 - clock_mhz / 2000)


def test_the_catalogs_clock_stands_in_for_the_manifests(bench):
    tables = fast(bench, gpu0=(1000, POWER_CAP))
    manifests = {"n0": {"devices": {"gpu0": {"power_limit_w": 700.0}}}}
    assert "throttle_frac" not in metrics_of(bench, tables, manifests=manifests)
    found = metrics_of(bench, tables, manifests=manifests, clock_max_mhz=2000.0)
    assert found["throttle_loss_frac"] == pytest.approx(0.5)


def test_a_table_without_reasons_says_nothing_of_throttling(bench):
    tables = fast(bench, gpu0=(1000, POWER_CAP))
    tables["fast"] = tables["fast"].drop_columns(["event_reasons"])
    assert metrics_of(bench, tables) == {}


@pytest.mark.parametrize(("watts", "throttled"), [(600.0, 0.0), (660.0, 0.0), (670.0, 1.0)])
def test_the_cap_takes_clock_only_where_power_is_near_it(bench, watts, throttled):
    """The reason bit is set all the time, as on a busy H200."""
    found = metrics_of(bench, fast(bench, lambda t: np.full(len(t), watts), gpu0=(1500, POWER_CAP)))
    assert found["throttle_frac"] == found["throttle_power_frac"] == throttled
    assert found["throttle_power_loss_frac"] == pytest.approx(0.25 * throttled)
    assert found["clock_deficit_frac"] == pytest.approx(0.25)


def test_without_power_or_its_limit_nobody_knows_whether_it_was_the_cap(bench):
    without_power = {"fast": fast(bench, gpu0=(1500, POWER_CAP))["fast"]}
    no_limit = {"n0": {"devices": {"gpu0": {"sm_clock_max_mhz": 2000.0}}}}
    for tables, manifests in ((without_power, MANIFEST), (fast(bench, gpu0=(1500, POWER_CAP)), no_limit)):
        found = metrics_of(bench, tables, manifests=manifests)
        assert found == {
            "clock_deficit_frac": pytest.approx(0.25),
            **dict.fromkeys(("throttle_thermal_frac", "throttle_thermal_loss_frac"), 0.0),
            **dict.fromkeys(("throttle_hw_frac", "throttle_hw_loss_frac"), 0.0),
        }
    # A bit that was never set needs no power to be known.
    never = metrics_of(bench, {"fast": fast(bench, gpu0=(1500, IDLE))["fast"]})
    assert never["throttle_frac"] == never["throttle_power_frac"] == 0.0


def brute_force_mean_w(power, at_s, count=20_001):
    """Means over the 200 ms before a time, or what of them the series covers, by fine numerical integration."""
    time_s = np.linspace(max(at_s - CAP_WINDOW_S, power.time_s[0]), min(at_s, power.time_s[-1]), count)
    return float(np.trapezoid(np.interp(time_s, power.time_s, power.value), time_s) / (time_s[-1] - time_s[0]))


def some_power(seed, count=200):
    rng = np.random.default_rng(seed)
    return Series(np.cumsum(rng.uniform(0.007, 0.046, count)), rng.uniform(300.0, 950.0, count))


@pytest.mark.parametrize("seed", range(5))
def test_near_the_cap_agrees_with_numerical_integration(seed):
    power = some_power(seed)
    at_s = np.random.default_rng(seed + 100).uniform(power.time_s[0] + 0.01, power.time_s[-1], 60)
    means_w = np.array([brute_force_mean_w(power, each_s) for each_s in at_s])
    clear = np.abs(means_w / (NEAR_CAP_FRAC * 650.0) - 1) > 1e-4
    assert clear.sum() > 50
    assert near_cap(power, 650.0, at_s)[clear].tolist() == (means_w >= NEAR_CAP_FRAC * 650.0)[clear].tolist()


def some_readings(seed, power, count=150):
    rng = np.random.default_rng(seed)
    time_s = np.linspace(power.time_s[0], power.time_s[-1], count)
    columns = {f"{cause}_cause": (rng.random(count) < 0.1).astype(float) for cause in ("thermal", "hw")}
    clock = rng.choice([1200.0, 1700.0, 1990.0], count)
    return Readings(time_s, {"sm_clock_mhz": clock, "power_cause": np.ones(count), **columns})


def throttled(readings, power, limit_w, end_s, clock_max_mhz=2000.0):
    return device_throttle(with_cap_causes(readings, power, limit_w), clock_max_mhz, end_s)


@given(st.integers(0, 1000), st.integers(5, 145))
def test_shares_of_two_halves_add_up_to_those_of_the_whole(seed, at):
    power = some_power(seed)
    readings = with_cap_causes(some_readings(seed, power), power, 650.0)
    start_s, cut_s, end_s = (float(readings.time_s[index]) for index in (0, at, -1))
    halves = [
        Readings(readings.time_s[rows], {name: column[rows] for name, column in readings.columns.items()})
        for rows in (slice(at + 1), slice(at, None))
    ]
    whole, first, second = (device_throttle(one, 2000.0, end_s) for one in (readings, *halves))
    for name in ("any_frac", "loss_frac", "deficit_frac"):
        together = getattr(first, name) * (cut_s - start_s) + getattr(second, name) * (end_s - cut_s)
        assert together == pytest.approx(getattr(whole, name) * (end_s - start_s), abs=1e-9)


def test_compute_loses_what_clock_is_lost_while_computing(bench):
    """The first half of each second computes at 1500 of 2000 MHz at the cap, the second half waits at full clock."""
    busy = np.mod(TIME_S + 1e-6, 1.0) < 0.5
    tables = fast(bench, gpu0=(np.where(busy, 1500, 2000), POWER_CAP))
    rows = []
    for step in range(20):
        rows += [(GPU, 0, step, "step", step, step + 1.0), (GPU, 0, step, "forward", step + 0.025, step + 0.475)]
    spans = bench.spans(rows)
    aligned = align(tables, spans, MANIFEST)
    found = clocks_and_temperatures(aligned, None, powers(aligned), segments(aligned, spans))[1][GPU]
    assert found.loss_frac == pytest.approx(0.125, rel=0.01)
    # Readings stand at 0, 0.05, ... s: clock falls back between 0.45 and 0.5 s, half of which is in the forward.
    assert found.computing_loss_frac == pytest.approx((0.425 * 0.25 + 0.025 * 0.75 * 0.25) / 0.45, rel=0.01)
    steps_alone = bench.steps([GPU])
    whole = clocks_and_temperatures(aligned, None, powers(aligned), segments(aligned, steps_alone))[1][GPU]
    assert whole.computing_loss_frac == pytest.approx(whole.loss_frac, rel=1e-3)


def counters(bench, power_ns, thermal_ns=np.zeros_like):
    time_s = np.arange(0.5, 20.0, 1.0)
    zero = np.zeros(len(time_s))
    columns = {"throttle_power_ns": power_ns(time_s), "throttle_thermal_ns": thermal_ns(time_s), "throttle_hw_ns": zero}
    return {"slow": bench.tier("slow", {GPU: {"time_s": time_s, **columns}})}


def test_raw_counters_over_their_own_span(bench):
    metrics = metrics_of(bench, counters(bench, lambda t: 1e12 + 0.3e9 * t))
    assert metrics["power_cap_active_frac"] == pytest.approx(0.3)
    assert metrics["thermal_active_frac"] == metrics["hw_active_frac"] == 0.0


def test_a_counter_a_step_ahead_is_all_of_the_time_and_no_more(bench):
    assert metrics_of(bench, counters(bench, lambda t: 1.005e9 * t))["power_cap_active_frac"] == 1.0


def test_a_counter_that_outruns_time_counts_something_else(bench):
    assert "power_cap_active_frac" not in metrics_of(bench, counters(bench, lambda t: 2e9 * t))
    assert "thermal_active_frac" not in metrics_of(bench, counters(bench, np.zeros_like, lambda t: 3e9 * t))
