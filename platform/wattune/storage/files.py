"""Where studies are kept, and how files are written there: whole or not at all."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from wattune.errors import PlanError, TelemetryError
from wattune.storage.parquet import encoded

STORAGE_VARIABLE: Final = "WATTUNE_STORAGE"
DEFAULT_STORAGE: Final = "~/wattune-studies"
CALIBRATIONS: Final = "calibration"


@dataclass(frozen=True, slots=True)
class Storage:
    """Where studies are kept."""

    folder: Path
    """Where work happens; always local."""
    url: str = ""
    """Where finished trials are sent as well, as whole objects; empty where the folder is all there is."""


def find_storage(storage: str | None = None) -> Storage:
    """Where studies are kept: the argument, else `$WATTUNE_STORAGE`, else `~/wattune-studies`.

    Args:
        storage: A path, on any file system, or a URL of fsspec's. With a URL work happens in the folder that
            `$WATTUNE_STORAGE` names, else in `~/wattune-studies`.
    """
    own = os.environ.get(STORAGE_VARIABLE) or DEFAULT_STORAGE
    text = storage or own
    url = text if "://" in text else ""
    folder = next(one for one in (text, own, DEFAULT_STORAGE) if "://" not in one)
    return Storage(Path(folder).expanduser().absolute(), url)


def storage_path(storage: str | None = None) -> Path:
    """The local folder of `find_storage`."""
    return find_storage(storage).folder


def is_hidden(path: str) -> bool:
    """Whether a path inside a study, `/` between its parts, is no part of it: locks and unfinished files."""
    return any(part.startswith(".") for part in path.split("/"))


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file so that a crash leaves either the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Writes one JSON file, whole or not at all."""
    write_whole(path, (json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n").encode())


def write_table(path: Path, table: pa.Table) -> None:
    """Writes one Parquet file, whole or not at all, in the study's one set of options."""
    write_whole(path, encoded(table).to_pybytes())


def write_asked(path: Path, text: str) -> None:
    """Writes a text where a user asked for it; over what is there, and as it is: it may be a pipe or a device.

    Raises:
        PlanError: It cannot be written there.
    """
    try:
        path.write_text(text)
    except OSError as error:
        raise PlanError(f"{path} cannot be written: {error.strerror}; give a file in a folder that is there") from error


def read_json_object(path: Path, writer: str = "a sampler") -> dict[str, Any]:
    """Reads what `write_json` wrote.

    Args:
        path: The file.
        writer: Who writes such files, for the error.

    Raises:
        TelemetryError: The file is no JSON object.
    """
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise TelemetryError(f"{path} cannot be read: {error}; it was not written by {writer}") from error
    if not isinstance(content, dict):
        raise TelemetryError(f"{path} is no JSON object; it was not written by {writer}")
    return content


def write_calibration(storage: Path, calibration: Mapping[str, Any]) -> Path:
    """Writes what `wattune.calibration.calibrate` found of one device, over what was known before, and says where."""
    path = _calibration_path(storage, str(calibration["uuid"]))
    write_json(path, calibration)
    return path


def with_calibrations(storage: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A node's manifest with what calibrations know of its devices: their `sensor_limits` and `link_peaks`.

    They are kept with the recording, so that it is judged alike wherever it is read.

    Raises:
        TelemetryError: A device's calibration is there and is not one.
    """
    devices = {}
    for name, facts in manifest.get("devices", {}).items():
        path = _calibration_path(storage, str(facts.get("uuid")))
        devices[name] = dict(facts)
        if path.exists():
            try:
                known = json.loads(path.read_text())
                devices[name]["sensor_limits"] = known["limits"]
                devices[name] |= {"link_peaks": known["link_peaks"]} if known.get("link_peaks") else {}
            except (ValueError, KeyError, TypeError) as error:
                raise TelemetryError(f"{path} is no calibration: {error!r}; calibrate {name} again") from error
    return {**manifest, "devices": devices} if devices else dict(manifest)


def _calibration_path(storage: Path, uuid: str) -> Path:
    return storage / CALIBRATIONS / f"{re.sub(r'[^A-Za-z0-9._-]', '_', uuid)}.json"
