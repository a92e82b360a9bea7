"""The budget of a call, and the expected time of a trial."""

import math

from specs import trial_spec

from wattune.orchestrate.scheduling.budget import Budget
from wattune.orchestrate.scheduling.durations import Pace
from wattune.trial import TrialSpec


def spec(size: int, *, engine: str = "torch") -> TrialSpec:
    return trial_spec(on="1x1 cpu", engine=engine, seq_len=8, batch=8, micro_batch_size=size)


def test_a_budget_of_trials_and_of_hours() -> None:
    now_s = [100.0]
    budget = Budget(max_hours=1, max_trials=2, clock_s=lambda: now_s[0])
    assert budget.allows(3600) and not budget.allows(3601)
    now_s[0] += 3000
    assert budget.allows(600) and not budget.allows(601)
    budget.spend()
    budget.spend()
    assert not budget.allows(0)
    assert Budget().allows(1e9)


def test_pace_is_the_median_of_what_was_seen_of_the_kind() -> None:
    pace = Pace()
    assert pace.expected_s(spec(1), 15) == 15 and pace.typical_s == 0
    for took_s in (20, 400, 30):
        pace.add(spec(1), took_s)
    assert pace.expected_s(spec(2), 15) == 30
    assert pace.expected_s(spec(2), 60) == 60
    assert pace.expected_s(spec(1, engine="other"), 0) == 30
    pace.add(spec(1, engine="other"), 5)
    assert pace.expected_s(spec(2, engine="other"), 0) == 5


def test_a_budget_of_device_hours_counts_what_runs_and_what_ran() -> None:
    now_s = [0.0]
    budget = Budget(max_device_hours=1, clock_s=lambda: now_s[0])
    assert budget.allows(900, num_devices=4) and not budget.allows(901, num_devices=4)
    budget.spend("a", num_devices=4, expected_s=600)
    assert budget.left_device_s == 1200  # what it is expected to take is not there for others
    assert budget.allows(300, num_devices=4) and not budget.allows(301, num_devices=4)
    now_s[0] = 700  # it takes longer
    assert budget.left_device_s == 800
    budget.settle("a")
    now_s[0] = 5000
    assert budget.left_device_s == 800
    budget.spend("b", num_devices=4, expected_s=150)
    now_s[0] += 100  # and one that is quicker gives the rest back
    budget.settle("b")
    assert budget.left_device_s == 400
    assert Budget().left_device_s == math.inf


def test_pace_tells_warm_starts_from_cold_ones() -> None:
    pace = Pace()
    for took_s, start in ((65, "new_workers"), (22, "new_graphs"), (24, "new_graphs"), (15, "warm"), (16, "warm")):
        pace.add(spec(1), took_s, start)
    assert [pace.expected_s(spec(2), 0, one) for one in ("new_workers", "new_graphs", "warm")] == [65, 23, 15.5]
    assert pace.expected_s(spec(2), 0) == 22, "the median of all where the start is not known"
    assert pace.expected_s(spec(2), 20, "warm") == 20
    pace.add(spec(1, engine="other"), 70, "new_workers")
    assert pace.expected_s(spec(1, engine="other"), 0, "warm") == 70, "none started so yet"
    pace.add(spec(1, engine="third"), 70, "new_workers", 50)
    assert pace.expected_s(spec(1, engine="third"), 0, "warm") == 20, "workers start once"
    assert pace.expected_s(spec(1, engine="third"), 0, "new_workers") == 70
