"""A recording read back: its tables, its window, and the figures of every device and of the whole."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from wattune.analysis.metrics.energy import powers, total_energy_j
from wattune.analysis.signals.align import align, clock_anchors_ns
from wattune.analysis.signals.readings import HOST, Device, Tables, as_source, codes, integers, with_values
from wattune.analysis.summary import Summary, is_simulated, summarize
from wattune.recording.sensors import simulate_from_host
from wattune.recording.steps import steps_of_open, told_memory, told_tokens, window_chosen
from wattune.storage.files import with_calibrations
from wattune.storage.measured import RecordingFolder
from wattune.telemetry.files.coverage import measured_facts
from wattune.telemetry.files.segments import read_manifest, read_tables
from wattune.units import ns_to_s, s_to_ns

LAG_S: Final = 1.1
"""Most the ring may lag behind the other tiers while sampling: it is drained once a second."""

_OF_SEVERAL: Final = ("node_", "cluster_", "nic_", "power_coincidence", "device_temp_spread")
"""Prefixes of metrics that do not describe a single device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Contents of a trial's or recording's folder."""

    tables: Mapping[str, pa.Table]
    spans: pa.Table | None = None
    manifests: Mapping[str, Mapping[str, Any]]
    window: tuple[int, int] | None = None
    """Of a recorded command, in nanoseconds of its node's wall clock; None where it is unknown."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """A recording's own manifest."""

    @property
    def window_s(self) -> float | None:
        """Length of the window."""
        return None if self.window is None else ns_to_s(self.window[1] - self.window[0])

    @property
    def devices(self) -> list[Device]:
        """Every device that was sampled, the hosts left out."""
        found = [(node, name) for node, manifest in self.manifests.items() for name in manifest.get("devices", {})]
        return sorted(device for device in found if device[1] != HOST)

    def summary(self) -> Summary:
        """Computes metrics and verdict of all devices together, without those that need a trial's specification."""
        return summarize(
            None,
            self.spans,
            self.tables,
            self.manifests,
            window=self.window,
            chosen=window_chosen(self.facts),
            tokens_per_step=told_tokens(self.facts),
            memory_peak_bytes=told_memory(self.facts),
        )

    def energy_j(self) -> float | None:
        """Energy of all devices over the window; None unless every power sensor covers it."""
        aligned = align(self.tables, self.spans, self.manifests, window=self.window)
        traces = None if aligned is None else powers(aligned)
        if aligned is None or traces is None or not traces.usable:
            return None
        return total_energy_j(traces, aligned.duration_s)

    def only(self, device: Device) -> "Measured":
        """The same as if this device had been sampled alone."""

        def own(table: pa.Table) -> pa.Table:
            node, name = (
                pc.equal(table[key].cast(pa.string()), text)
                for key, text in zip(("node", "device"), device, strict=True)
            )
            return table.filter(pc.and_(node, name))

        manifest = self.manifests[device[0]]
        return Measured(
            tables={tier: own(table) for tier, table in self.tables.items()},
            spans=None if self.spans is None else own(self.spans),
            manifests={device[0]: {**manifest, "devices": {device[1]: manifest["devices"][device[1]]}}},
            window=self.window,
            # Of the rest, tokens and memory are those of all devices together.
            facts={name: fact for name, fact in self.facts.items() if name == "window_why"},
        )

    def host_means(self) -> dict[str, float]:
        """Mean of every gauge of the `host` table in the window, over all nodes; what was not read is not in it."""
        if HOST not in self.tables or self.window is None:
            return {}
        table, (start_ns, end_ns) = with_values(self.tables[HOST], ("node", "mono_ns", "wall_ns")), self.window
        # By the monotonic clock, as all figures: a wall clock that is set takes no readings out of the window.
        anchors_ns, (node, names) = clock_anchors_ns(self.tables, None, self.manifests), codes(table, "node")
        at_ns = integers(table, "mono_ns") + np.array([anchors_ns.get(name, 0) for name in names], np.int64)[node]
        table = table.filter(pa.array((at_ns > start_ns) & (at_ns <= end_ns)))
        gauges = [column.name for column in table.schema if (column.metadata or {}).get(b"kind") == b"gauge"]
        means = {name: pc.mean(table[name]).as_py() for name in gauges}
        return {name: float(mean) for name, mean in means.items() if mean is not None}


def load(path: Path) -> Measured:
    """Reads a trial's or recording's folder; of one that was killed or still records, all there is so far.

    Raises:
        TelemetryError: A table or manifest in it cannot be read.
    """
    folder = RecordingFolder(path)
    facts = folder.facts()
    read_until_ns = None
    if facts.get("closed", True):
        folder.check()
        tables, spans, manifests = folder.telemetry(), folder.spans(), folder.manifests()
    else:
        tables, manifest = sampled(folder.node_folder(facts["node"]), simulated_device=facts["simulated_device"])
        manifests = {facts["node"]: with_calibrations(folder.storage, manifest)}
        read_until_ns = read_until_mono_ns(tables)
        spans, found = steps_of_open(path, facts, manifest, read_until_ns)
        facts |= found
    window = command_window(facts, tables, manifests, read_until_ns)
    return Measured(tables=tables, spans=spans, manifests=manifests, window=window, facts=facts)


def look(sampler_folder: Path, start_mono_ns: int) -> Measured:
    """Reads what a running sampler has written since a moment.

    Its window ends `LAG_S` before the last reading, up to which all sensors are in; None where that leaves no window.
    """
    tables, _ = read_tables(sampler_folder, start_mono_ns=start_mono_ns)
    manifest = read_manifest(sampler_folder)
    manifests = {manifest["node"]: manifest}
    end_mono_ns = _last_mono_ns(tables) - s_to_ns(LAG_S)
    facts = {"node": manifest["node"], "window": {"start_mono_ns": start_mono_ns, "end_mono_ns": end_mono_ns}}
    window = command_window(facts, tables, manifests) if end_mono_ns > start_mono_ns else None
    return Measured(tables=tables, manifests=manifests, window=window)


def sampled(sampler_folder: Path, *, simulated_device: str | None) -> tuple[dict[str, pa.Table], dict[str, Any]]:
    """Tables and manifest as a sampler left them.

    Args:
        sampler_folder: Where it wrote.
        simulated_device: A device whose sensors are computed from the host's activity and added.

    Raises:
        TelemetryError: The sampler never wrote its manifest.
    """
    tables, losses = read_tables(sampler_folder)
    manifest = read_manifest(sampler_folder) | {"losses": losses, "measured": measured_facts(tables)}
    if simulated_device is None or HOST not in tables:
        return tables, manifest
    simulated, own = simulate_from_host(simulated_device, manifest["node"], tables[HOST])
    both = {key: {**manifest[key], **own.get(key, {})} for key in ("devices", "tiers")}
    return {**tables, **simulated}, {**own, **manifest, **both, "simulated": True}


def command_window(
    facts: Mapping[str, Any],
    tables: Tables,
    manifests: Mapping[str, Mapping[str, Any]],
    read_until_ns: int | None = None,
) -> tuple[int, int] | None:
    """Returns the command's window in common time; where its end was not seen, up to the last reading.

    Args:
        facts: The recording's facts.
        tables: Its telemetry by tier.
        manifests: The manifest of each node's sampler.
        read_until_ns: `read_until_mono_ns` of a recording that is open, which the window does not pass.
    """
    known = facts.get("window")
    anchor_ns = clock_anchors_ns(tables, None, manifests).get(facts.get("node", ""))
    if known is None or anchor_ns is None:
        return None
    start_ns, end_ns = int(known["start_mono_ns"]), int(known.get("end_mono_ns") or _last_mono_ns(tables))
    if read_until_ns is not None:
        end_ns = min(end_ns, read_until_ns)
        if end_ns <= start_ns:  # it has only begun
            return None
    return start_ns + anchor_ns, end_ns + anchor_ns


def read_until_mono_ns(tables: Tables) -> int:
    """Returns the time up to which all sensors of an open recording were read.

    It is at most `LAG_S` before the last reading: a sensor that is silent for longer is lost. Simulated sensors are
    computed from those that are read, and lag behind none.
    """
    read = {tier: table for tier, table in tables.items() if not is_simulated({tier: table}, {})}
    lasts_ns = _lasts_mono_ns(read)
    return max(min(lasts_ns, default=0), max(lasts_ns, default=0) - s_to_ns(LAG_S))


def _last_mono_ns(tables: Tables) -> int:
    return max(_lasts_mono_ns(tables), default=0)


def _lasts_mono_ns(tables: Tables) -> list[int]:
    """Returns the time of the last reading of every device in every tier that has any."""
    found = []
    for source in map(as_source, tables.values()):
        for device in source.devices:
            parts = [part["mono_ns"] for part in source.parts(device, ["mono_ns"]) if part.num_rows]
            found += [max(pc.max(part).as_py() for part in parts)] if parts else []
    return found


def _length_s(window: Mapping[str, Any] | None) -> float | None:
    """Returns the length of a window of the manifest; None where its end was not seen."""
    start_ns, end_ns = (window or {}).get("start_mono_ns"), (window or {}).get("end_mono_ns")
    return None if start_ns is None or end_ns is None else ns_to_s(end_ns - start_ns)


def device_metrics(measured: Measured, device: Device) -> dict[str, float]:
    """Metrics of one device, as if it had been sampled alone; those of nodes and between devices are left out."""
    metrics = measured.only(device).summary().metrics
    return {name: value for name, value in metrics.items() if not name.startswith(_OF_SEVERAL)}


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
    devices: Mapping[Device, Mapping[str, float]]
    """Metrics of each as if it had been recorded alone."""
    host: Mapping[str, float]
    """Means of the host's gauges."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """The figures of a recording's folder.

        Raises:
            TelemetryError: A table or manifest in it cannot be read.
        """
        measured = load(path)
        return cls(
            path=path,
            command=tuple(measured.facts.get("command", ())),
            exit_code=measured.facts.get("exit_code"),
            window_s=measured.window_s,
            energy_j=measured.energy_j(),
            steps=measured.facts.get("steps") or {},
            window_why=str(measured.facts.get("window_why") or ""),
            command_s=_length_s(measured.facts.get("command_window") or measured.facts.get("window")),
            summary=measured.summary(),
            devices={device: device_metrics(measured, device) for device in measured.devices},
            host=measured.host_means(),
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
