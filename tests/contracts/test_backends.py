"""Promises of every backend, tested on each one that can run on this machine."""

import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from fake_nvml import RunningNvml

from wattune.errors import TelemetryError
from wattune.schema import TELEMETRY
from wattune.telemetry.backend import AVAILABLE, ERROR_SUFFIX, Backend, Row
from wattune.telemetry.registry import BACKENDS, load_backend

READS = 4
KEYS = {"node", "device", "mono_ns", "wall_ns"}
ARGUMENTS = {"replay": f":{Path(__file__).parents[1]}/golden/h200x4/dp4?start_s=20"}
"""Text after the name of a backend, with which every machine has it."""


FAKES = {"nvml on a fake driver": "nvml"}
"""Backends whose vendor's library is also there in memory, by the name of the variant."""

DRIVERS = {"amd_smi": Path("/dev/kfd"), "nvml": Path("/dev/nvidiactl")}
"""Files of the kernel where a vendor's driver found devices. Only without one may a backend say that there are none.

The backend of a device that is not here keeps the same promises on its fake driver, or on the stub library of
`test_amd_smi_stub.py`.
"""


@pytest.fixture(params=[*sorted(BACKENDS), *FAKES])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    if request.param in FAKES:
        RunningNvml(count=2).install(monkeypatch)
        loaded = load_backend(FAKES[request.param])
        yield loaded
        loaded.close()
        return
    try:
        loaded = load_backend(request.param + ARGUMENTS.get(request.param, ""))
    except TelemetryError as error:
        if request.param not in DRIVERS or DRIVERS[request.param].exists():
            raise
        pytest.skip(f"no such device is in this machine: {error}")
    yield loaded
    loaded.close()


@pytest.fixture
def readings(backend: Backend) -> dict[tuple[str, str], list[Row]]:
    """Rows by device and tier, read some times with work in between."""
    found: dict[tuple[str, str], list[Row]] = {}
    for _ in range(READS):
        time.sleep(0.03)
        for info in backend.devices():
            for tier in backend.capabilities(info.device):
                found.setdefault((info.device, tier), []).extend(backend.read(info.device, tier))
    return found


def test_devices_are_distinct_and_stay(backend: Backend) -> None:
    devices = backend.devices()
    assert devices and len({info.device for info in devices}) == len(devices)
    uuids = [info.uuid for info in devices if info.uuid is not None]
    assert len(set(uuids)) == len(uuids)
    assert [info.device for info in backend.devices()] == [info.device for info in devices]


def test_capabilities_name_every_column_of_a_tier_and_say_why_not(backend: Backend) -> None:
    for info in backend.devices():
        capabilities = backend.capabilities(info.device)
        assert capabilities.keys() <= TELEMETRY.keys()
        for tier, columns in capabilities.items():
            assert columns.keys() == set(TELEMETRY[tier].names) - KEYS
            for state in columns.values():
                assert state == AVAILABLE or state.removeprefix("unavailable: ").strip() not in ("", state)


def test_rows_fit_their_table(backend: Backend, readings: dict[tuple[str, str], list[Row]]) -> None:
    assert readings
    for (device, tier), rows in readings.items():
        schema, columns = TELEMETRY[tier], backend.capabilities(device)[tier]
        for row in rows:
            for name, value in row.items():
                base = name.removesuffix(ERROR_SUFFIX)
                assert columns[base] == AVAILABLE, f"{name} is read and not offered"
                if name != base:
                    assert isinstance(value, str) and row[base] is None
                elif value is not None:
                    assert pa.scalar(value, schema.field(name).type).is_valid
        if tier != "ring":
            assert len(rows) == READS
            offered = {name for name, state in columns.items() if state == AVAILABLE}
            assert all(offered <= row.keys() for row in rows)


def test_what_is_offered_is_read(backend: Backend, readings: dict[tuple[str, str], list[Row]]) -> None:
    for (device, tier), rows in readings.items():
        for name, state in backend.capabilities(device)[tier].items():
            if state == AVAILABLE:
                assert any(row.get(name) is not None for row in rows), f"{device} {tier} {name}"


def test_values_are_possible(readings: dict[tuple[str, str], list[Row]]) -> None:
    for (_, tier), rows in readings.items():
        for field in TELEMETRY[tier]:
            values = [value for row in rows if isinstance(value := row.get(field.name), int | float)]
            kind = (field.metadata or {}).get(b"kind")
            if field.name.endswith("_frac"):
                assert all(0 <= value <= 1 for value in values), field.name
            if field.name.endswith(("_w", "_bytes", "_j", "_mhz")):
                assert all(value >= 0 for value in values), field.name
            if kind == b"cumulative":
                assert values == sorted(values), field.name


def test_close_may_be_called_twice(backend: Backend) -> None:
    backend.close()
    backend.close()
