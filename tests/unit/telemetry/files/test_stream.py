"""Checked streams: bytes any Arrow reader takes, and an end that is proven."""

from pathlib import Path

import pyarrow as pa
import pytest
from fast_rows import SCHEMA, rows

from wattune.telemetry.files.stream import StreamWriter, checksums_of, read_stream


def test_a_stream_is_bytes_any_writer_would_have_written(tmp_path: Path) -> None:
    batch = pa.RecordBatch.from_pylist(rows(0), schema=SCHEMA)
    ours = StreamWriter(tmp_path / "a.arrows", SCHEMA, compressed=False)
    for _ in range(3):
        ours.write(batch)
    ours.close()
    with pa.OSFile(str(tmp_path / "b.arrows"), "wb") as file, pa.ipc.new_stream(file, SCHEMA) as plain:
        for one in (batch.slice(0, 0), batch, batch, batch):
            plain.write_batch(one)
    with pa.ipc.open_stream(tmp_path / "a.arrows") as a, pa.ipc.open_stream(tmp_path / "b.arrows") as b:
        assert a.read_all().equals(b.read_all())


def test_a_stream_without_its_checksums_is_not_believed(tmp_path: Path) -> None:
    writer = StreamWriter(tmp_path / "a.arrows", SCHEMA, compressed=True)
    writer.write(pa.RecordBatch.from_pylist(rows(0), schema=SCHEMA))
    writer.close()
    checksums_of(writer.path).unlink()
    table, why, unread_bytes = read_stream(writer.path)
    assert table is None and "a.arrows.crc32" in (why or "")
    assert unread_bytes == writer.path.stat().st_size


def test_a_stream_that_is_closed_twice_or_discarded_leaves_no_second_end_and_no_file(tmp_path: Path) -> None:
    writer = StreamWriter(tmp_path / "a.arrows", SCHEMA, compressed=False)
    with pytest.raises(FileExistsError):
        StreamWriter(tmp_path / "a.arrows", SCHEMA, compressed=False)
    writer.close()
    length = writer.path.stat().st_size
    writer.close()
    assert writer.path.stat().st_size == length and read_stream(writer.path)[1] is None
    writer.discard()
    assert list(tmp_path.iterdir()) == []
