"""Checked streams: Arrow IPC streams in which every batch can be proven to be as it was written.

A stream is a plain one that any Arrow reader opens. Beside it stands `<stream>.crc32`: eight bytes a batch, its length
and CRC-32 as little-endian 32-bit numbers, written once the batch is. Arrow itself notices neither most flipped bits
nor most zeroed blocks; here nothing is decoded before its checksum is right. Whatever a kill, a full disk, a power cut
or a failing disk left behind is read back batch by batch, up to the first that is not as it was written.
"""

import io
import os
import struct
import zlib
from pathlib import Path
from typing import Final

import pyarrow as pa

from wattune.storage.files import make_lasting

_END_MARK: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""A whole IPC stream ends with a continuation and a length of 0 (Arrow columnar format, IPC streaming format)."""
_CHECKSUM: Final = struct.Struct("<II")
"""Length and CRC-32 of a batch with what precedes it: the schema before the first, dictionaries; or of the end mark."""


def checksums_of(stream: Path) -> Path:
    """Returns the file beside a stream that holds its checksums."""
    return stream.with_name(f"{stream.name}.crc32")


class StreamWriter:
    """Writes one stream. A batch is safe from the end of this process as soon as `write` returns."""

    def __init__(self, path: Path, schema: pa.Schema, *, compressed: bool) -> None:
        """Makes the files and writes the schema.

        Compression costs some 20 bytes a buffer. Raises `FileExistsError`: there is such a stream.
        """
        self.path = path
        # Unbuffered: what is written here survives the process.
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 - closed by `close`
        self._checksums = open(checksums_of(path), "xb", buffering=0)  # noqa: SIM115 - likewise
        self._named = False
        self._encoded = io.BytesIO()
        # Level 1 takes as much off such columns as level 9 does. Threads belong to those who train.
        codec = pa.Codec("zstd", compression_level=1) if compressed else None
        options = pa.ipc.IpcWriteOptions(compression=codec, use_threads=False)
        self._encoder = pa.ipc.new_stream(self._encoded, schema, options=options)
        # An empty batch sends the schema, and loads what pyarrow loads on first use, before the first tick.
        self.write(pa.RecordBatch.from_pylist([], schema=schema))

    def write(self, batch: pa.RecordBatch) -> None:
        """Writes one batch, and then its checksum, which makes it count."""
        self._encoder.write_batch(batch)
        self._flush()

    def _flush(self) -> None:
        encoded = self._encoded.getvalue()
        self._encoded.seek(0)
        self._encoded.truncate()
        _write_all(self._file, encoded)
        _write_all(self._checksums, _CHECKSUM.pack(len(encoded), zlib.crc32(encoded)))

    def sync(self) -> None:
        """Waits until everything written is on the disk, and so are the files' names."""
        for file in (self._file, self._checksums):
            os.fdatasync(file.fileno())
        if not self._named:
            make_lasting(self.path.parent)
            self._named = True

    def close(self) -> None:
        """Ends the stream with its mark, on the disk too; may be called twice."""
        if not self._file.closed:
            self._encoder.close()
            self._flush()
            self.sync()
            self._close_files()

    def discard(self) -> None:
        """Deletes the stream."""
        self._close_files()
        for path in (checksums_of(self.path), self.path):
            path.unlink()

    def _close_files(self) -> None:
        self._file.close()
        self._checksums.close()


def _write_all(file: io.FileIO, content: bytes) -> None:
    """Writes all of it: a raw file may take less at once, as on a disk that is nearly full."""
    written = 0
    while written < len(content):
        written += file.write(content[written:])


def read_stream(path: Path) -> tuple[pa.Table | None, str | None, int]:
    """Reads back a stream whose writer ended well, was killed, or is still writing.

    Returns every batch that is as it was written, None where not even the schema is; why there may have been more, None
    where the end mark proves that there was not; and the bytes behind the last whole batch, which were not read. Raises
    `FileNotFoundError`: there is no such stream.
    """
    data = path.read_bytes()
    if not checksums_of(path).exists():
        return None, f"{checksums_of(path).name}, which proves its batches, is gone", len(data)
    intact, why = _intact_bytes(data, checksums_of(path).read_bytes())
    table = pa.ipc.open_stream(pa.py_buffer(data).slice(0, intact)).read_all() if intact else None
    return table, why, len(data) - intact


def _intact_bytes(data: bytes, checksums: bytes) -> tuple[int, str | None]:
    """Counts the bytes from the start that are as they were written; returns why there may have been more, too."""
    start = end = 0
    for length, checksum in _CHECKSUM.iter_unpack(checksums[: len(checksums) // _CHECKSUM.size * _CHECKSUM.size]):
        start, end = end, end + length
        if end > len(data):
            return start, "cut short"
        if not length or zlib.crc32(memoryview(data)[start:end]) != checksum:
            return start, "a batch is not as it was written"
    return end, None if end == len(data) and data[start:] == _END_MARK else "no end mark"
