"""Logs of documents as tables of texts: JSON of any nesting, Prometheus' text, metric files of MLflow, perf."""

import json
import re
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import pyarrow as pa
from prometheus_client.parser import text_string_to_metric_families

from wattune.errors import PlanError
from wattune.foreign.columns import named
from wattune.foreign.tables import TextTable, table_of

_LISTS: Final = {
    "result", "metrics", "MetricValues", "Members", "PowerControl", "samples", "data", "readings", "history", "rows",
    "events", "gpu_data", "values",
}  # fmt: skip
"""Keys of lists whose entries are rows: of Prometheus, MLflow, Redfish, amd-smi, and scripts around them."""

_BETWEEN: Final = re.compile(r"[ \t\n,]*")
_DEVICE_KEY: Final = re.compile(r"(card|gpu|device)_?\d+", re.IGNORECASE)


def documents(text: str, where: str) -> list[Any] | None:
    """Parses JSON: one document, one a line, or several behind one another, the last perhaps cut; None of other text.

    Raises `PlanError` where it begins like JSON and is none.
    """
    found: list[Any] = []
    decoder, text, at = json.JSONDecoder(), text.strip(), 0
    if not text.startswith(("{", "[")):
        return None
    while at < len(text):
        try:
            one, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            if found:
                break  # a tool that was killed
            raise PlanError(f"{where} begins like JSON and is none: {error}; give it whole") from error
        found.append(one)
        at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]  # it fits anywhere
    return found


def rows_of(value: Any, shared: dict[str, str] | None = None) -> Iterator[dict[str, str]]:
    """Yields the rows of a document: what nests has one name with dots, what is around a list is in all its rows."""
    shared = shared or {}
    if isinstance(value, list):
        for one in value:
            yield from rows_of(one, shared)
        return
    if not isinstance(value, dict):
        return
    if isinstance(labels := value.get("metric"), dict):  # Prometheus: labels, and pairs of time and value
        name = str(labels.get("__name__", "value"))
        own = {key: str(one) for key, one in labels.items() if key != "__name__"}
        for at, read in value.get("values") or filter(None, [value.get("value")]):
            yield own | {"time": str(at), name: str(read)}
        return
    own, below = dict(shared), []
    for key, one in value.items():
        nests = isinstance(one, dict) or (isinstance(one, list) and any(isinstance(each, dict) for each in one))
        if key in _LISTS and nests:
            below.append(one[:1] if key == "PowerControl" else one)
        elif _DEVICE_KEY.fullmatch(key) and isinstance(one, dict):
            below.append({"device": key, **one})
        else:
            own |= dict(_flat(key, one))
    if not below:
        yield own
    for one in below:
        yield from rows_of(one, own)


def _flat(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and {"value", "unit"} <= value.keys():
        yield key, f"{value['value']} {value['unit']}"
    elif isinstance(value, dict):
        for name, one in value.items():
            yield from _flat(f"{key}.{name}", one)
    elif value is not None and not isinstance(value, list):
        yield key, str(value)


def widened(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Makes a column of each key where rows are of one key and its value, as MLflow and Redfish reports have them."""
    words = {name: named(name)[0] for row in rows[:1] for name in row}
    key, value, time = (
        next((name for name, word in words.items() if re.fullmatch(form, word)), None)
        for form in ("key|metric(_id)?|sensor|field", "(metric_)?value|reading", "time.*")
    )
    if time is not None and (key is not None or re.fullmatch(r"\d+(\.\d+)?", rows[0][time])):  # one key after another
        rows = sorted(rows, key=lambda row: row.get(time, "").rjust(20))
    if key is None or value is None:
        return list(rows)
    return [
        {name: one for name, one in row.items() if name != value} | {row.get(key, ""): row.get(value, "")}
        for row in rows
    ]


def exposition(text: str, times: Sequence[str], lines: Sequence[str]) -> TextTable | None:
    """Reads Prometheus' text, with times on its lines (milliseconds) or between scrapes; None of other text."""
    if not re.search(r"^(# (TYPE|HELP) \w+ |\w+\{\w+=\")", text, re.MULTILINE):
        return None
    rows = []
    for at, line in enumerate(lines):
        if line.startswith("#") or not re.match(r"[A-Za-z_:][\w:]*[{ ]", line):
            continue
        try:
            (family,) = text_string_to_metric_families(line + "\n")
        except ValueError:
            continue  # cut, or of something else
        for sample in family.samples:
            now = str(sample.timestamp) if sample.timestamp is not None else times[at] if times else None
            rows.append({**sample.labels, **({} if now is None else {"time": now}), sample.name: repr(sample.value)})
    return table_of(rows) if rows else None


_PERF: Final = re.compile(
    r"\s*(?P<time>\d+\.\d+)[,;\s]+(?:S\d+\S*[,;\s]+\d+[,;\s]+)?(?P<joules>\d+(?:\.\d+)?|<[\w ]+>)[,;\s]+Joules[,;\s]+"
    r"\S*energy-(?P<what>pkg|ram|psys)\S*"
)
_PERF_NAMES: Final = {"pkg": "package_energy", "ram": "dram_energy", "psys": "node_energy"}


def perf(lines: Sequence[str]) -> TextTable | None:
    """Reads `perf stat -I -a -e power/energy-pkg/`, with `-x,` or without: joules of each interval."""
    total: dict[str, float] = {}
    rows = [dict.fromkeys(("time", *(f"{name} [J]" for name in _PERF_NAMES.values())), "0")]
    for found in filter(None, map(_PERF.match, lines)):
        name = f"{_PERF_NAMES[found['what']]} [J]"
        if rows[-1]["time"] != found["time"]:
            rows.append({"time": found["time"]})
        if not found["joules"].startswith("<"):
            total[name] = total.get(name, 0.0) + float(found["joules"])
            rows[-1][name] = repr(total[name])
    if len(rows) > 2 and float(rows[1]["time"]) > 1.5 * (float(rows[2]["time"]) - float(rows[1]["time"])):
        del rows[0]  # its beginning is lost: the first interval is not from the start
    kept = [{name: text for name, text in row.items() if name == "time" or name in total} for row in rows]
    return table_of(kept) if total else None


def metric_file(lines: Sequence[str], name: str) -> TextTable | None:
    """Reads a metric of MLflow's file store, lines of `milliseconds value step` in a file of the metric's name."""
    if not all(re.fullmatch(r"\d{13} \S+( \d+)?", line) for line in lines[:20]):
        return None
    return table_of([dict(zip(("time", name), line.split(), strict=False)) for line in lines])


def emissions(table: pa.Table, where: str) -> pa.Table:
    """Gives CodeCarbon's totals a row at which they began: it writes them at the end, `duration` seconds later.

    Raises `PlanError` where it has several runs, or its times cannot be read.
    """
    rows = table.to_pylist()
    try:
        runs = {row["run_id"] for row in rows}
        start = datetime.fromisoformat(rows[0]["timestamp"]) - timedelta(seconds=float(rows[0]["duration"]))
        none = {name for name in table.column_names if name.endswith("_energy") and float(rows[-1][name] or 0) == 0}
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise PlanError(f"{where} is not as CodeCarbon writes it: {error}; give the file as it wrote it") from error
    if len(runs) > 1:
        raise PlanError(f"{where} has {len(runs)} runs; keep the rows of one run_id")
    zero = {name: "0" if name.endswith("_energy") else text for name, text in rows[0].items()}
    whole = pa.Table.from_pylist([zero | {"timestamp": start.isoformat(timespec="seconds")}, *rows], table.schema)
    # Its power is of the last interval alone; an energy of 0 is of a device that it did not see.
    kept = [name for name in table.column_names if not name.endswith("_power") and name not in none]
    return whole.select(kept).rename_columns([f"{name} [kWh]" if name.endswith("_energy") else name for name in kept])
