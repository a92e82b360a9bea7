"""The race of a study: its share of repeats, their numbers, what it tells, and when it is over."""

from collections.abc import Callable
from typing import Any

import pytest

from wattune.fidelity import FIRST_REFERENCE_REPEAT
from wattune.objective import Question
from wattune.orchestrate.scheduling.race import Race
from wattune.run import Numbers, Run, RunStatus
from wattune.search.search_entry import Finalists
from wattune.trial import Measure, TrialSpec

MakeSpecs = Callable[..., list[TrialSpec]]


QUESTION = Question.of("maximize tokens_per_s")


def settings(until: float = 0.95, max_share: float = 1.0) -> Finalists:
    return Finalists(until=until, max_share=max_share)


def ended(spec: TrialSpec, value: float, repeat: int = 0, **more: Any) -> Run:
    facts = {"status": RunStatus.COMPLETED, "metrics": {"tokens_per_s": value}, **more}
    return Run(trial_id=spec.trial_id, repeat=repeat, **facts)


def of(specs: list[TrialSpec], values: list[float], *, measure: Measure | None = None, **more: float) -> Race:
    race = Race(settings(**more), QUESTION, measure or Measure())
    for spec, value in zip(specs, values, strict=True):
        race.note(spec, ended(spec, value))
    return race


RACED = Numbers(race_until_probability=0.95)

CLOSE = [1000.0, 1001.0, 1002.0, 700.0, 700.0]


def test_its_share_is_of_the_completed_runs_of_the_search(make_specs: MakeSpecs) -> None:
    specs = make_specs(5)
    race = of(specs, CLOSE, max_share=0.6)
    assert race.num_left == 3
    race.note(specs[3], ended(specs[3], 0.0, FIRST_REFERENCE_REPEAT))
    race.note(specs[4], ended(specs[4], 0.0, 1, status=RunStatus.CRASHED, metrics={}, numbers=RACED))
    assert race.num_left == 2, "a reference run adds nothing, and a repeat of the race that failed is used"
    assert race.num_expected(5) == 5


def test_it_is_over_once_the_share_is_used(make_specs: MakeSpecs) -> None:
    specs = make_specs(5)
    race = of(specs, CLOSE, max_share=0.4)
    for value in (960.0, 960.0):
        found = race.next(set())
        assert found is not None and not race.over
        race.start(found[0].trial_id, found[1])
        race.note(found[0], ended(found[0], value, found[1], numbers=RACED))
    step = race.news()
    assert race.over and race.next(set()) is None and step is not None
    assert step.ending == "its share of repeats is used" and (step.num_repeats, step.most_repeats) == (2, 2)
    assert race.num_expected(0) == 0


def test_a_clear_winner_ends_it_before_it_begins(make_specs: MakeSpecs) -> None:
    race = of(make_specs(3), [1300.0, 1000.0, 1000.0])
    step = race.news()
    assert race.over and race.num_left == 0 and step is not None
    assert step.ending == "the best is told apart" and step.best_probability > 0.99


def test_plans_that_differ_by_less_than_anybody_cares_for_end_it_too(make_specs: MakeSpecs) -> None:
    race = of(make_specs(3), [1000.0, 1000.5, 700.0])
    while not race.over:
        found = race.next(set())
        assert found is not None
        race.note(found[0], ended(found[0], 1000.0, found[1], numbers=RACED))
    step = race.news()
    assert step is not None and step.ending == "none is 2 % better"
    assert step.best_probability < 0.95 and step.num_repeats < step.most_repeats


def test_without_any_measured_trial_there_is_nothing_to_race() -> None:
    race = Race(settings(), QUESTION, Measure())
    step = race.news()
    assert race.over and step is not None and step.leader is None
    assert str(step) == "racing: P(best) 0.00, 0 of at most 0 repeats; no trial keeps every bound"


def test_repeats_that_run_count_and_the_next_one_is_of_another_trial(make_specs: MakeSpecs) -> None:
    specs = make_specs(5)
    race = of(specs, CLOSE, max_share=0.4)
    first = race.next(set())
    assert first is not None
    race.start(first[0].trial_id, first[1])
    second = race.next(set())
    assert second is not None and second[0] != first[0] and race.num_left == 1
    race.start(second[0].trial_id, second[1])
    assert race.next(set()) is None and not race.over
    race.give_up(second[0].trial_id, second[1])
    assert race.next(set()) == second


@pytest.mark.parametrize(
    ("measure", "first"), [(Measure(), 1), (Measure(repeats=3), 3), (Measure(soak_finalists=2), 1)]
)
def test_repeats_are_numbered_after_those_of_the_search(make_specs: MakeSpecs, measure: Measure, first: int) -> None:
    specs = make_specs(5)
    race = of(specs, CLOSE, measure=measure)
    found = race.next(set())
    assert found is not None and found[1] == first
    skipped = race.next({f"{found[0].trial_id}-{first}"})
    assert skipped == (found[0], first + 1), "a folder that cannot be read is left alone"


def test_every_change_is_told_once_with_the_probability_before(make_specs: MakeSpecs) -> None:
    specs = make_specs(5)
    race = of(specs, [1000.0, 1004.0, 1000.0, 700.0, 700.0], until=0.999)
    before = race.news()
    assert before is not None and before.before is None and race.news() is None
    race.note(specs[1], ended(specs[1], 1012.0, 1, numbers=RACED))
    after = race.news()
    assert after is not None and race.news() is None
    assert after.before == before.best_probability < after.best_probability
    named = f"{specs[1].model.name} {specs[1].label}"
    assert str(after) == (
        f"racing: P(best) {before.best_probability:.2f} -> {after.best_probability:.2f} for {named}, "
        "1 of at most 5 repeats"
    )
