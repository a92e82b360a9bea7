"""A report that is hard to fit: long names, six bounds, forty trials, several clusters, settings that vary."""

from dataclasses import replace
from pathlib import Path

from made_report import DOCUMENT, comparison_of, evidence_of, trial

from wattune.catalog.hardware import ClusterSpec
from wattune.objective import Question, parse_constraint, parse_objective
from wattune.plans.axes import Plan
from wattune.ranking.order import Ranking, rank
from wattune.report.page import render_report
from wattune.run import RunStatus

BOUNDS = (
    "node_device_power_peak_1s_w <= 2750",
    "device_temp_max_c < 85",
    "throttle_loss_frac <= 0.1",
    "excursion_peak_over_limit_frac <= 0.05",
    "memory_peak_bytes <= 150000000000",
    "device_power_peak_1s_w <= 1.0 * device_power_limit_w",
)


def wide_ranking(num_bounds: int, simulated: bool = False) -> Ranking:
    """Forty trials of long plans, a third of them beyond the bound on power."""
    pairs = []
    for number in range(40):
        spec, result = trial(1 + number % 4, 40_000.0 + 500 * number, 2300.0 + 20 * number, simulated=simulated)
        plan = Plan(tp=2, etp=2, micro_batch_size=1 + number % 4, sharding="zero1", overlap="grad_param")
        plan = replace(plan, recompute=("none", "selective", "full")[number % 3])
        cluster = ClusterSpec(device="h200_sxm", devices_per_node=8, num_nodes=1 + number // 12)
        spec = replace(spec, plan=plan, cluster=cluster)
        more = {
            "device_temp_max_c": 60.0 + number % 30,
            "throttle_loss_frac": 0.004 * number,
            "device_power_limit_w": 700.0,
        }
        more |= {"excursion_peak_over_limit_frac": 0.01, "memory_peak_bytes": 1.2e11, "device_power_peak_1s_w": 690.0}
        pairs.append((spec, replace(result, trial_id=spec.trial_id, metrics={**result.metrics, **more})))
    spec, result = trial(16, 0.0, status=RunStatus.OUT_OF_MEMORY, reason="rank 3 at 140.2 GiB: " + "no_break" * 30)
    pairs.append((spec, result))
    return rank(
        pairs,
        Question(
            objective=parse_objective("maximize tokens_per_s"),
            constraints=tuple(parse_constraint(text) for text in BOUNDS[:num_bounds]),
        ),
    )


def write_wide_report(path: Path, num_bounds: int = 5, simulated: bool = True) -> Path:
    """Writes the page with every kind of section."""
    ranking = wide_ranking(num_bounds, simulated)
    kept = [{"trial_id": row.trial_id, "status": "kept", "rule": "", "reason": ""} for row in ranking.trials]
    kept += [{"trial_id": f"{number:012x}", "status": "kept", "rule": "", "reason": ""} for number in range(640)]
    reason = "micro_batch_size 4 times dp 8 does not divide global_batch_size 16; choose a divisor"
    kept += [{"trial_id": "", "status": "rejected", "rule": "global_batch_size", "reason": reason}] * 1204
    shown = [*ranking.feasible[:4], *ranking.infeasible[:4]]
    evidence = {row.trial_id: evidence_of(slow=1.0 + number / 10) for number, row in enumerate(shown)}
    pair = comparison_of(ranking, evidence) if ranking.feasible and ranking.infeasible else None
    path.write_text(
        render_report("moe_expert_parallel_h200", DOCUMENT, ranking, kept, evidence, pair and {"price": pair})
    )
    return path
