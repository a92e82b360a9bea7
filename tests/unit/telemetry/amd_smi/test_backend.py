import ctypes
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.errors import TelemetryError
from wattune.schema import THROTTLE_REASON_BITS
from wattune.telemetry.amd_smi.backend import AmdSmiBackend, Gpu, power_owners
from wattune.telemetry.amd_smi.device import ENERGY_UNIT_J, EnergyPower, Residency, ThrottleTime, reasons
from wattune.telemetry.amd_smi.library import Metrics, library_generation, load_package
from wattune.telemetry.backend import AVAILABLE, FactsProvider
from wattune.units import NS_PER_S

U16, U64 = 0xFFFF, 2**64 - 1
RESIDENCIES = "ppt socket_thm vr_thm hbm_thm prochot"
MI250, MI300 = 0x740C, 0x74A1


class Struct(ctypes.Structure):
    """The part of `amdsmi_gpu_metrics_t` that is read; with the real one, see tests/contracts/test_amd_smi_stub.py."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("energy_accumulator", "system_clock_counter", "accumulation_counter")),
        *((f"{name}_residency_acc", ctypes.c_uint64) for name in RESIDENCIES.split()),
        ("indep_throttle_status", ctypes.c_uint64),
        ("xgmi_read_data_acc", ctypes.c_uint64 * 8),
        ("xgmi_write_data_acc", ctypes.c_uint64 * 8),
        *((f"temperature_{name}", ctypes.c_uint16) for name in ("hotspot", "mem")),
        ("temperature_hbm", ctypes.c_uint16 * 4),
        *((name, ctypes.c_uint16) for name in ("average_socket_power", "average_umc_activity", "current_gfxclk")),
        ("average_gfxclk_frequency", ctypes.c_uint16),
        ("current_gfxclks", ctypes.c_uint16 * 8),
    )


UNSET = {
    name: (1 << 8 * ctypes.sizeof(kind._type_ if issubclass(kind, ctypes.Array) else kind)) - 1
    for name, kind in Struct._fields_
}


def fill(struct: Struct, values: Mapping[str, Any]) -> None:
    ctypes.memset(ctypes.addressof(struct), 0xFF, ctypes.sizeof(struct))
    for name, value in values.items():
        setattr(struct, name, tuple(value) if isinstance(value, Sequence) else value)


def metrics(**values: int) -> Metrics:
    struct = Struct()
    fill(struct, values)
    return Metrics(struct, UNSET)


class Version(ctypes.Structure):
    _fields_ = (("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("release", ctypes.c_uint32))


class AmdSmiException(Exception):  # noqa: N818 – the package's own name
    def get_error_info(self, detailed: bool = True) -> str:
        return "AMDSMI_STATUS_NOT_SUPPORTED - Feature not supported" if detailed else "AMDSMI_STATUS_NOT_SUPPORTED"


class FakeAmdSmi:
    """The parts of `amdsmi` that are used. A device is a mapping: `bdf`, `hip_id`, `device_id`, and metrics fields."""

    __version__ = "26.2.0+fake"
    AmdSmiException = AmdSmiException
    AmdSmiClkType = SimpleNamespace(GFX=0)
    AmdSmiMemoryType = SimpleNamespace(VRAM=0)

    def __init__(self, *devices: dict[str, Any], major: int = 26) -> None:
        self.devices, self.major, self.open, self.calls = list(devices), major, 0, 0
        self.amdsmi_wrapper = SimpleNamespace(
            amdsmi_gpu_metrics_t=Struct,
            amdsmi_version_t=Version,
            amdsmi_get_lib_version=self._version,
            amdsmi_get_gpu_metrics_info=self._metrics,
            amdsmi_status_t__enumvalues={31: "AMDSMI_STATUS_NOT_FOUND"},
        )

    def _version(self, out: Any) -> int:
        out._obj.major = self.major
        return 0

    def _metrics(self, handle: int, out: Any) -> int:
        self.calls += 1
        device = self.devices[handle]
        fill(out._obj, {name: device[name] for name in UNSET if name in device})
        return int(device.get("status", 0))

    def amdsmi_init(self) -> None:
        self.open += 1

    def amdsmi_shut_down(self) -> None:
        self.open -= 1

    def amdsmi_get_processor_handles(self) -> list[int]:
        return list(range(len(self.devices)))

    def amdsmi_get_gpu_device_bdf(self, handle: int) -> str:
        return str(self.devices[handle]["bdf"])

    def amdsmi_get_gpu_device_uuid(self, handle: int) -> str:
        return f"uuid-{self.devices[handle]['bdf']}"

    def amdsmi_get_gpu_enumeration_info(self, handle: int) -> dict[str, Any]:
        return {"hip_id": self.devices[handle]["hip_id"]}

    def amdsmi_get_gpu_asic_info(self, handle: int) -> dict[str, Any]:
        return {"market_name": "AMD Instinct", "device_id": hex(self.devices[handle]["device_id"])}

    def amdsmi_get_power_cap_info(self, handle: int) -> dict[str, Any]:
        return {"power_cap": self.devices[handle].get("power_cap", 0)}

    def amdsmi_get_clock_info(self, handle: int, kind: int) -> dict[str, Any]:
        raise AmdSmiException

    def amdsmi_get_gpu_memory_usage(self, handle: int, kind: int) -> int:
        return 5 * 2**30

    def amdsmi_get_gpu_driver_info(self, handle: int) -> dict[str, Any]:
        return {"driver_version": "N/A"}


def die(bus: str, hip_id: int, *, primary: bool, **more: Any) -> dict[str, Any]:
    """One MI250 die: a second one reads 0 for everything of the package (aldebaran_ppt.c)."""
    values = {"energy_accumulator": 10**9 if primary else 0, "average_socket_power": 300 if primary else 0}
    values |= {"power_cap": 560_000_000 if primary else 0, "system_clock_counter": 1, "indep_throttle_status": 0}
    values |= {"temperature_hotspot": 55, "temperature_mem": 50, "current_gfxclk": 1700}
    return {"bdf": f"0000:{bus}:00.0", "hip_id": hip_id, "device_id": MI250, **values, **more}


def gpu(bdf: str, device_id: int, powered: bool) -> Gpu:
    return Gpu(handle=None, bdf=bdf, device_id=device_id, powered=powered)


@pytest.mark.parametrize(
    ("version", "generation"),
    [
        *(("7.0.2", 26), ("7.2.0", 26), ("6.4.4", 25), ("26.0.0+37d158ab", 26), ("25.4.2+aca1101", 25)),
        *(("6.3.3", None), ("8.0.0", None), ("", None), ("local", None)),
    ],
)
def test_wrapper_versions_name_the_library_they_were_made_for(version: str, generation: int | None) -> None:
    assert library_generation(version) == generation


@pytest.mark.parametrize("major", [25, 27])
def test_a_library_of_another_major_version_is_refused_before_it_is_started(major: int) -> None:
    package = FakeAmdSmi(die("c1", 0, primary=True), major=major)
    with pytest.raises(TelemetryError, match=rf"made for a library 26.x, libamd_smi.so is {major}.0.0"):
        AmdSmiBackend(package)
    assert package.open == 0


def test_a_package_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    with pytest.raises(TelemetryError, match="backend amd_smi needs amdsmi"):
        load_package()


def test_a_package_without_its_library_is_said_and_keeps_quiet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "amdsmi.py").write_text("print('Unable to find it')\n{}['libamd_smi.so']")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    with pytest.raises(TelemetryError, match="Unable to find it; set ROCM_PATH"):
        load_package()
    assert capsys.readouterr().out == ""


def test_dies_of_a_package_follow_each_other_in_bus_order() -> None:
    gpus = [gpu(f"0000:{bus}:00.0", MI250, powered) for bus, powered in
            (("c6", False), ("c1", True), ("ce", False), ("c9", True))]  # fmt: skip
    assert power_owners(gpus) == [1, 1, 3, 3]


def test_a_die_whose_package_is_read_at_a_hidden_one_has_no_owner() -> None:
    seen = [gpu("0000:c6:00.0", MI250, False), gpu("0000:c9:00.0", MI250, True), gpu("0000:ce:00.0", MI250, False)]
    assert power_owners([*seen, gpu("0000:d6:00.0", MI250, False)]) == [None, 1, 1, None]


def test_partitions_share_their_package_and_other_devices_share_nothing() -> None:
    partitions = [gpu(f"0000:05:00.{function}", MI300, function == 0) for function in range(3)]
    without_counter = gpu("0000:26:00.0", MI300, False)
    assert power_owners([*partitions, without_counter]) == [0, 0, 0, None]


@given(st.permutations(range(8)), st.sets(st.integers(0, 7)))
def test_no_power_is_owned_twice_whatever_is_visible(order: list[int], hidden: set[int]) -> None:
    visible = [number for number in order if number not in hidden]
    owners = power_owners([gpu(f"0000:{number:02x}:00.0", MI250, number % 2 == 0) for number in visible])
    for number, owner in zip(visible, owners, strict=True):
        assert (owner is not None and visible[owner] == number) == (number % 2 == 0)
        assert owner is None or owners.count(owner) <= 2


MI250_NODE = [die("c6", 1, primary=False), die("c1", 0, primary=True), die("c9", 3, primary=True)]


def test_devices_carry_hips_numbers_and_the_packages_limit_once() -> None:
    backend = AmdSmiBackend(FakeAmdSmi(*MI250_NODE, die("ce", 2, primary=False)))
    infos = backend.devices()
    assert isinstance(backend, FactsProvider)
    assert [(info.device, info.slot) for info in infos] == [("gpu0", 0), ("gpu1", 1), ("gpu2", 3), ("gpu3", 2)]
    assert [info.power_domain for info in infos] == ["gpu0", "gpu0", "gpu3", "gpu3"]
    assert all(info.to_json()["power_from_energy_counter"] is True for info in infos)
    assert [info.power_limit_w for info in infos] == [560.0, None, None, 560.0]
    assert {(info.driver, info.sm_clock_max_mhz) for info in infos} == {(None, None)}


def test_hips_order_can_be_given() -> None:
    package = FakeAmdSmi(*MI250_NODE)
    order = ["0000:C9:00.0", "0000:c1:00.0", "0000:c6:00.0"]
    infos = AmdSmiBackend(package, hip_bdfs=lambda: order).devices()
    assert [(info.device, info.uuid) for info in infos] == [
        (f"gpu{index}", f"uuid-{bdf.lower()}") for index, bdf in enumerate(order)
    ]


def test_an_order_that_is_not_known_is_an_error_and_leaves_nothing_open() -> None:
    for hip_ids in ((0, "N/A"), (0, 0)):
        package = FakeAmdSmi(*(die(bus, hip, primary=True) for bus, hip in zip(("c1", "c9"), hip_ids, strict=True)))
        with pytest.raises(TelemetryError, match=r"0000:c9:00.0 the HIP index"):
            AmdSmiBackend(package)
        assert package.open == 0
    with pytest.raises(TelemetryError, match=r"HIP's devices are at 0000:01:00.0"):
        AmdSmiBackend(FakeAmdSmi(*MI250_NODE), hip_bdfs=lambda: ["0000:01:00.0"])
    with pytest.raises(TelemetryError, match="shows no device"):
        AmdSmiBackend(FakeAmdSmi())


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


def test_without_an_energy_counter_there_is_no_power() -> None:
    guest = die("c1", 0, primary=False, device_id=MI300)
    backend = AmdSmiBackend(FakeAmdSmi(guest))
    assert backend.capabilities("gpu0")["fast"]["power_instant_w"] == (
        "unavailable: no energy counter (virtual machines have none)"
    )
    assert backend.devices()[0].power_domain == "gpu0"


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


def test_close_may_be_called_twice() -> None:
    package = FakeAmdSmi(die("c1", 0, primary=True))
    backend = AmdSmiBackend(package)
    assert package.open == 1
    backend.close()
    backend.close()
    assert package.open == 0
