"""State of a study while it runs: counts, the best so far, and the time left."""

import random
from dataclasses import replace
from typing import Any

import pytest
from made_events import CLUSTER, CONSTRAINTS, OBJECTIVE, ended, placement, preview, started

from wattune.objective import parse_objective
from wattune.orchestrate.events import RowStopped
from wattune.ranking.order import rank
from wattune.terminal.tally import Tally
from wattune.trial import TrialResult, TrialStatus


def tally() -> Tally:
    return Tally(OBJECTIVE, CONSTRAINTS)


def best(of: Tally) -> int | None:
    return None if of.best is None else of.best.spec.plan.micro_batch_size


def test_the_best_is_the_best_feasible_by_its_worst_repeat() -> None:
    seen = tally()
    seen.add(ended(1, 100), 0)
    assert best(seen) == 1
    seen.add(ended(2, 200, peak_w=1100), 0)
    assert best(seen) == 1
    seen.add(ended(4, 150), 0)
    assert best(seen) == 4
    seen.add(ended(4, 40, repeat=1), 0)  # a mean of 95
    assert best(seen) == 1
    seen.add(ended(1, 100, peak_w=1001, repeat=1), 0)
    assert best(seen) == 4


@pytest.mark.parametrize("metric", ["tokens_per_s", "throttle_loss_frac", "device_temp_max_c"])
def test_the_best_while_it_runs_is_the_first_of_the_ranking(metric: str) -> None:
    """Also where one trial was repeated and its interval is wide, and another's is narrow or of the prior alone."""
    rng, results = random.Random(7), []
    better = "maximize" if metric == "tokens_per_s" else "minimize"
    seen = Tally(parse_objective(f"{better} {metric}"), ())
    for _ in range(16):
        size = rng.choice([1, 2, 4, 8])
        event = ended(size, 0)
        repeat = sum(result.trial_id == event.spec.trial_id for _, result in results)
        result = replace(event.result, repeat=repeat, metrics={metric: round(rng.uniform(0.2, 0.3 + size / 100), 3)})
        results.append((event.spec, result))
        seen.add(replace(event, repeat=repeat, result=result), 0)
        first = rank(results, seen.objective, ()).best
        assert first is not None and seen.best is not None
        assert seen.best.trial_id == first.trial_id


def undecided(of: Tally) -> int | None:
    return None if of.undecided is None else of.undecided.spec.plan.micro_batch_size


def test_a_trial_whose_bound_is_not_decided_is_never_the_best() -> None:
    seen = tally()
    seen.add(ended(1, 200, peak_w=990), 0)  # 1 % below the bound, of a sensor that may be 5 % off
    assert (best(seen), undecided(seen)) == (None, 1)
    seen.add(ended(2, 100), 0)
    assert (best(seen), undecided(seen)) == (2, 1)
    seen.add(ended(4, 150, peak_w=990), 0)
    assert (best(seen), undecided(seen)) == (2, 1), "the leader of both"
    seen.add(ended(8, 300), 0)
    assert (best(seen), undecided(seen)) == (8, None), "an undecided trial behind the best decides nothing"
    seen.add(ended(8, status=TrialStatus.CRASHED, repeat=1), 0)
    assert (best(seen), undecided(seen)) == (2, 1)
    seen.add(ended(1, status=TrialStatus.CRASHED, repeat=1), 0)
    assert (best(seen), undecided(seen)) == (2, 4)


def test_time_left_follows_estimates_that_trials_correct() -> None:
    seen = tally()
    seen.add(preview(3, estimated=True), 0)  # 1800 s for all of them
    for size, took_s, now_s in ((1, 300.0, 0.0), (2, 500.0, 600.0)):
        seen.add(replace(started(size), expected_s=took_s, num_left=2 - size + 1), now_s)
        if size == 1:
            seen.add(replace(ended(size, 100), num_left=2), 600.0)  # twice the 300 s
    assert seen.left_s(600.0) == (1800 - 300) * 2
    assert seen.left_s(800.0) == (1800 - 300) * 2 - 200
    seen.add(replace(ended(2, status=TrialStatus.OUT_OF_MEMORY), num_left=0), 1600.0)
    assert (seen.left_s(1600.0), seen.done, seen.total) == (0, 2, 2), "a failed trial took its share of the estimate"


def test_counts_and_time_left() -> None:
    seen = tally()
    seen.add(preview(10, {TrialStatus.COMPLETED: 2}), 0)
    assert seen.left_s(0) is None
    for size in (1, 2):
        seen.add(ended(size, 100, kind="skipped"), 0)
    seen.add(placement(lanes=("n0", "n1"), num_at_once=2), 0)
    seen.add(started(4), 0)
    seen.add(ended(4, status=TrialStatus.OUT_OF_MEMORY), 20)
    assert (seen.total, seen.done, seen.skipped) == (12, 3, 2)
    assert seen.failed == {TrialStatus.OUT_OF_MEMORY: 1}
    assert seen.left_s(20) == 9 * 20 / 2
    seen.add(started(8), 20)
    assert seen.left_s(25) == (9 * 20 - 5) / 2
    assert seen.left_s(1000) == (9 * 20 - 20) / 2


def test_an_interrupted_trial_is_not_done() -> None:
    seen = tally()
    seen.add(preview(1), 0)
    seen.add(started(1), 0)
    seen.add(ended(1, status=TrialStatus.INTERRUPTED), 5)
    assert (seen.done, seen.running, dict(seen.failed)) == (0, {}, {})


def test_time_left_and_trials_to_come_are_those_of_this_call() -> None:
    seen = tally()
    seen.add(preview(40, num_now=3, most_s=50.0), 0)
    seen.add(placement(), 0)
    assert seen.total == 3
    seen.add(started(1), 0)
    seen.add(ended(1, 100), 30)
    assert seen.left_s(30) == 20, "two more would take 60 s"


def test_before_the_cluster_is_known_no_time_left_is_told() -> None:
    seen = tally()
    seen.add(replace(preview(3), measured=True), 0)
    assert seen.left_s(1) is None
    seen.add(placement(), 2)
    assert seen.left_s(2) == 60


@pytest.mark.slow
def test_a_thousand_trials_cost_the_same_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event judges its own trial's repeats and no other's, however many trials there were."""
    judged: list[int] = []

    def counted(results: Any, *others: Any) -> Any:
        judged.append(len(results))
        return rank(results, *others)

    monkeypatch.setattr("wattune.terminal.tally.rank", counted)
    seen = tally()
    seen.add(preview(1000), 0)
    for size in range(1, 1001):
        seen.add(started(size), size)
        seen.add(ended(size, 100 + size % 7), size + 1)
    assert judged == [1] * 1000
    assert seen.done == 1000


def test_failures_of_the_cluster_count_once_and_a_row_that_stops_is_kept() -> None:
    failed = TrialResult(trial_id="a", repeat=0, status=TrialStatus.INFRA_FAILED, reason="node n1 left the cluster")
    again = replace(ended(1, 100), result=failed, again=True)
    stopped = RowStopped(cluster=CLUSTER, engine="torch", result=failed, count=5, num_held=7)
    seen = tally()
    for event in (preview(12), again, replace(again, again=False), stopped):
        seen.add(event, 0)
    assert seen.done == 0 and seen.failed == {TrialStatus.INFRA_FAILED: 1} and seen.stopped == [str(stopped)]
