"""One AMD device: power, residencies, throttling, and columns that are not there."""

import pytest
from fake_amd_smi import MI300, RESIDENCIES, U16, U64, FakeAmdSmi, die, metrics
from hypothesis import given
from hypothesis import strategies as st

from wattune.errors import TelemetryError
from wattune.schema import THROTTLE_REASON_BITS
from wattune.telemetry.amd_smi.backend import AmdSmiBackend
from wattune.telemetry.amd_smi.device import ENERGY_UNIT_J, EnergyPower, Residency, ThrottleTime, reasons
from wattune.telemetry.amd_smi.library import Metrics
from wattune.telemetry.backend import AVAILABLE
from wattune.units import NS_PER_S


def test_what_a_product_lacks_is_left_out_and_said() -> None:
    backend = AmdSmiBackend(FakeAmdSmi(die("c1", 0, primary=True)))
    slow, counter = backend.capabilities("gpu0")["slow"], backend.capabilities("gpu0")["counter"]
    assert slow["throttle_power_ns"] == counter["nvlink_tx_bytes"] == "unavailable: N/A"
    assert counter["pcie_tx_bytes"] == "unavailable: AMD SMI counts both directions together"
    assert slow["energy_j"] == AVAILABLE
    assert backend.read("gpu0", "slow") == [
        {
            "energy_j": pytest.approx(10**9 * ENERGY_UNIT_J),
            "power_average_w": 300.0,
            "power_limit_w": 560.0,
            "memory_temp_c": 50.0,
            "memory_used_bytes": 5 * 2**30,
        }
    ]


def test_a_value_that_goes_away_is_null_with_its_code_and_a_lost_device_too() -> None:
    device = die("c1", 0, primary=True)
    now_ns = iter(range(0, 10**12, 10**9))
    backend = AmdSmiBackend(FakeAmdSmi(device), clock_ns=lambda: next(now_ns))
    device["temperature_hotspot"] = U16
    (row,) = backend.read("gpu0", "fast")
    assert (row["gpu_temp_c"], row["gpu_temp_c_error"], row["sm_clock_mhz"]) == (None, "N/A", 1700)
    device["status"] = 31
    (row,) = backend.read("gpu0", "fast")
    columns = {name for name, state in backend.capabilities("gpu0")["fast"].items() if state == AVAILABLE}
    assert row == dict.fromkeys(columns) | {f"{name}_error": "AMDSMI_STATUS_NOT_FOUND" for name in columns}


def test_other_tiers_read_again_what_is_fresh_and_no_tier_reads_one_answer_twice() -> None:
    now_ns = [0]
    package = FakeAmdSmi(die("c1", 0, primary=True))
    backend = AmdSmiBackend(package, clock_ns=lambda: now_ns[0])
    before = package.calls
    for tier, elapsed_ns, calls in (("fast", 0, 1), ("slow", 4_000_000, 1), ("slow", 0, 2), ("fast", 6_000_000, 3)):
        now_ns[0] += elapsed_ns
        backend.read("gpu0", tier)
        assert package.calls - before == calls


@given(st.lists(st.tuples(st.integers(1, 10**10), st.integers(0, 10**6)), min_size=1, max_size=30))
def test_power_times_time_is_the_energy_counted_whatever_stands_still(steps: list[tuple[int, int]]) -> None:
    now_ns, count, last_ns = 0, 5, 0
    power = EnergyPower(metrics(system_clock_counter=now_ns, energy_accumulator=count))
    energy_j, counted = 0.0, count
    for elapsed_ns, rise in steps:
        now_ns, count = now_ns + elapsed_ns, count + rise
        power_w = power.power_w(metrics(system_clock_counter=now_ns, energy_accumulator=count))
        assert (power_w is None) == (rise == 0)
        if power_w is not None:
            energy_j, last_ns, counted = energy_j + power_w * (now_ns - last_ns) / NS_PER_S, now_ns, count
    assert energy_j == pytest.approx((counted - 5) * ENERGY_UNIT_J)


def test_a_counter_that_falls_is_an_error_once() -> None:
    power = EnergyPower(metrics(system_clock_counter=0, energy_accumulator=100))
    with pytest.raises(TelemetryError, match="counter fell"):
        power.power_w(metrics(system_clock_counter=NS_PER_S, energy_accumulator=10))
    assert power.power_w(metrics(system_clock_counter=2 * NS_PER_S, energy_accumulator=65546)) == pytest.approx(1.0)


def residency(at_ns: int, cycles: int, **held: int) -> Metrics:
    zero = {f"{name}_residency_acc": 0 for name in RESIDENCIES.split()}
    given = {f"{name}_residency_acc": value for name, value in held.items()}
    return metrics(system_clock_counter=at_ns, accumulation_counter=cycles, **(zero | given))


def test_residency_is_a_share_of_cycles_and_overlapping_limits_count_once() -> None:
    held = Residency(residency(0, 1000)).held_ns(residency(NS_PER_S, 2000, ppt=250, socket_thm=100, hbm_thm=400))
    assert held == {"power": NS_PER_S // 4, "thermal": 2 * NS_PER_S // 5, "hw": 0}


def test_throttle_time_adds_up_once_a_read_and_leaves_out_a_reset() -> None:
    total = ThrottleTime(residency(0, 0))
    first = residency(NS_PER_S, 1000, ppt=500, prochot=1000)
    assert [total.total_ns(cause, first) for cause in ("power", "thermal", "hw", "power")] == [
        NS_PER_S // 2, 0, NS_PER_S, NS_PER_S // 2,
    ]  # fmt: skip
    assert total.total_ns("power", residency(NS_PER_S, 1000, ppt=500, prochot=1000)) == NS_PER_S // 2
    with pytest.raises(TelemetryError, match="counter fell"):
        total.total_ns("power", residency(2 * NS_PER_S, 10, ppt=10))
    assert total.total_ns("power", residency(3 * NS_PER_S, 1010, ppt=1010)) == 3 * NS_PER_S // 2


@given(
    st.lists(
        st.tuples(st.integers(1, 10**9), st.integers(0, 5000), *[st.integers(0, 5000)] * 5), min_size=1, max_size=20
    )
)
def test_throttle_time_is_monotone_and_at_most_the_time(steps: list[tuple[int, ...]]) -> None:
    now = [0] * 7
    total, last = ThrottleTime(residency(0, 0)), dict.fromkeys(THROTTLE_REASON_BITS, 0)
    for step in steps:
        now = [value + rise for value, rise in zip(now, step, strict=True)]
        at = residency(now[0], now[1], **dict(zip(RESIDENCIES.split(), now[2:], strict=True)))
        for cause in last:
            total_ns = total.total_ns(cause, at)
            assert last[cause] <= total_ns <= now[0] + len(steps)
            last[cause] = total_ns


@given(st.sets(st.sampled_from(sorted(THROTTLE_REASON_BITS))))
def test_reasons_are_read_back_as_the_same_causes(causes: set[str]) -> None:
    bits = reasons({cause: cause in causes for cause in THROTTLE_REASON_BITS})
    assert {cause for cause, mask in THROTTLE_REASON_BITS.items() if bits & mask} == causes


def test_without_flags_reasons_are_what_held_since_the_read_before() -> None:
    values = {f"{name}_residency_acc": 0 for name in RESIDENCIES.split()} | {"accumulation_counter": 0}
    device = die("c1", 0, primary=True, device_id=MI300, indep_throttle_status=U64, **values)
    device["current_gfxclks"] = [2000, 2100, *[U16] * 6]
    now_ns = iter(range(0, 10**12, 10**9))
    backend = AmdSmiBackend(FakeAmdSmi(device), clock_ns=lambda: next(now_ns))
    for held, reason in ((5, 0x4), (0, 0)):
        device["accumulation_counter"] += 50
        device["ppt_residency_acc"] += held
        device["system_clock_counter"] += 50_000_000
        (row,) = backend.read("gpu0", "fast")
        assert (row["event_reasons"], row["sm_clock_mhz"]) == (reason, 2050)
