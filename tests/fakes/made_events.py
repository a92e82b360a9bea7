"""Events of a made-up study, as a view of it hears them."""

import math
from collections import Counter
from typing import Any

from specs import trial_spec

from wattune.catalog.hardware import ClusterSpec
from wattune.objective import Question
from wattune.orchestrate.events import Placement, Preview, TrialEvent
from wattune.run import Run, RunStatus
from wattune.trial import TrialSpec

CLUSTER = ClusterSpec(device="cpu", devices_per_node=2)
QUESTION = Question.of("maximize tokens_per_s", "node_device_power_peak_1s_w <= 1000")


def spec(size: int) -> TrialSpec:
    return trial_spec(on=CLUSTER, seq_len=8, batch=64, micro_batch_size=size)


def started(size: int, **more: Any) -> TrialEvent:
    return TrialEvent(kind="started", spec=spec(size), repeat=0, nodes=("n0",), **more)


def ended(
    size: int,
    tokens_per_s: float = 0,
    peak_w: float = 900,
    status: RunStatus = RunStatus.COMPLETED,
    *,
    kind: Any = "finished",
    repeat: int = 0,
) -> TrialEvent:
    metrics = {"tokens_per_s": tokens_per_s, "node_device_power_peak_1s_w": peak_w}
    result = Run(
        trial_id=spec(size).trial_id,
        repeat=repeat,
        status=status,
        reason="" if status is RunStatus.COMPLETED else "rank 0: it broke",
        metrics=metrics if status is RunStatus.COMPLETED else {},
        start_wall_ns=10**18,
        end_wall_ns=10**18 + 20 * 10**9,
    )
    return TrialEvent(kind=kind, spec=spec(size), repeat=repeat, result=result, nodes=("n0",))


def preview(num_left: int, done: dict[RunStatus, int] | None = None, **more: Any) -> Preview:
    load_s = {CLUSTER: 1800.0}
    facts = {"num_references": 0, "num_finalists": 0, "num_again": 0, "load_s": load_s, "measured": False}
    facts |= {"num_now": num_left, "load_now_s": load_s, "most_s": math.inf}
    return Preview(num_left=num_left, done=Counter(done or {}), **(facts | more))


def placement(**facts: Any) -> Placement:
    return Placement(**{"lanes": ("n0",), "num_at_once": 1, "wall_s": 60, "device_s": 120, **facts})
