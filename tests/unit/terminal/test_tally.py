"""State of a study while it runs: counts, the best so far, and the time left."""

import random
from dataclasses import replace
from typing import Any

import pytest
from made_events import CLUSTER, QUESTION, ended, placement, preview, started
from stored_tables import results_of, studies

from wattune.objective import Question
from wattune.orchestrate.events import RowStopped, TrialEvent
from wattune.ranking.answer import answer_of
from wattune.ranking.order import rank
from wattune.run import Run, RunStatus
from wattune.terminal.tally import Tally


def tally() -> Tally:
    return Tally(QUESTION)


def best(of: Tally) -> int | None:
    found = of.ranking().best
    return None if found is None else found.spec.plan.micro_batch_size


@pytest.mark.parametrize("metric", ["tokens_per_s", "throttle_loss_frac", "device_temp_max_c"])
def test_the_best_while_it_runs_is_the_first_of_the_ranking(metric: str) -> None:
    """Also where one trial was repeated and its interval is wide, and another's is narrow or of the prior alone."""
    rng, results = random.Random(7), []
    better = "maximize" if metric == "tokens_per_s" else "minimize"
    seen = Tally(Question.of(f"{better} {metric}"))
    for _ in range(16):
        size = rng.choice([1, 2, 4, 8])
        event = ended(size, 0)
        repeat = sum(result.trial_id == event.spec.trial_id for _, result in results)
        result = replace(event.result, repeat=repeat, metrics={metric: round(rng.uniform(0.2, 0.3 + size / 100), 3)})
        results.append((event.spec, result))
        seen.add(replace(event, repeat=repeat, result=result), 0)
        first = rank(results, Question(objective=seen.question.objective)).best
        now = seen.ranking().best
        assert first is not None and now is not None and now.trial_id == first.trial_id


@pytest.mark.parametrize(("table", "question"), [*studies()])
def test_the_answer_while_it_runs_is_that_of_the_ranking_in_every_stored_study(table: str, question: Question) -> None:
    """Runs of other trials, drift and node sets say what one trial alone does not."""
    pairs = results_of(table)
    seen = Tally(question)
    for spec, result in sorted(pairs, key=lambda pair: pair[1].start_wall_ns):
        event = TrialEvent(kind="finished", spec=spec, repeat=result.repeat, result=result, nodes=("n0",))
        seen.add(event, 0)
    ranking = rank(pairs, Question(objective=question.objective, constraints=tuple(question.constraints)))
    told, expected = answer_of(seen.ranking()), answer_of(ranking)  # names differ where another engine's trial is left
    assert (told.state, told.plan and told.plan.trial_id) == (expected.state, expected.plan and expected.plan.trial_id)
    assert (told.best_probability, told.lead_frac, told.num_behind) == (
        expected.best_probability,
        expected.lead_frac,
        expected.num_behind,
    )
    assert [one[1:] for one in told.rivals] == [one[1:] for one in expected.rivals]


def test_time_left_follows_estimates_that_trials_correct() -> None:
    seen = tally()
    seen.add(preview(3, estimated=True), 0)  # 1800 s for all of them
    for size, took_s, now_s in ((1, 300.0, 0.0), (2, 500.0, 600.0)):
        seen.add(replace(started(size), expected_s=took_s, num_left=2 - size + 1), now_s)
        if size == 1:
            seen.add(replace(ended(size, 100), num_left=2), 600.0)  # twice the 300 s
    assert seen.left_s(600.0) == (1800 - 300) * 2
    assert seen.left_s(800.0) == (1800 - 300) * 2 - 200
    seen.add(replace(ended(2, status=RunStatus.OUT_OF_MEMORY), num_left=0), 1600.0)
    assert (seen.left_s(1600.0), seen.done, seen.total) == (0, 2, 2), "a failed trial took its share of the estimate"


def test_counts_and_time_left() -> None:
    seen = tally()
    seen.add(preview(10, {RunStatus.COMPLETED: 2}), 0)
    assert seen.left_s(0) is None
    for size in (1, 2):
        seen.add(ended(size, 100, kind="skipped"), 0)
    seen.add(placement(lanes=("n0", "n1"), num_at_once=2), 0)
    seen.add(started(4), 0)
    seen.add(ended(4, status=RunStatus.OUT_OF_MEMORY), 20)
    assert (seen.total, seen.done, seen.skipped) == (12, 3, 2)
    assert seen.failed == {RunStatus.OUT_OF_MEMORY: 1}
    assert seen.left_s(20) == 9 * 20 / 2
    seen.add(started(8), 20)
    assert seen.left_s(25) == (9 * 20 - 5) / 2
    assert seen.left_s(1000) == (9 * 20 - 20) / 2


def test_an_interrupted_trial_is_not_done() -> None:
    seen = tally()
    seen.add(preview(1), 0)
    seen.add(started(1), 0)
    seen.add(ended(1, status=RunStatus.INTERRUPTED), 5)
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


def test_an_event_ranks_nothing_and_a_view_ranks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand results of an earlier call come at once, and the view is drawn twice a second."""
    ranked: list[int] = []

    def counted(results: Any, *others: Any) -> Any:
        ranked.append(len(results))
        return rank(results, *others)

    monkeypatch.setattr("wattune.terminal.tally.rank", counted)
    seen = tally()
    for size in range(1, 101):
        seen.add(ended(size, 100 + size % 7), size)
    assert ranked == []
    assert seen.ranking().best is not None and seen.ranking(patient=True) is seen.ranking()
    assert ranked == [100]


def test_where_a_ranking_takes_long_a_view_shows_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]

    def slow(*asked: Any) -> Any:
        now_s[0] += 2.0
        return rank(*asked)

    monkeypatch.setattr("wattune.terminal.tally.rank", slow)
    monkeypatch.setattr("wattune.terminal.tally.time.perf_counter", lambda: now_s[0])
    seen = tally()
    seen.add(ended(1, 100), 0)
    first = seen.ranking(patient=True)
    seen.add(ended(2, 200), 1)
    now_s[0] += 39.0
    assert seen.ranking(patient=True) is first
    now_s[0] += 2.0
    second = seen.ranking(patient=True).best
    assert second is not None and second.spec.plan.micro_batch_size == 2
    seen.add(ended(4, 300), 2)
    assert best(seen) == 4, "who is not patient never gets an old one"


def test_failures_of_the_cluster_count_once_and_a_row_that_stops_is_kept() -> None:
    failed = Run(trial_id="a", repeat=0, status=RunStatus.INFRA_FAILED, reason="node n1 left the cluster")
    again = replace(ended(1, 100), result=failed, again=True)
    stopped = RowStopped(cluster=CLUSTER, engine="torch", result=failed, count=5, num_held=7)
    seen = tally()
    for event in (preview(12), again, replace(again, again=False), stopped):
        seen.add(event, 0)
    assert seen.done == 0 and seen.failed == {RunStatus.INFRA_FAILED: 1} and seen.stopped == [str(stopped)]
