"""Digests: a JSON or YAML file carries its own, and the one that is written last those of all files beside it.

`{"digest": "<SHA-256>", ...}` is the digest of all bytes after it. `files` in it has the SHA-256 of every other file,
as `sha256sum` prints it. They stand inside the file that makes a trial or a recording complete, so one rename makes
both the result and its digests visible.
"""

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from wattune.storage.documents import parse_json
from wattune.storage.format import FORMAT, FORMAT_KEY, without_format
from wattune.units import NS_PER_S

DIGEST: Final = "digest"
FILES: Final = "files"
ACCEPTED: Final = "accepted"
"""Files that were changed after they were written, and accepted by the user."""

DISAGREES: Final = "it does not agree with its digest: damaged, or edited"
LACKS: Final = "it has no digest: damaged, or edited"

_LINE_HEAD: Final = b"# digest: "
_HEAD: Final = f'{{\n "{DIGEST}": "'.encode()
_END: Final = len(_HEAD) + 64

_APART: Final = ("attempts", "error.txt")
"""Entries of a folder without a digest: earlier attempts have their own, and an error may be added at any time."""

_KINDS: Final = (".parquet", ".json", ".txt")
"""Files that have a digest. A sampler's own segments have checksums of their own, and logs are for people."""


NO_FILES: Final[Mapping[str, str]] = {}

SETTLED_NS: Final = 2 * NS_PER_S
"""Age from which a file's time tells it from an earlier one: some file systems count whole seconds."""


class DigestError(ValueError):
    """A file whose content does not agree with its digest, or that lacks one."""


def with_digest(data: Mapping[str, Any]) -> bytes:
    """Writes an object and its format as JSON, its digest in front of everything else.

    Raises `ValueError`: it has a number that JSON does not have.
    """
    others = {name: value for name, value in data.items() if name != DIGEST} | {FORMAT_KEY: FORMAT}
    body = b'",' + json.dumps(others, indent=1, sort_keys=True, allow_nan=False).encode()[1:] + b"\n"
    return _HEAD + hashlib.sha256(body).hexdigest().encode() + body


def agrees(content: bytes) -> bool:
    """Tells whether a JSON file has a digest in front and agrees with it."""
    return (
        content.startswith(_HEAD) and hashlib.sha256(content[_END:]).hexdigest().encode() == content[len(_HEAD) : _END]
    )


def with_digest_line(body: bytes) -> bytes:
    """Writes a text file, its digest in a first line that YAML takes as a comment."""
    return _LINE_HEAD + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def body_of(content: bytes) -> bytes:
    """Returns a text file without the line of its digest. A user who edits such a file takes the line out.

    Raises `DigestError`: it does not agree with its digest.
    """
    if not content.startswith(_LINE_HEAD):
        return content
    line, _, body = content.partition(b"\n")
    if line.rstrip(b"\r")[len(_LINE_HEAD) :] != hashlib.sha256(body).hexdigest().encode():
        raise DigestError(DISAGREES)
    return body


def object_of(
    content: bytes, *, bare: bool = False, accept: bool = False, any_depth: bool = False, elsewhere: bool = False
) -> dict[str, Any]:
    """Reads a JSON object of this format and checks its digest; returns it without both.

    A `bare` one may have no digest: such a file is written before others, one of which has it. To `accept` takes one
    that has no digest, or does not agree with it. One made `elsewhere` need not say a format; `any_depth` is that of
    `wattune.storage.documents.parse_json`. Raises `DigestError`: it does not agree with its digest, or lacks it,
    `FormatError`: it is of another format, `ValueError`: it is not JSON, `TypeError`: it is not an object.
    """
    data = parse_json(content, any_depth=any_depth)
    if not isinstance(data, dict):
        raise TypeError("is not a JSON object")
    has_digest = data.pop(DIGEST, None) is not None
    if has_digest and not (accept or agrees(content)):
        raise DigestError(DISAGREES)
    data = without_format(data, elsewhere=elsewhere)
    if not (has_digest or accept or bare):
        raise DigestError(LACKS)
    return data


@lru_cache(maxsize=2**16)
def _digest(path: str, _size_bytes: int, _time_ns: int, _inode: int) -> str:
    """Computes a file's digest once for every size and time, in this process only: a disk's error changes neither."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(path: Path) -> str:
    """Computes the digest of a file, or returns the one this process computed for the same size and time.

    Raises `OSError`: it cannot be read.
    """
    known = path.stat()
    if abs(time.time_ns() - known.st_mtime_ns) < SETTLED_NS:  # it may change again without another time
        return _digest.__wrapped__(str(path), 0, 0, 0)
    return _digest(str(path), known.st_size, known.st_mtime_ns, known.st_ino)


def digests_of(folder: Path, carrier: str, known: Mapping[str, str] = NO_FILES) -> dict[str, str]:
    """Returns the digests of all files of a folder by their place in it, but of the `carrier` that holds them.

    Files whose digests are `known` to who wrote them are not read, and need not be here.
    """
    found = {name: known.get(name) or digest_of(path) for name, path in _files(folder) if name != carrier}
    return dict(sorted({**known, **found}.items()))


def _files(folder: Path) -> list[tuple[str, Path]]:
    named = ((path.relative_to(folder), path) for path in sorted(folder.rglob("*")) if path.is_file())
    return [
        (place.as_posix(), path)
        for place, path in named
        if place.parts[0] not in _APART
        and path.suffix in _KINDS
        and not any(part.startswith(".") for part in place.parts)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileCheck:
    """Agreement of a folder's files with their digests."""

    digested: bool = False
    """False for folders that are not complete: damage to their files is not seen."""
    changed: tuple[str, ...] = ()
    """Files that do not agree, and measurements that were added."""
    missing: tuple[str, ...] = ()
    """Files that are not there, such as those that were never fetched."""
    accepted: tuple[str, ...] = ()
    """Files that were edited on purpose, by `wattune analyze --accept`."""


NO_DIGESTS: Final = FileCheck()
"""Of a folder that has no digests, or none that can be read."""


def check_files(folder: Path, files: Mapping[str, Any], accepted: Any) -> FileCheck:
    """Compares the files of a folder with their digests by place; `accepted` are names of files that a user accepted.

    Raises `OSError`: a file cannot be read.
    """
    found = dict(_files(folder))
    changed = [name for name, path in found.items() if name in files and digest_of(path) != files[name]]
    added = [name for name in found.keys() - files.keys() if name.endswith((".parquet", "/manifest.json"))]
    return FileCheck(
        digested=True,
        changed=tuple(sorted(changed + added)),
        missing=tuple(sorted(files.keys() - found.keys())),
        accepted=tuple(map(str, accepted)) if isinstance(accepted, list) else (),
    )
