"""One MLflow store: its client, its errors, and requests in the sizes that MLflow accepts.

MLflow is imported at the first request, not with this module: the import takes seconds, which every command line would
pay. Only the explicit client is used, never a thread's current run, so a store works in any thread or process.

A server that does not answer costs one short wait and a `TrackingError`. For the next minute every call fails at once.
"""

import fcntl
import logging
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from wattune.access import Access, one_line
from wattune.errors import StoreNotWritableError, TrackingError
from wattune.masking import without_secrets
from wattune.storage.files import nearest_existing
from wattune.tracking.locations import ARTIFACTS

_T = TypeVar("_T")

Point = tuple[str, float, int, int]
"""A value of a metric as MLflow stores it: name, value, wall-clock milliseconds, step."""

TABLES_WITHIN_S: Final = 120.0
"""Longest time of a call of a database: the first one makes its tables, and another process may be making them."""

READ_WITHIN_S: Final = 300.0
"""Longest time to read all trials of a study, page by page."""

_ENVIRONMENT: Final = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",  # seconds; MLflow's own 7 retries of 120 s block for minutes
    "MLFLOW_DISABLE_TELEMETRY": "true",  # otherwise MLflow reports its use to its makers
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",  # otherwise a bar for every file that is read back
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # standard output belongs to the command line
}
"""MLflow's settings, read from the environment at import and at every request; the user's own settings win."""

_SERVER: Final = ("http://", "https://")
_SQLITE: Final = "sqlite:///"
_LOCAL_UI: Final = "http://127.0.0.1:5000"
"""Default address of `mlflow ui`."""

_MAX_METRICS: Final = 1000  # of one log_batch; this and the next: mlflow/utils/validation.py, 3.17.2
_MAX_PARAMS_AND_TAGS: Final = 100
_PAGE: Final = 1000


def default_uri(storage: Path) -> str:
    """Returns the default store: one sqlite file in the storage folder."""
    return f"{_SQLITE}{storage.expanduser().absolute() / 'mlflow.db'}"


def ui_command(uri: str) -> str:
    """Returns the command that serves a store's studies at `ui_url`; empty if a server already does."""
    if uri.startswith(_SERVER):
        return ""
    database = sqlite_file(uri)
    files = "" if database is None else f" --artifacts-destination {shlex.quote(str(database.parent / ARTIFACTS))}"
    return f"MLFLOW_DISABLE_TELEMETRY=true mlflow ui --backend-store-uri {shlex.quote(uri)}{files}"


def ui_url(uri: str, page: str = "") -> str:
    """Returns the address of a page of MLflow's UI: on the store's own server, else on that of `ui_command`.

    The page is a path after the server's address, such as `Tracker.page`.
    """
    return f"{(uri if uri.startswith(_SERVER) else _LOCAL_UI).rstrip('/')}/{page}"


class Store(Access):
    """One store's client, which remembers the last failure to reach the store."""

    def __init__(self, uri: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Names a database, as `sqlite:///<file>`, or a tracking server; there is no request before the first call."""
        self.uri = uri
        mend = "start the server" if sqlite_file(uri) is None else "restore it"
        super().__init__(uri, f"{mend} or give another tracking URI", clock)
        if not uri.startswith(_SERVER):
            self.answer_s = TABLES_WITHIN_S
        self._client: Any = None

    def ask(self, action: str, operation: Callable[[Any], _T], *, moving_s: float = 0.0) -> _T:
        """Calls an operation with the client, as `do` does without one.

        Raises `TrackingError` where as that of `do`; `StoreNotWritableError` where the file may not be written.
        """

        def speak() -> _T:
            if self._client is None:
                self._client = _make_client(self.uri)
            return operation(self._client)

        return self.do(action, speak, moving_s=moving_s)

    def refusal(self, action: str, error: Exception) -> TrackingError | None:
        """Returns what to raise where the store refuses, or its file may not be written."""
        if _is_refusal(error):
            return TrackingError(f"cannot {action}: {without_secrets(self.uri)} refuses it: {one_line(error)}")
        database = sqlite_file(self.uri)
        if database is not None and not _may_write(database):
            return StoreNotWritableError(
                f"cannot {action}: {database} cannot be written; results stay in the study folder, make it and its "
                "folder writable or give another tracking URI, then run `wattune sync`"
            )
        return None


def _make_client(uri: str) -> Any:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Hides two lines about new tables at every first use of a store, and the traceback of an error that is raised too.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    from mlflow import MlflowClient

    from wattune.tracking.artifacts import BesideClient

    database = sqlite_file(uri)
    if database is None:
        return MlflowClient(tracking_uri=uri)
    if not _is_filled(database):
        _make_database(database)
    return BesideClient(uri, database)


def sqlite_file(uri: str) -> Path | None:
    """Returns the file of an sqlite store, None for any other store."""
    name = uri.removeprefix(_SQLITE).partition("?")[0]
    return Path(name).absolute() if uri.startswith(_SQLITE) and name != ":memory:" else None


def _may_write(database: Path) -> bool:
    """Returns whether a store's file, or the one that would be made, may be written: sqlite needs its folder too."""
    folder, writable = nearest_existing(database.parent)
    return writable and (folder != database.parent or not database.exists() or os.access(database, os.W_OK))


def require_store(uri: str) -> None:
    """Makes sure that a store exists before it is read: a client would create a missing sqlite file.

    Raises `TrackingError` where there is no such file.
    """
    database = sqlite_file(uri)
    if database is not None and not _is_filled(database):
        raise TrackingError(f"there is no MLflow store {database}; give the file or server that a study was sent to")


def _is_filled(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _make_database(path: Path) -> None:
    """Makes a store's file if it is missing, under another name until it is complete.

    MLflow makes its tables by dozens of migrations, which are not a transaction on sqlite. A process killed between
    them would leave a file that no later process can open.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f".{path.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_filled(path):
            return
        # Not public; the version of MLflow is pinned to one minor release.
        from mlflow.store.db.utils import _safe_initialize_tables, create_sqlalchemy_engine_with_retry

        begun = path.with_name(f".{path.name}.new")
        for left in (begun, begun.with_name(f"{begun.name}-journal")):
            left.unlink(missing_ok=True)
        engine = create_sqlalchemy_engine_with_retry(f"{_SQLITE}{begun}")
        _safe_initialize_tables(engine)
        engine.dispose()
        begun.replace(path)


def _is_refusal(error: Exception) -> bool:
    """Returns true if a store answered and refused, by MLflow's error codes; then waiting does not help."""
    from mlflow.exceptions import MlflowException

    out_of_reach = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "DEADLINE_EXCEEDED")
    return isinstance(error, MlflowException) and error.error_code not in out_of_reach


def check_alive(experiment: Any, uri: str) -> None:
    """Makes sure that a study was not deleted. Raises `TrackingError` where it was deleted."""
    if experiment.lifecycle_stage != "active":
        raise TrackingError(
            f'study "{experiment.name}" was deleted in {without_secrets(uri)}; restore it with '
            f"`mlflow experiments restore --experiment-id {experiment.experiment_id}` or give the study another name"
        )


def search(client: Any, experiment_id: str, tags: Mapping[str, str], more: str = "") -> Iterator[Any]:
    """Yields the runs with all of these tags, and with another condition if given; newest first, page by page."""
    where = " and ".join([*(f"tags.`{name}` = '{value}'" for name, value in tags.items()), *([more] if more else [])])
    token = None
    while True:
        page = client.search_runs([experiment_id], where, max_results=_PAGE, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def log(
    client: Any,
    run_id: str,
    *,
    params: Mapping[str, str] | None = None,
    tags: Mapping[str, str] | None = None,
    points: list[Point] | None = None,
) -> None:
    """Sends parameters, tags and points in batches of the sizes that MLflow accepts."""
    from mlflow.entities import Metric, Param, RunTag

    for part in _chunks([Param(*pair) for pair in (params or {}).items()], _MAX_PARAMS_AND_TAGS):
        client.log_batch(run_id, params=part)
    for part in _chunks([RunTag(*pair) for pair in (tags or {}).items()], _MAX_PARAMS_AND_TAGS):
        client.log_batch(run_id, tags=part)
    for part in _chunks([Metric(*point) for point in points or ()], _MAX_METRICS):
        client.log_batch(run_id, metrics=part)


def _chunks(items: list[Any], size: int) -> Iterator[list[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))
