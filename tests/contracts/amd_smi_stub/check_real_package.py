"""Runs the backend on a scripted library through the real `amdsmi`. `test_amd_smi_stub.py` starts it elsewhere.

It needs an interpreter with `amdsmi` and ROCM_PATH at the stub, so it is not a test of the project's own environment.
"""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import amdsmi
import pytest
from amdsmi import amdsmi_wrapper

from wattune.telemetry.amd_smi.backend import AmdSmiBackend
from wattune.telemetry.backend import AVAILABLE, Row

TICK_NS = 50_000_000
PROFILE = os.environ["AMDSMI_STUB_PROFILE"]
STRUCTURES = (
    "amdsmi_version_t amdsmi_bdf_t amdsmi_clk_info_t amdsmi_power_cap_info_t amdsmi_driver_info_t "
    "amdsmi_enumeration_info_t amdsmi_asic_info_t amdsmi_proc_info_t amdsmi_gpu_metrics_t"
)

mi250 = pytest.mark.skipif(PROFILE != "mi250", reason="of the other profile")
mi300 = pytest.mark.skipif(PROFILE != "mi300", reason="of the other profile")


class Script:
    """The stub's own functions, and a clock that goes with them."""

    def __init__(self) -> None:
        self._stub = ctypes.CDLL(str(Path(os.environ["ROCM_PATH"]) / "lib/libamd_smi.so"))
        self._stub.stub_advance_ns.argtypes = [ctypes.c_uint64]
        self._stub.stub_set_power_w.argtypes = [ctypes.c_uint32, ctypes.c_double]
        self._stub.stub_set_throttle.argtypes = [ctypes.c_uint32, ctypes.c_uint64]
        self._stub.stub_sizeof.restype = self._stub.stub_metrics_calls.restype = ctypes.c_uint64
        self.now_ns = 0
        self.tick()

    def tick(self, elapsed_ns: int = TICK_NS) -> None:
        self.now_ns += elapsed_ns
        self._stub.stub_advance_ns(elapsed_ns)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stub, f"stub_{name}")


@pytest.fixture
def script() -> Iterator[Script]:
    script = Script()
    yield script
    for index in range(2 if PROFILE == "mi300" else 4):
        script.set_throttle(index, 0)
        script.set_failure(index, 0)


@pytest.fixture
def backend(script: Script) -> Iterator[AmdSmiBackend]:
    backend = AmdSmiBackend(clock_ns=lambda: script.now_ns)
    yield backend
    backend.close()


def read(backend: AmdSmiBackend, device: str, tier: str) -> Row:
    (row,) = backend.read(device, tier)
    return row


def available(backend: AmdSmiBackend, device: str) -> set[str]:
    tiers = backend.capabilities(device).values()
    return {name for columns in tiers for name, state in columns.items() if state == AVAILABLE}


@pytest.mark.parametrize("name", STRUCTURES.split())
def test_the_stub_has_the_wrappers_structures(script: Script, name: str) -> None:
    assert script.sizeof(name.encode()) == ctypes.sizeof(getattr(amdsmi_wrapper, name))


def test_the_packages_own_reading_loses_the_throttle_bits(script: Script, backend: AmdSmiBackend) -> None:
    """The reason metrics are read below it. Where this fails, a newer package keeps them."""
    script.set_throttle(0, 1 << 36)
    values = amdsmi.amdsmi_get_gpu_metrics_info(amdsmi.amdsmi_get_processor_handles()[0])
    assert values["indep_throttle_status"] in (True, "N/A") and values["indep_throttle_status"] != 1 << 36


@mi250
def test_mi250_devices_are_dies_in_hips_order(backend: AmdSmiBackend) -> None:
    infos = {info.device: info for info in backend.devices()}
    assert list(infos) == ["gpu0", "gpu1", "gpu2", "gpu3"]
    assert [info.slot for info in infos.values()] == [2, 3, 0, 1]
    assert [backend.facts(name)["pci_bus_id"] for name in infos] == [
        f"0000:{bus}:00.0" for bus in ("c9", "ce", "c1", "c6")
    ]
    assert [info.power_domain for info in infos.values()] == ["gpu0", "gpu0", "gpu2", "gpu2"]
    assert [info.power_limit_w for info in infos.values()] == [560.0, None, 560.0, None]
    assert {info.sm_clock_max_mhz for info in infos.values()} == {1700.0}
    assert len({info.uuid for info in infos.values()}) == 4
    facts = backend.facts("gpu1")
    library = {"6.4.4": "25.0.2", "7.0.2": "26.0.2"}[amdsmi.__version__]
    assert (facts["amdsmi"], facts["libamd_smi"], facts["power_scope"]) == (amdsmi.__version__, library, "package")
    assert [backend.facts(name)["power_series"] for name in ("gpu0", "gpu1")] == ["power_instant_w", "none"]
    assert facts["other_processes"] == [{"pid": 4242, "memory_used_bytes": 2 * 2**30}]


@mi250
def test_mi250_power_is_the_packages_and_at_its_first_die_alone(script: Script, backend: AmdSmiBackend) -> None:
    assert available(backend, "gpu0") - available(backend, "gpu1") == {
        "power_instant_w",
        "energy_j",
        "power_average_w",
        "power_limit_w",
    }
    assert backend.capabilities("gpu1")["slow"]["energy_j"] == "unavailable: the package's power is read at gpu0"
    for power_w in (300.0, 540.0, 95.0):
        script.set_power_w(1, power_w)
        script.tick()
        row = read(backend, "gpu0", "fast")
        # One count of the accumulator is 15 uJ of 5 J and more.
        assert row["power_instant_w"] == pytest.approx(power_w, rel=1e-4)
        assert "power_instant_w" not in read(backend, "gpu1", "fast")
        assert read(backend, "gpu2", "fast")["power_instant_w"] == pytest.approx(400.0, rel=1e-4)


@mi250
def test_mi250_values(script: Script, backend: AmdSmiBackend) -> None:
    script.tick()
    assert read(backend, "gpu1", "fast") == {"sm_clock_mhz": 1501, "event_reasons": 0, "gpu_temp_c": 51.0}
    assert read(backend, "gpu1", "counter") == {"dram_active_frac": 0.35}
    assert read(backend, "gpu1", "slow") == {"memory_temp_c": 61.0, "memory_used_bytes": 3 * 2**30}
    before = read(backend, "gpu0", "slow")
    script.tick(1_000_000_000)
    after = read(backend, "gpu0", "slow")
    assert after["energy_j"] - before["energy_j"] == pytest.approx(after["power_average_w"], rel=1e-3)
    assert after["power_limit_w"] == 560.0


@mi250
@pytest.mark.parametrize(
    ("bit", "reasons"), [(0, 0x4), (16, 0x4), (32, 0x20), (38, 0x20), (45, 0x20), (47, 0x8), (10, 0)]
)
def test_mi250_throttle_flags_become_causes(script: Script, backend: AmdSmiBackend, bit: int, reasons: int) -> None:
    script.set_throttle(3, 1 << bit)
    script.tick()
    assert read(backend, "gpu1", "fast")["event_reasons"] == reasons
    assert read(backend, "gpu0", "fast")["event_reasons"] == 0


@mi300
def test_mi300_values(script: Script, backend: AmdSmiBackend) -> None:
    assert [(info.device, info.slot, info.power_domain) for info in backend.devices()] == [
        ("gpu0", 1, "gpu0"),
        ("gpu1", 0, "gpu1"),
    ]
    assert backend.facts("gpu0")["power_scope"] == "device"
    assert "power_average_w" not in available(backend, "gpu0")
    script.set_power_w(1, 700.0)
    script.tick()
    fast = read(backend, "gpu0", "fast")
    assert fast["power_instant_w"] == pytest.approx(700.0, rel=1e-4)
    assert fast["sm_clock_mhz"] == 2035 and fast["gpu_temp_c"] == 70.0
    assert fast["event_reasons"] == 0x4  # the power limit held for a part of the tick


@mi300
def test_mi300_counters(script: Script, backend: AmdSmiBackend) -> None:
    slow, counter = read(backend, "gpu0", "slow"), read(backend, "gpu0", "counter")
    script.tick(2_000_000_000)
    later, moved = read(backend, "gpu0", "slow"), read(backend, "gpu0", "counter")
    # A quarter of the time at the power limit, to a firmware cycle of 1 ms.
    assert later["throttle_power_ns"] - slow["throttle_power_ns"] == pytest.approx(0.5e9, abs=2e6)
    assert later["throttle_thermal_ns"] == later["throttle_hw_ns"] == 0
    assert moved["nvlink_rx_bytes"] - counter["nvlink_rx_bytes"] == pytest.approx(7 * 2e6 * 1024, rel=1e-6)
    assert moved["nvlink_tx_bytes"] - counter["nvlink_tx_bytes"] == pytest.approx(14 * 2e6 * 1024, rel=1e-6)
    assert moved["dram_active_frac"] == 0.5


def test_tiers_due_together_cost_one_call(script: Script, backend: AmdSmiBackend) -> None:
    script.tick()
    before = script.metrics_calls()
    for tier in ("fast", "counter", "slow"):
        read(backend, "gpu0", tier)
    assert script.metrics_calls() - before == 1
    read(backend, "gpu0", "fast")
    assert script.metrics_calls() - before == 2


def test_a_device_that_fails_gives_codes_and_comes_back(script: Script, backend: AmdSmiBackend) -> None:
    for index in range(2):
        script.set_failure(index, 30)
    script.tick()
    row = read(backend, backend.devices()[-1].device, "fast")
    assert row["gpu_temp_c"] is None and row["gpu_temp_c_error"] == "AMDSMI_STATUS_BUSY"
    for index in range(2):
        script.set_failure(index, 0)
    script.tick()
    row = read(backend, backend.devices()[-1].device, "fast")
    assert row["gpu_temp_c"] is not None and "gpu_temp_c_error" not in row
