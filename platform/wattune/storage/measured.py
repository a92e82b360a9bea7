"""Measurements as files: spans and telemetry of a trial or a recording, and a recording's own folder."""

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from wattune.errors import ImpossibleValueError, PlanError, TelemetryError
from wattune.schema import KERNELS, TELEMETRY
from wattune.storage.digests import ACCEPTED, FILES, FileCheck, check_files
from wattune.storage.files import (
    FOLDER_NAME,
    RESTORE,
    make_folder,
    read_json_object,
    write_digested,
    write_json,
    write_table,
    write_whole,
)
from wattune.storage.manifests import checked_manifest
from wattune.storage.parquet import ParquetTier, encoded, read_table, typed
from wattune.storage.values import DeviceFacts, wrong_columns

RUN: Final = "run.json"
"""The file that completes a trial or a recording. It has the digests of all others."""

MANIFEST: Final = "manifest.json"
"""Facts of a recording: of its command, from the start on."""

RECORDINGS: Final = "recordings"
"""Folder of the storage that holds the recordings."""


_FACT_KINDS: Final[dict[str, tuple[type, ...]]] = {
    "node": (str, type(None)),
    "simulated_device": (str, type(None)),
    "closed": (bool, type(None)),
    "exit_code": (int, type(None)),
    "command": (list, type(None)),
    "steps": (dict, type(None)),
    "devices": (dict, type(None)),
}
"""Kinds of a recording's facts that are used by name; none needs to be there."""


def _is_window(window: Any) -> bool:
    return (
        isinstance(window, dict)
        and isinstance(start := window.get("start_mono_ns"), int | float)
        and isinstance(end := window.get("end_mono_ns"), int | float | None)
        and 0 <= start < 2**62
        and (end is None or 0 <= end < 2**62)
    )


def tier_files(tables: Mapping[str, pa.Table]) -> dict[str, bytes]:
    """Encodes one node's tables as files, by name.

    A device's rows stand together, in the order of reading: then neighbouring rows are neighbours in time.
    """
    ranks = {tier: pc.rank(table["device"].cast(pa.string()), tiebreaker="first") for tier, table in tables.items()}
    ordered = {tier: table.take(pc.array_sort_indices(ranks[tier])) for tier, table in tables.items()}
    return {f"{tier}.parquet": encoded(table).to_pybytes() for tier, table in ordered.items()}


class MeasuredFolder:
    """Spans and telemetry of one trial or recording, as files."""

    def __init__(self, path: Path) -> None:
        """Names a folder. Nothing is read or made."""
        self.path = path

    @property
    def elsewhere(self) -> bool:
        """True for a folder of another tool, whose files need not say a format: wattune's own hold one of its words."""
        own = (self.path / RUN, self.path / "spec.json")
        facts = self.path / MANIFEST
        return not any(map(Path.exists, own)) and not (facts.is_file() and b'"closed"' in facts.read_bytes())

    def write_spans(self, spans: pa.Table) -> None:
        """Writes the spans of all ranks."""
        write_table(self.path / "spans.parquet", spans)

    def spans(self) -> pa.Table | None:
        """Reads the spans of all ranks; None where there are none.

        Raises `TelemetryError`: the file is not a Parquet table.
        """
        return self._table("spans")

    def check(self) -> FileCheck:
        """Compares every file with its digest, which `run.json` has.

        Raises `TelemetryError`: a file does not agree with its digest. Every such file is named.
        """
        found = self._check()
        if found.changed:
            verb = "does not agree with its digest" if len(found.changed) == 1 else "do not agree with their digests"
            raise TelemetryError(f"{self.path}: {', '.join(found.changed)} {verb}: damaged, or edited; {RESTORE}")
        return found

    def _check(self) -> FileCheck:
        path = self.path / RUN
        if not path.exists():
            return FileCheck()
        content = read_json_object(path, "wattune", bare=False)
        if not isinstance(content.get(FILES), dict):
            raise TelemetryError(f"{path} has no digests of the other files: damaged, or edited; {RESTORE}")
        return check_files(self.path, content[FILES], content.get(ACCEPTED))

    def write_kernels(self, kernels: pa.Table) -> None:
        """Writes the kernels of all ranks' profiled steps."""
        write_table(self.path / "kernels.parquet", kernels)

    def kernels(self) -> pa.Table | None:
        """Reads the kernels of all ranks' profiled steps; None where no step was profiled.

        Raises `TelemetryError`: the file is not such a table.
        """
        table = self._table("kernels")
        lacking = [] if table is None else [name for name in KERNELS.names if name not in table.column_names]
        if lacking:
            raise TelemetryError(f"{self.path / 'kernels.parquet'} has no {', '.join(lacking)}; remove it")
        wrong = [] if table is None else wrong_columns(table.schema, "kernels")
        if wrong:
            raise TelemetryError(f"{self.path / 'kernels.parquet'}: {'; '.join(wrong)}; remove it")
        return table

    def _table(self, name: str) -> pa.Table | None:
        path = self.path / f"{name}.parquet"
        if not path.exists():
            return None
        table = read_table(path, elsewhere=self.elsewhere)
        return table.cast(typed(table.schema, name))

    def write_telemetry(self, node: str, tables: Mapping[str, pa.Table], manifest: Mapping[str, Any]) -> None:
        """Writes one node's tables and, last, its manifest. A node with a manifest is complete."""
        self.write_files(node, tier_files(tables))
        self.write_manifest(node, manifest)

    def write_files(self, node: str, files: Mapping[str, bytes]) -> dict[str, str]:
        """Writes one node's tables, encoded by `tier_files`. Returns their digests by their place in the folder."""
        folder = self.path / "telemetry" / node
        for name, content in files.items():
            write_whole(folder / name, content)
        return {f"telemetry/{node}/{name}": sha256(content).hexdigest() for name, content in files.items()}

    def write_manifest(self, node: str, manifest: Mapping[str, Any]) -> None:
        """Writes one node's manifest, after its tables."""
        write_json(self.path / "telemetry" / node / "manifest.json", manifest)

    def nodes(self) -> list[str]:
        """Lists the nodes that have telemetry."""
        return sorted(folder.name for folder in (self.path / "telemetry").glob("*/"))

    def telemetry(self) -> dict[str, pa.Table]:
        """Reads every tier's table over all nodes. A tier that was not recorded is absent.

        Raises `TelemetryError`: a file is not a Parquet table.
        """
        tables, facts = {}, self._facts()
        for tier in TELEMETRY:
            try:
                parts = [read_table(path, facts, elsewhere=self.elsewhere) for path in self._tier_paths(tier)]
                if parts:
                    whole = pa.concat_tables(parts, promote_options="permissive").unify_dictionaries()
                    tables[tier] = whole.cast(typed(whole.schema, tier))
            except ImpossibleValueError:
                raise
            except (TelemetryError, pa.ArrowException) as error:
                raise TelemetryError(f"{self.path}: a {tier} table cannot be read: {error}") from error
        return tables

    def _tier_paths(self, tier: str) -> list[Path]:
        return sorted((self.path / "telemetry").glob(f"*/{tier}.parquet"))

    def _facts(self) -> DeviceFacts:
        found = ((node, manifest.get("devices", {})) for node, manifest in self.manifests().items())
        return {(node, name): facts for node, devices in found for name, facts in devices.items()}

    def stored(self) -> dict[str, ParquetTier]:
        """Opens every tier's tables over all nodes and reads no rows: analysis reads a device at a time.

        Raises `TelemetryError`: a file is not a Parquet table.
        """
        found, facts = {tier: self._tier_paths(tier) for tier in TELEMETRY}, self._facts()
        return {tier: ParquetTier(paths, facts, elsewhere=self.elsewhere) for tier, paths in found.items() if paths}

    def manifests(self) -> dict[str, dict[str, Any]]:
        """Reads the manifest of each node: the node's own file, else its part of the recording's.

        Raises `TelemetryError`: a file is not a JSON object, or a value in it is of another kind than its name says.
        """
        found: dict[str, dict[str, Any]] = {}
        whole = self.path / "manifest.json"
        if whole.exists():
            nodes = read_json_object(whole, "a recording", elsewhere=self.elsewhere).get("nodes", {})
            parts = nodes.items() if isinstance(nodes, dict) else [("?", nodes)]
            found = {node: checked_manifest(part, f"{whole}: nodes.{node}") for node, part in parts}
        for path in sorted((self.path / "telemetry").glob("*/manifest.json")):
            found[path.parent.name] = checked_manifest(read_json_object(path, elsewhere=self.elsewhere), str(path))
        return found


class RecordingFolder(MeasuredFolder):
    """One recording. Its facts are in `manifest.json`, and telemetry is where a trial has it."""

    @classmethod
    def create(cls, storage: Path, name: str, number: int = 0) -> "RecordingFolder":
        """Makes a new folder for a recording; with a `number` the first that is free, by numbers behind its name.

        Raises `PlanError`: the name cannot be a folder or is taken (a recording is never written over), or the storage
        cannot be written to.
        """
        if not FOLDER_NAME.fullmatch(name):
            raise PlanError(
                f'recording name "{name}" cannot be a folder of the storage; use up to 100 letters, digits, ".", "_" '
                'and "-", the first a letter or digit'
            )
        path = make_folder(storage / RECORDINGS) / name
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            if number:
                stem = name.removesuffix(f"-{number}")[:90] if number > 1 else name[:90]
                return cls.create(storage, f"{stem}-{number + 1}", number + 1)
            raise PlanError(f"{path} is there already; give another name, or remove it") from None
        return cls(path)

    def write_facts(self, facts: Mapping[str, Any]) -> None:
        """Writes the facts of the recording as a whole. They have a command line: nobody else reads them."""
        write_digested(self.path / MANIFEST, facts, private=True)

    def facts(self) -> dict[str, Any]:
        """Reads the facts of the recording as a whole; empty for a trial.

        Raises `TelemetryError`: the file is not a JSON object, or its window has another form.
        """
        path = self.path / "manifest.json"
        facts = read_json_object(path, "a recording", elsewhere=self.elsewhere) if path.exists() else {}
        if facts.get("closed") is False and not {"node", "simulated_device"} <= facts.keys():
            raise TelemetryError(f"{path}: it is not closed, and has no node or simulated_device; {RESTORE}")
        for name, kinds in _FACT_KINDS.items():
            if not isinstance(facts.get(name), kinds):
                raise TelemetryError(f"{path}: {name}: got {json.dumps(facts[name])[:80]}; {RESTORE}")
        window = facts.get("window")
        if window is not None and not _is_window(window):
            raise TelemetryError(
                f"{path}: window: got {json.dumps(window)[:200]}, allowed: an object with start_mono_ns and "
                "end_mono_ns, nanoseconds of the node's monotonic clock (the end null where it was not seen)"
            )
        return facts

    @property
    def storage(self) -> Path:
        """The storage that it was created in, which holds the calibrations too."""
        return self.path.absolute().parent.parent

    def node_folder(self, node: str) -> Path:
        """Returns the folder that a node's sampler writes to, and that its tables stay in."""
        return self.path / "telemetry" / node
