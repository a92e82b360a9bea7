"""One telemetry table of all trials of a study as a dataset. A damaged trial is named and left out, it alone."""

from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from wattune.errors import TelemetryError, closest
from wattune.schema import TELEMETRY
from wattune.storage.measured import MeasuredFolder
from wattune.storage.parquet import require_format
from wattune.storage.values import wrong_columns

if TYPE_CHECKING:
    import pyarrow.dataset as ds

UNREADABLE: Final = b"wattune.unreadable"
"""Key in the metadata of a dataset's schema: the trials that are left out, a line each. Absent where none is."""

_ADDED: Final = pa.schema([pa.field("trial", pa.string()), pa.field("simulated", pa.bool_())])
_DAMAGE: Final = (TelemetryError, pa.ArrowException, OSError, ValueError)


def open_tables(study: Path, tier: str) -> "ds.Dataset":
    """Opens one table of all trials of a study, a tier of `wattune.schema.TELEMETRY` or `spans`.

    Its rows are those of every trial's and node's file with two columns in front. `trial` is the trial folder's name.
    `simulated` is true where the file's values were computed instead of measured. A column that a file lacks is null.
    The metadata of the schema names the trials that are left out (`UNREADABLE`). Raises `TelemetryError`: the tier does
    not exist or no trial has it, or not one trial's table can be read.
    """
    # This loads pandas where it is installed; every command would wait a fifth of a second for it.
    import pyarrow.dataset as ds
    from pyarrow.fs import LocalFileSystem

    if tier not in (*TELEMETRY, "spans"):
        raise TelemetryError(f'"{tier}" is no table of a trial; {closest(tier, (*TELEMETRY, "spans"))}')
    trials = study / "trials"
    schemas: dict[Path, pa.Schema] = {}
    problems: dict[str, str] = {}
    for folder in sorted(path for path in trials.glob("*/") if not path.is_symlink()):
        paths = sorted(folder.glob("spans.parquet" if tier == "spans" else f"telemetry/*/{tier}.parquet"))
        if not paths:
            continue
        try:
            MeasuredFolder(folder).check()
            schemas |= {path: _schema(path, tier) for path in paths}
        except _DAMAGE as error:
            problems[folder.name] = f"{folder.name}: {' '.join(str(error).split())}"
    whole = _ADDED
    for path, schema in schemas.items():
        try:
            whole = pa.unify_schemas([whole, schema.remove_metadata()])
        except (pa.ArrowException, ValueError) as error:
            name = _trial(path, trials)
            problems[name] = f"{name}: {path}: columns of other types than in other trials: {error}"
    schemas = {path: one for path, one in schemas.items() if _trial(path, trials) not in problems}
    if not schemas:
        if problems:
            raise TelemetryError(f"a {tier} table cannot be read: {next(iter(problems.values()))}")
        raise TelemetryError(f'no trial of {study} has a table "{tier}"; run trials whose sensors give it')
    checked = ds.ParquetFragmentScanOptions(page_checksum_verification=True)
    parquet, disk = ds.ParquetFileFormat(default_fragment_scan_options=checked), LocalFileSystem()
    fragments = []
    for path, schema in schemas.items():
        simulated = (schema.metadata or {}).get(b"wattune.simulated") == b"true"
        belongs = (pc.field("trial") == _trial(path, trials)) & (pc.field("simulated") == simulated)
        fragments.append(parquet.make_fragment(str(path), disk, belongs))
    if problems:
        whole = whole.with_metadata({UNREADABLE: "\n".join(problems.values()).encode()})
    return ds.FileSystemDataset(fragments, whole, parquet, disk)


def left_out(schema: pa.Schema) -> list[str]:
    """Returns the reasons, a line each, why trials are left out of a table or dataset of this schema."""
    reasons: bytes = (schema.metadata or {}).get(UNREADABLE, b"")
    return reasons.decode().splitlines()


def _schema(path: Path, tier: str) -> pa.Schema:
    """Reads a file's schema.

    Raises `TelemetryError` where it is of another format, or a column is missing or of another type than the schema's.
    Raises `ArrowException`, `OSError` where the file is damaged.
    """
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            schema = file.schema_arrow
    except (pa.ArrowException, OSError) as error:
        raise TelemetryError(f"{path} cannot be read: {error}") from error
    require_format(schema, path)
    wrong = wrong_columns(schema, tier)
    if wrong:
        raise TelemetryError(f"{path}: {', '.join(wrong)}; it was not written by wattune, or is damaged")
    return schema


def _trial(path: Path, trials: Path) -> str:
    return path.relative_to(trials).parts[0]
