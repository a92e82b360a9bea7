"""Formats that are known: each is recognised from the content of a file.

Their shapes are those of nvidia-smi(1), `dcgmi dmon` (dcgm_fields.cpp has its short names), dcgm-exporter and the HTTP
API of Prometheus, amd-smi and rocm-smi, Zeus, CodeCarbon, Weights & Biases, MLflow, perf-stat(1), ipmitool(1), and the
Power, EnvironmentMetrics and MetricReport resources of Redfish.
"""

import hashlib
import re
from pathlib import Path
from typing import Final

from wattune.errors import PlanError
from wattune.foreign.columns import named
from wattune.foreign.documents import documents, emissions, exposition, metric_file, perf, rows_of, widened
from wattune.foreign.sampled import ForeignLog, sampled_of
from wattune.foreign.tables import (
    TextTable,
    aligned,
    blocks,
    plain_text,
    sensors,
    separated,
    stamped,
    table_of,
    unheaded,
)

KNOWN: Final = (
    "nvidia-smi (csv, dmon, -q), dcgmi dmon, dcgm-exporter and Prometheus, amd-smi, rocm-smi, Zeus, CodeCarbon, W&B, "
    "MLflow, perf stat, ipmitool, Redfish, CSV of a PDU"
)

_TOOLS: Final = {
    "CodeCarbon": r"country_name|emissions_rate",
    "W&B": r"_runtime|system\.gpu|system/gpu\.|_wandb",
    "MLflow": r"system/|gpu_\d+_\w+_(watts|percentage|megabytes)",
    "dcgm-exporter": r"DCGM_FI_",
    "Redfish": r"PowerConsumedWatts|PowerWatts|MetricId|@odata",
    "rocm-smi": r"Graphics Package Power",
    "amd-smi": r"socket_power|power_usage|hotspot|gfx_0",
    "dcgmi": r"Entity|TOTEC",
    "perf": r"(package|dram|node)_energy",
    "ipmitool": r"Instantaneous power reading|Pwr Consumption|IPMI",
    "nvidia-smi": r"power\.draw|[Pp]ower Draw|clocks\.|temperature\.gpu|\bpwr\b|gtemp",
    "Zeus": r"\b(gpu|GPU)\d",
    "PDU": r"[Oo]utlet|pdu|PDU|[Ii]nlet",
}
"""Tools by words of their columns; the first that fits. It is told, and changes nothing."""

MOST_BYTES: Final = 2 * 2**30
"""Largest file: a day of eight GPUs at ten readings a second has some 700 MB."""


def read_log(path: Path, zone: str | None, interval_s: float | None = None) -> ForeignLog:
    """Reads a log. Raises `PlanError` where it cannot be read, or is none of a format that is known."""
    where = path.name
    try:
        if not path.is_file():
            raise PlanError(f"{path} is not a file; give a log that another tool wrote, or MLflow's folder of a run")
        if path.stat().st_size > MOST_BYTES:
            raise PlanError(f"{path} has more than {MOST_BYTES / 2**30:.0f} GiB; cut it to the run")
        content = path.read_bytes()
        text = plain_text(content, where)
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}") from error
    found = _table(text, where)
    if found is None:
        first = next(line for line in text.split("\n") if line.strip()).strip()
        raise PlanError(f'{where} is of no format that is known; it begins "{first[:80]}"; known are: {KNOWN}')
    table, notes = found
    said = " ".join(table.column_names)
    tool = next((tool for tool, words in _TOOLS.items() if re.search(words, said)), "table")
    if tool == "CodeCarbon":
        table = emissions(table, where)
    log = sampled_of(table, where, tool, notes, zone, interval_s)
    log.digest = hashlib.sha256(said.encode() + content).hexdigest()  # a metric of MLflow has its name in the file's
    return log


def files_of(path: Path) -> list[Path]:
    """Returns a file, or for the folder of a run of MLflow, or one of its metrics, the files of its metrics."""
    folder = path / "metrics" if (path / "metrics").is_dir() else path
    below = folder.rglob("*") if "metrics" in folder.absolute().parts else ()
    return sorted(one for one in below if one.is_file()) or [path]


def _table(text: str, where: str) -> TextTable | None:
    if (parsed := documents(text, where)) is not None:
        rows = widened([row for one in parsed for row in rows_of(one)])
        return table_of(rows) if rows else None
    lines, times = stamped(text)
    if not lines:
        return None
    if (
        found := metric_file(text.strip().split("\n"), where)
        or perf(lines)
        or sensors(lines, times)
        or exposition(text, times, lines)
    ) is not None:
        return found
    if (found := separated(lines, times, where)) is not None:
        table, notes = found
        keys = {named(name)[0] for name in table.column_names}
        if {"key", "value"} <= keys or {"metric", "value"} <= keys:
            return table_of(widened(table.to_pylist()))[0], notes
        return found
    return aligned(lines, times) or unheaded(lines, where) or blocks(lines, times)
