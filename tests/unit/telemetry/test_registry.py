"""The table of backends: names, arguments, and the class behind each name."""

import subprocess
import sys

import pytest
from fake_nvml import FakeNvml

from wattune.errors import SensorChoiceError, TelemetryError
from wattune.telemetry.registry import BACKENDS, SHARED_BACKENDS, load_backend, split_backend


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "other", "wattune_no_such_library:Other")
    with pytest.raises(TelemetryError, match="needs wattune_no_such_library, which is not installed"):
        load_backend("other")


def test_naming_backends_imports_none() -> None:
    code = (
        "import sys, wattune.telemetry.backend, wattune.telemetry.registry\n"
        "unwanted = ('pynvml', 'amdsmi', 'ray', 'torch', 'wattune.telemetry.host')\n"
        "print([name for name in unwanted if name in sys.modules])"
    )
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert seen.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("text", "expected"), [("host", ("host", "")), ("replay:/a/b:c", ("replay", "/a/b:c")), ("nvml", ("nvml", ""))]
)
def test_a_name_and_its_argument_are_split_at_the_first_colon(text: str, expected: tuple[str, str]) -> None:
    assert split_backend(text) == expected


@pytest.mark.parametrize(("text", "usage"), [("replay", "write replay:FOLDER"), ("nvml:0", "write nvml")])
def test_an_argument_that_is_missing_or_too_much_is_an_error_with_the_usage(text: str, usage: str) -> None:
    with pytest.raises(SensorChoiceError, match=usage):
        split_backend(text)


def test_the_nvml_name_leads_to_nvidia_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(2).install(monkeypatch)
    backend = load_backend("nvml")
    assert type(backend).__name__ == "NvmlBackend"
    assert [info.device for info in backend.devices()] == ["gpu0", "gpu1"]
    backend.close()


def test_only_the_host_s_counters_may_be_shared() -> None:
    assert set(BACKENDS) > SHARED_BACKENDS == {"host"}
