"""The look for sensors with the drivers' own libraries."""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from wattune.errors import TelemetryError
from wattune.telemetry.probe import nvidia_products


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
    ("failing", "closes"),
    [("nvmlInit_v2", False), ("nvmlDeviceGetCount_v2", True), ("nvmlDeviceGetName", True)],
)
def test_a_driver_that_does_not_answer_is_said_and_closed(
    monkeypatch: pytest.MonkeyPatch, failing: str, closes: bool
) -> None:
    library = _Nvml(["NVIDIA H200"], failing)
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: library)
    with pytest.raises(TelemetryError, match="error 15"):
        nvidia_products()
    assert ("nvmlShutdown" in library.calls) == closes
