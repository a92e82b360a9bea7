"""One NVIDIA device: columns in their units, counters, throttling, and reads that fail."""

from pathlib import Path

import pytest
from fake_nvml import GPU_IS_LOST, NOT_SUPPORTED, U64, FakeNvml, opened, row

from wattune.telemetry.backend import OTHER_PROCESSES, FactsProvider, Row
from wattune.telemetry.files.segments import read_tables
from wattune.telemetry.nvml.fields import NEW_THROTTLE_FIELDS, OLD_THROTTLE_FIELDS
from wattune.telemetry.sampler.loop import Sampler


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


def test_a_driver_without_a_ring_says_what_stands_in(driver: FakeNvml) -> None:
    driver.gpus[0].faults["nvmlDeviceGetSamples"] = NOT_SUPPORTED
    backend = opened(driver)
    assert backend.capabilities("gpu0")["ring"] == dict.fromkeys(("sensor_ns", "power_w"), "unavailable: NOT_SUPPORTED")
    assert backend.facts("gpu0")["power_series"] == "power_instant_w" and "ring" not in backend.facts("gpu0")
    assert list(backend.read("gpu0", "ring")) == []


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


def test_a_device_without_gpm_has_the_rest(driver: FakeNvml) -> None:
    """Before Hopper, and on devices in MIG mode."""
    driver.gpus[0].faults["nvmlGpmQueryDeviceSupport"] = NOT_SUPPORTED
    driver.gpus[0].mig = True
    backend = opened(driver)
    assert backend.facts("gpu0")["mig"] is True
    assert backend.capabilities("gpu0")["counter"]["tensor_active_frac"] == "unavailable: NOT_SUPPORTED"
    assert row(backend, "counter").keys() >= {"pcie_tx_bytes", "nvlink_tx_bytes"}


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


def test_other_processes_are_named(driver: FakeNvml) -> None:
    driver.gpus[0].processes = [(4242, 10**9)]
    backend = opened(driver)
    assert isinstance(backend, FactsProvider)
    assert backend.facts("gpu0")[OTHER_PROCESSES] == [{"pid": 4242, "memory_used_bytes": 10**9}]


def test_the_code_of_a_lost_device_is_the_library_s() -> None:
    import pynvml

    assert pynvml.NVML_ERROR_GPU_IS_LOST == GPU_IS_LOST
