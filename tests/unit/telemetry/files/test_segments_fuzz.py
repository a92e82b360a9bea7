"""Damaged streams: whatever happened to the bytes, what is read back was written, and a loss is said."""

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.schema import table_schema
from wattune.telemetry.files.segments import TierWriter, read_tables

BATCHES, BATCH_ROWS = 5, 12
TIERS = ("fast", "slow")


def row(index: int) -> dict[str, Any]:
    keys = {"node": "n0", "device": f"gpu{index % 3}", "mono_ns": index * 10**7, "wall_ns": 10**18 + index * 10**7}
    failed = index % 5 == 2
    return keys | {
        "power_instant_w": None if failed else 100.5 + index,
        "sm_clock_mhz": 1980,
        "event_reasons": 4,
        "gpu_temp_c": 40.0,
        "energy_j": 1e6 + index / 8,
        "memory_used_bytes": 0 if failed else 2**37 + index,
    }


@functools.cache
def recorded(tier: str) -> tuple[bytes, bytes, list[dict[str, Any]]]:
    """A stream, its checksums, and its rows."""
    schema = table_schema(tier, backend="nvml", simulated=False)
    with tempfile.TemporaryDirectory() as folder:
        writer = TierWriter(Path(folder), schema, consolidate_s=0)
        for start in range(0, BATCHES * BATCH_ROWS, BATCH_ROWS):
            rows = [row(index) for index in range(start, start + BATCH_ROWS)]
            writer.write([{name: one[name] for name in schema.names if name in one} for one in rows])
        writer.close()
        stream = Path(folder) / f"{tier}-0000.arrows"
        return stream.read_bytes(), stream.with_name(f"{stream.name}.crc32").read_bytes(), read(tier, folder)[0]


def read(tier: str, folder: str) -> tuple[list[dict[str, Any]], list[str]]:
    tables, notes = read_tables(Path(folder))
    return tables[tier].to_pylist() if tier in tables else [], notes


def read_damaged(tier: str, stream: bytes, checksums: bytes) -> tuple[list[dict[str, Any]], list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / f"{tier}-0000.arrows").write_bytes(stream)
        (Path(folder) / f"{tier}-0000.arrows.crc32").write_bytes(checksums)
        return read(tier, folder)


def cut(content: bytearray, data: st.DataObject) -> None:
    del content[data.draw(st.integers(0, len(content) - 1)) :]


def zero(content: bytearray, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(content) - 1))
    length = data.draw(st.sampled_from([1, 8, 16, 64, 512, 4096]))
    content[start : start + length] = bytes(len(content[start : start + length]))


def flip(content: bytearray, data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))


def garble(content: bytearray, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(content) - 1))
    garbage = data.draw(st.binary(min_size=1, max_size=64))
    content[start : start + data.draw(st.integers(0, 64))] = garbage


def repeat(content: bytearray, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(content) - 1))
    content[start:start] = content[start : data.draw(st.integers(start + 1, len(content)))]


def drop(content: bytearray, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(content) - 1))
    del content[start : data.draw(st.integers(start + 1, len(content)))]


DAMAGES: list[Callable[[bytearray, st.DataObject], None]] = [cut, zero, flip, garble, repeat, drop]
damage_of = pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)


def assert_whole_batches(found: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
    assert found == rows[: len(found)] and len(found) % BATCH_ROWS == 0


@pytest.mark.parametrize("tier", TIERS)
@damage_of
@given(data=st.data())
def test_a_damaged_stream_gives_what_was_written_before_the_damage(
    data: st.DataObject, damage: Callable[[bytearray, st.DataObject], None], tier: str
) -> None:
    stream, checksums, rows = recorded(tier)
    damaged = bytearray(stream)
    damage(damaged, data)
    found, notes = read_damaged(tier, bytes(damaged), checksums)
    assert_whole_batches(found, rows)
    if damaged == stream:  # zeros upon zeros
        assert found == rows and notes == []
    else:
        (note,) = notes
        assert note.startswith(f"{tier}-0000.arrows: {len(found)} rows read; ")


@damage_of
@given(data=st.data())
def test_damaged_checksums_cost_rows_and_invent_none(
    data: st.DataObject, damage: Callable[[bytearray, st.DataObject], None]
) -> None:
    stream, checksums, rows = recorded("fast")
    damaged = bytearray(checksums)
    damage(damaged, data)
    found, notes = read_damaged("fast", stream, bytes(damaged))
    assert_whole_batches(found, rows)
    assert (len(found) == len(rows)) or notes


@given(stream=st.binary(max_size=200), checksums=st.binary(max_size=40))
def test_garbage_is_no_recording(stream: bytes, checksums: bytes) -> None:
    found, notes = read_damaged("fast", stream, checksums)
    assert found == [] and len(notes) == 1
