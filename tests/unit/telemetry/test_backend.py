"""The table of backends, what a device says of itself, and the look for sensors."""

import subprocess
import sys
from pathlib import Path

import pytest

from wattune.errors import TelemetryError
from wattune.telemetry import backend as backend_module
from wattune.telemetry.backend import DeviceInfo
from wattune.telemetry.probe import probe
from wattune.telemetry.registry import BACKENDS, load_backend


def test_an_unknown_backend_is_named_with_those_there_are() -> None:
    with pytest.raises(TelemetryError, match='backend "hots" is not built; did you mean "host"'):
        load_backend("hots")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "other", "wattune_no_such_library:Other")
    with pytest.raises(TelemetryError, match="needs wattune_no_such_library, which is not installed"):
        load_backend("other")


def test_what_is_unknown_of_a_device_is_not_in_its_json() -> None:
    info = DeviceInfo(device="gpu0", name="NVIDIA H200", power_limit_w=700.0, slot=0)
    assert info.to_json() == {"device": "gpu0", "name": "NVIDIA H200", "power_limit_w": 700.0, "slot": 0}


def test_naming_backends_imports_none() -> None:
    code = (
        "import sys, wattune.telemetry.backend\n"
        "unwanted = ('pynvml', 'amdsmi', 'ray', 'torch', 'wattune.telemetry.host')\n"
        "print([name for name in unwanted if name in sys.modules])"
    )
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert seen.stdout.strip() == "[]"


def test_the_probe_says_of_every_source_whether_it_is_there_or_why_not(tmp_path: Path) -> None:
    (tmp_path / "class/powercap/intel-rapl:0").mkdir(parents=True)
    (tmp_path / "class/powercap/intel-rapl:0/energy_uj").write_text("1\n")
    (tmp_path / "class/infiniband/mlx5_0").mkdir(parents=True)
    (tmp_path / "pressure").mkdir()
    (tmp_path / "pressure/cpu").write_text("some\n")
    sources = {source.name: source for source in probe(procfs=tmp_path, sysfs=tmp_path)}
    assert list(sources) == ["nvml", "amd_smi", "rapl", "hwmon", "infiniband", "psi"]
    assert sources["rapl"].available and sources["rapl"].detail == "1 zones"
    assert sources["infiniband"].available and sources["infiniband"].detail == "mlx5_0"
    assert sources["psi"].available
    assert not sources["hwmon"].available and "class/hwmon" in sources["hwmon"].detail
    assert all(source.detail and (source.available or source.follows) for source in sources.values())


def test_the_probe_names_what_keeps_a_source_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> str:
        raise PermissionError(13, "Permission denied", "energy_uj")

    monkeypatch.setattr(backend_module, "_find_rapl", refuse)
    sources = {source.name: source for source in probe(procfs=tmp_path, sysfs=tmp_path)}
    assert not sources["rapl"].available and "Permission denied" in sources["rapl"].detail


def test_board_sensors_are_named_by_their_chips(tmp_path: Path) -> None:
    for number, name in enumerate(["nvme", "coretemp"]):
        (tmp_path / f"class/hwmon/hwmon{number}").mkdir(parents=True)
        (tmp_path / f"class/hwmon/hwmon{number}/name").write_text(f"{name}\n")
    sources = {source.name: source for source in probe(procfs=tmp_path, sysfs=tmp_path)}
    assert sources["hwmon"].available and sources["hwmon"].detail == "coretemp, nvme"
