"""Each doubt sets in beyond its edge, and not before: values on both sides of it, one sensor at a time."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from wattune.analysis.metrics import doubts as d
from wattune.analysis.metrics.energy import Powers, PowerTrace
from wattune.analysis.signals.align import Aligned
from wattune.analysis.signals.readings import Readings, ReadingsCache
from wattune.analysis.signals.series import Series

A, B = ("n", "gpu0"), ("n", "gpu1")
TIME_S = np.arange(0.0, 60.0, 0.1)
NOISE_W = 500 + np.random.default_rng(1).normal(0, 5, len(TIME_S))


def trace(watts: Any = NOISE_W, device: tuple[str, str] = A, **facts: Any) -> PowerTrace:
    series = Series(TIME_S, np.broadcast_to(np.asarray(watts, float), TIME_S.shape))
    told = {"mean_w": float(series.value.mean()), "max_w": float(series.value.max())} | facts
    averaged_s, against_j = told.pop("averaged_s", 0.0), told.pop("counter", None)
    return PowerTrace(
        devices=(device,), load=lambda: series, start_s=0.0, end_s=60.0, from_ring=False, averaged_s=averaged_s,
        spacing_s=0.1, sensor_period_s=0.1, smoothed_s=(), coverage_frac=1.0, against_counter_j=against_j,
        largest_gap_s=0.1, first=series, **told,
    )  # fmt: skip


def told(
    *traces: PowerTrace, limit_w: float | None = 700, **tiers: Mapping[tuple[str, str], Readings]
) -> dict[str, str]:
    found = tuple(one.devices[0] for one in traces) or (A,)
    aligned = Aligned(
        start_ns=0, duration_s=60.0, steps=None, devices=found, tiers=tiers, cache=ReadingsCache(),
        known={} if limit_w is None else {one: {"power_limit_w": limit_w} for one in found},
    )  # fmt: skip
    return d.doubts(aligned, Powers(traces=traces, num_sensors=len(traces)))


def fast(**columns: Any) -> Readings:
    return Readings(
        TIME_S, {name: np.broadcast_to(np.asarray(value, float), TIME_S.shape) for name, value in columns.items()}
    )


def counter(energy_j: Any, time_s: Any = TIME_S) -> dict[tuple[str, str], Readings]:
    return {A: Readings(np.asarray(time_s, float), {"energy_j": np.asarray(energy_j, float)})}


@pytest.mark.parametrize(
    ("watts", "facts", "limit_w", "code"),
    [
        (NOISE_W, {}, 700, None),
        (NOISE_W, {"num_zeros": 1}, 700, d.ZERO_POWER),
        (2.4, {}, None, d.POWER_UNIT),
        (2.6, {}, None, None),
        (6.9, {}, 700, d.POWER_UNIT),  # less than a hundredth of the limit
        (7.1, {}, 700, None),
        (771, {}, 700, d.OVER_LIMIT),
        (769, {}, 700, None),
        (771, {}, None, None),
        (NOISE_W, {"averaged_s": 1.0}, 700, d.AVERAGED),
    ],
)
def test_one_sensor_is_doubted_beyond_an_edge(
    watts: Any, facts: dict[str, Any], limit_w: float | None, code: str | None
) -> None:
    assert list(told(trace(watts, **facts), limit_w=limit_w)) == ([code] if code else [])


@pytest.mark.parametrize(
    ("hold", "odd", "tiers", "doubted"),
    [
        ((0.0, 9.9, 500.0, 99), True, {}, False),
        ((0.0, 10.0, 500.0, 100), True, {}, True),
        ((0.0, 10.0, 500.0, 19), True, {}, False),
        ((0.0, 10.0, 0.0, 100), True, {}, False),  # zeros are another doubt
        ((0.0, 10.0, 500.0, 100), False, {}, False),  # it may have been as steady
        ((0.0, 30.0, 500.0, 300), False, {"fast": {A: fast(sm_clock_mhz=1500 + 300 * np.sin(TIME_S))}}, True),
        ((0.0, 30.0, 500.0, 300), False, {"fast": {A: fast(sm_clock_mhz=1500 + 100 * np.sin(TIME_S))}}, False),
        ((0.0, 30.0, 500.0, 300), False, {"slow": counter(1e6 + 530 * TIME_S)}, True),
        ((20.0, 50.0, 500.0, 300), False, {"slow": counter(470 * TIME_S)}, True),
        ((0.0, 30.0, 500.0, 300), False, {"slow": counter(520 * TIME_S)}, False),
        ((0.0, 30.0, 500.0, 300), False, {"slow": counter(530 * TIME_S[:40], TIME_S[:40])}, False),  # too short to tell
    ],
)  # fmt: skip
def test_a_sensor_that_holds_one_value_is_stuck_where_something_tells(
    hold: Any, odd: bool, tiers: Any, doubted: bool
) -> None:
    assert (d.POWER_STUCK in told(trace(hold=hold, hold_is_odd=odd), **tiers)) is doubted


@pytest.mark.parametrize(
    ("share_s", "value_w", "other_w", "doubted"),
    [
        (60.0, 500.0, 300 + 50 * np.sin(TIME_S), True),
        (53.0, 500.0, 300 + 50 * np.sin(TIME_S), False),  # not the whole time
        (60.0, 170.0, 300 + 50 * np.sin(TIME_S), False),  # may idle
        (60.0, 180.0, 300 + 50 * np.sin(TIME_S), True),
        (60.0, 500.0, 300 + 30 * np.sin(TIME_S), False),  # the other is as steady
    ],
)  # fmt: skip
def test_one_value_all_the_time_is_stuck_where_others_vary(
    share_s: float, value_w: float, other_w: Any, doubted: bool
) -> None:
    held = trace(value_w, hold=(0.0, share_s, value_w, 600))
    assert (d.POWER_STUCK in told(held, trace(other_w, B))) is doubted
    alone = told(held)
    assert d.POWER_STUCK not in alone


@pytest.mark.parametrize(
    ("a_j", "b_j", "swapped"),
    [
        ((100, 200), (200, 100), True),
        ((100, 203), (203, 100), True),
        ((100, 203), (200, 100), True),
        ((100, 205), (200, 100), False),
        ((100, 104), (104, 100), False),  # within 5 % of its own
        ((100, 104), (106, 98.2), False),  # one of the two
        ((100, 200), (200, 0), False),
        (None, (200, 100), False),
    ],
)
def test_two_sensors_are_swapped_where_each_agrees_with_the_others_counter(a_j: Any, b_j: Any, swapped: bool) -> None:
    other = np.random.default_rng(2).normal(500, 5, len(TIME_S))
    assert (d.SWAPPED in told(trace(counter=a_j), trace(other, B, counter=b_j))) is swapped


@pytest.mark.parametrize(
    ("a", "b", "swapped"),
    [
        ({"sm_clock_mhz": 400}, {"sm_clock_mhz": 1900}, True),
        ({"sm_clock_mhz": 1000}, {"sm_clock_mhz": 1900}, False),
        ({"sm_clock_mhz": 1900}, {"sm_clock_mhz": 400}, False),
        ({"gpu_temp_c": np.where(TIME_S < 30, 60, 45)}, {"gpu_temp_c": np.where(TIME_S < 30, 45, 60)}, True),
        ({"gpu_temp_c": np.where(TIME_S < 30, 60, 51)}, {"gpu_temp_c": np.where(TIME_S < 30, 51, 60)}, False),
        ({"gpu_temp_c": np.where(TIME_S < 30, 60, 45)}, {"gpu_temp_c": np.where(TIME_S < 30, 45, 64)}, False),
    ],
)
def test_devices_are_exchanged_where_clock_or_temperature_tell(a: Any, b: Any, swapped: bool) -> None:
    pair = trace(450 + NOISE_W - 500), trace(200 + np.random.default_rng(2).normal(0, 5, len(TIME_S)), B)
    assert (d.SWAPPED in told(*pair, fast={A: fast(**a), B: fast(**b)})) is swapped


@pytest.mark.parametrize(
    ("same_frac", "noisy", "apart", "doubted"),
    [
        (1.0, True, {}, True),
        (0.96, True, {}, True),
        (0.93, True, {}, False),
        (1.0, False, {}, False),  # a program may draw the same
        (1.0, False, {"gpu_temp_c": 2.1}, True),
        (1.0, False, {"gpu_temp_c": 1.9}, False),
        (1.0, False, {"sm_clock_mhz": 31}, True),
        (1.0, False, {"sm_clock_mhz": 29}, False),
    ],
)
def test_the_same_digits_are_one_sensor_where_devices_differ(
    same_frac: float, noisy: bool, apart: dict[str, float], doubted: bool
) -> None:
    watts = NOISE_W if noisy else 400 + 2 * TIME_S
    again = np.where(np.random.default_rng(3).permutation(len(watts)) < same_frac * len(watts), watts, watts + 0.5)
    other = fast(gpu_temp_c=60 + apart.get("gpu_temp_c", 0), sm_clock_mhz=1900 - apart.get("sm_clock_mhz", 0))
    tiers = {A: fast(gpu_temp_c=60, sm_clock_mhz=1900), B: other}
    assert (d.SAME_POWER in told(trace(watts), trace(again, B), fast=tiers)) is doubted
    assert d.SAME_POWER not in told(trace(watts), trace(again, ("m", "gpu1"))), "sensors of another node are no pair"


@pytest.mark.parametrize(
    ("slow", "code"),
    [
        (counter(500 * TIME_S), None),
        (counter([0, 500], [0.0, 1.0]), None),
        (counter(np.where(TIME_S < 40, 500 * TIME_S, 500 * (TIME_S - 40))), d.COUNTER_RESET),
        (counter((500 * TIME_S + 1e4) % 65_536 + 0.0), None),  # a register that no driver has does not wrap
        (counter(np.minimum(500 * TIME_S, 500 * 49.8)), d.COUNTER_STUCK),
        (counter(np.minimum(500 * TIME_S, 500 * 50.2)), None),
        (counter(np.append(500 * TIME_S[1:], 500 * TIME_S[-1]), np.append(TIME_S[1:], TIME_S[-1])), d.DOUBLED),
    ],
)  # fmt: skip
def test_a_counter_is_doubted_beyond_an_edge(slow: Any, code: str | None) -> None:
    found = list(told(trace(), slow=slow))
    assert code in found if code else not {d.COUNTER_STUCK, d.DOUBLED, d.COUNTER_WRAPPED} & set(found)


@pytest.mark.parametrize(
    ("degrees", "code"),
    [
        (60, None),
        (0, d.TEMPERATURE_STUCK),
        (110, None),
        (111, d.TEMPERATURE_UNIT),
        (np.round(np.linspace(30, 51, len(TIME_S))) * 1.8 + 32, None),  # whole degrees Fahrenheit are told rounded
        (np.round(np.round(np.linspace(30, 51, len(TIME_S))) * 1.8 + 32), d.TEMPERATURE_UNIT),
        (np.round(np.round(np.linspace(10, 32, len(TIME_S))) * 1.8 + 32), None),  # no hotter than 90
    ],
)
def test_a_temperature_is_doubted_beyond_an_edge(degrees: Any, code: str | None) -> None:
    assert list(told(trace(), fast={A: fast(gpu_temp_c=degrees)})) == ([code] if code else [])


@pytest.mark.parametrize(
    ("low_w", "degrees", "others", "doubted"),
    [
        (240, 60, np.round(55 + TIME_S / 6), True),
        (260, 60, np.round(55 + TIME_S / 6), False),  # power does not double
        (240, 60, 60, False),  # nothing moves
        (240, np.where(TIME_S < 50, 60, 61), np.round(55 + TIME_S / 6), False),
    ],
)
def test_a_temperature_is_stuck_where_power_doubles_and_others_move(
    low_w: float, degrees: Any, others: Any, doubted: bool
) -> None:
    watts = np.where(TIME_S < 30, low_w, 500) + np.random.default_rng(4).normal(0, 0.01, len(TIME_S))
    tiers = {A: fast(gpu_temp_c=degrees), B: fast(gpu_temp_c=others)}
    assert (d.TEMPERATURE_STUCK in told(trace(watts), trace(NOISE_W, B), fast=tiers)) is doubted


@pytest.mark.parametrize(
    ("off_s", "doubted"),
    [(0.0, False), (900.0, True), (-3600.0, True), (842.0, True), (838.0, False), (907.0, False), (450.0, False)],
)
def test_a_node_off_by_quarters_of_an_hour_is_in_another_zone(off_s: float, doubted: bool) -> None:
    span_s = np.arange(0.0, 130.0, 1.0) + off_s
    found = told(trace(), slow={A: Readings(span_s, {"gpu_temp_c": np.full(len(span_s), 60.0)})})
    assert (d.TIME_ZONE in found) is doubted


def test_of_many_devices_four_are_told_and_the_rest_counted() -> None:
    many = [trace(NOISE_W, ("n", f"gpu{i}"), num_zeros=1) for i in range(6)]
    one = told(*(replace(one, first=Series(TIME_S, NOISE_W + i)) for i, one in enumerate(many)))[d.ZERO_POWER]
    assert one.count("n/gpu") == 4 and one.endswith("; 2 more")
