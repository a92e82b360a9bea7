"""Clock lost for a cause, and raw counters that say something else."""

import numpy as np
import pytest

from wattune.analysis.examine import clocks_and_temperatures
from wattune.analysis.metrics.throttle import throttle_metrics
from wattune.analysis.signals.align import align

GPU = ("n0", "gpu0")
TWIN = ("n0", "gpu1")
TIME_S = np.arange(-1.0, 21.0, 0.05)
POWER_CAP, HW_SLOWDOWN, THERMAL, IDLE = 0x4, 0x8, 0x20, 0x1
MANIFEST = {"n0": {"devices": {"gpu0": {"sm_clock_max_mhz": 2000.0}, "gpu1": {"sm_clock_max_mhz": 2000.0}}}}


def fast(bench, **devices):
    return {
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
        )
    }


def metrics_of(bench, tables, devices=(GPU,), manifests=MANIFEST, clock_max_mhz=None):
    aligned = align(tables, bench.steps(list(devices)), manifests)
    return throttle_metrics(aligned, clocks_and_temperatures(aligned, clock_max_mhz)[1])


def test_clock_lost_for_a_quarter_of_the_time(bench):
    capped = (TIME_S >= 5) & (TIME_S < 10)
    tables = fast(bench, gpu0=(np.where(capped, 1500, 2000), np.where(capped, POWER_CAP, IDLE)))
    metrics = metrics_of(bench, tables)
    assert metrics["throttle_frac"] == pytest.approx(0.25, abs=3e-3)
    assert metrics["throttle_time_s"] == pytest.approx(5.0, abs=0.06)
    assert metrics["throttle_loss_frac"] == pytest.approx(0.25 * 0.25, abs=1e-3)
    assert metrics["throttle_power_frac"] == metrics["throttle_frac"]
    assert metrics["throttle_thermal_frac"] == metrics["throttle_hw_frac"] == 0.0


def test_a_cause_without_lost_clock_is_no_throttling(bench):
    metrics = metrics_of(bench, fast(bench, gpu0=(1965, POWER_CAP)))
    assert metrics["throttle_frac"] == metrics["throttle_loss_frac"] == 0.0
    assert metrics["clock_deficit_frac"] == pytest.approx(35 / 2000)


def test_lost_clock_without_a_cause_is_a_deficit_only(bench):
    metrics = metrics_of(bench, fast(bench, gpu0=(1000, IDLE)))
    assert metrics["throttle_frac"] == 0.0
    assert metrics["clock_deficit_frac"] == pytest.approx(0.5)


def test_causes_overlap_and_are_counted_once_in_the_whole(bench):
    metrics = metrics_of(bench, fast(bench, gpu0=(1000, POWER_CAP | THERMAL), gpu1=(1000, HW_SLOWDOWN)), (GPU, TWIN))
    assert metrics["throttle_frac"] == 1.0
    assert metrics["throttle_power_frac"] == metrics["throttle_thermal_frac"] == 0.5
    assert metrics["throttle_hw_frac"] == 0.5


def test_high_vendor_bits_do_not_hide_low_ones(bench):
    assert metrics_of(bench, fast(bench, gpu0=(1000, (1 << 62) | POWER_CAP)))["throttle_power_frac"] == 1.0


def test_the_catalogs_clock_stands_in_for_the_manifests(bench):
    tables = fast(bench, gpu0=(1000, POWER_CAP))
    assert "throttle_frac" not in metrics_of(bench, tables, manifests={})
    assert metrics_of(bench, tables, manifests={}, clock_max_mhz=2000.0)["throttle_loss_frac"] == pytest.approx(0.5)


def test_one_device_without_readings_makes_it_absent(bench):
    tables = fast(bench, gpu0=(1000, POWER_CAP))
    assert metrics_of(bench, tables, (GPU, TWIN)) == {}


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


def test_software_and_hardware_slowing_down_at_once_are_all_of_the_time(bench):
    """One column sums both; that metric must not go where it is worst."""
    assert metrics_of(bench, counters(bench, np.zeros_like, lambda t: 1.7e9 * t))["thermal_active_frac"] == 1.0
