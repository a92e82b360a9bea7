"""The NVML backend over a driver's library in memory; what it stands for is in `fake_nvml`."""

import sys

import pytest
from fake_nvml import FakeNvml, opened

from wattune.errors import TelemetryError
from wattune.telemetry.backend import AVAILABLE, OTHER_PROCESSES
from wattune.telemetry.nvml.backend import NvmlBackend

TIERS = ("ring", "fast", "counter", "slow")


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
