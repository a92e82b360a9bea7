"""The look for sensor sources: found, or the reason they are not."""

from pathlib import Path

import pytest

from wattune.telemetry import probe as probe_module
from wattune.telemetry.probe import probe


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

    monkeypatch.setattr(probe_module, "_find_rapl", refuse)
    sources = {source.name: source for source in probe(procfs=tmp_path, sysfs=tmp_path)}
    assert not sources["rapl"].available and "Permission denied" in sources["rapl"].detail


def test_board_sensors_are_named_by_their_chips(tmp_path: Path) -> None:
    for number, name in enumerate(["nvme", "coretemp"]):
        (tmp_path / f"class/hwmon/hwmon{number}").mkdir(parents=True)
        (tmp_path / f"class/hwmon/hwmon{number}/name").write_text(f"{name}\n")
    sources = {source.name: source for source in probe(procfs=tmp_path, sysfs=tmp_path)}
    assert sources["hwmon"].available and sources["hwmon"].detail == "coretemp, nvme"
