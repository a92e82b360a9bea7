"""Conversion of a trial to an MLflow run and back: parameters, tags, metrics and curves."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from wattune.errors import TrackingError
from wattune.plans.axes import AXES
from wattune.plans.program import text_of
from wattune.run import Run, RunStatus
from wattune.storage.format import FORMAT, FORMAT_TAG, FormatError, check_format
from wattune.tracking.store import Point
from wattune.trial import TrialSpec
from wattune.units import NS_PER_S

Curves = Mapping[str, tuple[NDArray[np.int64], NDArray[np.floating[Any]]]]
"""Curves for MLflow's charts by name, such as `node0/device_power_w`: wall-clock nanoseconds and values."""

TRIAL_TAG: Final = "wattune.trial"
"""Tag of a run with its trial and repeat."""

STUDY_TAG: Final = "wattune.study"
"""Tag of a study's parent run with the study's name."""

RUN_STATUS: Final = {
    RunStatus.COMPLETED: "FINISHED",
    RunStatus.ABORTED: "KILLED",
    RunStatus.INTERRUPTED: "KILLED",
    RunStatus.INFRA_FAILED: "KILLED",
}
"""MLflow's status of a run by the trial's; FAILED for all others."""

NOT_FINAL: Final = tuple(str(status) for status in RunStatus if not status.is_final)
"""Statuses of trials that run again."""

NS_PER_MS: Final = NS_PER_S // 1000

_MAX_TAG_CHARS: Final = 8000  # MLflow silently cuts longer ones; mlflow/utils/validation.py, 3.17.2
_WHOLE: Final = {"wattune.spec": "spec.json", "wattune.run": "run.json"}
"""Tags that hold a whole file, so that one request reads a page of trials; a longer file is only an artifact."""


def is_whole(run: Any) -> bool:
    """Returns true if all of a trial was sent: its end is sent last."""
    return bool(run.info.status != "RUNNING")


def run_params(spec: TrialSpec) -> dict[str, str]:
    """Returns the specification as flat parameters: axes of the plan, engine, workload, cluster and model."""
    model, cluster, plan = spec.model, spec.cluster, spec.plan
    values: dict[str, Any] = {name: getattr(plan, name) for name in AXES}
    values |= {"dp": plan.dp(cluster.world_size), "engine": spec.engine, **asdict(spec.workload)}
    values |= {"cluster": cluster.label, **asdict(cluster), "world_size": cluster.world_size}
    shape = ("num_layers", "hidden_size", "ffn_hidden_size", "num_heads", "num_kv_heads", "vocab_size")
    experts = ("num_experts", "num_experts_per_token", "num_parameters", "num_active_parameters")
    shown = shape + experts if model.is_known else ()
    values |= {"model": model.name, **{f"model.{name}": getattr(model, name) for name in shown}}
    values |= {f"flags.{name}": text_of(value) for name, value in spec.flags}
    if not spec.workload.is_known:
        values = {name: value for name, value in values.items() if name not in asdict(spec.workload)}
    return {name: _text(value) for name, value in values.items()}


def _text(value: Any) -> str:
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)


def run_tags(spec: TrialSpec, result: Run) -> dict[str, str]:
    """Returns tags for filters, and the whole specification and result for `read_study`."""
    texts = (json.dumps(one.to_json(), separators=(",", ":")) for one in (spec, result))
    whole = dict(zip(_WHOLE, texts, strict=True))
    commit = result.tags.get("git_commit")
    tags = {
        **result.tags,
        **{name: f"{value:.17g}" for name, value in result.numbers.known.items()},
        FORMAT_TAG: str(FORMAT),
        "trial_id": result.trial_id,
        "repeat": str(result.repeat),
        "status": str(result.status),
        "reason": result.reason,
        **quality_tags(result),
        "engine": spec.engine,
        "device": spec.cluster.device,
        "label": spec.label,
        **({"mlflow.source.git.commit": commit} if commit else {}),
        **{tag: text for tag, text in whole.items() if len(text) <= _MAX_TAG_CHARS},
    }
    return {name: text for name, text in tags.items() if text}


def shown_params(spec: TrialSpec) -> dict[str, str | float]:
    """Returns the parameters for stores that draw numbers on an axis: numbers as such, all others as text."""
    return {name: _number_of(text) for name, text in run_params(spec).items()}


def _number_of(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


def shown_tags(spec: TrialSpec, result: Run) -> dict[str, str]:
    """Returns the tags that are for people: without whole files, and without those that MLflow alone knows."""
    tags = run_tags(spec, result)
    return {name: text for name, text in tags.items() if name not in _WHOLE and not name.startswith("mlflow.")}


def quality_tags(result: Run) -> dict[str, str]:
    """Returns the tags that say how far a result can be trusted."""
    return {"quality": result.quality, "quality_reasons": ", ".join(result.quality_reasons)}


def require_format(run: Any, where: str) -> None:
    """Makes sure that a run is of the format that this code reads.

    Raises `TrackingError` where it is of another one.
    """
    try:
        check_format(run.data.tags.get(FORMAT_TAG))
    except FormatError as error:
        raise TrackingError(f"{where}: {error}") from error


def read_run(client: Any, run: Any) -> tuple[TrialSpec, Run]:
    """Reads the trial of a run. Raises `TrackingError` where it is of another format, or damaged."""
    require_format(run, f"run {run.info.run_id}")
    spec, result = (_read_whole(client, run, tag) for tag in _WHOLE)
    return pair_of(spec, result, f"run {run.info.run_id}")


def _read_whole(client: Any, run: Any, tag: str) -> bytes | str:
    if tag in run.data.tags:
        return str(run.data.tags[tag])
    with TemporaryDirectory() as folder:
        return Path(client.download_artifacts(run.info.run_id, _WHOLE[tag], folder)).read_bytes()


def pair_of(spec: bytes | str, result: bytes | str, where: str) -> tuple[TrialSpec, Run]:
    """Reads a trial and its result from the JSON of both.

    Raises `TrackingError` where they are damaged; `where` they are is in the message.
    """
    try:
        return TrialSpec.from_json(json.loads(spec)), Run.from_json(json.loads(result))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise TrackingError(f"{where} is damaged ({error})") from error


def run_points(result: Run, series: Curves) -> list[Point]:
    """Returns metrics as MLflow stores them: name, value, wall-clock milliseconds, step."""
    end_ms = result.end_wall_ns // NS_PER_MS
    points = [(name, float(value), end_ms, 0) for name, value in result.metrics.items()]
    for name, (wall_ns, values) in series.items():
        for step, (second_ns, value) in enumerate(mean_per_second(wall_ns, values)):
            points.append((f"trace/{name}", value, second_ns // NS_PER_MS, step))
    return points


def mean_per_second(wall_ns: NDArray[np.int64], values: NDArray[np.floating[Any]]) -> list[tuple[int, float]]:
    """Computes the mean of a series in every second with samples, in order of time; NaN and infinity are left out.

    Returns wall-clock nanoseconds of each second's first sample, and the mean of its samples.
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
