"""The fit, held to known waves through known filters, to simulated sensors, and to a recorded H200."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wattune.calibration.fit import SIGNALS, fit, fit_link, fit_overhead, waves_of
from wattune.catalog.hardware import device
from wattune.errors import TelemetryError
from wattune.schema import SPANS, TELEMETRY
from wattune.simulation.activity import DeviceActivity, Part
from wattune.simulation.device_model import KINDS, device_model
from wattune.simulation.sensors import simulate_node

NS = 1_000_000_000
MONO_0_NS = 77_000 * NS
WALL_AHEAD_NS = 1_795_000_000 * NS
LOW_W, HIGH_W = 100.0, 900.0
PLAN = ((0.2, 20), (0.5, 10), (1.0, 6), (4.0, 2))
REST_S = 2.0
GOLDEN = Path(__file__).parents[2] / "golden" / "h200x4" / "square_inphase"


def edges_s() -> tuple[np.ndarray, np.ndarray]:
    """Start and end of every on-phase, rests of `REST_S` between waves; the first begins at 0."""
    start_s, at_s = [], 0.0
    halves = []
    for period_s, count in PLAN:
        start_s += [at_s + k * period_s for k in range(count)]
        halves += [period_s / 2] * count
        at_s += period_s * count + REST_S
    return np.array(start_s), np.array(start_s) + np.array(halves)


def spans() -> pa.Table:
    return spans_of(*edges_s())


def spans_of(start_s: np.ndarray, end_s: np.ndarray) -> pa.Table:
    rows = [
        {"node": "n", "device": "gpu0", "rank": 0, "step": step, "phase": "step"}
        | {f"{edge}_mono_ns": MONO_0_NS + round(at_s * NS) for edge, at_s in (("start", first), ("end", last))}
        | {f"{edge}_wall_ns": MONO_0_NS + WALL_AHEAD_NS for edge in ("start", "end")}
        for step, (first, last) in enumerate(zip(start_s, end_s, strict=True))
    ]
    return pa.Table.from_pylist(rows, schema=SPANS)


def energy_j(at_s: np.ndarray) -> np.ndarray:
    """True energy since time 0, exact."""
    start_s, end_s = edges_s()
    times = np.stack([start_s, end_s], axis=1).ravel()
    worked_s = np.stack([np.zeros(len(start_s)), end_s - start_s], axis=1).ravel().cumsum()
    return LOW_W * at_s + (HIGH_W - LOW_W) * np.interp(at_s, times, worked_s)


def mean_w(at_s: np.ndarray, window_s: float, delay_s: float) -> np.ndarray:
    return (energy_j(at_s - delay_s) - energy_j(at_s - delay_s - window_s)) / window_s


def table(tier: str, time_s: np.ndarray, columns: Mapping[str, np.ndarray], drained_late_s: float = 0.0) -> pa.Table:
    mono_ns = MONO_0_NS + np.round((time_s + drained_late_s) * NS).astype(np.int64)
    whole: dict[str, Any] = {"node": ["n"] * len(time_s), "device": ["gpu0"] * len(time_s), **columns}
    whole |= {"mono_ns": mono_ns, "wall_ns": mono_ns + WALL_AHEAD_NS}
    whole |= {"sensor_ns": MONO_0_NS + WALL_AHEAD_NS + np.round(time_s * NS).astype(np.int64)}
    schema = TELEMETRY[tier]
    arrays = [
        pa.array(whole[field.name]).cast(field.type, safe=False)
        if field.name in whole
        else pa.nulls(len(time_s), field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def held(time_s: np.ndarray, period_s: float, phase_s: float = 0.013) -> np.ndarray:
    """Returns, for each time, when the value shown then was refreshed."""
    return np.floor((time_s - phase_s) / period_s) * period_s + phase_s


def tables(
    *,
    ring_window_s: float = 0.02,
    ring_delay_s: float = 0.0,
    gain: float = 1.0,
    average_window_s: float | None = 1.0,
    average_delay_s: float = 0.0,
) -> dict[str, pa.Table]:
    """Telemetry of the load; without an average power where that has no window."""
    end_s = edges_s()[1][-1] + 2.5
    ring_s = np.arange(-2.0, end_s, 0.02)
    fast_s = np.arange(-2.0, end_s, 0.02) + 0.003
    slow_s = np.arange(-2.0, end_s, 0.05) + 0.001
    slow = {"energy_j": energy_j(held(slow_s, 0.1))}
    if average_window_s is not None:
        slow["power_average_w"] = mean_w(held(slow_s, 0.1), average_window_s, average_delay_s)
    return {
        "ring": table("ring", ring_s, {"power_w": gain * mean_w(ring_s, ring_window_s, ring_delay_s)}, 0.7),
        "fast": table("fast", fast_s, {"power_instant_w": mean_w(held(fast_s, 0.1), 0.025, 0.0)}),
        "slow": table("slow", slow_s, slow),
    }


@pytest.fixture(scope="module")
def ideal() -> dict[str, Any]:
    return fit(tables(), "gpu0", spans(), PLAN)


def test_periods_are_recovered_within_five_percent(ideal: dict[str, Any]) -> None:
    periods_s = {name: signal["sensor_period_s"] for name, signal in ideal["signals"].items()}
    assert periods_s == pytest.approx({"ring": 0.02, "instant": 0.1, "average": 0.1}, rel=0.05)


def test_windows_and_delays_are_recovered(ideal: dict[str, Any]) -> None:
    ring, instant, average = (ideal["signals"][name] for name in ("ring", "instant", "average"))
    assert (ring["window_s"], ring["delay_s"]) == pytest.approx((0.02, 0.0), abs=0.002)
    assert (instant["window_s"], instant["delay_s"]) == pytest.approx((0.025, 0.0), abs=0.02)  # polled every 20 ms
    assert (average["window_s"], average["delay_s"]) == pytest.approx((1.0, 0.0), abs=0.05)  # polled every 50 ms
    assert min(signal["explained_frac"] for signal in ideal["signals"].values()) > 0.97


def test_the_finest_window_is_two_periods_or_the_sensors_own_window(ideal: dict[str, Any]) -> None:
    finest_s = {name: ideal["limits"][SIGNALS[name][0]]["finest_window_s"] for name in ideal["signals"]}
    assert finest_s == pytest.approx({"ring": 0.04, "instant": 0.2, "average": 1.0}, rel=0.06)
    assert set(ideal["limits"]) == {"ring", "fast", "slow"}


@settings(max_examples=settings().max_examples // 8)
@given(delay_s=st.floats(0.0, 0.4), window_s=st.floats(0.02, 0.3), gain=st.floats(0.8, 1.2))
def test_any_ring_is_recovered(delay_s: float, window_s: float, gain: float) -> None:
    recorded = tables(ring_delay_s=delay_s, ring_window_s=window_s, gain=gain, average_window_s=None)
    del recorded["fast"]
    seen = fit(recorded, "gpu0", spans(), PLAN)["signals"]["ring"]
    assert seen["delay_s"] == pytest.approx(delay_s, abs=0.005)
    assert seen["window_s"] == pytest.approx(window_s, abs=0.01)
    assert seen["gain_frac"] == pytest.approx(gain, rel=0.005)
    assert seen["explained_frac"] > 0.99


def test_what_each_window_hides_is_what_a_square_wave_says(ideal: dict[str, Any]) -> None:
    swing_w, half_w = HIGH_W - LOW_W, (HIGH_W + LOW_W) / 2
    by_period = {wave["period_s"]: wave for wave in ideal["waves"]}
    assert by_period[0.2]["peaks_w"]["20ms"] == pytest.approx(HIGH_W)
    assert by_period[0.5]["peaks_w"]["100ms"] == pytest.approx(HIGH_W)
    for period_s in (0.2, 0.5, 1.0):  # a second holds whole periods of these
        assert by_period[period_s]["peaks_w"]["1s"] == pytest.approx(half_w, rel=0.03)
        assert by_period[period_s]["under_report_frac"]["1s"] == pytest.approx(1 - half_w / HIGH_W, abs=0.02)
        assert by_period[period_s]["under_report_frac"]["average"] == pytest.approx(1 - half_w / HIGH_W, abs=0.05)
    assert by_period[4.0]["peaks_w"]["1s"] == pytest.approx(LOW_W + swing_w, rel=0.02)  # and one on-phase of this


def test_energy_agrees_with_the_counter(ideal: dict[str, Any]) -> None:
    assert ideal["signals"]["ring"]["gain_frac"] == pytest.approx(1.0, abs=0.002)
    assert max(wave["energy_error_frac"] for wave in ideal["waves"] if wave["energy_error_frac"] is not None) < 0.005
    assert [wave["energy_error_frac"] is None for wave in ideal["waves"]] == [False] * len(PLAN)


def test_without_a_counter_there_is_no_gain() -> None:
    seen = fit({"ring": tables()["ring"]}, "gpu0", spans(), PLAN)
    assert seen["signals"]["ring"]["gain_frac"] is None
    assert all(wave["mean_w"] is None and wave["energy_error_frac"] is None for wave in seen["waves"])


def test_a_wrong_device_is_an_error() -> None:
    with pytest.raises(TelemetryError, match="gpu1"):
        fit(tables(), "gpu1", spans(), PLAN)


def test_a_device_that_the_load_did_not_reach_is_said_although_it_settled_before() -> None:
    at_s = np.arange(-2.0, edges_s()[1][-1] + 2.5, 0.02)
    idle = table("ring", at_s, {"power_w": np.where(at_s < -1.0, 90.0, 80.0)})
    with pytest.raises(TelemetryError, match="no power signal of gpu0 moved while the load ran"):
        fit({"ring": idle}, "gpu0", spans(), PLAN)


def test_spans_of_another_load_are_refused() -> None:
    with pytest.raises(TelemetryError, match="38 spans"):
        waves_of(spans(), [(0.5, 3)])


def test_simulated_sensors_are_found_as_they_are_made() -> None:
    """A second bed: physics, noise, late slots and a sampler's own rates (slow readings once a second)."""
    start_s, end_s = edges_s()
    part = Part(
        start_ns=MONO_0_NS + (start_s * NS).astype(np.int64),
        end_ns=MONO_0_NS + (end_s * NS).astype(np.int64),
        shares=np.array([float(kind == "tensor") for kind in KINDS]),
    )
    simulated, _ = simulate_node(
        device_model(device("h200_sxm")),
        "n",
        [DeviceActivity(device="gpu0", steps=None, phases=(part,))],
        wall_minus_mono_ns=WALL_AHEAD_NS,
        first_ns=MONO_0_NS - 3 * NS,
        last_ns=MONO_0_NS + round((end_s[-1] + 3.0) * NS),
        seed=0,
    )
    seen = fit(simulated, "gpu0", spans(), PLAN)
    ring, instant = seen["signals"]["ring"], seen["signals"]["instant"]
    assert ring["sensor_period_s"] == pytest.approx(0.02, rel=0.05)
    assert (ring["delay_s"], ring["window_s"]) == pytest.approx((0.0, 0.02), abs=0.01)
    assert ring["gain_frac"] == pytest.approx(1.0, abs=0.01)
    assert instant["sensor_period_s"] == pytest.approx(0.1, rel=0.05)
    assert seen["waves"][0]["under_report_frac"]["1s"] > 0.3


def test_a_recorded_h200_is_found_as_the_notes_say() -> None:
    """0.5 s waves on four H200: ring of 20 ms, instant power every 100 ms, peaks hidden from both 1 s means."""
    recorded = {
        tier: pq.read_table(GOLDEN / "telemetry" / "node0" / f"{tier}.parquet") for tier in ("ring", "fast", "slow")
    }
    whole = pq.read_table(GOLDEN / "spans.parquet")
    own = whole.filter(pc.equal(whole["device"].cast(pa.string()), "gpu0"))
    seen = fit(recorded, "gpu0", own, [(0.5, own.num_rows)])
    ring, instant = seen["signals"]["ring"], seen["signals"]["instant"]
    assert ring["sensor_period_s"] == pytest.approx(0.02, rel=0.05)
    assert (ring["delay_s"], ring["window_s"]) == pytest.approx((0.0, 0.025), abs=0.015)
    assert ring["gain_frac"] == pytest.approx(1.0, abs=0.01)
    assert instant["sensor_period_s"] == pytest.approx(0.1, rel=0.05)
    assert seen["waves"][0]["under_report_frac"]["average"] > 0.45


def blocks(ratio: float, num_pairs: int, noise: float, drift: float = 0.0) -> list[tuple[np.ndarray, np.ndarray]]:
    stream = np.random.default_rng(7)
    pairs = []
    for index in range(num_pairs):
        base = 0.03 * (1 + drift * index) * (1 + noise * stream.standard_normal((2, 60)))
        pairs.append((base[0], ratio * base[1]))
    return pairs


@pytest.mark.parametrize("ratio", [0.99, 1.0, 1.003, 1.05])
def test_overhead_is_inside_its_interval_whatever_the_drift(ratio: float) -> None:
    cost = fit_overhead(blocks(ratio, 30, 0.01, drift=0.01))
    assert cost["low"] <= ratio <= cost["high"]
    assert cost["low"] <= cost["ratio"] <= cost["high"]
    assert cost["high"] - cost["low"] < 0.005
    assert (cost["num_pairs"], cost["num_steps"]) == (30, 3600)


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    stream = np.random.default_rng(3)
    hits = 0
    for _ in range(60):
        pairs = [tuple(0.03 * (1 + 0.02 * stream.standard_normal((2, 20)))) for _ in range(20)]
        cost = fit_overhead(pairs)
        hits += cost["low"] <= 1.0 <= cost["high"]
    assert 50 <= hits <= 60


def test_overhead_is_the_same_for_the_same_seed() -> None:
    pairs = blocks(1.0, 10, 0.02)
    assert fit_overhead(pairs, seed=1) == fit_overhead(pairs, seed=1)
    assert fit_overhead(pairs, seed=1) != fit_overhead(pairs, seed=2)


def test_overhead_of_one_pair_is_refused() -> None:
    with pytest.raises(TelemetryError, match="two pairs"):
        fit_overhead([*blocks(1.0, 1, 0.0), (np.empty(0), np.ones(3))])


def link(tx_per_s: float, rx_per_s: float, *, reset_at_s: float = 99.0, hz: float = 5.0) -> dict[str, pa.Table]:
    """A device that carries so much a second from second 1 to 6, and nothing around it."""
    time_s = np.arange(0.0, 8.0, 1 / hz)
    busy_s = np.clip(time_s - 1.0, 0.0, 5.0)
    sent = np.where(time_s < reset_at_s, tx_per_s * busy_s + 1e12, 0.0)
    return {"counter": table("counter", time_s, {"pcie_tx_bytes": sent, "pcie_rx_bytes": rx_per_s * busy_s})}


def test_a_link_carries_what_its_busier_direction_did_while_the_load_ran() -> None:
    load = spans_of(np.arange(1.0, 6.0), np.arange(2.0, 7.0))
    columns = ("pcie_tx_bytes", "pcie_rx_bytes")
    assert fit_link(link(54e9, 50e9), "gpu0", columns, load) == pytest.approx(54e9, rel=1e-6)
    assert fit_link(link(54e9, 50e9), "gpu1", columns, load) is None, "another device's counter"
    assert fit_link(link(0.0, 0.0), "gpu0", columns, load) is None, "the counter does not count"
    assert fit_link(link(54e9, 50e9, reset_at_s=3.0), "gpu0", columns, load) is None
    assert fit_link(link(54e9, 50e9, hz=1.0), "gpu0", columns, load) is None, "too few readings"
    assert fit_link({}, "gpu0", columns, load) is None
