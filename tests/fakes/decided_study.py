"""A study with a known truth of which some plans were measured: speed and power rise together with the micro-batch."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wattune import api
from wattune.run import Run, RunStatus
from wattune.storage.study import StudyFolder
from wattune.trial import TrialSpec

SPACE: dict[str, Any] = {
    "study": "decided",
    "model": {
        "name": "llama3_8b",
        "num_layers": 4,
        "hidden_size": 256,
        "ffn_hidden_size": 512,
        "num_heads": 4,
        "num_kv_heads": 2,
        "vocab_size": 512,
    },
    "cluster": {"device": "cpu", "num_nodes": 1, "devices_per_node": 2, "simulate_sensors_of": "h200_sxm"},
    "engine": "torch",
    "workload": {"mode": "pretrain", "seq_len": 128, "global_batch_size": 16},
    "space": {"tp": [1, 2], "recompute": ["none", "full"], "micro_batch_size": [1, 2, 4, 8]},
    "objective": "maximize tokens_per_s",
    "constraints": ["node_device_power_peak_1s_w <= 1000"],
    "search": {"strategy": "random"},
}
POWER = "node_device_power_peak_1s_w"


def truth(spec: TrialSpec) -> dict[str, float]:
    """Speed rises with the micro-batch and falls with recomputation and tp; power follows speed."""
    plan = spec.plan
    speed = 1000 * math.exp(
        0.2 * math.log2(plan.micro_batch_size) - 0.3 * (plan.recompute == "full") - 0.25 * (plan.tp == 2)
    )
    return {"tokens_per_s": speed, POWER: 500 + 0.4 * speed, "step_time_s": 2048 / speed}


def measured(spec: TrialSpec, repeat: int = 0, error: float = 0.0) -> Run:
    """The result of a plan, 20 s long, each figure with an error."""
    metrics = {name: value * math.exp(error) for name, value in truth(spec).items()}
    return Run(
        trial_id=spec.trial_id,
        repeat=repeat,
        status=RunStatus.COMPLETED,
        metrics=metrics,
        quality="indicative",
        quality_reasons=("simulated",),
        tags={"simulated": "true"},
        start_wall_ns=10**18 + repeat * 10**11,
        end_wall_ns=10**18 + repeat * 10**11 + 20 * 10**9,
    )


def write_study(
    storage: Path, ran: Callable[[TrialSpec], bool], *, name: str = "decided", repeats: int = 2, **changed: Any
) -> StudyFolder:
    """Writes a study of which the plans that are chosen were measured, each repeat a little different."""
    planned = api.plan({**SPACE, "study": name, **changed})
    study = StudyFolder.create(storage, name, planned.spec.document)
    for spec in filter(ran, planned.candidates.specs):
        for repeat in range(repeats):
            folder = study.trial(spec.trial_id, repeat)
            folder.write_spec(spec)
            error = 0.004 * math.sin(int(spec.trial_id[:6], 16) + 2.4 * repeat)
            folder.write_result(measured(spec, repeat, error))
    return study


def best_below(bound_w: float, storage: Path) -> TrialSpec:
    """The truly best plan of the space below a bound on power."""
    specs = api.plan(StudyFolder(storage / "decided").document()).candidates.specs
    return max((s for s in specs if truth(s)[POWER] <= bound_w), key=lambda s: truth(s)["tokens_per_s"])
