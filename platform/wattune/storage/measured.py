"""What was measured, as files: spans and telemetry of a trial or a recording, and a recording's own folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from wattune.errors import PlanError, TelemetryError
from wattune.schema import KERNELS, TELEMETRY
from wattune.storage.files import (
    FOLDER_NAME,
    checked_manifest,
    make_folder,
    read_json_object,
    write_json,
    write_table,
)
from wattune.storage.parquet import ParquetTier
from wattune.storage.versions import RENAMED_FILES, VERSION, check_version

RECORDINGS: Final = "recordings"
"""The folder of the storage that recordings are in."""


def _stable_order(names: pa.ChunkedArray) -> pa.Array:
    """Row numbers by name, equal names in the order they are in."""
    return pc.array_sort_indices(pc.rank(names.cast(pa.string()), tiebreaker="first"))


def _is_window(window: Any) -> bool:
    return (
        isinstance(window, dict)
        and isinstance(window.get("start_mono_ns"), int | float)
        and isinstance(window.get("end_mono_ns"), int | float | None)
    )


def table_path(folder: Path, name: str) -> Path | None:
    """Where a table of a trial or recording is, also under its name in an earlier version; None where it is not."""
    names = (name, RENAMED_FILES[name]) if name in RENAMED_FILES else (name,)
    return next((path for each in names if (path := folder / f"{each}.parquet").exists()), None)


class MeasuredFolder:
    """Spans and telemetry of one trial or recording, as files."""

    def __init__(self, path: Path) -> None:
        """Names a folder; nothing is read or made."""
        self.path = path

    def write_spans(self, spans: pa.Table) -> None:
        """Writes the spans of all ranks."""
        write_table(self.path / "spans.parquet", spans)

    def spans(self) -> pa.Table | None:
        """The spans of all ranks, None where there are none.

        Raises:
            TelemetryError: The file is there and is not a Parquet table.
        """
        return self._table("spans")

    def write_kernels(self, kernels: pa.Table) -> None:
        """Writes what ran on all ranks' devices in the profiled steps."""
        write_table(self.path / "kernels.parquet", kernels)

    def kernels(self) -> pa.Table | None:
        """What ran in the profiled steps of all ranks, None where none was profiled.

        Raises:
            TelemetryError: The file is there and is not such a table.
        """
        table = self._table("kernels")
        lacking = [] if table is None else [name for name in KERNELS.names if name not in table.column_names]
        if lacking:
            raise TelemetryError(f"{self.path / 'kernels.parquet'} has no {', '.join(lacking)}; remove it")
        return table

    def _table(self, name: str) -> pa.Table | None:
        path = table_path(self.path, name)
        try:
            return pq.read_table(path) if path is not None else None
        except (pa.ArrowException, OSError) as error:
            raise TelemetryError(f"{path} cannot be read: {error}") from error

    def write_telemetry(self, node: str, tables: Mapping[str, pa.Table], manifest: Mapping[str, Any]) -> None:
        """Writes one node's tables and, last, its manifest: a node with a manifest is complete."""
        folder = self.path / "telemetry" / node
        for tier, table in tables.items():
            # A device's rows together, in the order they were read: then neighbours are neighbours in time.
            write_table(folder / f"{tier}.parquet", table.take(_stable_order(table["device"])))
        write_json(folder / "manifest.json", manifest)

    def nodes(self) -> list[str]:
        """The nodes there is telemetry of."""
        return sorted(folder.name for folder in (self.path / "telemetry").glob("*/"))

    def telemetry(self) -> dict[str, pa.Table]:
        """Every tier's table over all nodes; a tier nobody recorded is not in it.

        Raises:
            TelemetryError: A file is there and is not a Parquet table.
        """
        tables = {}
        for tier in TELEMETRY:
            paths = sorted((self.path / "telemetry").glob(f"*/{tier}.parquet"))
            try:
                parts = [pq.read_table(path) for path in paths]
            except (pa.ArrowInvalid, OSError) as error:
                raise TelemetryError(f"{self.path}: a {tier} table cannot be read: {error}") from error
            if parts:
                tables[tier] = pa.concat_tables(parts, promote_options="permissive").unify_dictionaries()
        return tables

    def stored(self) -> dict[str, ParquetTier]:
        """Every tier's tables over all nodes, opened and not read: for analysis, which takes a device at a time.

        Raises:
            TelemetryError: A file is there and is not a Parquet table.
        """
        found = {tier: sorted((self.path / "telemetry").glob(f"*/{tier}.parquet")) for tier in TELEMETRY}
        return {tier: ParquetTier(paths) for tier, paths in found.items() if paths}

    def manifests(self) -> dict[str, dict[str, Any]]:
        """What each node's sampler knew, by node: the node's own file, else its part of the recording's.

        Raises:
            TelemetryError: A file is there and is no JSON object, or says something of another kind than its name.
        """
        found: dict[str, dict[str, Any]] = {}
        whole = self.path / "manifest.json"
        if whole.exists():
            nodes = read_json_object(whole).get("nodes", {})
            parts = nodes.items() if isinstance(nodes, dict) else [("?", nodes)]
            found = {node: checked_manifest(part, f"{whole}: nodes.{node}") for node, part in parts}
        for path in sorted((self.path / "telemetry").glob("*/manifest.json")):
            found[path.parent.name] = checked_manifest(read_json_object(path), str(path))
        return found


class RecordingFolder(MeasuredFolder):
    """One recording: what was recorded is in its `manifest.json`, the node's telemetry where a trial has it."""

    @classmethod
    def create(cls, storage: Path, name: str) -> "RecordingFolder":
        """A new folder for a recording.

        Raises:
            PlanError: The name cannot be a folder, is taken (a recording is never written over), or nothing can be
                written there.
        """
        if not FOLDER_NAME.fullmatch(name):
            raise PlanError(
                f'recording name "{name}" cannot be a folder of the storage; use up to 100 letters, digits, ".", "_" '
                'and "-", the first a letter or digit'
            )
        path = make_folder(storage / RECORDINGS) / name
        try:
            path.mkdir()
        except FileExistsError:
            raise PlanError(f"{path} is there already; give another name, or remove it") from None
        return cls(path)

    def write_facts(self, facts: Mapping[str, Any]) -> None:
        """Writes what is known of the recording as a whole."""
        write_json(self.path / "manifest.json", {"version": VERSION, **facts})

    def facts(self) -> dict[str, Any]:
        """What is known of the recording as a whole; empty for a trial.

        Raises:
            TelemetryError: The file is there and is no JSON object, or its window is none.
        """
        path = self.path / "manifest.json"
        facts = read_json_object(path, "a recording") if path.exists() else {}
        check_version(facts.pop("version", None), str(path))
        window = facts.get("window")
        if window is not None and not _is_window(window):
            raise TelemetryError(
                f"{path}: window: got {json.dumps(window)[:200]}, allowed: an object with start_mono_ns and "
                "end_mono_ns, nanoseconds of the node's monotonic clock (the end null where it was not seen)"
            )
        return facts

    @property
    def storage(self) -> Path:
        """What it was created in, which holds the calibrations too."""
        return self.path.absolute().parent.parent

    def node_folder(self, node: str) -> Path:
        """Where a node's sampler writes, and its tables are afterwards."""
        return self.path / "telemetry" / node
