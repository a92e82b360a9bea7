"""The store reads back what it wrote: everything, or up to the last whole batch with a note on the loss."""

import errno
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from fast_rows import BATCH_ROWS, BATCHES, SCHEMA, rows
from hypothesis import given
from hypothesis import strategies as st

from wattune.errors import TelemetryError
from wattune.schema import TELEMETRY, table_schema
from wattune.telemetry.files.segments import (
    MANIFEST,
    SegmentStore,
    TierWriter,
    read_manifest,
    read_tables,
    write_manifest,
)
from wattune.telemetry.files.stream import StreamWriter


def manifest() -> dict[str, Any]:
    return {"node": "n0", "tiers": {}}


@functools.cache
def stream() -> tuple[bytes, list[dict[str, Any]], list[int], bytes]:
    """A whole stream, its rows, the length of the file after each batch, and its checksums."""
    with tempfile.TemporaryDirectory() as folder:
        writer = TierWriter(Path(folder), SCHEMA, consolidate_s=0)
        path = Path(folder) / "fast-0000.arrows"
        ends = []
        for batch in range(BATCHES):
            writer.write(rows(batch * BATCH_ROWS))
            ends.append(path.stat().st_size)
        writer.close()
        ends = [*ends[1:], path.stat().st_size - 8]  # a batch goes to the segment when the next one comes
        table = read_tables(Path(folder))[0]["fast"].to_pylist()
        return path.read_bytes(), table, ends, path.with_name(f"{path.name}.crc32").read_bytes()


def read_bytes(content: bytes) -> tuple[list[dict[str, Any]], list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "fast-0000.arrows").write_bytes(content)
        (Path(folder) / "fast-0000.arrows.crc32").write_bytes(stream()[3])
        tables, notes = read_tables(Path(folder))
        return tables["fast"].to_pylist() if "fast" in tables else [], notes


def whole_batches(length: int) -> int:
    return sum(end <= length for end in stream()[2])


def test_a_whole_stream_comes_back_as_it_was_written() -> None:
    content, table, _, _ = stream()
    assert table == rows(0, BATCHES * BATCH_ROWS)
    assert read_bytes(content) == (table, [])


def test_stored_tables_say_what_they_are(tmp_path: Path) -> None:
    writer = TierWriter(tmp_path, table_schema("fast", backend="replay", simulated=True))
    writer.write(rows(0))
    writer.close()
    schema = read_tables(tmp_path)[0]["fast"].schema
    assert schema.remove_metadata() == TELEMETRY["fast"].remove_metadata()
    assert schema.metadata[b"wattune.backend"] == b"replay" and schema.metadata[b"wattune.simulated"] == b"true"
    assert schema.field("power_instant_w").metadata[b"unit"] == b"W"


@given(st.data())
def test_a_cut_stream_gives_every_whole_batch_and_a_note(data: st.DataObject) -> None:
    content, table, _, _ = stream()
    length = data.draw(st.integers(0, len(content) - 1))
    found, notes = read_bytes(content[:length])
    assert found == table[: whole_batches(length) * BATCH_ROWS]
    assert len(notes) == 1 and notes[0].startswith("fast-0000.arrows: ")


def test_an_error_gets_a_column_only_where_one_occurred(tmp_path: Path) -> None:
    writer = TierWriter(tmp_path, SCHEMA)
    writer.write(rows(0))
    writer.write(rows(10, power_instant_w=None, power_instant_w_error="NVML_ERROR_GPU_IS_LOST"))
    writer.write(rows(20))
    writer.close()
    assert [segment["rows"] for segment in writer.segments] == [10, 20]
    tables, notes = read_tables(tmp_path)
    assert notes == [] and tables["fast"].num_rows == 30
    codes = tables["fast"]["power_instant_w_error"].to_pylist()
    assert codes == [None] * 10 + ["NVML_ERROR_GPU_IS_LOST"] * 10 + [None] * 10
    assert tables["fast"]["power_instant_w"].null_count == 10


def test_segments_rotate_and_hold_each_row_once(tmp_path: Path) -> None:
    writer = TierWriter(tmp_path, SCHEMA, segment_s=1.0)
    for batch in range(8):  # half a second each
        writer.write(rows(batch * 10))
    writer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"fast-000{number}.{kind}" for number in range(4) for kind in ("arrows", "arrows.crc32")
    ]
    tables, notes = read_tables(tmp_path)
    assert notes == [] and tables["fast"].to_pylist() == rows(0, 80)


def test_segments_that_ended_before_a_time_are_not_opened(tmp_path: Path) -> None:
    writer = TierWriter(tmp_path, SCHEMA, segment_s=1.0)
    for batch in range(8):
        writer.write(rows(batch * 10))
    writer.close()
    write_manifest(tmp_path, {"tiers": {"fast": {"segments": writer.segments}}})
    (tmp_path / "fast-0000.arrows").write_bytes(b"not read")
    tables, notes = read_tables(tmp_path, start_mono_ns=1_500_000_000)
    assert notes == [] and tables["fast"].to_pylist() == rows(30, 50)
    assert len(read_tables(tmp_path)[1]) == 1


def test_a_folder_is_not_written_twice(tmp_path: Path) -> None:
    TierWriter(tmp_path, SCHEMA).close()
    with pytest.raises(FileExistsError):
        TierWriter(tmp_path, SCHEMA)


def record(folder: Path, batches: Sequence[list[dict[str, Any]]]) -> SegmentStore:
    store = SegmentStore(folder, {"fast": "nvml", "slow": "nvml"}, simulated=False)
    for batch in batches:
        store.put({"fast": batch}, manifest())
    return store


def test_the_manifest_counts_what_is_written(tmp_path: Path) -> None:
    record(tmp_path, [rows(0), rows(10)]).close(manifest())
    found = read_manifest(tmp_path)
    assert found["closed"] is True
    assert found["tiers"]["fast"]["rows"] == 20 and found["tiers"]["slow"]["rows"] == 0
    (segment,) = found["tiers"]["fast"]["segments"]
    assert segment == {
        "file": "fast-0000.arrows",
        "rows": 20,
        "closed": True,
        "start_mono_ns": 0,
        "end_mono_ns": 19 * 50_000_000,
    }
    tables, notes = read_tables(tmp_path)
    assert notes == [] and tables["fast"].num_rows == 20 and tables["slow"].num_rows == 0


def test_the_last_manifest_and_its_name_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[Path, bool]] = []

    def note(descriptor: int) -> None:
        path = tmp_path / MANIFEST
        closed = path.exists() and json.loads(path.read_text())["closed"]
        synced.append((Path(f"/proc/self/fd/{descriptor}").readlink(), closed))

    store = record(tmp_path, [rows(0)])
    monkeypatch.setattr(os, "fsync", note)
    store.close(manifest())
    assert (tmp_path, True) in synced


def test_rows_the_manifest_counts_and_files_that_are_gone_are_missed(tmp_path: Path) -> None:
    record(tmp_path, [rows(0), rows(10)]).close(manifest())
    path = tmp_path / "fast-0000.arrows"
    path.write_bytes(path.read_bytes()[:-200])
    (tmp_path / "slow-0000.arrows").unlink()
    tables, notes = read_tables(tmp_path)
    assert tables["fast"].num_rows == 0 and "slow" not in tables
    assert any("slow-0000.arrows: the file is gone" in note for note in notes)
    assert any("20 rows that the manifest counts are missing" in note for note in notes)


def test_a_failed_write_reaches_the_sampling_thread_and_the_manifest(tmp_path: Path) -> None:
    store = record(tmp_path, [rows(0), rows(10, sm_clock_mhz="fast")])
    with pytest.raises(TelemetryError, match="telemetry cannot be written"):
        while True:  # pytest-timeout ends it
            store.put({"fast": rows(20)})
    with pytest.raises(TelemetryError, match="telemetry cannot be written"):
        store.close(manifest())
    found = read_manifest(tmp_path)
    assert found["closed"] is False and found["tiers"]["fast"]["rows"] == 10
    assert read_tables(tmp_path)[0]["fast"].num_rows == 10


def test_where_the_manifest_cannot_be_written_either_the_error_is_still_ours(tmp_path: Path) -> None:
    folder = tmp_path / "node0"
    store = SegmentStore(folder, {"fast": "nvml"}, simulated=False)
    shutil.rmtree(folder)  # as on a full disk, no file can be made there
    with pytest.raises(TelemetryError, match="telemetry cannot be written"):
        store.close(manifest())
    assert not folder.exists(), "what was removed stays removed"


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_sync_folders_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    sync = os.fsync

    def refuse(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().is_dir():
            raise OSError(number, os.strerror(number))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    record(tmp_path, [rows(0)]).close(manifest())
    assert read_manifest(tmp_path)["closed"] is True and read_tables(tmp_path)[1] == []


def test_a_disk_that_fills_up_keeps_what_was_acknowledged(tmp_path: Path) -> None:
    code = (
        "import pathlib, resource, sys\n"
        "from wattune.schema import table_schema\n"
        "from wattune.telemetry.files.segments import TierWriter\n"
        "writer = TierWriter(pathlib.Path(sys.argv[1]), table_schema('fast', backend='nvml', simulated=False))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "row = {'node': 'n0', 'device': 'gpu0', 'wall_ns': 10**18}\n"
        "for batch in range(1000):\n"
        "    try:\n"
        "        writer.write([{**row, 'mono_ns': 10 * batch + index} for index in range(10)])\n"
        "    except OSError:\n"
        "        print(batch)\n"
        "        break\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    acknowledged = int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout)
    tables, (note,) = read_tables(tmp_path)
    assert acknowledged > 3 and tables["fast"]["mono_ns"].to_pylist() == list(range(10 * acknowledged))
    assert "no end mark" in note and "fast-0000.tail" in note


def test_a_folder_without_a_recording_says_so(tmp_path: Path) -> None:
    assert read_tables(tmp_path) == ({}, [])
    with pytest.raises(TelemetryError, match="holds no recording"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text("[]")
    with pytest.raises(TelemetryError, match="not a JSON object"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("tier", ["fast", "host"])
def test_any_arrow_reader_opens_a_stream(tmp_path: Path, tier: str) -> None:
    writer = TierWriter(tmp_path, table_schema(tier, backend="nvml", simulated=False))
    for start in range(3):
        writer.write([{"node": "n0", "device": "a", "mono_ns": start, "wall_ns": 10**18}])
    writer.close()
    with pa.ipc.open_stream(tmp_path / f"{tier}-0000.arrows") as reader:
        assert reader.read_all()["mono_ns"].to_pylist() == [0, 1, 2]


def test_a_tier_with_many_rows_is_compressed(tmp_path: Path) -> None:
    writer = TierWriter(tmp_path, SCHEMA)
    writer.write(rows(0, 5000))
    writer.close()
    batch = pa.RecordBatch.from_pylist(rows(0, 5000), schema=SCHEMA)
    assert (tmp_path / "fast-0000.arrows").stat().st_size < batch.nbytes / 2


def test_a_batch_counts_once_its_checksum_is_written(tmp_path: Path) -> None:
    writer = TierWriter(tmp_path, SCHEMA)
    writer.write(rows(0))
    writer.write(rows(10))
    checksums = tmp_path / "fast-0000.tail.crc32"
    for cut in range(1, 9):  # killed between the two, or within the second
        checksums.write_bytes(checksums.read_bytes()[: 24 - cut])
        tables, (note,) = read_tables(tmp_path)
        assert tables["fast"].to_pylist() == rows(0) and "no end mark" in note and "fast-0000.tail" in note


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_rows_are_read_once_wherever_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The moves from tail to segment, seen before, between and after every change of a file."""
    seen: list[dict[str, bytes]] = []
    for name in ("write", "discard", "close"):
        whole = getattr(StreamWriter, name)

        def spied(self: StreamWriter, *given: Any, whole: Any = whole) -> None:
            whole(self, *given)
            seen.append(files(tmp_path / "written"))

        monkeypatch.setattr(StreamWriter, name, spied)
    (tmp_path / "written").mkdir()
    writer = TierWriter(tmp_path / "written", SCHEMA, consolidate_s=1.0)
    acknowledged = []
    for start in range(0, 90, 10):  # half a second each
        acknowledged.append(len(seen))
        writer.write(rows(start))
    writer.close()
    for moment, content in enumerate(seen):
        folder = tmp_path / f"moment-{moment}"
        folder.mkdir()
        for name, data in content.items():
            (folder / name).write_bytes(data)
        tables, notes = read_tables(folder)
        found = tables["fast"].to_pylist()
        assert found == rows(0, len(found))
        whole_batches = sum(count <= moment + 1 for count in acknowledged[1:])
        assert len(found) >= 10 * whole_batches
        assert bool(notes) == (not content["fast-0000.arrows"].endswith(b"\xff" * 4 + bytes(4)))
