"""A folder as a living sampler would have it: real H200 readings, up to a moment that a test chooses."""

from dataclasses import replace
from pathlib import Path
from typing import Final

import pyarrow.compute as pc

from wattune.recording.recording import load
from wattune.schema import table_schema
from wattune.storage.measured import MeasuredFolder
from wattune.telemetry.files.segments import write_manifest
from wattune.telemetry.files.stream import StreamWriter, checksums_of

DP4: Final = Path(__file__).parents[1] / "golden" / "h200x4" / "dp4"
NODE: Final = "node0"


class LivingSampler:
    """The readings of `tests/golden/h200x4/dp4` in the files that a sampler writes, at moments after their start."""

    def __init__(self, storage: Path) -> None:
        """Writes nothing yet.

        Args:
            storage: The recording is `storage/recordings/live`.
        """
        self.measured = replace(load(DP4), tables=MeasuredFolder(DP4).telemetry())
        self.first_ns: int = self.measured.tables["fast"]["mono_ns"][0].as_py()
        self.folder = storage / "recordings" / "live" / "telemetry" / NODE
        self.folder.mkdir(parents=True)
        devices = self.measured.manifests[NODE]["devices"]
        self.manifest = {
            "node": NODE,
            "devices": {name: {**facts, "uuid": f"GPU-{name}"} for name, facts in devices.items()},
            "tiers": {"fast": {"missed_ticks": 3, "errors": {"gpu_temp_c": {"999": 2}}}},
            "sampler": {"cpu_s": 1.5},
        }

    def at_ns(self, after_s: float) -> int:
        """Returns the monotonic time of a moment."""
        return self.first_ns + round(after_s * 1e9)

    def write_until(self, after_s: float) -> None:
        """Writes everything that was read before a moment."""
        for tier, table in self.measured.tables.items():
            stream = self.folder / f"{tier}-0000.arrows"
            for path in (stream, checksums_of(stream)):
                path.unlink(missing_ok=True)
            schema = table_schema(tier, backend="nvml", simulated=False)
            seen = table.filter(pc.less(table["mono_ns"], self.at_ns(after_s))).cast(schema).combine_chunks()
            writer = StreamWriter(stream, schema, compressed=True)
            for batch in seen.to_batches():
                writer.write(batch)
            writer.close()
        write_manifest(self.folder, self.manifest)
