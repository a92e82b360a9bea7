"""The study folder: the only reader and writer of its layout.

```
<storage>/<study>/study.yaml candidates.parquet ranking.parquet report.html
  trials/<trial_id>-<repeat>/spec.json result.json marks.parquet [kernels.parquet]
  trials/<trial_id>-<repeat>/telemetry/<node>/<tier>.parquet telemetry/<node>/manifest.json
  trials/<trial_id>-<repeat>/ranks.json stacks/rank<k>.txt    where ranks ran; where their threads were when they hung
  trials/<trial_id>-<repeat>/attempts/<n>/result.json ...     what interrupted attempts left
<storage>/recordings/<name>/manifest.json telemetry/<node>/... [marks.parquet]
<storage>/calibration/<device_uuid>.json
```

A finished trial is a `result.json` renamed into place: whatever is killed, a folder either has a whole result or none,
and a study resumes by looking at its folder.
"""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml

from wattune.errors import PlanError, SpaceError, TelemetryError, closest
from wattune.schema import TELEMETRY
from wattune.storage.files import CALIBRATIONS, read_json_object, write_json, write_table, write_whole
from wattune.storage.parquet import ParquetTier
from wattune.trial import TrialResult, TrialSpec

if TYPE_CHECKING:
    import pyarrow.dataset as ds

RECORDINGS: Final = "recordings"
_ATTEMPTS: Final = "attempts"
_TAKEN: Final = (RECORDINGS, CALIBRATIONS)
"""Names in the storage that are no study's."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_GROWS: Final = ("search.num_trials", "measure.timeout_s")
"""What may change between two runs of one study without making it another study."""


def check_study_name(name: str) -> str:
    """A name that is one folder inside the storage.

    Raises:
        SpaceError: It is not: empty, too long, with separators, or taken by the layout.
    """
    if not _NAME.fullmatch(name) or name in _TAKEN:
        raise SpaceError(
            f'study name "{name}" cannot be a folder of the storage; use up to 100 letters, digits, ".", "_" and "-", '
            f"the first a letter or digit, and none of {', '.join(_TAKEN)}"
        )
    return name


def _stable_order(names: pa.ChunkedArray) -> pa.Array:
    """Row numbers by name, equal names in the order they are in."""
    return pc.array_sort_indices(pc.rank(names.cast(pa.string()), tiebreaker="first"))


class MeasuredFolder:
    """Marks and telemetry of one trial or recording, as files."""

    def __init__(self, path: Path) -> None:
        """Names a folder; nothing is read or made."""
        self.path = path

    def write_marks(self, marks: pa.Table) -> None:
        """Writes the marks of all ranks."""
        write_table(self.path / "marks.parquet", marks)

    def marks(self) -> pa.Table | None:
        """The marks of all ranks, None where there are none.

        Raises:
            TelemetryError: The file is there and is not a Parquet table.
        """
        path = self.path / "marks.parquet"
        try:
            return pq.read_table(path) if path.exists() else None
        except (pa.ArrowException, OSError) as error:
            raise TelemetryError(f"{path} cannot be read: {error}") from error

    def write_kernels(self, kernels: pa.Table) -> None:
        """Writes what ran on all ranks' devices in the profiled steps."""
        write_table(self.path / "kernels.parquet", kernels)

    def kernels(self) -> pa.Table | None:
        """What ran in the profiled steps of all ranks, None where none was profiled."""
        path = self.path / "kernels.parquet"
        return pq.read_table(path) if path.exists() else None

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
            TelemetryError: A file is there and is no JSON object.
        """
        found: dict[str, dict[str, Any]] = {}
        whole = self.path / "manifest.json"
        if whole.exists():
            found |= read_json_object(whole).get("nodes", {})
        for path in sorted((self.path / "telemetry").glob("*/manifest.json")):
            found[path.parent.name] = read_json_object(path)
        return found


class RecordingFolder(MeasuredFolder):
    """One recording: what was recorded is in its `manifest.json`, the node's telemetry where a trial has it."""

    @classmethod
    def create(cls, storage: Path, name: str) -> "RecordingFolder":
        """A new folder for a recording.

        Raises:
            PlanError: The name cannot be a folder, or is taken: a recording is never written over.
        """
        if not _NAME.fullmatch(name):
            raise PlanError(
                f'recording name "{name}" cannot be a folder of the storage; use up to 100 letters, digits, ".", "_" '
                'and "-", the first a letter or digit'
            )
        path = storage / RECORDINGS / name
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            raise PlanError(f"{path} is there already; give another name, or remove it") from None
        return cls(path)

    def write_facts(self, facts: Mapping[str, Any]) -> None:
        """Writes what is known of the recording as a whole."""
        write_json(self.path / "manifest.json", facts)

    def facts(self) -> dict[str, Any]:
        """What is known of the recording as a whole; empty for a trial.

        Raises:
            TelemetryError: The file is there and is no JSON object.
        """
        path = self.path / "manifest.json"
        return read_json_object(path, "a recording") if path.exists() else {}

    @property
    def storage(self) -> Path:
        """What it was created in, which holds the calibrations too."""
        return self.path.absolute().parent.parent

    def node_folder(self, node: str) -> Path:
        """Where a node's sampler writes, and its tables are afterwards."""
        return self.path / "telemetry" / node


class TrialFolder(MeasuredFolder):
    """One repeat of one trial."""

    def write_spec(self, spec: TrialSpec) -> None:
        """Writes what is about to run."""
        write_json(self.path / "spec.json", spec.to_json())

    def spec(self) -> TrialSpec:
        """What ran.

        Raises:
            PlanError: The folder holds no readable specification.
        """
        try:
            return TrialSpec.from_json(json.loads((self.path / "spec.json").read_text()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PlanError(f"{self.path}: no trial of this version of wattune ({error})") from error

    def write_ranks(self, places: Sequence[Mapping[str, Any]]) -> None:
        """Writes where each rank ran: node, device and its identity, slot, process."""
        write_json(self.path / "ranks.json", {"ranks": list(places)})

    def write_stacks(self, stacks: Mapping[int, str]) -> None:
        """Writes where the threads of ranks were that hung."""
        for rank, text in stacks.items():
            write_whole(self.path / "stacks" / f"rank{rank}.txt", text.encode())

    def write_result(self, result: TrialResult) -> None:
        """Writes the result in one rename; from then on the trial is done."""
        write_json(self.path / "result.json", result.to_json())

    def result(self) -> TrialResult | None:
        """The result, None while there is none."""
        path = self.path / "result.json"
        return TrialResult.from_json(json.loads(path.read_text())) if path.exists() else None

    def write_error(self, text: str) -> None:
        """Writes what went wrong in this program itself while the trial ran."""
        write_whole(self.path / "error.txt", text.encode())

    def set_aside(self) -> None:
        """Moves what an attempt that does not count left here to `attempts/<n>`: the next one begins empty."""
        target = self.path / _ATTEMPTS / str(len(self.attempts()) + 1)
        target.mkdir(parents=True, exist_ok=True)
        stays = {_ATTEMPTS, "spec.json", "result.json"}
        for entry in [*(path for path in self.path.iterdir() if path.name not in stays), self.path / "result.json"]:
            if entry.exists():
                entry.rename(target / entry.name)  # the result last: with it the attempt is whole

    def attempts(self) -> list[TrialResult]:
        """Results of the attempts that were set aside, in order."""
        paths = sorted((self.path / _ATTEMPTS).glob("*/result.json"), key=lambda path: int(path.parent.name))
        return [TrialResult.from_json(json.loads(path.read_text())) for path in paths]

    def begun_wall_ns(self) -> int:
        """When the latest attempt wrote its specification, on the file system's clock."""
        return (self.path / "spec.json").stat().st_mtime_ns

    def clear(self) -> None:
        """Removes what an attempt left that another one takes the place of."""
        shutil.rmtree(self.path, ignore_errors=True)


class StudyFolder:
    """One study's folder."""

    def __init__(self, path: Path) -> None:
        """Names a folder; nothing is read or made. Use `create` or `open`."""
        self.path = path

    @classmethod
    def create(cls, storage: Path, name: str, document: Mapping[str, Any]) -> "StudyFolder":
        """The folder of a study, made now or found as the same study left it.

        Args:
            storage: Where studies are kept.
            name: The study's name.
            document: The search space, every default spelled out.

        Raises:
            SpaceError: The name is unusable, or the folder holds a study of another space; the difference is shown.
        """
        study = cls(storage / check_study_name(name))
        if (study.path / "study.yaml").exists():
            study.require_space(document)
        write_whole(study.path / "study.yaml", yaml.safe_dump(dict(document), sort_keys=False).encode())
        return study

    @classmethod
    def open(cls, name_or_path: str, storage: Path) -> "StudyFolder":
        """An existing study, by name under the storage or by its folder.

        Raises:
            PlanError: There is no study there; those that are, are named.
        """
        for path in (storage / name_or_path, Path(name_or_path).expanduser()):
            if (path / "study.yaml").is_file():
                return cls(path.absolute())
        known = sorted(path.parent.name for path in storage.glob("*/study.yaml"))
        have = f"it holds: {', '.join(known)}" if known else "it holds none"
        raise PlanError(f'no study "{name_or_path}" in {storage}, {have}; give a name, a study folder, or --storage')

    @property
    def name(self) -> str:
        """The study's name."""
        return self.path.name

    def document(self) -> dict[str, Any]:
        """The search space the study was begun with."""
        document: dict[str, Any] = yaml.safe_load((self.path / "study.yaml").read_text())
        return document

    def require_space(self, document: Mapping[str, Any], where: str = "") -> None:
        """Makes sure that a search space is the one the study was begun with.

        Args:
            document: The space, every default spelled out.
            where: Whose space it is, where it is not the user's.

        Raises:
            SpaceError: It is another one; the difference is shown.
        """
        differences = _differences(self.document(), document)
        if differences:
            listed = "\n".join(f"  {line}" for line in differences)
            other = f"another space than the one in {where}" if where else "another space"
            raise SpaceError(
                f"study {self.path} was begun with {other}:\n{listed}\n"
                "give the study another name, or restore the space to continue it"
            )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Holds the study for one runner; the lock ends with its process, however that ends.

        Raises:
            PlanError: Another process is running this study.
        """
        with self.if_idle() as idle:
            if not idle:
                raise PlanError(f"study {self.path} is being run by another process; wait for it or stop it")
            yield

    @contextmanager
    def if_idle(self) -> Iterator[bool]:
        """Holds the study unless another process runs it, and says which."""
        with open(self.path / ".running", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
            else:
                yield True

    def trial(self, trial_id: str, repeat: int) -> TrialFolder:
        """The folder of one repeat of one trial, made or not."""
        return TrialFolder(self.path / "trials" / f"{trial_id}-{repeat}")

    def trials(self) -> list[TrialFolder]:
        """Every trial begun, finished or not."""
        return [TrialFolder(path.parent) for path in sorted(self.path.glob("trials/*/spec.json"))]

    def results(self) -> list[tuple[TrialSpec, TrialResult]]:
        """Every finished trial with its specification.

        Raises:
            PlanError: A file of a finished trial cannot be read as one.
        """
        # Ten thousand trials are ranked while somebody waits: every file is opened once, and no path object is made.
        found = []
        for folder in _folders(self.path / "trials"):
            try:
                with open(f"{folder}/result.json", "rb") as file:
                    written = file.read()
            except FileNotFoundError:
                continue
            try:
                with open(f"{folder}/spec.json", "rb") as file:
                    spec = TrialSpec.from_json(json.loads(file.read().decode()))
                found.append((spec, TrialResult.from_json(json.loads(written.decode()))))
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise PlanError(f"{folder}: no trial of this version of wattune ({error})") from error
        return found

    def dataset(self, tier: str) -> "ds.Dataset":
        """One table of all trials, for queries beyond one trial: pyarrow and duckdb read only what they are asked for.

        Args:
            tier: A key of `wattune.schema.TELEMETRY`, or `marks`.

        Returns:
            The rows of every trial's and node's file with two columns in front: `trial`, the trial folder's name, and
            `simulated`, whether that file's values were computed instead of measured. A column a file lacks is null.

        Raises:
            TelemetryError: There is no such tier, or no trial has it.
        """
        # Loads pandas where there is one: what every command would wait a fifth of a second for.
        import pyarrow.dataset as ds
        from pyarrow.fs import LocalFileSystem

        if tier not in (*TELEMETRY, "marks"):
            raise TelemetryError(f'"{tier}" is no table of a trial; {closest(tier, (*TELEMETRY, "marks"))}')
        trials = self.path / "trials"
        inside = "marks.parquet" if tier == "marks" else f"telemetry/*/{tier}.parquet"
        schemas = {path: pq.read_schema(path) for path in sorted(trials.glob(f"*/{inside}"))}
        if not schemas:
            raise TelemetryError(f'no trial of {self.path} has a table "{tier}"; run trials whose sensors give it')
        parquet, disk = ds.ParquetFileFormat(), LocalFileSystem()
        fragments = []
        for path, schema in schemas.items():
            simulated = (schema.metadata or {}).get(b"wattune.simulated") == b"true"
            belongs = (pc.field("trial") == path.relative_to(trials).parts[0]) & (pc.field("simulated") == simulated)
            fragments.append(parquet.make_fragment(str(path), disk, belongs))
        added = pa.schema([pa.field("trial", pa.string()), pa.field("simulated", pa.bool_())])
        # What a file says of itself does not hold for all of them.
        whole = pa.unify_schemas([added, *(schema.remove_metadata() for schema in schemas.values())])
        return ds.FileSystemDataset(fragments, whole, parquet, disk)

    def write_candidates(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes every combination of the space: kept, rejected by a rule, or folded into another."""
        write_table(self.path / "candidates.parquet", pa.Table.from_pylist(list(rows)))

    def candidates(self) -> list[dict[str, Any]]:
        """Every combination of the space as `write_candidates` got it; empty before that."""
        path = self.path / "candidates.parquet"
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist() if path.exists() else []
        return rows

    def write_ranking(self, table: pa.Table) -> None:
        """Writes the ranking of the moment."""
        write_table(self.path / "ranking.parquet", table)

    @property
    def report_path(self) -> Path:
        """Where the study's report stands."""
        return self.path / "report.html"

    def write_report(self, html: str) -> Path:
        """Writes the report and says where."""
        write_whole(self.report_path, html.encode())
        return self.report_path


def _folders(path: Path) -> list[str]:
    """The folders in a folder, by name; none where it is not there."""
    try:
        with os.scandir(path) as entries:
            return sorted(entry.path for entry in entries if entry.is_dir())
    except FileNotFoundError:
        return []


def _flatten(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {key: leaf for name, item in value.items() for key, leaf in _flatten(item, f"{path}.{name}").items()}
    return {path.lstrip("."): list(value) if isinstance(value, tuple) else value}


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    before, after = _flatten(old), _flatten(new)
    return [
        f"{path}: was {before.get(path, 'absent')}, now {after.get(path, 'absent')}"
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path) and path not in _GROWS
    ]
