"""Expected times of trials: predictions, corrected by what trials took."""

from dataclasses import replace

import pytest
from specs import trial_spec

from wattune.orchestrate.scheduling.durations import BESIDE_STEPS_S, KEPT_FRAC, NEW_WORKERS_S, Durations, Pace
from wattune.run import Numbers, Run, RunStatus
from wattune.trial import Measure, TrialSpec

MEASURE = Measure(warmup_steps=5, min_steps=10, min_seconds=10, timeout_s=1000, profile_steps=0)
WARM_S, NEW_S = BESIDE_STEPS_S["warm"], NEW_WORKERS_S


def spec(size: int, *, engine: str = "torch") -> TrialSpec:
    return trial_spec(on="1x1 h200_sxm", engine=engine, seq_len=8, batch=8, micro_batch_size=size)


def predicted(one: TrialSpec, _measure: Measure) -> float | None:
    return 150.0 * one.plan.micro_batch_size if one.plan.micro_batch_size < 64 else None


def ran(step_time_s: float, beside_s: float = WARM_S, start_s: float = 0.0) -> Run:
    """A trial of 15 steps, of which 10 are its window."""
    took_s = 15 * step_time_s + beside_s
    return Run(
        trial_id="a",
        repeat=0,
        status=RunStatus.COMPLETED,
        metrics={"step_time_s": step_time_s},
        numbers=Numbers(window_s=10 * step_time_s, warmup_steps=5),
        start_wall_ns=int(start_s * 1e9),
        end_wall_ns=int((start_s + took_s) * 1e9),
    )


def test_predicted_steps_are_corrected_by_the_trials_that_ran() -> None:
    times = Durations(Pace(), predicted)
    assert times.expected_s(spec(2), MEASURE) == 300 + WARM_S
    for step_s in (15.0, 16.0, 40.0):
        times.add(spec(1), MEASURE, ran(step_s), "warm")
    assert times.expected_s(spec(2), MEASURE) == pytest.approx(300 * 1.6 + WARM_S)
    assert times.expected_s(spec(4, engine="megatron"), MEASURE) == pytest.approx(600 * 1.6 + WARM_S), (
        "the ratio of all"
    )
    times.add(spec(1, engine="megatron"), MEASURE, ran(5.0), "warm")
    assert times.expected_s(spec(4, engine="megatron"), MEASURE) == pytest.approx(300 + WARM_S)


def test_what_a_trial_takes_beside_its_steps_is_learned_by_how_it_starts() -> None:
    times = Durations(Pace(), predicted)
    assert times.expected_s(spec(2), MEASURE, "new_workers") == 300 + NEW_S
    for _ in range(3):
        times.add(spec(1), MEASURE, ran(10.0, beside_s=20.0), "new_workers")
    learned_s = (NEW_S + 3 * 20.0) / 4
    assert times.expected_s(spec(2), MEASURE, "new_workers") == pytest.approx(300 + learned_s)
    other = spec(2, engine="megatron")
    slow_s = BESIDE_STEPS_S["new_workers"]
    mixed_s = (slow_s + 3 * 20.0) / 4
    assert times.expected_s(other, MEASURE, "new_workers") == pytest.approx(300 + mixed_s), "nothing of its own yet"
    assert times.expected_s(spec(2), MEASURE, "warm") == 300 + WARM_S
    times.add(spec(1, engine="megatron"), MEASURE, ran(10.0, beside_s=80.0), "new_workers")
    assert times.expected_s(other, MEASURE, "new_workers") == pytest.approx(300 + (slow_s + 80.0) / 2)


def test_other_studies_of_the_storage_teach_starts() -> None:
    times = Durations(Pace(), predicted)
    waited = replace(
        ran(1.0, beside_s=10.0, start_s=100.0), numbers=Numbers(window_s=10.0, group_start_s=7.0, warmup_steps=5)
    )
    failed = replace(ran(1.0, beside_s=500.0, start_s=300.0), status=RunStatus.CRASHED, reason="made up")
    times.beside.take([(spec(1), failed), (spec(1), ran(1.0, beside_s=4.0, start_s=200.0)), (spec(1), waited)])
    profile_s = 1.0  # what other studies profiled is not known: as usual on GPUs, where a step takes a second
    assert times.beside.expected_s(spec(1), "new_workers") == pytest.approx((NEW_S + 10.0 - profile_s) / 2)
    assert times.beside.expected_s(spec(1), "warm") == pytest.approx((WARM_S + 4.0 - profile_s) / 2)


def test_kernels_that_an_earlier_study_compiled_make_a_start_shorter() -> None:
    """As nine plans on H100 and H200 have it: three quarters of a first step beyond a step's are saved."""
    times, new_s = Durations(Pace(), predicted), BESIDE_STEPS_S["new_graphs"]
    compiled = replace(ran(1.0, beside_s=new_s), numbers=Numbers(window_s=10.0, warmup_steps=5, first_step_time_s=6.0))
    new = replace(compiled, numbers=replace(compiled.numbers, group_start_s=7.0))
    cold_s = {size: times.beside.expected_s(spec(size), "new_graphs") for size in (1, 2)}
    times.beside.take([(spec(1), new)])
    saved_s = {size: cold_s[size] - times.beside.expected_s(spec(size), "new_graphs") for size in (1, 2)}
    assert saved_s == {1: pytest.approx(KEPT_FRAC * 5.0), 2: 0.0}, "of a plan that nobody compiled nothing is saved"
    assert times.beside.expected_s(spec(1), "warm") == WARM_S
    kept = ran(1.0, beside_s=new_s - KEPT_FRAC * 5.0)
    times.beside.add(spec(1), MEASURE, kept, "new_graphs")
    assert times.beside.expected_s(spec(2), "new_graphs") == pytest.approx(new_s), "what was saved is not learned"


def test_graphs_that_are_compiled_ahead_are_announced_as_kept_kernels_are() -> None:
    times, new_s = Durations(Pace(), predicted, ahead=True).beside, BESIDE_STEPS_S["new_graphs"]
    saved_s = KEPT_FRAC * (new_s - WARM_S)
    assert times.expected_s(spec(1), "new_graphs") == pytest.approx(new_s - saved_s)
    assert times.expected_s(spec(1, engine="megatron"), "new_graphs") == new_s
    assert (times.expected_s(spec(1), "warm"), times.expected_s(spec(1), "new_workers")) == (WARM_S, NEW_S)
    times.add(spec(1), MEASURE, ran(10.0, beside_s=new_s), "new_graphs")
    learned_s = new_s + saved_s / 2 - saved_s
    assert times.expected_s(spec(2), "new_graphs") == pytest.approx(learned_s), "a host that compiles none says so"


def test_what_was_announced_stays_while_trials_correct_it() -> None:
    times = Durations(Pace(), predicted)
    times.announce()
    times.add(spec(1), MEASURE, ran(30.0, beside_s=3 * WARM_S), "warm")
    announced_s, expected_s = times.announced_s(spec(2), MEASURE), times.expected_s(spec(2), MEASURE)
    assert (announced_s, expected_s) == (300 + WARM_S, pytest.approx(900 + 2 * WARM_S))
    times.announce()
    assert times.announced_s(spec(2), MEASURE) == expected_s
    assert times.announced_s(spec(64), MEASURE) == 0


def test_steps_take_no_longer_than_the_time_out_and_no_less_than_the_window() -> None:
    times = Durations(Pace(), predicted)
    assert times.expected_s(spec(32), MEASURE) == 1000 + WARM_S and times.predicted_s(spec(32), MEASURE) == 4800
    assert times.expected_s(spec(1), Measure(min_seconds=500)) == 500 + WARM_S


def test_without_a_prediction_it_is_what_trials_took() -> None:
    pace = Pace()
    times = Durations(pace, predicted)
    assert times.expected_s(spec(64), MEASURE) == 10 and not times.pace.typical_s
    pace.add(spec(64), 70.0)
    assert times.expected_s(spec(64), MEASURE) == 70 and times.pace.typical_s == 70
    assert Durations(Pace()).predicted_s(spec(1), MEASURE) is None


def test_the_wait_for_cool_devices_comes_on_top_of_predictions_and_of_the_time_out() -> None:
    times = Durations(Pace(), predicted)
    for wait_s in (300.0, 500.0):
        times.add(spec(1), MEASURE, ran(20.0), "warm", wait_s)
    assert times.expected_s(spec(2), MEASURE) == pytest.approx(600 + WARM_S + 400)
    assert times.expected_s(spec(32), MEASURE) == pytest.approx(1000 + WARM_S + 400)
    times.announce()
    assert times.announced_s(spec(2), MEASURE) == pytest.approx(1000 + WARM_S)
