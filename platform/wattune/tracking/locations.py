"""Places of runs' files in a store that is one sqlite file: `mlartifacts` beside it, wherever both are copied to.

The store keeps `mlflow-artifacts:/<study>/<run>/artifacts`, which has no machine's path in it. It is the form that an
MLflow server itself writes, and `mlflow ui --artifacts-destination <storage>/mlartifacts` shows these files.
"""

from typing import Final
from urllib.parse import unquote, urlsplit

from wattune.storage.files import is_inside

ARTIFACTS: Final = "mlartifacts"
"""Name of the folder beside the store; it is also the one that `mlflow server` takes in its current directory."""

SCHEME: Final = "mlflow-artifacts"


def location(study_name: str) -> str:
    """Returns the place of a study's artifacts as the store keeps it."""
    return f"{SCHEME}:/{study_name}"


def path_inside(uri: str) -> str | None:
    """Returns a URI's path inside `mlartifacts`; None where it leads elsewhere, such as to a folder the user named."""
    parts = urlsplit(uri)
    inside = unquote(parts.path).strip("/")
    return inside if parts.scheme == SCHEME and not parts.netloc and inside and is_inside(inside) else None
