"""A recording of foreign logs: files joined by node, and written as a sampler's would be."""

import shutil
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from wattune.analysis.signals.sensor_check import AVERAGE_S
from wattune.errors import ImpossibleValueError, PlanError
from wattune.foreign.formats import files_of, read_log
from wattune.foreign.sampled import ForeignLog, Sampled, SampledValues, plain_name, tier_of
from wattune.foreign.steps import steps_beside
from wattune.recording.recording import measured_run, run_of
from wattune.recording.window import STEADY, parse_window
from wattune.run import Run
from wattune.schema import MOST_SPAN_NS, table_schema
from wattune.storage.files import storage_path
from wattune.storage.measured import RecordingFolder
from wattune.storage.study import TrialFolder
from wattune.telemetry.files.coverage import measured_facts
from wattune.telemetry.host import HOST
from wattune.units import NS_PER_S, ns_to_s
from wattune.version import __version__

NODE: Final = "node0"
"""Node of a log that names none."""

_POWERS: Final = ("power_instant_w", "power_average_w", "node_power_w", "package_power_w")


def import_logs(
    files: Sequence[Path],
    *,
    storage: str | None = None,
    name: str | None = None,
    nodes: Sequence[str] = (),
    timezone: str | None = None,
    interval_s: float | None = None,
    steps: Path | None = None,
    window: str = STEADY,
    tokens_per_step: float | None = None,
) -> tuple[Run, dict[str, Any]]:
    """Makes a recording of logs that other tools wrote.

    Returns the recording, and what was read of the logs: `imported`, a file each, and `energies`, what the logs say of
    energy by themselves. Raises `PlanError`: a file cannot be read, is of no known format or contradicts another, or
    the name is taken.

    Args:
        files: The logs, of one run: of several sources, several nodes, or one after another. A folder is that of a
            run of MLflow. Those that have no readings are left out where others have some.
        storage: Folder recordings are kept in, under `recordings`; see `wattune.storage.files.find_storage`.
        name: The recording's name; None is the first file's.
        nodes: Node of the logs that name none, one for all or one a file; none is `NODE`, or each file's own name where
            they are of several.
        timezone: Zone of times without one, such as `Europe/Berlin`; None is UTC.
        interval_s: Time between the readings of logs that have no times.
        steps: The log of the training run, whose steps are then the recording's (`wattune.foreign.steps`).
        window: The part that the figures are of, where there are steps (`wattune.recording.window.parse_window`).
        tokens_per_step: Tokens of a step over all ranks, for a log that does not tell them.
    """
    given, files = files, [one for path in files for one in files_of(path)]
    if len(nodes) > 1 and len(nodes) != len(files):
        raise PlanError(f"--node: got {len(nodes)} for {len(files)} files, allowed: one, or one a file")
    wrong = [one for one in nodes if plain_name(one) != one]
    if wrong:
        raise PlanError(f'--node: got "{wrong[0]}", allowed: letters, digits, ".", "_" and "-"')
    logs, problems, seen = [], [], set[str]()
    for file in files:
        try:
            logs.append(read_log(file, timezone, interval_s))
            if logs[-1].digest in seen:
                raise PlanError(f"{file.name} was given twice; give each log once")
            seen.add(logs[-1].digest)
        except PlanError as error:
            problems.append(str(error))
    if problems or not any(log.sampled for log in logs):
        raise PlanError("\n".join(problems or [log.nothing for log in logs]))
    nodes = list(nodes) * len(files) if len(nodes) == 1 else nodes
    sampled, facts = _joined(logs, nodes or _nodes(logs, files))
    tables, manifests = _tables(sampled), _manifests(sampled, facts, logs)
    facts_of_all: dict[str, Any] = {
        "kind": "recording",
        "command": [],
        "backends": sorted({log.format for log in logs if log.sampled}),
        "simulated_device": None,
        "node": min(tables),
        "recorded": datetime.fromtimestamp(ns_to_s(min(int(one[1][0]) for one in sampled.values())), UTC).isoformat(),
        "wattune": __version__,
        "closed": True,
        "window": _window(sampled, ", ".join(log.file for log in logs)),
        "window_why": "from the first reading of power to the last",
        "imported": [_told(log) for log in logs],
        "energies": energies(sampled),
    }
    spans = None
    if steps is not None:
        parse_window(window)
        facts_of_all["steps_asked"] = {"source": "auto", "window": window, "tokens_per_step": tokens_per_step}
        names = {one: [name for name in each["devices"] if name != HOST] for one, each in manifests.items()}
        has_date = not any("date" in note for log in logs for note in log.notes)
        spans, found = steps_beside(steps, facts_of_all, names, timezone, has_date=has_date)
        facts_of_all |= found
    folder = RecordingFolder.create(storage_path(storage), name or plain_name(given[0].absolute().stem) or "imported")
    try:
        for one, each in tables.items():
            folder.write_telemetry(one, each, manifests[one] | {"measured": measured_facts(each)})
        if spans is not None:
            folder.write_spans(spans)
        folder.write_facts(facts_of_all)
        TrialFolder(folder.path).write_result(measured_run(folder.path))
    except BaseException as error:  # such as a full disk: nothing stays
        shutil.rmtree(folder.path)
        if isinstance(error, ImpossibleValueError):
            raise PlanError(f"{', '.join(log.file for log in logs)}: {error}") from error
        raise
    kept = folder.facts()
    return run_of(folder.path), {key: kept[key] for key in ("imported", "energies")}


def _joined(logs: Sequence[ForeignLog], nodes: Sequence[str]) -> tuple[Sampled, dict[tuple[str, str], dict[str, Any]]]:
    """Joins the logs of a node: other values, the same ones one after another, or from another tool."""
    found: Sampled = {}
    facts: dict[tuple[str, str], dict[str, Any]] = {}
    for log, here in zip(logs, nodes, strict=True):
        for (own, device, column), series in log.sampled.items():
            key = own or here, device, column
            if key in found and _overlap(found[key], series):
                if series[2].size <= found[key][2].size:
                    log.notes.append(f"{device}: {column} is taken from another file, which has more readings")
                    continue
                del found[key]
            parts = sorted([found[key], series] if key in found else [series], key=lambda one: int(one[0][0]))
            mono, wall, values = (np.concatenate([one[place] for one in parts]) for place in range(3))
            found[key] = mono, wall, values
        facts |= {(own or here, device): {"backend": log.format, **known} for (own, device), known in log.facts.items()}
    return found, facts


def _nodes(logs: Sequence[ForeignLog], files: Sequence[Path]) -> list[str]:
    """Names the node of each log that names none.

    It is the one that another log names, else `NODE`; where logs of one tool have the same devices at the same times
    they are of several nodes, each of its file's name, or of its folder's where files of two folders have one name.
    Raises `PlanError` where logs of several tools do, and no identifier says whether their devices are the same; or
    neither name tells the nodes apart.
    """
    named = {node for log in logs for node, _, _ in log.sampled if node}
    usual, apart = (min(named) if len(named) == 1 else NODE), False
    own = [plain_name(file.stem) for file in files]
    if len(set(own)) < len(own):
        own = [plain_name(file.absolute().parent.name) for file in files]
    for (other, theirs), (one, mine) in combinations(zip(logs, own, strict=True), 2):
        same = [
            key
            for key in sorted(one.sampled.keys() & other.sampled.keys())
            if not key[0] and _overlap(one.sampled[key], other.sampled[key])
        ]
        known = [(one.facts.get(key[:2], {}).get("uuid"), other.facts.get(key[:2], {}).get("uuid")) for key in same]
        if not same or all(a and a == b for a, b in known):
            continue
        if not mine or mine == theirs or (one.format != other.format and not all(a and b for a, b in known)):
            raise PlanError(
                f"{other.file} and {one.file} both have {same[0][2]} of {same[0][1]} at the same times; give --node A "
                "where they are of one node, --node A --node B where they are of two"
            )
        apart = True
    return own if apart else [usual] * len(logs)


def _overlap(one: SampledValues, other: SampledValues) -> bool:
    return bool(one[0][0] <= other[0][-1] and other[0][0] <= one[0][-1])


def _tables(sampled: Sampled) -> dict[str, dict[str, pa.Table]]:
    """Returns tables by node and tier; values read at one time are one row."""
    groups: dict[tuple[str, str], dict[str, dict[str, SampledValues]]] = {}
    for (node, device, column), series in sampled.items():
        groups.setdefault((node, tier_of(device, column)), {}).setdefault(device, {})[column] = series
    found: dict[str, dict[str, pa.Table]] = {}
    for (node, tier), devices in groups.items():
        parts = [_rows(node, device, tier, columns) for device, columns in devices.items()]
        found.setdefault(node, {})[tier] = pa.concat_tables(parts).unify_dictionaries()
    return found


def _rows(node: str, device: str, tier: str, columns: Mapping[str, SampledValues]) -> pa.Table:
    schema = table_schema(tier, backend="imported", simulated=False)
    mono_ns, first = np.unique(np.concatenate([one[0] for one in columns.values()]), return_index=True)
    wall = np.concatenate([one[1] for one in columns.values()])[first]
    arrays = {"node": [node] * len(mono_ns), "device": [device] * len(mono_ns), "mono_ns": mono_ns, "wall_ns": wall}
    kept = [field for field in schema if field.name in (*arrays, *columns)]
    for name, (times_ns, _, values) in columns.items():
        whole = np.full(len(mono_ns), np.nan)
        read = ~np.isnan(values)  # of several at one time the first counts
        whole[np.searchsorted(mono_ns, times_ns[read][::-1])] = values[read][::-1]
        missing = np.isnan(whole)
        kind = schema.field(name).type
        number = np.where(missing, 0, whole).astype(kind.to_pandas_dtype())
        arrays[name] = pa.array(number, kind, mask=missing)
    return pa.table(
        [pa.array(arrays[field.name], field.type) for field in kept], schema=pa.schema(kept, schema.metadata)
    )


def _manifests(
    sampled: Sampled, facts: Mapping[tuple[str, str], Mapping[str, Any]], logs: Sequence[ForeignLog]
) -> dict[str, dict[str, Any]]:
    clock = {"steps": [step for log in logs for step in log.clock_steps]}
    formats = ", ".join(sorted({log.format for log in logs if log.sampled}))
    devices: dict[str, dict[str, Any]] = {}
    for node, device, _ in sampled:
        told = {"device": device, "backend": formats, **facts.get((node, device), {})}
        devices.setdefault(node, {})[device] = told
    common = {"simulated": False, "closed": True, "tiers": {}, "clock": clock}
    return {node: {"node": node, "devices": each, **common} for node, each in devices.items()}


def _window(sampled: Sampled, where: str) -> dict[str, int]:
    """Returns the time over which power was read; of any value where it was not."""
    powers = [series for (_, _, name), series in sampled.items() if name in (*_POWERS, "energy_j")]
    every = [times[~np.isnan(values)] for times, _, values in powers]
    whole = [times for times, _, _ in sampled.values()]
    if max(int(one.max()) for one in whole) - min(int(one.min()) for one in whole) > MOST_SPAN_NS:
        raise PlanError(f"{where}: times more than {MOST_SPAN_NS / NS_PER_S / 86400:.0f} days apart; cut it to the run")
    read = [times for times in every if len(times)] or whole
    start, end = min(int(one.min()) for one in read), max(int(one.max()) for one in read)
    if end <= start:
        raise PlanError(f"{where}: a single reading; give a log of a run, with two or more")
    return {"start_mono_ns": start, "end_mono_ns": end}


def energies(sampled: Sampled) -> dict[str, dict[str, float]]:
    """Returns what a log says of energy by itself, by node, device and column: under power, or a counter's rise.

    `finest_window_s` is the shortest time over which its power has a peak: two readings, and two of a driver's means.
    """
    found = {}
    for (node, device, column), (times_ns, _, values) in sorted(sampled.items()):
        read = ~np.isnan(values)
        time_s, value = (times_ns[read] - times_ns[0]) / NS_PER_S, values[read]
        if len(value) < 2 or column not in (*_POWERS, "dram_power_w", "energy_j"):
            continue
        rise = np.diff(value)
        energy_j = float(rise[rise > 0].sum()) if column == "energy_j" else float(np.trapezoid(value, time_s))
        one = {"energy_j": energy_j, "span_s": float(time_s[-1] - time_s[0]), "num_readings": len(value)}
        if column != "energy_j":
            interval_s = float(np.median(np.diff(time_s)))
            one["finest_window_s"] = 2 * max(interval_s, AVERAGE_S if column == "power_average_w" else 0.0)
        found[f"{node}/{device}/{column}"] = one
    return found


def _told(log: ForeignLog) -> dict[str, Any]:
    columns = sorted({column for _, _, column in log.sampled})
    return {
        "file": log.file, "format": log.format, "num_rows": log.rows, "columns": columns, "left_out": log.left_out,
        "notes": log.notes,
    }  # fmt: skip
