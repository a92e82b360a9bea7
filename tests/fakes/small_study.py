"""A small study made of real recordings: two trials measured on four H200s, one that failed, one without telemetry.

What the two gave is recomputed from their recordings (`tests/golden/h200x4`), nothing is made up; a third says only how
it ended.
"""

import shutil
import tempfile
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

from runs import run_data
from specs import made_run, trial_spec

from wattune.analysis.run_data import WINDOW_NODE
from wattune.analysis.summary import Summary, summarize
from wattune.catalog.models import model
from wattune.objective import Question, parse_constraint, parse_objective
from wattune.plans.axes import Plan
from wattune.ranking.order import Ranking, rank
from wattune.run import Numbers, Run, RunStatus
from wattune.storage.files import write_json
from wattune.storage.measured import MeasuredFolder
from wattune.storage.study import StudyFolder
from wattune.trial import TrialSpec

GOLDEN = Path(__file__).parents[1] / "golden" / "h200x4"
START_NS = 1_790_000_000_000_000_000

PLANS = {"dp4": Plan(overlap="grad_param"), "tp2pp2": Plan(tp=2, pp=2, etp=2)}


def spec_of(plan: Plan) -> TrialSpec:
    """The dense slice the recordings are of."""
    return trial_spec(replace(model("llama3_8b"), num_layers=8, vocab_size=32_000), engine="megatron", plan=plan)


@cache
def _summary(recording: str) -> Summary:
    recorded = MeasuredFolder(GOLDEN / recording)
    return summarize(run_data(spec_of(PLANS[recording]), recorded.spans(), recorded.telemetry(), recorded.manifests()))


def make_study(storage: Path, name: str = "dense_h200x4", bound_w: float = 3000.0) -> StudyFolder:
    """Writes the study into a storage folder, as a copy of one that is made once in this process.

    Power is bounded beyond the sensor's accuracy of 5 %. So one trial is feasible, and the other breaks the bound on
    throttling.
    """
    return StudyFolder(Path(shutil.copytree(Path(_template(name, bound_w).name) / name, storage / name)))


@cache
def _template(name: str, bound_w: float) -> "tempfile.TemporaryDirectory[str]":
    """A storage folder with the study, which ends with the process."""
    storage = tempfile.TemporaryDirectory()
    _write_study(Path(storage.name), name, bound_w)
    return storage


def _write_study(storage: Path, name: str, bound_w: float) -> None:
    specs = {recording: spec_of(plan) for recording, plan in PLANS.items()}
    first = specs["dp4"]
    document = {
        "study": name,
        "model": [{"name": "llama3_8b", "num_layers": 8}],
        "cluster": [asdict(first.cluster)],
        "engine": ["megatron"],
        "workload": asdict(first.workload),
        "space": {"tp": [1, 2], "pp": [1, 2], "micro_batch_size": [1, 2]},
        "measure": {"warmup_steps": 5, "min_steps": 10},
        "objective": "maximize tokens_per_s",
        "constraints": [f"node_device_power_peak_1s_w <= {bound_w:g}", "throttle_loss_frac <= 0.1"],
        "limits": {},
        "search": {"strategy": "grid"},
    }
    study = StudyFolder.create(storage, name, document)
    for number, (recording, spec) in enumerate(specs.items()):
        folder = study.trial(spec.trial_id, 0)
        shutil.copytree(GOLDEN / recording, folder.path, ignore=shutil.ignore_patterns("manifest.json"))
        recorded = MeasuredFolder(GOLDEN / recording)
        for node, manifest in recorded.manifests().items():
            write_json(folder.path / "telemetry" / node / "manifest.json", manifest)
        folder.write_spec(spec)
        found = _summary(recording)
        folder.write_result(
            made_run(
                spec,
                metrics=found.metrics,
                quality=found.quality,
                quality_reasons=found.quality_reasons,
                tags={**found.tags, "version.megatron": "0.19.2"},
                numbers=found.numbers,
                start_wall_ns=START_NS + number * 60_000_000_000,
                end_wall_ns=START_NS + number * 60_000_000_000 + 20_000_000_000,
            )
        )
    failed = spec_of(Plan(tp=1, micro_batch_size=2))
    study.trial(failed.trial_id, 0).write_spec(failed)
    study.trial(failed.trial_id, 0).write_result(
        made_run(
            failed,
            status=RunStatus.OUT_OF_MEMORY,
            reason="rank 3 at 140.2 GiB",
            start_wall_ns=START_NS + 200_000_000_000,
            end_wall_ns=START_NS + 210_000_000_000,
        )
    )
    kept = (*specs.values(), failed)
    rows = [{"trial_id": spec.trial_id, "status": "kept", "rule": "", "reason": ""} for spec in kept]
    reason = "tp=8 does not divide num_kv_heads=8 over 4 devices"
    study.commit(
        study.document(), [*rows, {"trial_id": "", "status": "rejected", "rule": "world_size", "reason": reason}]
    )


def without_steps(study: StudyFolder, trial_id: str) -> Run:
    """Makes a trial one whose command told no steps: no spans, and the window in the result."""
    folder = study.trial(trial_id, 0)
    (folder.path / "spans.parquet").unlink()
    at_ns = folder.telemetry()["fast"]["mono_ns"].to_numpy()
    result = folder.result()
    assert result is not None
    numbers = Numbers(window_start_mono_ns=int(at_ns.min()), window_end_mono_ns=int(at_ns.max()))
    folder.write_result(replace(result, tags={**result.tags, WINDOW_NODE: "node0"}, numbers=numbers))
    return folder.result() or result


def ranking_of(study: StudyFolder) -> Ranking:
    """The study's own ranking."""
    document = study.document()
    bounds = [parse_constraint(text) for text in document["constraints"]]
    return rank(study.results(), Question(objective=parse_objective(document["objective"]), constraints=tuple(bounds)))
