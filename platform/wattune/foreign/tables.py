"""Logs of lines as tables of texts: separated values, aligned columns, blocks of `name : value`.

The columns keep the names that the tool gave them. Times that a shell put before each line (`ts` of moreutils), or
between outputs (`date`), are a column like any other.
"""

import csv
import io
import re
from collections import Counter
from collections.abc import Sequence
from typing import Final, TypeAlias

import pyarrow as pa
import pyarrow.csv

from wattune.errors import PlanError
from wattune.foreign.columns import KEYS, UNITS, meaning
from wattune.foreign.times import STAMP

TextTable: TypeAlias = tuple[pa.Table, list[str]]
"""A table whose columns are all texts, and notes for whoever reads it."""

_LOOK: Final = 60
"""Lines at the front of a file among which its header is."""

_ALONE: Final = re.compile(rf"(?!.*:\d\d,)#?\s*({STAMP})\s*")  # a comma parts a time from its value
_BEFORE: Final = re.compile(rf"\[?((?>{STAMP}))\]?[ \t]+(?=[^,;\s])")

_SENSOR: Final = re.compile(rf"(?:({STAMP}),\s*)?([^,]*[A-Za-z][^,]*),([\d.]*),([A-Za-z% ]*),(?:ok|ns|nc|cr|nr)")


def plain_text(content: bytes, where: str) -> str:
    """Decodes a file; of Windows' shells too, which write UTF-16. Raises `PlanError` where it is empty, or no text."""
    encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise PlanError(f"{where} is no text; give the log itself, not packed and no picture of it")
    if not text.strip():
        raise PlanError(f"{where} is empty; see that the tool wrote to it")
    return _without_cut(text.replace("\r\n", "\n").replace("\r", "\n"))


def _without_cut(text: str) -> str:
    """Leaves out a last line that has no end and is shorter than any like it: a tool was killed inside of a number."""
    whole, _, last = text.rpartition("\n")
    before = [line for line in whole[-2000 * _LOOK :].split("\n")[-_LOOK:] if line.strip()]
    alike = [line for line in before if line[:12] == last[:12]] or before
    return f"{whole}\n" if len(alike) > 2 and 0 < len(last) < min(map(len, alike)) else text


def stamped(text: str) -> tuple[list[str], list[str]]:
    """Returns the lines that say anything, and the time before each: on the line, or alone on one above; else empty."""
    lines = [line for line in text.split("\n") if line.strip()]
    before = sum(_BEFORE.match(line) is not None for line in lines[:_LOOK]) * 2 > len(lines[:_LOOK])
    before = before and not _keys_of(lines[0].split("\t")) & {"time", "date"}  # a column's, with a tab behind it
    found, times, now = [], [], ""
    for line in lines:
        if (alone := _ALONE.fullmatch(line)) is not None:
            now = alone[1]
            continue
        if before and (own := _BEFORE.match(line)) is not None:
            now, line = own[1], line[own.end() :]
        found.append(line)
        times.append(now)
    return found, times if any(times) else []


def separated(lines: Sequence[str], times: Sequence[str], where: str) -> TextTable | None:
    """Reads comma, semicolon or tab separated values under a header; None without one.

    The header may come again. A row of another length is left out, and a note says so. Raises `PlanError` where more
    than one row in a hundred is of another length, or a later header has other columns.
    """
    for at, line in enumerate(lines[:_LOOK]):
        for mark in (",", ";", "\t"):
            names = _cells(line, mark)
            if len(names) > 1 and _is_header(names, has_time=bool(times)):
                return _under(lines[at + 1 :], times[at + 1 :], names, mark, where)
    return None


def _cells(line: str, mark: str) -> list[str]:
    return [name.strip() for name in next(csv.reader([line], delimiter=mark, skipinitialspace=True), [])]


def _keys_of(names: Sequence[str]) -> set[str]:
    return {one[0] for name in names if (one := meaning(name, of_devices=True)) is not None}


def _is_header(names: Sequence[str], *, has_time: bool) -> bool:
    found = _keys_of(names)
    of_devices = bool(found & {"device", "uuid"} and found - set(KEYS))  # its times may be left to `--interval`
    wanted = bool(found - {"name"}) if has_time else of_devices or bool(found & {"time", "date"})
    return wanted and not any(re.fullmatch(r"[-+]?\d[\d.:/ -]*", name) for name in names)


def _under(lines: Sequence[str], times: Sequence[str], names: list[str], mark: str, where: str) -> TextTable:
    begin = names[0]
    keep = [
        at
        for at, line in enumerate(lines)
        if not line.startswith("#") and (not line.lstrip(' "').startswith(begin) or _is_row(line, names, mark, where))
    ]
    rows = [f"{times[at]}{mark}{lines[at]}" if times else lines[at] for at in keep]
    names = ["timestamp", *names] if times else names
    count = Counter(names)
    unique = [name if count[name] == 1 and name else f"{name} #{place}" for place, name in enumerate(names)]
    bad: list[str] = []

    def skip(row: pyarrow.csv.InvalidRow) -> str:
        bad.append(row.text)
        return "skip"

    if not rows:
        raise PlanError(f"{where} has a header and no row; see that the tool ran")
    table = pyarrow.csv.read_csv(
        io.BytesIO("\n".join(rows).encode()),
        read_options=pyarrow.csv.ReadOptions(column_names=unique, use_threads=False),
        parse_options=pyarrow.csv.ParseOptions(delimiter=mark, invalid_row_handler=skip),
        convert_options=pyarrow.csv.ConvertOptions(column_types={name: pa.string() for name in unique}),
    )
    if len(bad) > max(1, len(rows) // 100) or not table.num_rows:
        raise PlanError(
            f"{where}: {len(bad)} of {len(rows)} rows have not the {len(names)} columns of the header, such as "
            f'"{bad[0][:80]}"; give one file a table'
        )
    return table, [f"{len(bad)} row of another length was left out"] if bad else []


def _is_row(line: str, names: list[str], mark: str, where: str) -> bool:
    """Tells a row that begins like the header from the header come again; refuses another header."""
    again = _cells(line, mark)
    if again == names:
        return False
    if _is_header(again, has_time=False):
        raise PlanError(
            f"{where}: its header comes again with other columns ({line.strip()[:80]}); give one file a table"
        )
    return True


def aligned(lines: Sequence[str], times: Sequence[str]) -> TextTable | None:
    """Reads columns under a header with `#`, and perhaps their units in a line below: dmon of nvidia-smi and dcgmi.

    `nvidia-smi dmon -o DT` prints `#Date Time gpu pwr` over `#YYYYMMDD HH:MM:SS Idx W`, `dcgmi dmon -e 155` prints
    `#Entity POWER` over `ID W`, and rows such as `GPU 0 71.5`.
    """
    names: list[str] = []
    rows: list[dict[str, str]] = []
    under_header = False
    for at, line in enumerate(lines):
        words = re.sub(r"\b(GPU|CPU|Switch|Instance|GPU-I) (\d+)", r"\1\2", line.strip().lstrip("#")).split()
        words = [word for word in words if not times or word.lower() not in ("date", "time", "yyyymmdd", "hh:mm:ss")]
        if under_header and len(words) == len(names) and not re.search(r"\d", "".join(words)):
            names = [
                f"{name} [{unit}]" if unit.lower() in UNITS else name for name, unit in zip(names, words, strict=True)
            ]
        elif line.lstrip().startswith("#") or not names:
            under_header = line.lstrip().startswith("#") and "device" in _keys_of(words)
            names = words if under_header else names
            continue
        elif len(words) == len(names):
            rows.append({**({"timestamp": times[at]} if times else {}), **dict(zip(names, words, strict=True))})
        under_header = False
    return table_of(rows) if rows else None


def blocks(lines: Sequence[str], times: Sequence[str]) -> TextTable | None:
    """Reads blocks of `name : value`, or `name | value`: `nvidia-smi -q`, `ipmitool dcmi power reading` and `sdr`.

    A block ends where its first name comes again, at a GPU's heading or line of `nvidia-smi -L`, and at a time. The
    first value of a name counts: nvidia-smi gives a module's power behind the device's.
    """
    rows: list[dict[str, str]] = [{}]
    shared: dict[str, str] = {}
    for at, line in enumerate(lines):
        time = times[at] if times else ""
        found = re.match(r"\s*([^:|]+?)\s*(?::\s|\|)(.*)", line)
        if heading := re.fullmatch(r"GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f:.]+)\s*", line):
            rows.append({**shared, "pci_bus_id": heading[1]})
        elif listed := re.fullmatch(r"\s*(?:GPU|MIG .+ Device) +(\d+): (.*)\(UUID: (.+)\)", line):
            rows.append(dict(zip(("index", "name", "uuid"), listed.groups(), strict=True)))
        elif found is not None and found[1] == "Timestamp":
            shared = {"timestamp": found[2].strip()}
            rows.append({})
        elif found is not None:
            # Of cells that with a unit is the value: `77h | ok | 7.1 | 220 Watts`, `220.000 | Watts | ok`.
            cells = re.sub(r"\s*\|\s*(?=Watts)", " ", found[2]).split("|")
            value = next((cell for cell in cells if re.search(r"\d \w", cell)), cells[-1]).strip()
            if found[1] == next(iter(rows[-1]), None) or (time and rows[-1].get("timestamp", time) != time):
                rows.append({})
            if time:
                rows[-1].setdefault("timestamp", time)
            rows[-1].setdefault(found[1], value)
    kept = [one for one in rows if any(meaning(name, of_devices=True) for name in one)]
    return table_of(kept) if kept else None


def sensors(lines: Sequence[str], times: Sequence[str]) -> TextTable | None:
    """Reads lines of `ipmitool -c sdr`, `name,value,unit,state`, with or without a time before; None for others."""
    found = [_SENSOR.fullmatch(line) for line in lines]
    if not all(found):
        return None
    rows = [one.groups("") for one in found if one]
    return blocks([f"{name} | {value} {unit}" for _, name, value, unit in rows], [*times] or [row[0] for row in rows])


def table_of(rows: Sequence[dict[str, str]]) -> TextTable:
    """Makes a table of rows: of the columns that mean anything, where there is one of values, else of all."""
    names = dict.fromkeys(name for row in rows for name in row)
    known = {name: found[0] for name in names if (found := meaning(name, of_devices=True)) is not None}
    kept = known if set(known.values()) - set(KEYS) else names
    return pa.table({name: pa.array([row.get(name) for row in rows], pa.string()) for name in kept}), []


def unheaded(lines: Sequence[str], where: str) -> TextTable | None:
    """Reads `nvidia-smi --format=csv,noheader`, whose columns tell by their values what they are; None for others.

    Only power is printed with decimals (`%.2f W`), only reasons as 0x and 16 digits. The power that changes is the
    draw; a number behind the time with a 0 among its values is the index. Raises `PlanError` where several columns may
    be the power, or none.
    """
    first = _cells(lines[0], ",")
    own = re.fullmatch(r"\d{4}/\d{2}/\d{2} \d{2}:\d{2}:\d{2}\.\d{3}", first[0]) is not None
    if (
        len(first) < 2
        or not re.fullmatch(STAMP, first[0])
        or not (own or any(re.search(r"\d W$", one) for one in first))
    ):
        return None
    columns = list(zip(*(_cells(line, ",") for line in lines[:2000] if line.count(",") == len(first) - 1), strict=True))
    names, numbers = ["timestamp"], False
    for values in columns[1:]:
        read = [value for value in values if re.search(r"\d", value)] or [""]
        kinds = {
            "power.draw": r"\d+\.\d\d( W)?",
            "clocks_event_reasons.active": r"0x[0-9a-fA-F]{16}",
            "uuid": r"GPU-[0-9a-f-]{8,}",
            "pci.bus_id": r"[0-9A-Fa-f]{8}:[0-9A-Fa-f:.]+",
            "index": r"\d|[0-3]\d" if not numbers and "0" in read else r"(?!)",
        }
        names.append(next((kind for kind, form in kinds.items() if all(re.fullmatch(form, one) for one in read)), ""))
        numbers |= all(re.fullmatch(r"[\d.]+( \w+)?", one) for one in read)
    powers = [place for place, name in enumerate(names) if name == "power.draw"]
    powers = [place for place in powers if len(set(columns[place])) > 1] or powers
    if len(powers) != 1:
        raise PlanError(
            f"{where}: {len(powers)} of its columns may be the power, and no header says which; log with a header, or "
            "put the names of --query-gpu before the first line"
        )
    names = ["" if name == "power.draw" and place != powers[0] else name for place, name in enumerate(names)]
    table, notes = _under(lines, [], names, ",", where)
    return table, [*notes, f"no header: column {powers[0] + 1} was taken as power.draw, by how it is printed"]
