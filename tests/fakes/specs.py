"""Specifications of trials and runs of them, in few words: what a test does not say is the same everywhere."""

from dataclasses import fields, replace
from typing import Any

from wattune.catalog.hardware import ClusterSpec, parse_cluster_label
from wattune.catalog.models import ModelSpec, model
from wattune.plans.axes import Plan
from wattune.run import Run, RunStatus
from wattune.trial import TrialSpec
from wattune.workload import Workload


def trial_spec(
    of: str | ModelSpec = "llama3_8b",
    *,
    on: str | ClusterSpec = "1x4 h200_sxm",
    engine: str = "torch",
    seq_len: int = 4096,
    batch: int = 16,
    plan: Plan | None = None,
    **more: Any,
) -> TrialSpec:
    """A trial of a model on a cluster, each by its name or itself; fields of cluster, workload and plan may follow.

    A plan of such fields splits experts as the rest: `etp` is `tp`.
    """

    def taken(record: type[Any]) -> dict[str, Any]:
        return {field.name: more.pop(field.name) for field in fields(record) if field.name in more}

    cluster = replace(parse_cluster_label(on) if isinstance(on, str) else on, **taken(ClusterSpec))
    workload = more.pop("workload", None) or Workload(seq_len=seq_len, global_batch_size=batch, **taken(Workload))
    return TrialSpec(
        model=model(of) if isinstance(of, str) else of,
        cluster=cluster,
        engine=engine,
        workload=workload,
        plan=plan or Plan(**({"etp": more.get("tp", 1)} | more)),
    )


def made_run(spec: TrialSpec, **more: Any) -> Run:
    """A run of a trial, the first one, which completed."""
    return Run(**({"trial_id": spec.trial_id, "repeat": 0, "status": RunStatus.COMPLETED} | more))


def store_run(study: Any, spec: TrialSpec, run: Run) -> Any:
    """Writes a run into the folder of its study; returns the folder of the trial."""
    folder = study.trial(spec.trial_id, run.repeat)
    folder.write_spec(spec)
    folder.write_result(run)
    return folder
