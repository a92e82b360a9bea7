"""Trials with made-up figures, and their order in a ranking."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from specs import trial_spec

from wattune.objective import RISK, Constraint, Objective, Question, parse_constraint, parse_objective
from wattune.ranking.assessment import RankedTrial
from wattune.run import Numbers, Run, RunStatus
from wattune.trial import TrialSpec

FASTEST = parse_objective("maximize tokens_per_s")


LEAST_ENERGY = parse_objective("minimize energy_per_token_j")


POWER = parse_constraint("node_device_power_peak_1s_w <= 2750")


COOL = parse_constraint("device_temp_max_c < 85")


CAPPED = parse_constraint("device_power_peak_1s_w <= 1.0 * device_power_limit_w")


Pair = tuple[TrialSpec, Run]


def asked(objective: Objective, *constraints: Constraint, risk: float = RISK) -> Question:
    """The question for the best trial within some bounds."""
    return Question(objective=objective, constraints=constraints, risk=risk)


def trial(
    number: int,
    metrics: Mapping[str, float] | None = None,
    *,
    repeat: int = 0,
    status: RunStatus = RunStatus.COMPLETED,
    quality: str = "publishable",
    reason: str = "",
    tags: Mapping[str, str] | None = None,
    window_s: float | None = None,
) -> Pair:
    """Trial `number`: each is another micro-batch size, so each has another identity."""
    spec = trial_spec(micro_batch_size=number, layout=(8, 8), rank_order=(1, 0))
    return spec, Run(
        trial_id=spec.trial_id,
        repeat=repeat,
        status=status,
        reason=reason,
        metrics=metrics or {},
        quality=quality if metrics else "",
        tags=tags or {},
        numbers=Numbers(window_s=window_s),
    )


def speed(number: int, tokens_per_s: float, power_w: float = 2000.0, repeat: int = 0) -> Pair:
    return trial(number, {"tokens_per_s": tokens_per_s, "node_device_power_peak_1s_w": power_w}, repeat=repeat)


def numbers(rows: Sequence[RankedTrial]) -> list[int]:
    return [row.spec.plan.micro_batch_size for row in rows]


def reference_runs(
    values: Sequence[float], *, number: int = 90, start_s: float = 0.0, every_s: float = 600.0
) -> list[Pair]:
    """The reference trial trial again and again, one run every ten minutes."""
    pairs = []
    for count, value in enumerate(values):
        spec, result = speed(number, value, repeat=1000 + count)
        start_ns = round((1_790_000_000 + start_s + count * every_s) * 1e9)
        pairs.append((spec, replace(result, tags={"reference": "true", "nodes": "n0"}, start_wall_ns=start_ns)))
    return pairs


def on_n0(pair: Pair, at_s: float = 0.0) -> Pair:
    spec, result = pair
    return spec, replace(result, tags={"nodes": "n0"}, start_wall_ns=round((1_790_000_000 + at_s) * 1e9))
