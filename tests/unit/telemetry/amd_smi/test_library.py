"""AMD SMI's package: its version against the library's, and an import that fails."""

import sys
from typing import Any

import pytest
from fake_amd_smi import U64, FakeAmdSmi, die, metrics

from wattune.errors import TelemetryError
from wattune.telemetry.amd_smi.backend import AmdSmiBackend
from wattune.telemetry.amd_smi.library import NOT_AVAILABLE, Library, library_generation, load_package


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


def test_a_field_of_all_ones_and_one_the_wrapper_lacks_are_not_available() -> None:
    found = metrics(temperature_hotspot=55, xgmi_read_data_acc=[7, *[U64] * 7])
    assert found.has("temperature_hotspot") and found.value("temperature_hotspot") == 55
    assert found.values("xgmi_read_data_acc") == [7]
    for name in ("temperature_mem", "no_such_field"):
        assert not found.has(name)
        with pytest.raises(TelemetryError, match=NOT_AVAILABLE):
            found.value(name)
    with pytest.raises(TelemetryError, match=NOT_AVAILABLE):
        found.values("xgmi_write_data_acc")


def test_a_function_this_release_lacks_and_one_that_fails_are_errors_with_their_code() -> None:
    library = Library(FakeAmdSmi(die("c1", 0, primary=True)))
    with pytest.raises(TelemetryError, match="lacks amdsmi_no_such_function"):
        library.call("amdsmi_no_such_function")
    with pytest.raises(TelemetryError, match=r"^AMDSMI_STATUS_NOT_SUPPORTED$"):
        library.call("amdsmi_get_clock_info", 0, "AmdSmiClkType.GFX")
