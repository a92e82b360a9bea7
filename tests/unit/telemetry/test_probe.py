"""The look for sensor sources and products: found, or the reason they are not."""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wattune.errors import TelemetryError
from wattune.telemetry import probe as probe_module
from wattune.telemetry.probe import nvidia_products, probe


class _Nvml:
    """NVML's C interface, as `ctypes` calls it; a call named in `failing` returns an error code."""

    def __init__(self, names: list[str], failing: str = "") -> None:
        self.names, self.failing, self.calls = names, failing, list[str]()
        self.nvmlErrorString = lambda code: f"error {code}".encode()

    def __getattr__(self, call: str) -> Callable[..., int]:
        def answer(*arguments: Any) -> int:
            self.calls.append(call)
            if call == "nvmlDeviceGetCount_v2":
                arguments[0]._obj.value = len(self.names)
            elif call == "nvmlDeviceGetHandleByIndex_v2":
                arguments[1]._obj.value = arguments[0] + 1
            elif call == "nvmlDeviceGetName":
                arguments[1].value = self.names[arguments[0].value - 1].encode()
            return 15 if call == self.failing else 0

        return answer


def test_products_are_named_as_the_driver_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    library = _Nvml(["NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe"])
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: library)
    assert nvidia_products() == ["NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe"]
    assert library.calls[0] == "nvmlInit_v2" and library.calls[-1] == "nvmlShutdown"


@pytest.mark.parametrize(
    ("failing", "closes"), [("nvmlInit_v2", False), ("nvmlDeviceGetCount_v2", True), ("nvmlDeviceGetName", True)]
)
def test_a_driver_that_does_not_answer_is_said_and_closed(
    monkeypatch: pytest.MonkeyPatch, failing: str, closes: bool
) -> None:
    library = _Nvml(["NVIDIA H200"], failing)
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: library)
    with pytest.raises(TelemetryError, match="error 15"):
        nvidia_products()
    assert ("nvmlShutdown" in library.calls) == closes


def test_the_probe_says_of_every_source_whether_it_is_there_or_why_not(tmp_path: Path) -> None:
    (tmp_path / "class/powercap/intel-rapl:0").mkdir(parents=True)
    (tmp_path / "class/powercap/intel-rapl:0/energy_uj").write_text("1\n")
    (tmp_path / "class/infiniband/mlx5_0").mkdir(parents=True)
    (tmp_path / "pressure").mkdir()
    (tmp_path / "pressure/cpu").write_text("some\n")
    sources = {name: source for name, *source in probe(procfs=tmp_path, sysfs=tmp_path)}
    assert list(sources) == ["nvml", "amd_smi", "rapl", "hwmon", "infiniband", "psi"]
    assert sources["rapl"][0] and sources["rapl"][1] == "1 zones"
    assert sources["infiniband"][0] and sources["infiniband"][1] == "mlx5_0"
    assert sources["psi"][0]
    assert not sources["hwmon"][0] and "class/hwmon" in sources["hwmon"][1]
    assert all(detail and (available or follows) for available, detail, follows in sources.values())


def test_the_probe_names_what_keeps_a_source_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> str:
        raise PermissionError(13, "Permission denied", "energy_uj")

    monkeypatch.setattr(probe_module, "_find_rapl", refuse)
    sources = {name: source for name, *source in probe(procfs=tmp_path, sysfs=tmp_path)}
    assert not sources["rapl"][0] and "Permission denied" in sources["rapl"][1]


def test_board_sensors_are_named_by_their_chips(tmp_path: Path) -> None:
    for number, name in enumerate(["nvme", "coretemp"]):
        (tmp_path / f"class/hwmon/hwmon{number}").mkdir(parents=True)
        (tmp_path / f"class/hwmon/hwmon{number}/name").write_text(f"{name}\n")
    sources = {name: source for name, *source in probe(procfs=tmp_path, sysfs=tmp_path)}
    assert sources["hwmon"][0] and sources["hwmon"][1] == "coretemp, nvme"
