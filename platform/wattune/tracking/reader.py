"""Reads a study back from MLflow, ten thousand trials in seconds.

MLflow returns a run with all of its metrics, parameters and tags, which takes some four milliseconds a run. So one
artifact of the study's parent run, the delivery log, holds all results that were sent. Only runs that ended later are
read one by one.
"""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pyarrow as pa

from wattune.errors import TelemetryError, TrackingError
from wattune.run import Run
from wattune.storage.files import write_table
from wattune.storage.parquet import read_table
from wattune.storage.study import Unreadable
from wattune.tracking.run import NS_PER_MS, STUDY_TAG, TRIAL_TAG, is_whole, pair_of, read_run, require_format
from wattune.tracking.store import READ_WITHIN_S, Store, check_alive, require_store, search
from wattune.trial import TrialSpec
from wattune.units import NS_PER_S

DELIVERY_LOG: Final = "results.parquet"

OVERLAP_S: Final = 600
"""Seconds before the newest end in the delivery log from which runs are read one by one: a trial ends before its
analysis writes the result, and lanes finish in any order."""

_COLUMNS: Final = pa.schema(
    [("trial", pa.string()), ("end_wall_ns", pa.int64()), ("spec", pa.string()), ("result", pa.string())]
)

TrackedResults = list[tuple[TrialSpec, Run]]


TrackedStudy = tuple[TrackedResults, Unreadable, dict[str, Any]]
"""Every repeat of a trial that was sent completely; the reasons of those that were sent and cannot be read; and the
study's `objective` and `constraints`, as its space has them. The objective is None where the store does not have it."""


def read_study(uri: str, name: str) -> TrackedStudy:
    """Reads every trial repeat of a study that was sent completely, for `rank`, with objective and constraints.

    Raises `TrackingError`: the store cannot be reached or has no such study, or not one of its trials can be read.
    """
    require_store(uri)

    def read(client: Any) -> TrackedStudy:
        found = client.get_experiment_by_name(name)
        if found is None:
            known = sorted(other.name for other in client.search_experiments() if other.name != "Default")
            raise TrackingError(f'no study "{name}" in {uri}; it holds: {", ".join(known) or "none"}')
        check_alive(found, uri)
        parent = next(search(client, found.experiment_id, {STUDY_TAG: name}), None)
        if parent:
            require_format(parent, f"study {name} in {uri}")
        rows = _rows(client, parent.info.run_id) if parent else []
        results, problems = _pairs(rows)
        # A row that cannot be read may be there as a run, at any age.
        for run in _later(client, found.experiment_id, [] if problems else rows):
            trial = run.data.tags[TRIAL_TAG]
            try:
                spec, result = read_run(client, run)
            except TrackingError as error:  # one damaged run costs itself alone
                problems.setdefault(trial, str(error))
                continue
            if trial not in results or result.end_wall_ns >= results[trial][1].end_wall_ns:
                results[trial] = spec, result
        unreadable = {trial: why for trial, why in problems.items() if trial not in results}
        if unreadable and not results:
            raise TrackingError(next(iter(unreadable.values())))
        tags = parent.data.tags if parent else {}
        constraints = json.loads(tags.get("wattune.constraints", "[]"))
        return list(results.values()), unreadable, {"objective": tags.get("objective"), "constraints": constraints}

    return Store(uri, time.monotonic).ask(f"read study {name}", read, moving_s=READ_WITHIN_S)


def write_delivery_log(client: Any, parent_id: str, results: Sequence[tuple[TrialSpec, Run]]) -> None:
    """Adds results to a study's delivery log; of two results of one repeat the one that ended later stays."""
    rows = {row["trial"]: row for row in _rows(client, parent_id)}
    for spec, result in results:
        trial = f"{result.trial_id}-{result.repeat}"
        if trial not in rows or result.end_wall_ns >= rows[trial]["end_wall_ns"]:
            rows[trial] = {
                "trial": trial,
                "end_wall_ns": result.end_wall_ns,
                "spec": json.dumps(spec.to_json()),
                "result": json.dumps(result.to_json()),
            }
    with TemporaryDirectory() as folder:
        path = Path(folder) / DELIVERY_LOG
        write_table(path, pa.Table.from_pylist(list(rows.values()), schema=_COLUMNS))
        client.log_artifact(parent_id, str(path))


def _rows(client: Any, parent_id: str) -> list[dict[str, Any]]:
    """Reads the rows of the delivery log; none if there is no log yet, or it is damaged and the runs have to do."""
    if not any(entry.path == DELIVERY_LOG for entry in client.list_artifacts(parent_id)):
        return []
    with TemporaryDirectory() as folder:
        path = client.download_artifacts(parent_id, DELIVERY_LOG, folder)
        try:
            table = read_table(Path(path))
        except TelemetryError:
            return []
    if not set(_COLUMNS.names) <= set(table.column_names):
        return []
    rows: list[dict[str, Any]] = table.to_pylist()
    return [row for row in rows if None not in row.values()]


def _pairs(rows: Sequence[dict[str, Any]]) -> tuple[dict[str, tuple[TrialSpec, Run]], dict[str, str]]:
    """Returns the trials of the delivery log by name, and by name the reasons that others cannot be read."""
    results, problems = {}, {}
    for row in rows:
        try:
            results[row["trial"]] = pair_of(row["spec"], row["result"], f"trial {row['trial']} in {DELIVERY_LOG}")
        except TrackingError as error:
            problems[row["trial"]] = str(error)
    return results, problems


def _later(client: Any, experiment_id: str, rows: Sequence[dict[str, Any]]) -> Iterator[Any]:
    """Yields the runs of trials that may be missing in the delivery log, oldest first."""
    newest_ns = max((row["end_wall_ns"] for row in rows), default=None)
    ended = "" if newest_ns is None else f"attributes.end_time > {(newest_ns - OVERLAP_S * NS_PER_S) // NS_PER_MS}"
    runs = [run for run in search(client, experiment_id, {}, ended) if TRIAL_TAG in run.data.tags]
    yield from reversed([run for run in runs if is_whole(run)])
