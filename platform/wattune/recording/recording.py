"""A recording read back: its tables, its window, and the figures of every device and of the whole."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import pyarrow as pa

from wattune.analysis.run_data import RunData, is_simulated, last_mono_ns
from wattune.analysis.signals.readings import HOST, Tables
from wattune.analysis.summary import IMPOSSIBLE, Summary, metrics_by_device, summarize
from wattune.recording.sensors import simulate_from_host
from wattune.recording.steps import steps_of_open
from wattune.schema import DeviceKey
from wattune.storage.files import with_calibrations
from wattune.storage.measured import RecordingFolder
from wattune.telemetry.files.coverage import measured_facts
from wattune.telemetry.files.segments import read_manifest, read_tables
from wattune.units import ns_to_s, s_to_ns

LAG_S: Final = 1.1
"""Most the ring may lag behind the other tiers while sampling: it is drained once a second."""


def load(path: Path) -> RunData:
    """Reads a trial's or recording's folder; of one that was killed or still records, all there is so far.

    Raises:
        TelemetryError: A table or manifest in it cannot be read.
    """
    folder = RecordingFolder(path)
    facts = folder.facts()
    if facts.get("closed", True):
        folder.check()
        return RunData.of(path)
    tables, manifest = sampled(folder.node_folder(facts["node"]), simulated_device=facts["simulated_device"])
    read_until_ns = read_until_mono_ns(tables)
    spans, found = steps_of_open(path, facts, manifest, read_until_ns)
    manifests = {facts["node"]: with_calibrations(folder.storage, manifest)}
    data = RunData(tables=tables, spans=spans, manifests=manifests)
    return data.of_recording(facts | found, read_until_ns=read_until_ns)


def look(sampler_folder: Path, start_mono_ns: int) -> RunData:
    """Reads what a running sampler has written since a moment.

    Its window ends `LAG_S` before the last reading, up to which all sensors are in; None where that leaves no window.
    """
    tables, _ = read_tables(sampler_folder, start_mono_ns=start_mono_ns)
    manifest = read_manifest(sampler_folder)
    data = RunData(tables=tables, manifests={manifest["node"]: manifest})
    end_mono_ns = max(last_mono_ns(tables), default=0) - s_to_ns(LAG_S)
    if end_mono_ns <= start_mono_ns:
        return data
    window = {"start_mono_ns": start_mono_ns, "end_mono_ns": end_mono_ns}
    return data.of_recording({"node": manifest["node"], "window": window})


def sampled(sampler_folder: Path, *, simulated_device: str | None) -> tuple[dict[str, pa.Table], dict[str, Any]]:
    """Tables and manifest as a sampler left them, with those of a device that is simulated from the host's activity.

    Raises TelemetryError where the sampler never wrote its manifest.
    """
    tables, losses = read_tables(sampler_folder)
    manifest = read_manifest(sampler_folder) | {"losses": losses, "measured": measured_facts(tables)}
    if simulated_device is None or HOST not in tables:
        return tables, manifest
    simulated, own = simulate_from_host(simulated_device, manifest["node"], tables[HOST])
    both = {key: {**manifest[key], **own.get(key, {})} for key in ("devices", "tiers")}
    return {**tables, **simulated}, {**own, **manifest, **both, "simulated": True}


def read_until_mono_ns(tables: Tables) -> int:
    """Returns the time up to which all sensors of an open recording were read.

    It is at most `LAG_S` before the last reading: a sensor that is silent for longer is lost. Simulated sensors are
    computed from those that are read, and lag behind none.
    """
    read = {tier: table for tier, table in tables.items() if not is_simulated(table)}
    lasts_ns = last_mono_ns(read)
    return max(min(lasts_ns, default=0), max(lasts_ns, default=0) - s_to_ns(LAG_S))


def _length_s(window: Mapping[str, Any] | None) -> float | None:
    """Returns the length of a window of the manifest; None where its end was not seen."""
    start_ns, end_ns = (window or {}).get("start_mono_ns"), (window or {}).get("end_mono_ns")
    return None if start_ns is None or end_ns is None else ns_to_s(end_ns - start_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Figures of a recording."""

    path: Path
    command: Sequence[str]
    """Empty where the machine was recorded."""
    exit_code: int | None
    """As a shell gives it; None where the command's end was not seen."""
    window_s: float | None
    energy_j: float | None
    """Of all devices together, over the window."""
    steps: Mapping[str, Any]
    """The manifest's facts of the command's steps: `source`, `num_steps`, `tokens_per_step` and more."""
    window_why: str
    """The choice of the window in words; empty where there was none."""
    command_s: float | None
    """Length of the whole command."""
    summary: Summary
    devices: Mapping[DeviceKey, Mapping[str, float]]
    """Metrics of each as if it had been recorded alone."""
    host: Mapping[str, float]
    """Means of the host's gauges."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """The figures of a recording's folder.

        Raises:
            TelemetryError: A table or manifest in it cannot be read.
        """
        data = load(path)
        facts, summary = data.facts, summarize(data)
        examined = None if IMPOSSIBLE in summary.tags else data.examined
        return cls(
            path=path,
            command=tuple(facts.get("command", ())),
            exit_code=facts.get("exit_code"),
            window_s=data.window_s,
            energy_j=None if examined is None else examined.energy_j,
            steps=facts.get("steps") or {},
            window_why=str(facts.get("window_why") or ""),
            command_s=_length_s(facts.get("command_window") or facts.get("window")),
            summary=summary,
            devices={} if examined is None else metrics_by_device(data),
            host={} if examined is None else examined.host_means(),
        )

    @property
    def simulated(self) -> bool:
        """Returns True where any figure was computed and not measured."""
        return self.summary.tags.get("simulated") == "true"

    def to_json(self) -> dict[str, Any]:
        """Plain data; what was not measured is not in it."""
        known = {
            "exit_code": self.exit_code,
            "command_s": self.command_s,
            "window_s": self.window_s,
            "energy_j": self.energy_j,
        }
        return {
            "folder": str(self.path),
            "command": list(self.command),
            **{name: value for name, value in known.items() if value is not None},
            "steps": dict(self.steps),
            "window_why": self.window_why,
            "simulated": self.simulated,
            "metrics": dict(self.summary.metrics),
            "quality": self.summary.quality,
            "quality_reasons": list(self.summary.quality_reasons),
            "devices": {f"{node}/{name}": dict(metrics) for (node, name), metrics in self.devices.items()},
            "host": dict(self.host),
        }
