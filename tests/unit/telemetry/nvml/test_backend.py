"""The NVML backend over a driver's library in memory; what it stands for is in `fake_nvml`."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from fake_nvml import GPU_IS_LOST, NOT_SUPPORTED, RING_DEPTH, U64, FakeNvml, square_wave
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wattune.errors import TelemetryError
from wattune.telemetry.backend import AVAILABLE, OTHER_PROCESSES, FactsProvider, Row
from wattune.telemetry.files.segments import read_tables
from wattune.telemetry.nvml.backend import NvmlBackend
from wattune.telemetry.nvml.fields import (
    NEW_THROTTLE_FIELDS,
    OLD_THROTTLE_FIELDS,
    Counter,
    counter_bits,
    decode,
    throttle_fields,
)
from wattune.telemetry.sampler.loop import Sampler

TIERS = ("ring", "fast", "counter", "slow")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    return FakeNvml().install(monkeypatch)


def opened(driver: FakeNvml) -> NvmlBackend:
    return NvmlBackend(driver.clock_ns, driver.wall_ns, driver.sleep)


def row(backend: NvmlBackend, tier: str, device: str = "gpu0") -> Row:
    (only,) = backend.read(device, tier)
    return only


def drain(backend: NvmlBackend) -> list[tuple[int, float]]:
    return [(int(one["sensor_ns"] or 0), float(one["power_w"] or 0)) for one in backend.read("gpu0", "ring")]


def test_every_column_is_read_in_its_own_unit(driver: FakeNvml) -> None:
    backend = opened(driver)
    driver.sleep(0.39)
    fast = row(backend, "fast")
    assert fast == {"power_instant_w": 120.0, "sm_clock_mhz": 1500, "event_reasons": 4, "gpu_temp_c": 38}
    counter = row(backend, "counter")
    assert counter["nvlink_rx_bytes"] == 2 * int(counter["nvlink_tx_bytes"] or 0) == 36 * 10_500 * 1024
    assert [counter[f"{unit}_active_frac"] for unit in ("sm", "tensor", "dram")] == [0.5, 0.25, 0.125]
    assert row(backend, "slow") == {
        "energy_j": pytest.approx(1e6 + 500 * 10.5),
        "power_average_w": 500.0,
        "power_limit_w": 700.0,
        "memory_temp_c": 41,
        "thermal_margin_c": 49,
        "throttle_power_ns": 0,
        "throttle_thermal_ns": 0,
        "throttle_hw_ns": 0,
        "memory_used_bytes": 5 * 10**9,
    }


def test_devices_are_named_by_slot_and_known_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML does not look at CUDA_VISIBLE_DEVICES, so that must not move a name to another device."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    driver = FakeNvml(2).install(monkeypatch)
    infos = opened(driver).devices()
    assert [(info.device, info.slot, info.uuid) for info in infos] == [
        (f"gpu{index}", index, driver.gpus[index].uuid) for index in range(2)
    ]
    assert {info.power_limit_w for info in infos} == {700.0} and {info.sm_clock_max_mhz for info in infos} == {1980}
    assert [info.power_domain for info in infos] == ["gpu0", "gpu1"]
    assert infos[0].driver == "580.159.04"


def test_no_blocking_call_is_made_while_reading(driver: FakeNvml) -> None:
    backend = opened(driver)
    driver.calls.clear()
    for _ in range(3):
        driver.sleep(0.2)
        for tier in TIERS:
            backend.read("gpu0", tier)
    banned = ("PcieThroughput", "RunningProcesses", "FanSpeed", "Init", "HandleBy", "MaxClockInfo", "ViolationStatus")
    assert [call for call in driver.calls if any(name in call for name in banned)] == []


# The ring


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
        driver.gpus[0].power_w = lambda time_s: wave(time_s) + (time_s * 7919 % 1)
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


def test_a_driver_without_a_ring_says_what_stands_in(driver: FakeNvml) -> None:
    driver.gpus[0].faults["nvmlDeviceGetSamples"] = NOT_SUPPORTED
    backend = opened(driver)
    assert backend.capabilities("gpu0")["ring"] == dict.fromkeys(("sensor_ns", "power_w"), "unavailable: NOT_SUPPORTED")
    assert backend.facts("gpu0")["power_series"] == "power_instant_w" and "ring" not in backend.facts("gpu0")
    assert list(backend.read("gpu0", "ring")) == []


# Fields and counters


@pytest.mark.parametrize(
    ("value_type", "member"), [*enumerate(("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal"))]
)
def test_values_are_decoded_by_their_type(value_type: int, member: str) -> None:
    import pynvml

    value = pynvml.c_nvmlValue_t()
    setattr(value, member, -7 if member in ("dVal", "sllVal", "siVal") else 7)
    assert decode(value_type, value) == getattr(value, member)


def test_an_unknown_value_type_is_an_error_and_no_number() -> None:
    with pytest.raises(TelemetryError, match="VALUE_TYPE_9"):
        decode(9, None)
    with pytest.raises(TelemetryError, match="VALUE_TYPE_0"):
        counter_bits(0)


@given(rises=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), start=st.integers(0, 2**32 - 1))
def test_a_narrow_counter_is_unwrapped(rises: Sequence[int], start: int) -> None:
    counter, total = Counter(), start
    counter.advance(start, 32, 0.0)
    for rise in rises:
        total += rise
        assert counter.advance(total % 2**32, 32, 1.0) == total


@given(
    rises=st.lists(st.integers(0, 40 * 2**32), min_size=1, max_size=20),
    error=st.floats(-0.04, 0.04),
)
def test_another_sensor_tells_how_often_a_counter_wrapped(rises: Sequence[int], error: float) -> None:
    counter, total = Counter(), 0
    counter.advance(0, 32, 0.0)
    for time_s, rise in enumerate(rises, 1):
        total += rise
        about = rise + error * min(rise, 10 * 2**32)  # right when the other sensor errs by less than half a wrap
        assert counter.advance(total % 2**32, 32, time_s, about_per_s=about) == total


def test_a_wide_counter_that_falls_was_reset_and_goes_on() -> None:
    counter = Counter()
    counter.advance(1000, 64, 0.0)
    with pytest.raises(TelemetryError, match="COUNTER_RESET"):
        counter.advance(10, 64, 1.0)
    assert counter.advance(25, 64, 2.0) == 1015


def test_a_wide_counter_of_all_ones_is_no_count() -> None:
    counter = Counter()
    for time_s in (0.0, 2.0):
        with pytest.raises(TelemetryError, match="ALL_BITS_SET"):
            counter.advance(2**64 - 1, 64, time_s)
        assert counter.advance(1000, 64, time_s + 1) == 1000


def test_all_ones_from_the_bus_are_null_and_the_recording_goes_on(
    driver: FakeNvml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Reads of a device that fell off the bus give all ones until the driver notices: no bytes any table can hold."""
    backend, field = opened(driver), driver.gpus[0].field

    def failing(number: int, scope: int) -> tuple[int, int, int]:
        return (0, U64, 2**64 - 1) if number == 138 and driver.now_ns > 13e9 else field(number, scope)

    def expired() -> bool:
        return driver.now_ns > 16e9

    monkeypatch.setattr(driver.gpus[0], "field", failing)
    clocks = {"clock_ns": driver.clock_ns, "wall_ns": driver.wall_ns, "wait": driver.sleep}
    Sampler(tmp_path, {"nvml": backend}, node="n0", expired=expired, **clocks).run()
    late = [one for one in read_tables(tmp_path)[0]["counter"].to_pylist() if one["mono_ns"] > 13e9]
    assert len(late) > 10 and {one["nvlink_tx_bytes"] for one in late} == {None}
    assert {one["nvlink_tx_bytes_error"] for one in late} == {"ALL_BITS_SET"}
    assert None not in {one["nvlink_rx_bytes"] for one in late}


def test_pcie_bytes_are_right_at_full_speed(driver: FakeNvml) -> None:
    """55 GB/s wrap the 32-bit register 2.6 times between two reads at 5 Hz (seen on H200 with pinned copies)."""
    driver.gpus[0].pcie_bytes_per_s = 27e9
    backend = opened(driver)
    first = row(backend, "counter")
    start_ns = driver.now_ns
    for _ in range(10):
        driver.sleep(0.2)
        last = row(backend, "counter")
    elapsed_s = (driver.now_ns - start_ns) / 1e9
    for way, rate in (("tx", 27e9), ("rx", 54e9)):
        rise = int(last[f"pcie_{way}_bytes"] or 0) - int(first[f"pcie_{way}_bytes"] or 0)
        assert rise == pytest.approx(rate * elapsed_s, rel=1e-6)


def test_pcie_bytes_stay_right_after_a_reading_that_failed(driver: FakeNvml) -> None:
    driver.gpus[0].pcie_bytes_per_s = 27e9
    backend = opened(driver)
    first = row(backend, "counter")
    for failing in (True, False):
        driver.sleep(0.2)
        driver.gpus[0].faults = {197: 10} if failing else {}
        last = row(backend, "counter")
        assert (last["pcie_tx_bytes"] is None) == failing
    assert int(last["pcie_tx_bytes"] or 0) - int(first["pcie_tx_bytes"] or 0) == pytest.approx(0.4 * 27e9, rel=1e-6)


def test_pcie_bytes_of_64_bits_are_read_as_such(driver: FakeNvml) -> None:
    driver.gpus[0].types = {197: U64}
    driver.gpus[0].pcie_bytes_per_s = 10e9
    assert row(opened(driver), "counter")["pcie_tx_bytes"] == pytest.approx(10e9 * driver.gpus[0].time_s)


def test_nvlink_counts_all_links(driver: FakeNvml) -> None:
    backend = opened(driver)
    link_0_bytes = 1024 * 1000 * driver.gpus[0].time_s
    assert row(backend, "counter")["nvlink_tx_bytes"] == pytest.approx(18 * link_0_bytes, rel=1e-3)


# Throttling


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("535.183.01", None),
        ("570.86.15", None),
        ("575.51.03", OLD_THROTTLE_FIELDS),
        ("580.65.06", OLD_THROTTLE_FIELDS),
        ("580.126.09", NEW_THROTTLE_FIELDS),
        ("580.159.04", NEW_THROTTLE_FIELDS),
        ("615.12", NEW_THROTTLE_FIELDS),
    ],
)
def test_throttle_fields_go_by_the_driver(version: str, expected: object) -> None:
    assert throttle_fields(version) == expected


def throttled(driver: FakeNvml) -> tuple[dict, Row]:
    backend = opened(driver)
    driver.sleep(1.0)
    driver.gpus[0].throttle_ns |= {"sw_thermal": 100_000_000, "hw_thermal": 20_000_000, "brake": 3_000_000}
    return backend.facts("gpu0"), row(backend, "slow")


@pytest.mark.parametrize("old", [True, False])
def test_counters_of_either_numbering_are_found_and_verified(driver: FakeNvml, old: bool) -> None:
    if old:
        driver.old_numbering().version = "580.65.06"
    facts, slow = throttled(driver)
    assert facts["throttle_abi"] == "verified"
    assert facts["throttle_fields"] == list(OLD_THROTTLE_FIELDS if old else NEW_THROTTLE_FIELDS)
    assert facts["throttle_check"]["low_utilization_ns"] == [10**9, 10**9]
    assert (slow["throttle_thermal_ns"], slow["throttle_hw_ns"]) == (120_000_000, 3_000_000)


def test_a_driver_that_renumbered_early_is_believed_and_said_to_be_assumed(driver: FakeNvml) -> None:
    driver.power_smoothing().version = "580.100.01"
    facts, slow = throttled(driver)
    assert facts["throttle_abi"] == "assumed" and facts["throttle_fields"] == list(NEW_THROTTLE_FIELDS)
    assert slow["throttle_hw_ns"] == 3_000_000


def test_power_smoothing_is_never_read_as_throttling(driver: FakeNvml) -> None:
    driver.power_smoothing().version = "570.86.15"
    driver.throttle_fields = (-1, -2, -3)
    facts, slow = throttled(driver)
    assert facts["throttle_abi"] == "unavailable"
    assert "throttle_thermal_ns" not in slow and "throttle_power_ns" in slow


@pytest.mark.parametrize("how", ["disagrees", "cannot be asked"])
def test_without_violation_status_the_numbering_is_assumed(driver: FakeNvml, how: str) -> None:
    if how == "disagrees":
        driver.nvmlDeviceGetViolationStatus = lambda handle, policy, violation: 0  # type: ignore[method-assign]
    else:
        driver.missing.add("nvmlDeviceGetViolationStatus")
    assert opened(driver).facts("gpu0")["throttle_abi"] == "assumed"


def test_a_throttle_counter_faster_than_time_is_null(driver: FakeNvml) -> None:
    backend = opened(driver)
    driver.sleep(1.0)
    driver.gpus[0].throttle_ns["sw_thermal"] = 60 * 10**9
    slow = row(backend, "slow")
    assert slow["throttle_thermal_ns"] is None and slow["throttle_thermal_ns_error"] == "COUNTER_TOO_FAST"
    driver.sleep(1.0)
    driver.gpus[0].throttle_ns["sw_thermal"] += 10**9
    assert row(backend, "slow")["throttle_thermal_ns"] == 10**9


# GPM


def test_gpm_needs_100_ms_and_then_covers_all_of_the_time_since(driver: FakeNvml) -> None:
    backend = opened(driver)
    driver.sleep(0.05)
    soon = row(backend, "counter")
    assert soon["sm_active_frac"] is None and "sm_active_frac_error" not in soon
    driver.sleep(0.05)
    assert row(backend, "counter")["sm_active_frac"] == 0.5


@pytest.mark.parametrize(("value", "read", "code"), [(100.3, 1.0, None), (float("nan"), None, "NOT_FINITE")])
def test_a_gpm_value_that_is_no_share_is_none(driver: FakeNvml, value: float, read: object, code: object) -> None:
    backend = opened(driver)
    driver.sleep(0.2)
    driver.gpm_values[5] = value
    counter = row(backend, "counter")
    assert counter["tensor_active_frac"] == read and counter.get("tensor_active_frac_error") == code
    assert counter["sm_active_frac"] == 0.5


def test_a_device_without_gpm_has_the_rest(driver: FakeNvml) -> None:
    """Before Hopper, and on devices in MIG mode."""
    driver.gpus[0].faults["nvmlGpmQueryDeviceSupport"] = NOT_SUPPORTED
    driver.gpus[0].mig = True
    backend = opened(driver)
    assert backend.facts("gpu0")["mig"] is True
    assert backend.capabilities("gpu0")["counter"]["tensor_active_frac"] == "unavailable: NOT_SUPPORTED"
    assert row(backend, "counter").keys() >= {"pcie_tx_bytes", "nvlink_tx_bytes"}


# Faults


def test_a_field_that_fails_is_null_with_its_own_code(driver: FakeNvml) -> None:
    backend = opened(driver)
    driver.gpus[0].faults = {82: 10, 185: 999}
    slow = row(backend, "slow")
    assert slow["memory_temp_c"] is None and slow["memory_temp_c_error"] == "TIMEOUT"
    assert slow["power_average_w_error"] == "UNKNOWN"
    assert slow["energy_j"] is not None


def test_what_a_device_refuses_is_unavailable_and_not_read(driver: FakeNvml) -> None:
    driver.gpus[0].faults = {138: NOT_SUPPORTED, 139: NOT_SUPPORTED}
    driver.gpus[0].memory_temp_c = 0
    driver.missing.add("nvmlDeviceGetMarginTemperature")
    backend = opened(driver)
    capabilities = backend.capabilities("gpu0")
    assert capabilities["counter"]["nvlink_tx_bytes"] == "unavailable: NOT_SUPPORTED"
    assert capabilities["slow"]["memory_temp_c"] == "unavailable: READS_ZERO"
    assert capabilities["slow"]["thermal_margin_c"] == "unavailable: FUNCTION_NOT_FOUND"
    assert not {"nvlink_tx_bytes", "memory_temp_c"} & {*row(backend, "counter"), *row(backend, "slow")}


def test_a_lost_device_is_null_everywhere_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeNvml(2).install(monkeypatch)
    backend = opened(driver)
    driver.gpus[0].lost = True
    for _ in range(3):
        driver.sleep(1.0)
        for tier in TIERS:
            for one in backend.read("gpu0", tier):
                values = {name: value for name, value in one.items() if not name.endswith("_error")}
                assert {value for name, value in values.items() if name != "sensor_ns"} == {None}
                assert {value for name, value in one.items() if name.endswith("_error")} == {"GPU_IS_LOST"}
            assert all("_error" not in name for one in backend.read("gpu1", tier) for name in one)
    assert backend.read("gpu0", "ring")[0]["sensor_ns"] == driver.wall_ns()
    assert OTHER_PROCESSES not in backend.facts("gpu0")
    backend.close()


def test_a_device_lost_before_the_start_keeps_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeNvml(3).install(monkeypatch)
    driver.gpus[1].lost = True
    backend = opened(driver)
    assert [info.device for info in backend.devices()] == ["gpu0", "gpu1", "gpu2"]
    assert backend.devices()[1].name == "unknown device: GPU_IS_LOST" and backend.devices()[1].uuid is None
    assert backend.capabilities("gpu1") == {}
    assert backend.capabilities("gpu2")["ring"]["power_w"] == AVAILABLE
    assert backend.facts("gpu1") == {}
    backend.close()


def test_other_processes_are_named(driver: FakeNvml) -> None:
    driver.gpus[0].processes = [(4242, 10**9)]
    backend = opened(driver)
    assert isinstance(backend, FactsProvider)
    assert backend.facts("gpu0")[OTHER_PROCESSES] == [{"pid": 4242, "memory_used_bytes": 10**9}]


def test_nothing_stays_open(driver: FakeNvml) -> None:
    backend = opened(driver)
    assert driver.started == 1
    backend.close()
    backend.close()
    assert driver.started == 0 and driver.gpm_allocated == 0


@pytest.mark.parametrize("refused", ["nvmlShutdown", "nvmlGpmSampleFree"])
def test_a_driver_that_refuses_to_be_closed_is_left_alone(driver: FakeNvml, refused: str) -> None:
    backend = opened(driver)
    driver.missing.add(refused)
    backend.close()
    assert (driver.started, driver.gpm_allocated) == ((1, 0) if refused == "nvmlShutdown" else (0, 2))


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda driver: driver.missing.add("nvmlInitWithFlags"), "NVML does not start"),
        (lambda driver: driver.missing.add("nvmlDeviceGetCount_v2"), "does not answer"),
        (lambda driver: driver.gpus.clear(), "shows no device"),
    ],
)
def test_a_driver_that_cannot_be_used_says_why(driver: FakeNvml, break_it: object, message: str) -> None:
    break_it(driver)  # type: ignore[operator]
    with pytest.raises(TelemetryError, match=message):
        opened(driver)
    assert driver.started == 0


def test_without_the_package_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(TelemetryError, match="install nvidia-ml-py"):
        NvmlBackend()


def test_the_code_of_a_lost_device_is_the_library_s() -> None:
    import pynvml

    assert pynvml.NVML_ERROR_GPU_IS_LOST == GPU_IS_LOST
