"""Telemetry tables in Parquet files. A device's rows are written together and read a device at a time."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from wattune.arrays import Ints
from wattune.errors import TelemetryError
from wattune.schema import KERNELS, SPANS, TELEMETRY, DeviceKey
from wattune.storage.format import FORMAT, FORMAT_TAG, FormatError, check_format
from wattune.storage.values import DeviceFacts, require_possible, require_possible_rows, require_schema

SMALL_ROWS: Final = 2**18
"""Most rows of a file with a single row group, which is read whole: more groups would cost more than they save."""

DAMAGE: Final = (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError, KeyError, IndexError, TypeError)
"""Errors from Arrow and its Python part on a file that is damaged or no table."""

MOST_GROUP_ROWS: Final = 2**20
"""Most rows of a row group of larger files, which holds one device alone: 5.8 hours of a 20 ms ring."""

_KEYS: Final = ("node", "device")


def encoded(table: pa.Table) -> pa.Buffer:
    """Encodes a table as a Parquet file, with the format in its footer and the options that all tables share.

    A table of more than `SMALL_ROWS` rows with node and device has one or more row groups for every stretch of rows of
    one device. So its rows should be in order of devices.
    """
    # Neighbouring times and counters differ by little, and so do the high bytes of neighbouring measurements.
    numbers = {field.name: "DELTA_BINARY_PACKED" for field in table.schema if pa.types.is_integer(field.type)}
    if "sensor_ns" in numbers:  # a drain has one time of reading: runs are fastest for few distinct values
        numbers = {name: encoding for name, encoding in numbers.items() if name not in ("mono_ns", "wall_ns")}
    numbers |= {field.name: "BYTE_STREAM_SPLIT" for field in table.schema if pa.types.is_floating(field.type)}
    others = [name for name in table.column_names if name not in numbers]
    sink = pa.BufferOutputStream()
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), FORMAT_TAG: str(FORMAT)})
    with pq.ParquetWriter(
        sink,
        table.schema,
        compression="zstd",
        compression_level=3,
        use_dictionary=others,
        column_encoding=numbers,
        write_page_checksum=True,
    ) as writer:
        for start, end in _stretches(table):
            writer.write_table(table.slice(start, end - start), row_group_size=MOST_GROUP_ROWS)
    return sink.getvalue()


def _stretches(table: pa.Table) -> Iterator[tuple[int, int]]:
    """Yields the first row and the end of every stretch of one device, or of the whole table."""
    starts = np.zeros(1, np.int64)
    if table.num_rows > SMALL_ROWS and set(_KEYS) <= set(table.column_names):
        changes = [np.diff(codes(table, name)[0]) != 0 for name in _KEYS]
        own = np.append(0, np.flatnonzero(changes[0] | changes[1]) + 1)
        # Rows in no order by device have a change at every row; groups of them would be worth nothing.
        starts = own if len(own) <= table.num_rows // 2**10 else starts
    return zip(starts.tolist(), [*starts[1:].tolist(), table.num_rows], strict=True)


def codes(table: pa.Table, name: str) -> tuple[Ints, list[str]]:
    """Returns a text column as indices into its distinct values, -1 for null."""
    column = table[name]
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    whole = column.unify_dictionaries().combine_chunks()
    return whole.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64), whole.dictionary.to_pylist()


class TableSource:
    """A table in memory as a source: its rows are sorted by device once."""

    def __init__(self, table: pa.Table) -> None:
        """Finds the rows of each device; rows without node or device are left out."""
        (node, nodes), (device, names) = (codes(table, name) for name in _KEYS)
        key = np.where((node < 0) | (device < 0), -1, node * len(names) + device)
        order = np.argsort(key.astype(np.int16) if key.max(initial=0) < 2**15 else key, kind="stable")
        bounds = np.searchsorted(key[order], np.arange(len(nodes) * len(names) + 1))
        self.schema = table.schema
        self._table = table
        self._rows: dict[DeviceKey, Ints | slice] = {}
        for index, (start, end) in enumerate(pairwise(bounds)):
            if end > start:
                rows = order[start:end]
                together = rows[-1] - rows[0] == len(rows) - 1
                where = nodes[index // len(names)], names[index % len(names)]
                self._rows[where] = slice(int(rows[0]), int(rows[-1]) + 1) if together else rows

    @property
    def devices(self) -> Sequence[DeviceKey]:
        """Every device that has rows."""
        return list(self._rows)

    def parts(self, device: DeviceKey, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yields some columns of a device's rows, all at once; nothing where it has none."""
        rows, chosen = self._rows.get(device), self._table.select(list(columns))
        if rows is None:
            return
        if isinstance(rows, slice):
            yield chosen.slice(rows.start, rows.stop - rows.start)
        else:
            yield chosen.take(pa.array(rows))


def require_file(path: Path) -> None:
    """Makes sure that a path is a file: a pipe or a device in its place may never end. Raises `OSError`: it is none."""
    if not path.is_file():
        raise OSError("it is no file")


def require_format(schema: pa.Schema, path: Path, *, elsewhere: bool = False) -> None:
    """Makes sure that a file's schema says the format that this code reads. One made `elsewhere` need not say any.

    Raises `TelemetryError`: it says another one, or none.
    """
    said = (schema.metadata or {}).get(FORMAT_TAG.encode())
    if said is None and elsewhere:
        return
    try:
        check_format(None if said is None else said.decode(errors="replace"))
    except FormatError as error:
        raise TelemetryError(f"{path}: {error}") from error


def read_table(
    path: Path, facts: DeviceFacts | None = None, *, elsewhere: bool = False, columns: Sequence[str] | None = None
) -> pa.Table:
    """Reads a table or some `columns`, pages checked against their checksums and values against their bounds.

    `facts` are of the devices of a telemetry table; for `elsewhere` see `require_format`. Raises `TelemetryError`: it
    is not a Parquet table of this format, or is damaged, `ImpossibleValueError`: a value in it cannot be.
    """
    try:
        require_file(path)
        with pq.ParquetFile(path, page_checksum_verification=True) as file:  # `pq.read_table` would load pandas
            require_format(file.schema_arrow, path, elsewhere=elsewhere)
            require_schema(file.schema_arrow, str(path))
            table = file.read(columns)
        table.validate(full=True)
    except DAMAGE as error:
        raise TelemetryError(f"{path} cannot be read: {in_a_line(error)}") from error
    if facts is None:
        require_possible(table, str(path))
    else:
        require_possible_rows(table, str(path), facts)
    return table


def typed(schema: pa.Schema, name: str) -> pa.Schema:
    """Returns a table's schema, where a column that has no value at all has the type it should have.

    Some tools write such a column with Arrow's type `null`, which few functions take. `name` is a key of
    `wattune.schema.TELEMETRY`, `spans` or `kernels`; the columns of any other table stay.
    """
    known = {**TELEMETRY, "spans": SPANS, "kernels": KERNELS}.get(name)
    if known is None:
        return schema
    fields = [
        one.with_type(known.field(one.name).type) if pa.types.is_null(one.type) and one.name in known.names else one
        for one in schema
    ]
    return pa.schema(fields, schema.metadata)


def in_a_line(error: BaseException) -> str:
    """Returns what an error says, in a line."""
    return " ".join(str(error).split())[:500]


class ParquetTier:
    """One tier of one or several nodes, read from its files on demand, a device at a time."""

    def __init__(self, paths: Sequence[Path], facts: DeviceFacts | None = None, *, elsewhere: bool = False) -> None:
        """Opens one file or more and reads no rows.

        `facts` of their devices bound values more closely than the schema; for `elsewhere` see `require_format`. Raises
        `TelemetryError`: a file is not a Parquet table, or its columns contradict another file's.
        """
        self._paths, self._facts = list(paths), facts or {}
        try:
            for path in paths:
                require_file(path)
            self._files = [pq.ParquetFile(path, page_checksum_verification=True) for path in paths]
            schemas = [file.schema_arrow for file in self._files]
            for path, schema in zip(paths, schemas, strict=True):
                require_format(schema, path, elsewhere=elsewhere)
                require_schema(schema, str(path))
            unified = pa.unify_schemas([schema.remove_metadata() for schema in schemas], promote_options="permissive")
        except DAMAGE as error:
            raise TelemetryError(
                f"{', '.join(map(str, paths))}: no tables that can be read: {in_a_line(error)}"
            ) from error
        self._schemas = schemas
        # Where the values of one file are simulated, the whole tier counts as simulated.
        said = [schema.metadata or {} for schema in schemas]
        simulated = [each for each in said if each.get(b"wattune.simulated") == b"true"]
        self.schema = typed(unified.with_metadata((simulated or said)[0]), paths[0].stem)
        self._small: dict[int, TableSource] = {}
        self._owners = [self._owners_of(number) for number in range(len(self._files))]
        """The one device of each row group; None where it has several or none is named."""

    @property
    def num_rows(self) -> int:
        """Number of rows of all files."""
        return sum(file.metadata.num_rows for file in self._files)

    @property
    def devices(self) -> Sequence[DeviceKey]:
        """Every device that has rows."""
        return list(self._places)

    @cached_property
    def _places(self) -> Mapping[DeviceKey, Sequence[tuple[int, int]]]:
        """The row groups of every device, by the numbers of file and group: else each would look at those of all."""
        found: dict[DeviceKey, list[tuple[int, int]]] = {}
        for number, owners in enumerate(self._owners):
            for group, alone in enumerate(owners):
                for device in self._shared(number, group, ()).devices if alone is None else (alone,):
                    found.setdefault(device, []).append((number, group))
        return found

    def parts(self, device: DeviceKey, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Reads some columns of a device's rows, in the order of writing. A column that a file lacks is null there.

        Yields the rows of one row group at a time, so that memory of earlier ones can be freed. Raises
        `TelemetryError`: a file is damaged, `ImpossibleValueError`: a value cannot be.
        """
        schema = pa.schema([self.schema.field(name) for name in columns])
        for number, group in self._places.get(device, ()):
            have = [name for name in columns if name in self._schemas[number].names]
            if self._owners[number][group] == device:
                parts = iter([self._rows(number, [group], have)])
            else:
                parts = self._shared(number, group, have).parts(device, have)
            for part in parts:
                rows = _with_columns(part, schema)
                require_possible(rows, f"{self._paths[number]}: {device[1]}", self._facts.get(device))
                yield rows

    def _shared(self, number: int, group: int, columns: Sequence[str]) -> TableSource:
        """Returns some columns, or more, of a row group of several devices. A small file is sorted once."""
        if self._files[number].metadata.num_rows > SMALL_ROWS:
            return TableSource(self._rows(number, [group], [*_KEYS, *columns]))
        if number not in self._small:
            self._small[number] = TableSource(self._rows(number, [group], self.schema.names))
        return self._small[number]

    def table(self) -> pa.Table:
        """Reads all rows of all files. Raises `TelemetryError`: a file is damaged."""
        every = [
            _with_columns(self._rows(number, list(range(file.num_row_groups)), self.schema.names), self.schema)
            for number, file in enumerate(self._files)
        ]
        return pa.concat_tables(every).unify_dictionaries()

    def _rows(self, number: int, groups: Sequence[int], columns: Sequence[str]) -> pa.Table:
        """Reads some row groups of one file, those columns that it has."""
        file, path = self._files[number], self._paths[number]
        have = [name for name in columns if name in self._schemas[number].names]
        try:
            if file.metadata.num_rows > SMALL_ROWS:
                return file.read_row_groups(list(groups), columns=have)
            whole = file.read()
            whole.validate(full=True)
            return whole.select(have)
        except DAMAGE as error:
            raise TelemetryError(f"{path} cannot be read: {in_a_line(error)}") from error

    def _owners_of(self, number: int) -> list[DeviceKey | None]:
        """Finds `_owners` of one file. A small file counts as one group. Without keys there are no devices."""
        file, names = self._files[number], self._schemas[number].names
        if not set(_KEYS) <= set(names):
            return []
        if file.metadata.num_rows <= SMALL_ROWS:
            return [None]
        return [self._alone(number, group) for group in range(file.num_row_groups)]

    def _alone(self, number: int, group: int) -> DeviceKey | None:
        found: list[str] = []
        for name in _KEYS:
            column = self._files[number].metadata.row_group(group).column(self._schemas[number].names.index(name))
            told = column.statistics if column.is_stats_set else None
            if told is None or not told.has_min_max or told.min != told.max or told.null_count:
                return None
            found.append(str(told.min))
        return found[0], found[1]


def _with_columns(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Returns a table with exactly a schema's columns. Those it lacks are null.

    Raises `TelemetryError`: values of one file do not fit the type that the files of all nodes have together.
    """
    if table.schema.equals(schema):
        return table
    have = set(table.column_names)
    try:
        arrays = [
            table[field.name].cast(field.type) if field.name in have else pa.nulls(table.num_rows, field.type)
            for field in schema
        ]
    except pa.ArrowException as error:
        raise TelemetryError(f"columns of several files do not fit together: {in_a_line(error)}") from error
    return pa.table(arrays, schema=schema)
