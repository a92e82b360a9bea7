"""One telemetry table of all trials of a study, opened without reading it."""

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from wattune.errors import TelemetryError, closest
from wattune.schema import TELEMETRY
from wattune.storage.measured import MeasuredFolder, table_path

if TYPE_CHECKING:
    import pyarrow.dataset as ds


def open_dataset(study: Path, tier: str) -> "ds.Dataset":
    """Opens one table of all trials; see `wattune.storage.study.StudyFolder.dataset`."""
    # This loads pandas where it is installed; every command would wait a fifth of a second for it.
    import pyarrow.dataset as ds
    from pyarrow.fs import LocalFileSystem

    if tier not in (*TELEMETRY, "spans"):
        raise TelemetryError(f'"{tier}" is no table of a trial; {closest(tier, (*TELEMETRY, "spans"))}')
    trials = study / "trials"
    if tier == "spans":
        paths = [path for folder in sorted(trials.glob("*/")) if (path := table_path(folder, "spans")) is not None]
    else:
        paths = sorted(trials.glob(f"*/telemetry/*/{tier}.parquet"))
    for name in sorted({path.relative_to(trials).parts[0] for path in paths}):
        try:
            MeasuredFolder(trials / name).check()
        except TelemetryError as error:
            raise TelemetryError(f"a {tier} table cannot be read: {error}") from error
    schemas = {path: pq.read_schema(path) for path in paths}
    if not schemas:
        raise TelemetryError(f'no trial of {study} has a table "{tier}"; run trials whose sensors give it')
    checked = ds.ParquetFragmentScanOptions(page_checksum_verification=True)
    parquet, disk = ds.ParquetFileFormat(default_fragment_scan_options=checked), LocalFileSystem()
    fragments = []
    for path, schema in schemas.items():
        simulated = (schema.metadata or {}).get(b"wattune.simulated") == b"true"
        belongs = (pc.field("trial") == path.relative_to(trials).parts[0]) & (pc.field("simulated") == simulated)
        fragments.append(parquet.make_fragment(str(path), disk, belongs))
    added = pa.schema([pa.field("trial", pa.string()), pa.field("simulated", pa.bool_())])
    # The metadata of one file does not hold for all of them.
    whole = pa.unify_schemas([added, *(schema.remove_metadata() for schema in schemas.values())])
    return ds.FileSystemDataset(fragments, whole, parquet, disk)
