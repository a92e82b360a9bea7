"""Two studies of one space on one H200: what one calls sure, runs of the other break as seldom as it says.

Plans whose device waits for its host ran at another pace in each. The width that they are given now was found on the
same runs, so this is no blind test of it.
"""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from wattune.objective import parse_constraint, parse_objective
from wattune.ranking.bounds import RISK
from wattune.ranking.order import rank
from wattune.schema import METRICS
from wattune.trial import TrialResult, TrialSpec, TrialStatus

DATA = Path(__file__).parents[2] / "benchmarks" / "data"
TABLES = ("dense_llama_1b_h200", "dense_llama_1b_h200_ladder")
PEAK = "node_device_power_peak_1s_w"
BOUNDS = (450, 500, 550, 600, 620, 640, 660)


def runs(table: str, *, without: tuple[str, ...] = ()):
    return [
        (
            TrialSpec.from_json(json.loads(row["spec"])),
            TrialResult(
                trial_id=row["trial_id"],
                repeat=row["repeat"],
                status=TrialStatus(row["status"]),
                start_wall_ns=row["start_wall_ns"],
                quality=row["quality"],
                metrics={name: row[name] for name in METRICS.keys() - {*without} if row.get(name) is not None},
                tags=json.loads(row["tags"]),
            ),
        )
        for row in pq.read_table(DATA / f"{table}.parquet").to_pylist()
    ]


def promises(*, without: tuple[str, ...] = ()) -> tuple[list[tuple[str, int, float]], float]:
    """Plans that a study calls sure to keep a bound, against every run of the same plan in the other study.

    Returns:
        Those that a run is past by more than 1 %, and their share.
    """
    broken, count = [], 0
    for one, other in (TABLES, TABLES[::-1]):
        seen = [(run.trial_id, run.metrics[PEAK]) for _, run in runs(other)]
        for bound in BOUNDS:
            constraint = parse_constraint(f"{PEAK} <= {bound}")
            ranking = rank(runs(one, without=without), parse_objective("maximize tokens_per_s"), [constraint])
            sure = {row.trial_id for row in ranking.feasible}
            count += sum(trial in sure for trial, _ in seen)
            broken += [(trial, bound, peak_w) for trial, peak_w in seen if trial in sure and peak_w > 1.01 * bound]
    return broken, len(broken) / count


def test_what_is_called_sure_is_broken_as_seldom_as_the_risk_says() -> None:
    _, share = promises()
    assert share <= RISK


def test_the_wait_for_the_host_is_why() -> None:
    broken, share = promises(without=("host_bound_frac",))
    assert ("5f2dd45b80fc", 620, pytest.approx(667.7, abs=0.1)) in broken
    assert share > 2 * RISK


def test_both_studies_name_the_same_plan_under_the_bound() -> None:
    objective, constraint = parse_objective("maximize tokens_per_s"), parse_constraint(f"{PEAK} <= 620")
    best = [rank(runs(table), objective, [constraint]).best for table in TABLES]
    assert [row and row.trial_id for row in best] == ["3d2a723dc2be"] * 2
