"""A recording read back: its tables, its window, and the figures of every device and of the whole."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from wattune.analysis.run_data import RunData, is_simulated, last_mono_ns
from wattune.analysis.signals.readings import HOST, Tables
from wattune.analysis.summary import IMPOSSIBLE, metrics_by_device, summarize
from wattune.metrics import METRICS
from wattune.recording.devices import OTHERS, apart
from wattune.recording.sensors import simulate_from_host
from wattune.recording.steps import steps_of_open
from wattune.run import Recorded, Run, RunStatus
from wattune.storage.files import with_calibrations
from wattune.storage.measured import MeasuredFolder, RecordingFolder
from wattune.storage.study import TrialFolder
from wattune.telemetry.files.coverage import measured_facts
from wattune.telemetry.files.segments import read_manifest, read_tables
from wattune.units import NS_PER_S, ns_to_s, s_to_ns

LAG_S: Final = 1.1
"""Most the ring may lag behind the other tiers while sampling: it is drained once a second."""


def load(path: Path, *, checked: bool = False) -> RunData:
    """Reads a trial's or recording's folder; of one that was killed or still records, all there is so far.

    Files that the caller has not `checked` are compared with their digests. Raises `TelemetryError` where a table or
    manifest in it cannot be read.
    """
    folder = RecordingFolder(path)
    facts = folder.facts()
    if facts.get("closed", True):
        if not checked:
            folder.check()
        return RunData.of(path)
    sampler_folder = folder.node_folder(facts["node"])
    (tables, manifest), _ = apart(*sampled(sampler_folder, simulated_device=facts["simulated_device"]), facts)
    read_until_ns = read_until_mono_ns(tables)
    spans, found = steps_of_open(path, facts, manifest, read_until_ns)
    manifests = {facts["node"]: with_calibrations(folder.storage, manifest)}
    data = RunData(tables=tables, spans=spans, manifests=manifests)
    return data.of_recording(facts | found, read_until_ns=read_until_ns)


def look(sampler_folder: Path, start_mono_ns: int) -> RunData:
    """Reads what a running sampler has written since a moment, of the devices that count; `others` names the rest.

    Its window ends `LAG_S` before the last reading, up to which all sensors are in; None where that leaves no window.
    """
    tables, _ = read_tables(sampler_folder, start_mono_ns=start_mono_ns)
    facts = RecordingFolder(sampler_folder.parents[1]).facts()
    (tables, manifest), (_, others) = apart(tables, read_manifest(sampler_folder), facts)
    known = {"node": manifest["node"], "others": sorted(others.get("devices", ()))}
    data = RunData(tables=tables, manifests={manifest["node"]: manifest}, facts=known)
    end_mono_ns = max(last_mono_ns(tables), default=0) - s_to_ns(LAG_S)
    if end_mono_ns <= start_mono_ns:
        return data
    window = {"start_mono_ns": start_mono_ns, "end_mono_ns": end_mono_ns}
    return data.of_recording({**known, "window": window})


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


def run_of(path: Path) -> Run:
    """Reads a recording as a run: what was stored when it ended; of one that was killed or still records, all so far.

    Raises `PlanError` where its run cannot be read. Raises `TelemetryError` where a table or manifest in it cannot be
    read.
    """
    run = TrialFolder(path).result() or measured_run(path)
    recorded = replace(run.recorded or Recorded(), place=str(path))
    return replace(run, trial_id=path.name, recorded=recorded)


def measured_run(path: Path) -> Run:
    """Computes what a recording's folder tells of its run.

    Raises `TelemetryError` where a table or manifest in it cannot be read.
    """
    data = load(path)
    facts, summary = data.facts, summarize(data)
    examined = None if IMPOSSIBLE in summary.tags else data.examined
    devices = {} if examined is None else metrics_by_device(data)
    try:
        start_wall_ns = round(datetime.fromisoformat(str(facts.get("recorded"))).timestamp() * NS_PER_S)
    except ValueError:  # made elsewhere
        start_wall_ns = 0
    recorded = Recorded(
        command=tuple(map(str, facts.get("command") or ())),
        exit_code=facts.get("exit_code"),
        ended="exit_code" in facts or bool(facts.get("closed", True)),
        machine=_machine(data),
        command_s=_length_s(facts.get("command_window") or facts.get("window")),
        window_s=data.window_s,
        window_why=str(facts.get("window_why") or ""),
        energy_j=None if examined is None else examined.energy_j,
        steps=facts.get("steps") or {},
        devices={"/".join(device): metrics for device, metrics in devices.items()},
        devices_why=str((facts.get("devices") or {}).get("why") or ""),
        others=_others(path, facts),
        host={} if examined is None else examined.host_means(),
    )
    return Run(
        trial_id=path.name,
        repeat=0,
        status=RunStatus.COMPLETED,
        metrics={name: value for name, value in summary.metrics.items() if name in METRICS},
        quality=summary.quality,
        quality_reasons=summary.quality_reasons,
        tags={**summary.tags, "nodes": str(facts.get("node") or "")},
        numbers=summary.numbers,
        start_wall_ns=start_wall_ns,
        end_wall_ns=start_wall_ns,
        recorded=recorded,
    )


def _others(path: Path, facts: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Returns the metrics of the devices that do not count, over the same window."""
    folder = MeasuredFolder(path / OTHERS)
    if not folder.path.is_dir():
        return {}
    data = RunData(tables=folder.stored(), manifests=folder.manifests()).of_recording(facts)
    return {"/".join(device): metrics for device, metrics in metrics_by_device(data).items()}


def _machine(data: RunData) -> dict[str, str]:
    """Describes nodes, devices, driver and sensors of a recording in words."""
    each = (manifest.get("devices", {}).items() for manifest in data.manifests.values())
    listed = [one for devices in each for key, one in devices if key != HOST]
    names = Counter(str(one.get("name") or "device") for one in listed)
    found = {
        "node": str(data.facts.get("node") or ", ".join(data.manifests)),
        "devices": ", ".join(f"{count} x {name}" for name, count in sorted(names.items())) or "none",
        "driver": ", ".join(sorted({str(one["driver"]) for one in listed if one.get("driver")})),
        "sensors": ", ".join(sorted({str(one["backend"]) for one in listed if one.get("backend")})),
    }
    return {name: text for name, text in found.items() if text}
