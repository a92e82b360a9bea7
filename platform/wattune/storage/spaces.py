"""The spaces of a study: the one that holds, every one before it, and the table of all combinations.

`study.yaml` is the space that holds. It names its number and the SHA-256 of the files that came with it. A change of
the space writes, in this order,

1. `space.<n>.yaml`, the new space, and `candidates.next.parquet`, its combinations;
2. `study.yaml` in one rename: from now on the new space holds;
3. `candidates.parquet`, by renaming `candidates.next.parquet`.

A process that is killed before 2 leaves the old space, after 2 the new one: until 3 the table is read from where its
digest is found. A YAML file has its own digest in its first line, `# digest: <SHA-256 of all bytes after this line>`.
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import yaml

from wattune.deadline import read_bounded
from wattune.errors import PlanError, TelemetryError
from wattune.run import Run
from wattune.storage.digests import DigestError, body_of, with_digest_line
from wattune.storage.documents import MOST_BYTES, parse_yaml
from wattune.storage.files import make_lasting, write_whole
from wattune.storage.format import FORMAT, FORMAT_KEY, FormatError, without_format
from wattune.storage.parquet import encoded, read_table
from wattune.storage.space_changes import changes

STUDY: Final = "study.yaml"
CANDIDATES: Final = "candidates.parquet"
NEXT_CANDIDATES: Final = "candidates.next.parquet"
RECORD: Final = "record"
"""Key of `study.yaml` that holds the space's number and the digests; wattune writes it, and a space ignores it."""

SPACE_COLUMN: Final = "space"
"""Column of the table of combinations: the number of the space that a trial came with."""

REMOVED: Final = "removed"
"""Status of trials that the space does not list any more; what was measured of them stays and is ranked."""

_RESTORE: Final = "restore it, or remove the study's folder and run the space again"
_ANEW: Final = "`wattune run` of the space writes it anew"


def space_name(number: int) -> str:
    """Returns the name of the file that keeps a space."""
    return f"space.{number}.yaml"


def space_number(result: Run) -> int:
    """Returns the number of the space that held when a trial ran; 1 where nobody says."""
    return result.numbers.space or 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSpace:
    """One space of a study, as a file keeps it."""

    number: int
    """1 for the space that the study was begun with."""
    document: dict[str, Any]
    files: Mapping[str, str]
    """SHA-256 of the files that came with it, by name."""


def read_space(path: Path) -> StoredSpace:
    """Reads a `study.yaml`, or a `space.<n>.yaml`.

    Raises `PlanError`: it cannot be read, does not agree with its digest, is not a mapping, or is of another format.
    """
    try:
        return space_of(read_bounded(path, MOST_BYTES), path)
    except (OSError, ValueError) as error:
        raise PlanError(f"{path} cannot be read: {' '.join(str(error).split())}; {_RESTORE}") from error


def space_of(content: bytes, where: Path | str) -> StoredSpace:
    """Reads the content of a `study.yaml`. Raises `PlanError`: see `read_space`."""
    try:
        document = deepcopy(_document_of(content))
    except DigestError as error:
        raise PlanError(
            f"{where}: {error}; copy the space.<n>.yaml of the highest number over it, or remove "
            "its first line to take it as it is"
        ) from None
    except ValueError as error:
        raise PlanError(f"{where} cannot be read: {' '.join(str(error).split())}; {_RESTORE}") from error
    if not isinstance(document, dict):
        raise PlanError(f"{where} holds no search space; {_RESTORE}")
    try:
        space = without_format(document)
    except FormatError as error:
        raise PlanError(f"{where}: {error}") from None
    record = space.pop(RECORD, None)
    number, files = (record.get("space", 1), record.get("files", {})) if isinstance(record, dict) else (1, {})
    if type(number) is not int or number < 1 or not isinstance(files, dict):
        raise PlanError(f"{where}: {RECORD} holds no number of a space; {_RESTORE}")
    return StoredSpace(number=number, document=space, files=files)


@lru_cache(maxsize=16)
def _document_of(content: bytes) -> Any:
    """Reads a space's file. A command asks for the same few again and again, and YAML takes 5 to 10 ms each time."""
    return parse_yaml(body_of(content).decode())


def all_spaces(folder: Path) -> list[StoredSpace]:
    """Reads every space of a study, the one it was begun with first.

    Raises `PlanError`: one cannot be read, or does not agree with its digest.
    """
    current = read_space(folder / STUDY)
    earlier = []
    for number in range(1, current.number):
        path = folder / space_name(number)
        found = read_space(path)
        if found.number != number or current.files.get(path.name, _sha256(path)) != _sha256(path):
            raise PlanError(f"{path} does not agree with its digest in {STUDY}: damaged, or edited; restore it")
        earlier.append(found)
    return [*earlier, current]


def commit(folder: Path, document: Mapping[str, Any], rows: Sequence[Mapping[str, Any]] | None = None) -> StoredSpace:
    """Makes a space the one that holds, with the table of its combinations. A crash leaves the old one or the new.

    `document` has every default, and that it may follow the stored one was checked. `rows` are all its combinations;
    None leaves the table as it is. Raises `PlanError`: the stored space cannot be read.
    """
    stored = read_space(folder / STUDY) if (folder / STUDY).exists() else None
    number = 1 if stored is None else stored.number
    if stored is not None:
        finish(folder)
        if changes(stored.document, document):
            number += 1
    if stored is None or number > stored.number or not (folder / space_name(number)).exists():
        _write_space(folder / space_name(number), number, document)
    files = {name: digest for name, digest in (stored.files if stored else {}).items() if name == CANDIDATES}
    files |= {path.name: _sha256(path) for n in range(1, number + 1) if (path := folder / space_name(n)).exists()}
    if rows is not None:
        earlier: list[dict[str, Any]] = []
        with suppress(PlanError):  # where it is damaged, it is written anew
            earlier = candidates(folder)
        table = encoded(pa.Table.from_pylist(grown(earlier, rows, number))).to_pybytes()
        files[CANDIDATES] = hashlib.sha256(table).hexdigest()
        if not (folder / CANDIDATES).exists() or _sha256(folder / CANDIDATES) != files[CANDIDATES]:
            write_whole(folder / NEXT_CANDIDATES, table)
    _write_space(folder / STUDY, number, document, files)
    finish(folder)
    return read_space(folder / STUDY)


def finish(folder: Path) -> None:
    """Puts the table of combinations in its place where a process was killed before it could."""
    following, wanted = folder / NEXT_CANDIDATES, read_space(folder / STUDY).files.get(CANDIDATES)
    if not following.exists():
        return
    if wanted == _sha256(following):
        following.replace(folder / CANDIDATES)
        make_lasting(folder)
    else:  # of a space that never held
        following.unlink()


def grown(known: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], number: int) -> list[dict[str, Any]]:
    """Joins the combinations of a space with those of the spaces before it.

    Returns `rows`, each with the number of the space that its trial came with; then the trials that earlier spaces had
    and this one has not, with the status `removed`.
    """
    first = {row["trial_id"]: row.get(SPACE_COLUMN) or 1 for row in known if row.get("trial_id")}
    now = [{**row, SPACE_COLUMN: first.get(row.get("trial_id"), number)} for row in rows]
    left = {row.get("trial_id") for row in rows}
    gone = [row for row in known if row.get("trial_id") and row["trial_id"] not in left]
    reason = f"not in space {number}; what was measured of it counts"
    removed = [{**row, "status": REMOVED, "reason": reason, SPACE_COLUMN: first[row["trial_id"]]} for row in gone]
    return [
        *now,
        *(
            {**row, "reason": old["reason"]} if old["status"] == REMOVED else row
            for row, old in zip(removed, gone, strict=True)
        ),
    ]


_TEXTS: Final = ("trial_id", "status", "reason")


def candidates(folder: Path) -> list[dict[str, Any]]:
    """Reads every combination of a study's spaces; empty before the table was written.

    Raises `PlanError`: the table cannot be read, or does not agree with its digest.
    """
    table = candidates_table(folder)
    return [] if table is None else list(table.to_pylist())


def candidates_table(folder: Path, *columns: str) -> pa.Table | None:
    """Reads the table of every combination of a study's spaces, or some columns, as written; None before it was.

    Raises `PlanError`: the table cannot be read, or does not agree with its digest.
    """
    for _ in range(2):  # a study that runs may change its space between two of these lines
        wanted = read_space(folder / STUDY).files.get(CANDIDATES) if (folder / STUDY).exists() else None
        paths = [path for path in (folder / CANDIDATES, folder / NEXT_CANDIDATES) if path.is_file()]
        agreeing = [path for path in paths if wanted in (None, _sha256(path))]
        if agreeing or (not paths and wanted is None):
            break
    if not paths and wanted is None:
        return None
    if not agreeing:
        why = "does not agree with its digest: damaged, or edited" if paths else "is missing"
        raise PlanError(f"{folder / CANDIDATES} {why}; {_ANEW}")
    try:
        table = read_table(agreeing[0], columns=columns or None)
        for one in table.schema:
            if one.name in _TEXTS and not (pa.types.is_string(one.type) or pa.types.is_null(one.type)):
                raise TelemetryError(f"{agreeing[0]}: {one.name} is {one.type}, allowed: text")
        return table
    except TelemetryError as error:
        raise PlanError(f"{error}; {_ANEW}") from error


def _write_space(path: Path, number: int, document: Mapping[str, Any], files: Mapping[str, str] | None = None) -> None:
    record: dict[str, Any] = {"space": number}
    if files is not None:
        record["files"] = dict(sorted(files.items()))
    content = {FORMAT_KEY: FORMAT, RECORD: record, **document}
    body = with_digest_line(yaml.safe_dump(content, sort_keys=False).encode())
    if not path.exists() or path.read_bytes() != body:
        write_whole(path, body)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
