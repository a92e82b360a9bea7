"""A driver's library in memory for every test of NVML."""

import pytest
from fake_nvml import FakeNvml


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    return FakeNvml().install(monkeypatch)
