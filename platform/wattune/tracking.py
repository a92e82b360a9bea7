"""MLflow: the study's results where people look for them. The study folder stays the truth; this only copies it.

A study is an MLflow experiment with one parent run, a repeat of a trial is a child run. MLflow is imported when a
`Tracker` is made, not with this module: the import takes seconds, which every command line would pay. Only the
explicit client is used, no thread's current run, so trackers can live in any thread or process.

A server that is gone costs one short wait and a `TrackingError`; for the next minute every call fails at once, and
what was not sent is sent by a later `log_trial` of the same trial.
"""

import json
import logging
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from wattune.errors import TrackingError
from wattune.plan.axes import AXES
from wattune.trial import TrialResult, TrialSpec, TrialStatus
from wattune.units import NS_PER_S

Series = Mapping[str, tuple[NDArray[np.int64], NDArray[np.floating[Any]]]]
"""Curves for MLflow's charts by name, such as `node0/device_power_w`: wall-clock nanoseconds and values."""

RETRY_AFTER_S: Final = 60.0
"""How long a store that could not be reached is left alone."""

_ENVIRONMENT: Final = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",  # seconds; MLflow's own 7 retries of 120 s block for minutes
    "MLFLOW_DISABLE_TELEMETRY": "true",  # MLflow reports its use to its makers otherwise
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # standard output belongs to the command line
}
"""MLflow's settings, read from the environment at import and at every request; what the user has set stands."""

_MS_PER_S: Final = 1000
_NS_PER_MS: Final = NS_PER_S // _MS_PER_S
_MAX_METRICS: Final = 1000  # of one log_batch; this and the next two: mlflow/utils/validation.py, 3.17.2
_MAX_PARAMS_AND_TAGS: Final = 100
_MAX_TAG_CHARS: Final = 8000  # MLflow cuts longer ones off without a word
_PAGE: Final = 1000

_WHOLE: Final = {"wattune.spec": "spec.json", "wattune.result": "result.json"}
"""Tags that hold a whole file, so that one request reads a page of trials; a longer file is only the artifact."""

_TRIAL_TAG: Final = "wattune.trial"
_STUDY_TAG: Final = "wattune.study"
_PARENT_TAG: Final = "mlflow.parentRunId"
_KIND: Final = {"mlflow.experimentKind": "custom_model_development"}
"""Makes the UI open on runs and their charts, not on traces of language models; read by the UI of MLflow 3.17.2."""

_VERDICTS: Final = ("feasible", "infeasible", "unknown", "failed")

_RUN_STATUS: Final = {
    TrialStatus.COMPLETED: "FINISHED",
    TrialStatus.ABORTED: "KILLED",
    TrialStatus.INTERRUPTED: "KILLED",
}
"""MLflow's word for a status; FAILED for all others."""


def default_uri(storage: Path) -> str:
    """The store used where none is named: one sqlite file in the storage folder."""
    return f"sqlite:///{storage.expanduser().absolute() / 'mlflow.db'}"


def ui_command(uri: str) -> str:
    """What to type to see a store's studies in a browser."""
    if uri.startswith(("http://", "https://")):
        return f"python -m webbrowser {shlex.quote(uri)}"
    return f"MLFLOW_DISABLE_TELEMETRY=true mlflow ui --backend-store-uri {shlex.quote(uri)}"


class Tracker:
    """Sends one study to one MLflow store."""

    def __init__(
        self,
        uri: str,
        study_name: str,
        artifact_root: str | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Names a store and a study; nothing is reached before the first call.

        Args:
            uri: `sqlite:///<file>` or another database, or `http(s)://` of a tracking server.
            study_name: Becomes the MLflow experiment's name.
            artifact_root: Folder or URI under which the study's artifacts go; None is `mlartifacts` beside an sqlite
                file, and the server's own choice elsewhere.
            clock: Monotonic seconds, for the wait after a failure.
        """
        self.uri = uri
        self.study_name = study_name
        self._store = _Store(uri, clock)
        self._artifact_root = artifact_root or _artifacts_beside(uri)
        self._experiment_id = ""
        self._parent_id = ""

    def log_trial(self, spec: TrialSpec, result: TrialResult, folder: Path, series: Series | None = None) -> bool:
        """Sends one repeat of a trial with its folder's files; a repeat that was sent whole is not sent again.

        Args:
            spec: What ran.
            result: What came of it.
            folder: The trial's folder; every file in it becomes an artifact at the same place, hidden ones excepted.
            series: Curves for MLflow's charts; they are averaged to at most one point a second.

        Returns:
            Whether it was sent now.

        Raises:
            TrackingError: The store cannot be reached or refuses; a part may have been sent, the next call replaces it.
        """
        name = f"{result.trial_id}-{result.repeat}"
        identity = {_TRIAL_TAG: name}
        params, points = _params(spec), _points(result, series or {})
        tags = {**_tags(spec, result), **identity}
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        with self._store.speaking(f"send trial {name} of study {self.study_name}") as client:
            parent_id = self._parent(client)
            for run in _search(client, self._experiment_id, identity):
                if _is_over(run):
                    return False
                client.delete_run(run.info.run_id)
            run_id = client.create_run(
                self._experiment_id,
                start_time=result.start_wall_ns // _NS_PER_MS or None,
                tags={**identity, _PARENT_TAG: parent_id},
                run_name=f"{spec.label} #{result.repeat}",
            ).info.run_id
            _log(client, run_id, params=params, tags=tags, points=points)
            for path in files:
                inside = path.relative_to(folder)
                if not any(part.startswith(".") for part in inside.parts):
                    client.log_artifact(run_id, str(path), inside.parent.as_posix() if len(inside.parts) > 1 else None)
            client.set_terminated(
                run_id,
                status=_RUN_STATUS.get(result.status, "FAILED"),
                end_time=result.end_wall_ns // _NS_PER_MS or None,
            )
        return True

    def log_study(self, document: Mapping[str, Any], ranking: Mapping[str, Any], report_path: Path | None) -> None:
        """Sends what is known of the whole study, again as often as it changes.

        Args:
            document: The search space, every default spelled out.
            ranking: `Ranking.to_json()`.
            report_path: The report, where there is one.

        Raises:
            TrackingError: The store cannot be reached or refuses.
        """
        counts = {f"num_{verdict}": str(len(ranking[verdict])) for verdict in _VERDICTS}
        tags = {
            **counts,
            "objective": ranking["objective"],
            "constraints": ", ".join(ranking["constraints"]),
            "note": ranking["note"],
            "simulated": str(ranking["simulated"]).lower(),
            "best": " ".join(f"{row['label']} ({row['trial_id']})" for row in ranking["feasible"][:1]) or "none",
        }
        with self._store.speaking(f"send study {self.study_name}") as client:
            parent_id = self._parent(client)
            client.log_text(parent_id, json.dumps(document, indent=1), "study.json")
            client.log_text(parent_id, json.dumps(ranking, indent=1), "ranking.json")
            if report_path is not None:
                client.log_artifact(parent_id, str(report_path))
            _log(client, parent_id, tags=tags)
            client.set_terminated(parent_id)

    def _parent(self, client: Any) -> str:
        """The study's own run, found or made."""
        if self._parent_id:
            return self._parent_id
        self._experiment_id = self._experiment(client)
        runs = _search(client, self._experiment_id, {_STUDY_TAG: self.study_name})
        run = next(runs, None) or client.create_run(
            self._experiment_id, tags={_STUDY_TAG: self.study_name}, run_name=self.study_name
        )
        self._parent_id = run.info.run_id
        return self._parent_id

    def _experiment(self, client: Any) -> str:
        experiment = client.get_experiment_by_name(self.study_name)
        if experiment is None:
            location = f"{self._artifact_root.rstrip('/')}/{self.study_name}" if self._artifact_root else None
            return str(client.create_experiment(self.study_name, artifact_location=location, tags=_KIND))
        _check_alive(experiment, self.uri)
        return str(experiment.experiment_id)


def read_results(uri: str, experiment: str) -> list[tuple[TrialSpec, TrialResult]]:
    """Every trial repeat of a study that was sent whole, as `rank` takes them.

    Args:
        uri: The store.
        experiment: The study's name.

    Raises:
        TrackingError: The store cannot be reached, has no such study, or its runs are of another version of wattune.
    """
    with _Store(uri, time.monotonic).speaking(f"read study {experiment}") as client:
        found = client.get_experiment_by_name(experiment)
        if found is None:
            known = sorted(other.name for other in client.search_experiments() if other.name != "Default")
            raise TrackingError(f'no study "{experiment}" in {uri}; it holds: {", ".join(known) or "none"}')
        _check_alive(found, uri)
        results: dict[str, tuple[TrialSpec, TrialResult]] = {}
        for run in _search(client, found.experiment_id, {}):
            if _TRIAL_TAG in run.data.tags and run.info.status != "RUNNING":
                results.setdefault(run.data.tags[_TRIAL_TAG], _read_run(client, run))
        return list(results.values())


class _Store:
    """One store's client, and the memory of when it was last out of reach."""

    def __init__(self, uri: str, clock: Callable[[], float]) -> None:
        self._uri = uri
        self._clock = clock
        self._client: Any = None
        self._closed_until_s = 0.0
        self._cause = ""

    @contextmanager
    def speaking(self, action: str) -> Iterator[Any]:
        """Gives the client, and turns whatever goes wrong into a `TrackingError`.

        Raises:
            TrackingError: With the action, the cause and the remedy; at once, untried, where the store was out of
                reach within the last `RETRY_AFTER_S`.
        """
        if self._cause and self._clock() < self._closed_until_s:
            raise TrackingError(f"cannot {action}: {self._cause}; not tried again for {RETRY_AFTER_S:g} s")
        try:
            if self._client is None:
                self._client = _make_client(self._uri)
            yield self._client
            self._cause = ""
        except TrackingError:
            raise
        except Exception as error:
            # Stores raise what their vendors raise (requests, SQLAlchemy, boto3): no narrower class covers them all.
            # Our own work is done before a store is spoken to, so what is caught here is the store's.
            if _is_refusal(error):
                raise TrackingError(f"cannot {action}: {self._uri} refuses it: {_one_line(error)}") from error
            self._closed_until_s = self._clock() + RETRY_AFTER_S
            self._cause = f"{self._uri} cannot be reached ({_one_line(_first_cause(error))})"
            raise TrackingError(
                f"cannot {action}: {self._cause}; results stay in the study folder, "
                "start the server or give another tracking URI, then run `wattune sync`"
            ) from error


def _make_client(uri: str) -> Any:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Two lines about tables it creates, on every first use of a store.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


def _is_refusal(error: Exception) -> bool:
    """Whether a store was there and said no, by MLflow's error codes; then there is no point in waiting for it."""
    from mlflow.exceptions import MlflowException

    out_of_reach = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "DEADLINE_EXCEEDED")
    return isinstance(error, MlflowException) and error.error_code not in out_of_reach


def _first_cause(error: BaseException) -> BaseException:
    """What began a chain of errors: `Connection refused` under three layers of retries."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__


def _artifacts_beside(uri: str) -> str | None:
    """A folder beside an sqlite file: MLflow's own choice would be one in the current directory."""
    if not uri.startswith("sqlite:///"):
        return None
    return (Path(uri.removeprefix("sqlite:///")).absolute().parent / "mlartifacts").as_uri()


def _check_alive(experiment: Any, uri: str) -> None:
    if experiment.lifecycle_stage != "active":
        raise TrackingError(
            f'study "{experiment.name}" was deleted in {uri}; restore it with '
            f"`mlflow experiments restore --experiment-id {experiment.experiment_id}` or give the study another name"
        )


def _search(client: Any, experiment_id: str, tags: Mapping[str, str]) -> Iterator[Any]:
    """The runs with all of these tags, newest first, page by page."""
    where = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
    token = None
    while True:
        page = client.search_runs([experiment_id], where, max_results=_PAGE, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _is_over(run: Any) -> bool:
    """Whether a run holds a whole trial: its end is the last thing sent, and an interrupted trial runs again."""
    return bool(run.info.status != "RUNNING" and run.data.tags.get("status") != TrialStatus.INTERRUPTED)


def _params(spec: TrialSpec) -> dict[str, str]:
    """The specification, flat: axes by name, and what they apply to."""
    model, cluster, plan = spec.model, spec.cluster, spec.plan
    values: dict[str, Any] = {name: getattr(plan, name) for name in AXES}
    values |= {"dp": plan.dp(cluster.world_size), "engine": spec.engine, **asdict(spec.workload)}
    values |= {"cluster": cluster.label, **asdict(cluster), "world_size": cluster.world_size}
    shape = ("num_layers", "hidden_size", "ffn_hidden_size", "num_heads", "num_kv_heads", "vocab_size")
    experts = ("num_experts", "num_experts_per_token", "num_parameters", "num_active_parameters")
    values |= {"model": model.name, **{f"model.{name}": getattr(model, name) for name in shape + experts}}
    return {name: _text(value) for name, value in values.items()}


def _text(value: Any) -> str:
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _tags(spec: TrialSpec, result: TrialResult) -> dict[str, str]:
    """What people filter by, and the whole specification and result for `read_results`."""
    whole = dict(zip(_WHOLE, map(_compact, (spec.to_json(), result.to_json())), strict=True))
    commit = result.tags.get("git_commit")
    tags = {
        **result.tags,
        "trial_id": result.trial_id,
        "repeat": str(result.repeat),
        "status": str(result.status),
        "reason": result.reason,
        "quality": result.quality,
        "quality_reasons": ", ".join(result.quality_reasons),
        "engine": spec.engine,
        "device": spec.cluster.device,
        "label": spec.label,
        **({"mlflow.source.git.commit": commit} if commit else {}),
        **{tag: text for tag, text in whole.items() if len(text) <= _MAX_TAG_CHARS},
    }
    return {name: text for name, text in tags.items() if text}


def _compact(data: Mapping[str, Any]) -> str:
    return json.dumps(data, separators=(",", ":"))


def _read_run(client: Any, run: Any) -> tuple[TrialSpec, TrialResult]:
    try:
        spec, result = (json.loads(_read_whole(client, run, tag)) for tag in _WHOLE)
        return TrialSpec.from_json(spec), TrialResult.from_json(result)
    except (KeyError, TypeError, ValueError) as error:
        raise TrackingError(f"run {run.info.run_id} holds no trial of this version of wattune ({error})") from error


def _read_whole(client: Any, run: Any, tag: str) -> str:
    if tag in run.data.tags:
        return str(run.data.tags[tag])
    with TemporaryDirectory() as folder:
        return Path(client.download_artifacts(run.info.run_id, _WHOLE[tag], folder)).read_text()


def _points(result: TrialResult, series: Series) -> list[tuple[str, float, int, int]]:
    """Metrics as MLflow stores them: name, value, wall-clock milliseconds, step."""
    end_ms = result.end_wall_ns // _NS_PER_MS
    points = [(name, float(value), end_ms, 0) for name, value in result.metrics.items()]
    for name, (wall_ns, values) in series.items():
        for step, (second_ns, value) in enumerate(mean_per_second(wall_ns, values)):
            points.append((f"trace/{name}", value, second_ns // _NS_PER_MS, step))
    return points


def mean_per_second(wall_ns: NDArray[np.int64], values: NDArray[np.floating[Any]]) -> list[tuple[int, float]]:
    """The mean of a series in every second it has samples in, in order of time.

    Args:
        wall_ns: Times, in any order, shape (n,).
        values: Values at these times, shape (n,); those that are no number are left out.

    Returns:
        Wall-clock nanoseconds of each second's first sample, and the mean of its samples.
    """
    known = np.isfinite(values)
    times, kept = np.asarray(wall_ns)[known], np.asarray(values, dtype=np.float64)[known]
    order = np.argsort(times, kind="stable")
    times, kept = times[order], kept[order]
    _, first, count = np.unique(times // NS_PER_S, return_index=True, return_counts=True)
    if not first.size:
        return []
    means = np.add.reduceat(kept, first) / count
    return list(zip(times[first].tolist(), means.tolist(), strict=True))


def _log(
    client: Any,
    run_id: str,
    *,
    params: Mapping[str, str] | None = None,
    tags: Mapping[str, str] | None = None,
    points: list[tuple[str, float, int, int]] | None = None,
) -> None:
    """Sends in batches of the sizes MLflow takes."""
    from mlflow.entities import Metric, Param, RunTag

    for part in _chunks([Param(*pair) for pair in (params or {}).items()], _MAX_PARAMS_AND_TAGS):
        client.log_batch(run_id, params=part)
    for part in _chunks([RunTag(*pair) for pair in (tags or {}).items()], _MAX_PARAMS_AND_TAGS):
        client.log_batch(run_id, tags=part)
    for part in _chunks([Metric(*point) for point in points or ()], _MAX_METRICS):
        client.log_batch(run_id, metrics=part)


def _chunks(items: list[Any], size: int) -> Iterator[list[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))
