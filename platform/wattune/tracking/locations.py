"""Places of runs' files in a store that is one sqlite file: `mlartifacts` beside it, wherever both are copied to.

The store keeps `mlflow-artifacts:/<study>/<run>/artifacts`, which has no machine's path in it. It is the form that an
MLflow server itself writes, and `mlflow ui --artifacts-destination <storage>/mlartifacts` shows these files.

Earlier versions stored the storage's absolute path. A copy of such a storage names the original. `path_inside` finds
the place beside the copy nevertheless, and `make_relative` mends what the store says.
"""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from wattune.storage.files import is_inside

ARTIFACTS: Final = "mlartifacts"
"""Name of the folder beside the store; it is also the one that `mlflow server` takes in its current directory."""

SCHEME: Final = "mlflow-artifacts"

_LOCK_WITHIN_S: Final = 30.0
"""Longest wait for another process that writes to the store."""


def location(study_name: str) -> str:
    """Returns the place of a study's artifacts as the store keeps it."""
    return f"{SCHEME}:/{study_name}"


def path_inside(uri: str) -> str | None:
    """Returns a URI's path inside `mlartifacts`; None where it leads elsewhere, such as to a folder the user named."""
    parts = urlsplit(uri)
    path = unquote(parts.path)
    if parts.scheme == SCHEME and not parts.netloc:
        inside = path.strip("/")
    elif parts.scheme == "file":
        _, found, inside = path.rpartition(f"/{ARTIFACTS}/")
        inside = inside.strip("/") if found else ""
    else:
        return None
    return inside if inside and is_inside(inside) else None


def make_relative(database: Path, experiment_id: str, uri: str) -> str:
    """Replaces the absolute path that a store of an earlier version keeps for a study's artifacts.

    Args:
        database: The store's file.
        experiment_id: MLflow's id of the study.
        uri: The experiment's artifact location.

    Returns:
        The location that holds from now on: `uri` where it is none of ours.
    """
    inside = path_inside(uri)
    if inside is None or uri.startswith(f"{SCHEME}:"):
        return uri
    mended = f"{SCHEME}:/{inside}"
    # MLflow has no call for it. One transaction: a store says one or the other of all runs of the study.
    with closing(sqlite3.connect(database, timeout=_LOCK_WITHIN_S)) as store, store:
        store.execute("UPDATE experiments SET artifact_location = ? WHERE experiment_id = ?", (mended, experiment_id))
        store.execute(
            "UPDATE runs SET artifact_uri = ? || substr(artifact_uri, ?) "
            "WHERE experiment_id = ? AND substr(artifact_uri, 1, ?) = ?",
            (mended, len(uri.rstrip("/")) + 1, experiment_id, len(uri.rstrip("/")) + 1, f"{uri.rstrip('/')}/"),
        )
    return mended
