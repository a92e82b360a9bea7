"""The ladder: what is promoted, by bursts that hold their bounds, fail, or measured nothing."""

from wattune.fidelity import BURST, FIDELITY, FIRST_BURST_REPEAT
from wattune.objective import Question, parse_constraint, parse_objective
from wattune.orchestrate.scheduling.ladder import Ladder
from wattune.run import Run, RunStatus
from wattune.search.search_entry import LadderSettings
from wattune.trial import Measure

POWER = parse_constraint("node_device_power_peak_1s_w <= 1000")
QUESTION = Question(objective=parse_objective("maximize tokens_per_s"), constraints=(POWER,))


def burst(spec, speed, power_w=900.0, status=RunStatus.COMPLETED, repeat=FIRST_BURST_REPEAT) -> Run:
    figures = {"tokens_per_s": speed, "node_device_power_peak_1s_w": power_w}
    metrics = {name: value for name, value in figures.items() if value is not None}
    tags = {FIDELITY: BURST} if repeat == FIRST_BURST_REPEAT else {}
    return Run(
        trial_id=spec.trial_id,
        repeat=repeat,
        status=status,
        metrics=metrics if status is RunStatus.COMPLETED else {},
        tags=tags,
        start_wall_ns=0,
        end_wall_ns=5 * 10**9,
    )


def told(specs, speeds, **changed) -> Ladder:
    ladder = Ladder(LadderSettings(), QUESTION)
    for spec, speed in zip(specs, speeds, strict=False):
        ladder.note(spec, burst(spec, speed, **changed))
    return ladder


def taken(ladder, *, searching, left_out=()) -> list:
    found = []
    while (spec := ladder.next(left_out, searching=searching)) is not None:
        found.append(spec)
    return found


def test_a_burst_is_short_and_is_not_profiled():
    measure = Ladder(LadderSettings(), QUESTION).burst(Measure(min_steps=20, min_seconds=15, warmup_steps=7))
    assert (measure.min_steps, measure.min_seconds, measure.profile_steps, measure.warmup_steps) == (3, 1.5, 0, 7)


def test_the_best_share_is_promoted_the_best_first_and_each_once(make_specs):
    specs = make_specs(8)
    ladder = told(specs, [1, 5, 3, 8, 2, 4, 7, 6])
    assert taken(ladder, searching=True) == [specs[3], specs[6]]
    assert taken(ladder, searching=False) == []
    assert ladder.promoted(specs) == [specs[3], specs[6]]


def test_what_breaks_a_bound_is_not_promoted_while_another_keeps_it(make_specs):
    specs = make_specs(4)
    ladder = told(specs[:3], [9, 8, 7], power_w=1020.0)
    ladder.note(specs[3], burst(specs[3], 1, power_w=1004.0))  # within the scatter of a burst
    assert taken(ladder, searching=False) == [specs[3]]


def test_where_nothing_keeps_the_bound_the_nearest_is_measured_so_that_the_study_has_an_answer(make_specs):
    specs = make_specs(3)
    ladder = Ladder(LadderSettings(), QUESTION)
    for spec, power_w in zip(specs, (1300.0, 1100.0, 1200.0), strict=True):
        ladder.note(spec, burst(spec, 5, power_w=power_w))
    assert taken(ladder, searching=True) == []
    assert taken(ladder, searching=False) == [specs[1]]


def test_a_peak_that_a_short_window_does_not_give_breaks_nothing(make_specs):
    specs = make_specs(4)
    assert taken(told(specs, [1, 2, 3, 4], power_w=None), searching=True) == [specs[3]]


def test_a_failed_burst_ends_its_trial_and_an_invalid_one_leaves_it_to_a_full_measurement(make_specs):
    specs = make_specs(3)
    ladder = Ladder(LadderSettings(), QUESTION)
    for spec, status in zip(specs, (RunStatus.OUT_OF_MEMORY, RunStatus.INVALID, RunStatus.CRASHED), strict=True):
        ladder.note(spec, burst(spec, None, status=status))
    assert taken(ladder, searching=True) == [specs[1]]
    assert taken(ladder, searching=False) == []


def test_a_figure_that_is_no_number_counts_as_not_measured(make_specs):
    """Sorted as a number it would put the others in any order."""
    specs = make_specs(8)
    nan = float("nan")
    ladder = told(specs, [nan, 5, nan, 8, 2, nan, 7, 6])
    assert taken(ladder, searching=True) == [specs[3], specs[6]]


def test_a_bound_that_was_not_measured_is_neither_kept_nor_broken(make_specs):
    """The full measurement of such a trial tells; one that broke a bound is held back."""
    kept, blind, broken = make_specs(3)
    ladder = Ladder(LadderSettings(promote=0.999), QUESTION)
    for spec, power_w in ((kept, 900.0), (blind, None), (broken, 1500.0)):
        ladder.note(spec, burst(spec, 1.0 if spec is kept else 9.0, power_w=power_w))
    assert taken(ladder, searching=True) == [blind, kept]
