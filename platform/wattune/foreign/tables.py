"""Logs as tables of texts, whatever their layout; the columns keep the names that the tool gave them."""

import csv
import io
import re
from collections import Counter
from typing import Final

import pyarrow as pa
import pyarrow.csv

from wattune.errors import PlanError
from wattune.foreign.columns import meaning

_LOOK: Final = 40
"""Lines at the front of a file among which its header is."""


def plain_text(content: bytes, where: str) -> str:
    """Decodes a file; of Windows' shells too, which write UTF-16.

    Raises:
        PlanError: It is empty, or no text.
    """
    encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise PlanError(f"{where} is no text; give the log itself, not packed and no picture of it")
    if not text.strip():
        raise PlanError(f"{where} is empty; see that the tool wrote to it")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def csv_table(text: str, where: str) -> tuple[pa.Table, list[str]] | None:
    """Reads comma, semicolon or tab separated values under a header that names a time; None without such a header.

    The header may come again. A row of another length is left out, and a note says so.

    Raises:
        PlanError: More than one row in a hundred is of another length, or a later header has other columns.
    """
    lines = text.split("\n", _LOOK + 1)[:_LOOK]
    for at, line in enumerate(lines):
        for mark in (",", ";", "\t"):
            names = [name.strip() for name in next(csv.reader([line], delimiter=mark, skipinitialspace=True), [])]
            if len(names) > 1 and _is_header(names):
                return _rows_under(text, at, line, names, mark, where)
    return None


def _is_header(names: list[str]) -> bool:
    said = [meaning(name, of_devices=True) for name in names]
    return any(one is not None and one[0] in ("time", "date") for one in said) and not any(
        re.fullmatch(r"[-+]?\d[\d.:/ -]*", name) for name in names
    )


def _rows_under(text: str, at: int, header: str, names: list[str], mark: str, where: str) -> tuple[pa.Table, list[str]]:
    body = "\n".join(text.split("\n")[at + 1 :])
    begin = header.split(mark)[0].strip()
    kept = [line for line in body.split("\n") if line.strip()]
    rows = [
        line for line in kept if not (begin and line.lstrip().startswith(begin)) or _other(line, names, mark, where)
    ]
    count = Counter(names)
    unique = [name if count[name] == 1 else f"{name} ({place})" for place, name in enumerate(names)]
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


def _other(line: str, names: list[str], mark: str, where: str) -> bool:
    """Refuses a later header of other columns; a row that only begins like one is a row."""
    again = [name.strip() for name in next(csv.reader([line], delimiter=mark, skipinitialspace=True))]
    if again == names:
        return False
    if _is_header(again):
        raise PlanError(
            f"{where}: its header comes again with other columns ({line.strip()[:80]}); give one file a table"
        )
    return True
