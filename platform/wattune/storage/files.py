"""The place of studies, and their files: each is written whole or not at all."""

import errno
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from wattune.deadline import read_bounded
from wattune.errors import PlanError, TelemetryError
from wattune.storage.digests import DigestError, object_of, with_digest
from wattune.storage.documents import MOST_BYTES
from wattune.storage.format import FORMAT, FORMAT_KEY, FormatError

STORAGE_VARIABLE: Final = "WATTUNE_STORAGE"
DEFAULT_STORAGE: Final = "~/wattune-studies"
CALIBRATIONS: Final = "calibration"

FOLDER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""Names that a study or a recording may have."""

RESTORE: Final = "restore it, or accept what it holds with `wattune analyze --accept`"
"""The remedy for a file that does not agree with its digest."""

_NO_HARD_LINKS: Final = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)
"""Errors of a file system without hard links, such as FAT or a mounted bucket."""


Storage = tuple[Path, str]
"""The place where studies are kept: the local folder in which they run, and the URL that finished trials are sent to as
well, as whole objects; empty where there is none."""


def find_storage(storage: str | None = None) -> Storage:
    """Finds the place of studies: the argument, else `$WATTUNE_STORAGE`, else `~/wattune-studies`.

    `storage`: a path on any file system, or a URL of fsspec's. With a URL studies run in the folder that
    `$WATTUNE_STORAGE` names, else in `~/wattune-studies`. Raises `PlanError`: it is in the home of a user that this
    machine does not have.
    """
    own = os.environ.get(STORAGE_VARIABLE) or DEFAULT_STORAGE
    text = storage or own
    url = text if "://" in text else ""
    folder = next(one for one in (text, own, DEFAULT_STORAGE) if "://" not in one)
    return named_path(folder).absolute(), url


def named_path(text: str | Path) -> Path:
    """Returns the path that a user typed, with the home that `~` stands for.

    Raises `PlanError`: it is the home of a user that this machine does not have.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise PlanError(f"{text} is in the home of a user this machine does not have; give the whole path") from error


def storage_path(storage: str | None = None) -> Path:
    """Returns the local folder of `find_storage`."""
    return find_storage(storage)[0]


def nearest_existing(folder: Path) -> tuple[Path, bool]:
    """Returns a folder, or the nearest existing one above it, and whether it can be written to."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return existing, existing.is_dir() and os.access(existing, os.W_OK)


def require_writable(folder: Path) -> None:
    """Makes sure, before work whose result goes there, that a folder exists or could be made. Makes nothing.

    Raises `PlanError`: it does not exist and cannot be made, or cannot be written to.
    """
    existing, writable = nearest_existing(folder)
    if not writable:
        raise _unwritable(folder, f"{existing} is not a folder that may be written to")


def make_folder(folder: Path) -> Path:
    """Makes a folder of the storage, with those above it, unless it exists.

    Raises `PlanError`: it cannot be made, or cannot be written to.
    """
    require_writable(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, str(error.strerror)) from error
    return folder


def _unwritable(folder: Path, why: str) -> PlanError:
    return PlanError(f"{folder} cannot be written: {why}; give --storage, or ${STORAGE_VARIABLE}, another folder")


def is_hidden(path: str) -> bool:
    """Tells whether a path inside a study (`/` between its parts) is of a lock or an unfinished file."""
    return any(part.startswith(".") for part in path.split("/"))


def is_inside(path: str) -> bool:
    """Tells whether a path that somebody else named (`/` between its parts) stays below the folder it is put in."""
    return not path.startswith("/") and ".." not in path.split("/")


def is_file_of(folder: Path, path: Path) -> bool:
    """Tells whether a path is a file that lies in a folder. A link, or a file below one, may be of any place."""
    return path.is_file() and not path.is_symlink() and path.resolve().is_relative_to(folder.resolve())


def write_whole(path: Path, content: bytes, *, over: bool = True, private: bool = False) -> bool:
    """Writes a file so that a crash leaves either the old content or the new, never a part; tells whether it did.

    Without `over` one of several processes that write at the same moment succeeds: the first, or on a file system
    without hard links the last. A `private` file, such as a command line, is for its owner alone.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(partial, "wb") as file:
            if private:
                os.fchmod(file.fileno(), 0o600)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if over:
            partial.replace(path)
        elif not _is_first(partial, path):
            return False
        make_lasting(path.parent)
    except OSError as error:
        error.filename = str(path)  # a full disk names no file, and a user does not know the unfinished one
        raise
    finally:
        with suppress(OSError):  # the error that stopped the writing may stop this too; the caller must see the first
            partial.unlink(missing_ok=True)
    return True


def _is_first(partial: Path, path: Path) -> bool:
    """Puts a file in its place unless there is one. Returns whether there was none."""
    try:
        os.link(partial, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        if path.exists():
            return False
        partial.replace(path)
    return True


def make_lasting(folder: Path) -> None:
    """Makes a rename in a folder survive a power cut, where the folder and its file system can do that."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # a folder may be writable and not readable
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a disk that fails must be reported
            raise
    finally:
        os.close(descriptor)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Writes one JSON file with its format, whole or not at all. See `write_whole`."""
    text = json.dumps({**data, FORMAT_KEY: FORMAT}, indent=1, sort_keys=True, allow_nan=False)
    write_whole(path, f"{text}\n".encode())


def write_digested(path: Path, data: Mapping[str, Any], *, over: bool = True, private: bool = False) -> bool:
    """Writes one JSON file with its format and its own digest, whole or not at all. See `write_whole`."""
    return write_whole(path, with_digest(data), over=over, private=private)


def write_table(path: Path, table: pa.Table) -> None:
    """Writes one Parquet file, whole or not at all, with the options that all tables share."""
    from wattune.storage.parquet import encoded  # a sampler writes JSON alone, and starts with every trial

    write_whole(path, encoded(table).to_pybytes())


def write_asked(path: Path, content: str | bytes) -> None:
    """Writes a text or bytes to a path of the user, over what is there. The path may be a pipe or a device.

    Raises `PlanError`: the path cannot be written to.
    """
    try:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise PlanError(f"{path} cannot be written: {error.strerror}; give a file in a folder that is there") from error


def read_json_object(
    path: Path, writer: str = "a sampler", *, bare: bool = True, elsewhere: bool = False
) -> dict[str, Any]:
    """Reads an object that `write_json` or `write_digested` wrote, and names the `writer` in the error.

    `bare` and `elsewhere` are those of `wattune.storage.digests.object_of`. Raises `TelemetryError`: the file is not a
    JSON object of this format, or does not agree with its digest.
    """
    try:
        return object_of(read_bounded(path, MOST_BYTES), bare=bare, elsewhere=elsewhere)
    except DigestError as error:
        raise TelemetryError(f"{path}: {error}; {RESTORE}") from error
    except FormatError as error:
        raise TelemetryError(f"{path}: {error}") from error
    except TypeError as error:
        raise TelemetryError(f"{path} {error}; it was not written by {writer}") from error
    except (ValueError, OSError) as error:
        raise TelemetryError(f"{path} cannot be read: {error}; it was not written by {writer}") from error


def write_calibration(storage: Path, calibration: Mapping[str, Any]) -> Path:
    """Writes one device's calibration over an earlier one. Returns its path."""
    path = _calibration_path(storage, str(calibration["uuid"]))
    write_digested(path, calibration)
    return path


def with_calibrations(storage: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a node's manifest with the calibrations of its devices: their `sensor_limits` and `link_peaks`.

    They are kept with the recording, so that it is judged alike wherever it is read. Raises `TelemetryError`: a
    device's calibration cannot be read.
    """
    devices = {}
    for name, facts in manifest.get("devices", {}).items():
        path = _calibration_path(storage, str(facts.get("uuid")))
        devices[name] = dict(facts)
        if path.exists():
            try:
                known = object_of(path.read_bytes())
                devices[name]["sensor_limits"] = known["limits"]
                devices[name] |= {"link_peaks": known["link_peaks"]} if known.get("link_peaks") else {}
            except FormatError as error:
                raise TelemetryError(f"{path}: {error}") from error
            except (ValueError, KeyError, TypeError, OSError) as error:
                raise TelemetryError(f"{path} is not a calibration: {error!r}; calibrate {name} again") from error
    return {**manifest, "devices": devices} if devices else dict(manifest)


def _calibration_path(storage: Path, uuid: str) -> Path:
    return storage / CALIBRATIONS / f"{re.sub(r'[^A-Za-z0-9._-]', '_', uuid)}.json"
