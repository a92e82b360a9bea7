"""The store: one stream per tier and segment, written beside the sampling thread, read back after any end.

Files are `<tier>-<number>.arrows`, numbered from 0, streams of `wattune.telemetry.files.stream`. Batches of ten seconds
take half the space of batches of a second, and a kill may cost a second at most. So rows first go to
`<tier>-<number>.tail`, a stream that is written every second. When it holds ten seconds they move to the segment as one
batch, and a new tail begins. Only a segment's end mark proves that nothing is missing. The manifest's row counts say
how much is.
"""

import json
import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from wattune.errors import TelemetryError
from wattune.schema import TELEMETRY, table_schema
from wattune.storage.files import make_lasting, read_json_object
from wattune.storage.format import FORMAT, FORMAT_KEY
from wattune.telemetry.backend import ERROR_SUFFIX
from wattune.telemetry.files.stream import StreamWriter, read_stream
from wattune.units import s_to_ns

MANIFEST: Final = "manifest.json"
"""The file beside the segments that holds what `wattune.telemetry.files.manifest` describes."""

SEGMENT_S: Final = 600.0
"""Length of a segment: what a bit error in one stream can cost at most."""
CONSOLIDATE_S: Final = 10.0
"""Time between two batches of a segment."""
SYNC_S: Final = 5.0
"""Time between two flushes to the disk: what a power cut can cost. A killed process costs only unwritten batches."""

_SUFFIX: Final = ".arrows"
_TAIL_SUFFIX: Final = ".tail"
_AFTER_ROWS: Final = b"wattune.after_rows"
"""In a tail's schema: how many rows its segment held when it began. What the segment holds beyond is in both."""
_ERROR_TYPE: Final = pa.dictionary(pa.int32(), pa.string())

StoredRow = Mapping[str, int | float | str | None]
"""A backend's row with its node, device, mono_ns and wall_ns."""


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Writes the manifest in one rename: a reader sees the old one or the new one, after a power cut too.

    A folder that was moved or removed meanwhile is not made again: another recording may want its name.
    """
    partial = folder / f".{MANIFEST}.{os.getpid()}"
    with open(partial, "w") as file:
        json.dump({**manifest, FORMAT_KEY: FORMAT}, file, indent=1, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / MANIFEST)
    make_lasting(folder)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The last manifest a sampler wrote there.

    Raises `TelemetryError`: there is none, or it is not a JSON object of this format.
    """
    if not (folder / MANIFEST).exists():
        raise TelemetryError(f"{folder} holds no recording; give the folder of one")
    return read_json_object(folder / MANIFEST)


class TierWriter:
    """The streams of one tier. Not for the sampling thread: it compresses and waits for the disk."""

    def __init__(
        self, folder: Path, schema: pa.Schema, segment_s: float = SEGMENT_S, consolidate_s: float = CONSOLIDATE_S
    ) -> None:
        """Opens the first segment. Raises `FileExistsError`: the folder holds such a segment already."""
        self.segments: list[dict[str, Any]] = []
        self._folder, self._schema = folder, schema
        self._segment_ns, self._consolidate_ns = s_to_ns(segment_s), s_to_ns(consolidate_s)
        self._open()

    def _open(self) -> None:
        tier = self._schema.metadata[b"wattune.table"].decode()
        path = self._folder / f"{tier}-{len(self.segments):04d}{_SUFFIX}"
        self._words: dict[str, dict[Any, int]] = {}
        self._segment = StreamWriter(path, self._schema, compressed=True)
        self.segments.append({"file": path.name, "rows": 0, "closed": False})
        self._open_tail()

    def _open_tail(self) -> None:
        self._recent: list[pa.RecordBatch] = []
        self._recent_since_ns: int | None = None
        after_rows = str(self.segments[-1]["rows"]).encode()
        schema = self._schema.with_metadata({**self._schema.metadata, _AFTER_ROWS: after_rows})
        # Not compressed: it is small, and soon deleted.
        self._tail = StreamWriter(self._segment.path.with_suffix(_TAIL_SUFFIX), schema, compressed=False)

    def write(self, rows: Sequence[StoredRow]) -> None:
        """Writes one batch, in a new segment where the last one is long enough or lacks a column for an error."""
        if not rows:
            return
        times_ns = [int(row["mono_ns"] or 0) for row in rows]
        names = {name for row in rows for name in row if name.endswith(ERROR_SUFFIX)}.difference(self._schema.names)
        if names or times_ns[0] - self.segments[-1].get("start_mono_ns", times_ns[0]) >= self._segment_ns:
            self.close()
            for name in sorted(names):
                self._schema = self._schema.append(pa.field(name, _ERROR_TYPE, metadata={"kind": "error"}))
            self._open()
        elif self._recent_since_ns is not None and times_ns[0] - self._recent_since_ns >= self._consolidate_ns:
            self._consolidate()
            self._open_tail()
        batch = self._batch(rows)
        self._tail.write(batch)
        self._recent.append(batch)
        if self._recent_since_ns is None:
            self._recent_since_ns = times_ns[0]
        segment = self.segments[-1]
        segment["rows"] += len(rows)
        segment["start_mono_ns"] = min(segment.get("start_mono_ns", times_ns[0]), *times_ns)
        segment["end_mono_ns"] = max(segment.get("end_mono_ns", times_ns[0]), *times_ns)

    def _batch(self, rows: Sequence[StoredRow]) -> pa.RecordBatch:
        """Rows as a batch whose dictionaries only grow: one in another order would be written out again."""
        columns = []
        for field in self._schema:
            values = [row.get(field.name) for row in rows]
            if pa.types.is_dictionary(field.type):
                words = self._words.setdefault(field.name, {})
                codes = [None if value is None else words.setdefault(value, len(words)) for value in values]
                indices = pa.array(codes, field.type.index_type)
                columns.append(pa.DictionaryArray.from_arrays(indices, pa.array(words, field.type.value_type)))
            else:
                columns.append(pa.array(values, field.type))
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _consolidate(self) -> None:
        """Moves the tail's rows to the segment, and deletes the tail once they are on the disk."""
        if self._recent:
            self._segment.write(pa.concat_batches(self._recent))
            self._segment.sync()
        self._tail.discard()

    def sync(self) -> None:
        """Waits until everything written is on the disk."""
        self._tail.sync()

    def close(self) -> None:
        """Ends the segment with its mark; may be called twice."""
        if not self.segments[-1]["closed"]:
            self._consolidate()
            self._segment.close()
            self.segments[-1]["closed"] = True


class SegmentStore:
    """All tiers of one recording and its manifest, written by a thread of its own. The sampling thread never waits."""

    def __init__(
        self, folder: Path, backends: Mapping[str, str], *, simulated: bool, segment_s: float = SEGMENT_S
    ) -> None:
        """Opens the first segment of every tier and starts the thread.

        The folder is made if need be; `backends` has by tier the one that reads it, and `simulated` says that any value
        is computed.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._writers = {
            tier: TierWriter(folder, table_schema(tier, backend=backend, simulated=simulated), segment_s)
            for tier, backend in backends.items()
        }
        self._queue: queue.SimpleQueue[tuple[Mapping[str, Sequence[StoredRow]], dict[str, Any] | None] | None]
        self._queue = queue.SimpleQueue()
        self._failure: Exception | None = None
        # Daemon: a process that fails before `close` must end, not wait for rows nobody sends.
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    def put(self, rows: Mapping[str, Sequence[StoredRow]], manifest: dict[str, Any] | None = None) -> None:
        """Hands over rows by tier, and a manifest to write once they are written. Neither may change afterwards.

        Raises `TelemetryError`: an earlier write failed.
        """
        self._check()
        self._queue.put((rows, manifest))

    def close(self, manifest: dict[str, Any]) -> None:
        """Writes what is left, ends every stream, and writes the last manifest.

        `closed`, set in it here, says whether every stream has its end mark. Raises `TelemetryError`: a write failed.
        """
        self._queue.put(None)
        self._thread.join()
        try:
            self._write_manifest(manifest | {"closed": self._failure is None})
        except OSError as error:  # a full disk has no room for the manifest either
            self._failure = self._failure or error
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise TelemetryError(
                f"telemetry cannot be written to {self._folder}: {self._failure}; make room, or give another folder"
            ) from self._failure

    def _run(self) -> None:
        synced_s = time.monotonic()
        try:
            while (item := self._queue.get()) is not None:
                rows, manifest = item
                for tier, tier_rows in rows.items():
                    self._writers[tier].write(tier_rows)
                if time.monotonic() - synced_s >= SYNC_S:
                    for writer in self._writers.values():
                        writer.sync()
                    synced_s = time.monotonic()
                if manifest is not None:
                    self._write_manifest(manifest | {"closed": False})
            for writer in self._writers.values():
                writer.close()
        except Exception as error:  # whatever ends this thread must reach the sampling thread, through `_check`
            self._failure = error

    def _write_manifest(self, manifest: dict[str, Any]) -> None:
        """Adds what only the store knows; the manifest never counts a row that is not in its file yet."""
        for tier, writer in self._writers.items():
            rows = sum(segment["rows"] for segment in writer.segments)
            manifest["tiers"].setdefault(tier, {}).update(rows=rows, segments=writer.segments)
        write_manifest(self._folder, manifest)


def _salvage(path: Path) -> tuple[pa.Table | None, str | None]:
    """Every row of a segment and its tail that is as it was written, each once, and why there may have been more."""
    tail_path = path.with_suffix(_TAIL_SUFFIX)
    tail, unread_of_tail = None, 0
    with suppress(FileNotFoundError):
        # The tail first: rows that move to the segment in between are in both, and never in neither.
        tail, _, unread_of_tail = read_stream(tail_path)
    table, why, unread_bytes = read_stream(path)
    parts = [] if table is None else [table]
    loss = why and f"{why}; {unread_bytes} bytes behind the last whole batch were not read"
    if tail is not None:
        moved = sum(part.num_rows for part in parts) - int(tail.schema.metadata[_AFTER_ROWS])
        metadata = {name: value for name, value in tail.schema.metadata.items() if name != _AFTER_ROWS}
        parts.append(tail.slice(max(moved, 0)).replace_schema_metadata(metadata))
    if unread_of_tail and loss is not None:
        loss += f", nor {unread_of_tail} of {tail_path.name}"
    return pa.concat_tables(parts) if parts else None, loss


def _recorded_segments(folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the manifest's entry of every segment, by file; empty where there is no manifest."""
    if not (folder / MANIFEST).exists():
        return {}
    tiers = read_manifest(folder).get("tiers", {})
    return {segment["file"]: segment for tier in tiers.values() for segment in tier.get("segments", [])}


def read_tables(folder: Path, *, start_mono_ns: int | None = None) -> tuple[dict[str, pa.Table], list[str]]:
    """Reads back what a sampler wrote, whether it ended well, was killed, or is still writing.

    Rows read before a time are left out; a `ring` row is read up to a drain after its `sensor_ns`. Returns tables by
    tier, each row once and in the order it was read on its device; and a note on every segment that lacks its end mark,
    cannot be read to its end, or holds fewer rows than the manifest counts. A note is not a failure: the last segments
    of a living or killed sampler have one each. Raises `TelemetryError`: the manifest exists and cannot be read.
    """
    import pyarrow.compute as pc  # not with the module: a sampler only writes

    recorded = _recorded_segments(folder)
    notes = [f"{name}: the file is gone" for name in sorted(recorded) if not (folder / name).exists()]
    tables: dict[str, pa.Table] = {}
    for tier in TELEMETRY:
        parts = []
        for path in sorted(folder.glob(f"{tier}-*{_SUFFIX}")):
            known = recorded.get(path.name, {})
            if start_mono_ns is not None and known.get("closed") and known.get("end_mono_ns", 2**63) < start_mono_ns:
                # An open segment may hold more than is known.
                continue
            part, loss = _salvage(path)
            parts += [part] if part is not None else []
            rows, expected = part.num_rows if part is not None else 0, known.get("rows", 0)
            missing = f"; {expected - rows} rows that the manifest counts are missing" if rows < expected else ""
            if loss or missing:
                notes.append(f"{path.name}: {rows} rows read; {loss or 'end mark found'}{missing}")
        if parts:
            table = pa.concat_tables(parts, promote_options="default").unify_dictionaries().combine_chunks()
            tables[tier] = (
                table if start_mono_ns is None else table.filter(pc.greater_equal(table["mono_ns"], start_mono_ns))
            )
    return tables, notes
