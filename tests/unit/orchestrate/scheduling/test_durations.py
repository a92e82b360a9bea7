"""Expected times of trials: predictions, corrected by what trials took."""

from specs import trial_spec

from wattune.orchestrate.scheduling.durations import Durations, Pace
from wattune.trial import Measure, TrialSpec

MEASURE = Measure(min_seconds=10, timeout_s=1000)


def spec(size: int, *, engine: str = "torch") -> TrialSpec:
    return trial_spec(on="1x1 h200_sxm", engine=engine, seq_len=8, batch=8, micro_batch_size=size)


def predicted(one: TrialSpec, _measure: Measure) -> float | None:
    return 100.0 * one.plan.micro_batch_size if one.plan.micro_batch_size < 64 else None


def test_a_prediction_is_corrected_by_the_trials_that_ran() -> None:
    times = Durations(Pace(), predicted)
    assert times.expected_s(spec(2), MEASURE) == 200
    for took_s in (150.0, 160.0, 400.0):
        times.add(spec(1), MEASURE, took_s)
    assert times.expected_s(spec(2), MEASURE) == 320
    assert times.expected_s(spec(4, engine="megatron"), MEASURE) == 640, "other workers: the ratio of all"
    times.add(spec(1, engine="megatron"), MEASURE, 50.0)
    assert times.expected_s(spec(4, engine="megatron"), MEASURE) == 200


def test_what_was_announced_stays_while_trials_correct_it() -> None:
    times = Durations(Pace(), predicted)
    times.announce()
    times.add(spec(1), MEASURE, 300.0)
    assert (times.announced_s(spec(2), MEASURE), times.expected_s(spec(2), MEASURE)) == (200, 600)
    times.announce()
    assert times.announced_s(spec(2), MEASURE) == 600
    assert times.announced_s(spec(64), MEASURE) == 0


def test_a_trial_takes_no_longer_than_its_time_out_and_no_less_than_its_window() -> None:
    times = Durations(Pace(), predicted)
    assert times.expected_s(spec(32), MEASURE) == 1000 and times.predicted_s(spec(32), MEASURE) == 3200
    assert times.expected_s(spec(1), Measure(min_seconds=500)) == 500


def test_without_a_prediction_it_is_what_trials_took() -> None:
    pace = Pace()
    times = Durations(pace, predicted)
    assert times.expected_s(spec(64), MEASURE) == 10 and not times.measured
    pace.add(spec(64), 70.0)
    assert times.expected_s(spec(64), MEASURE) == 70 and times.measured
    assert Durations(Pace()).predicted_s(spec(1), MEASURE) is None


def test_the_wait_for_cool_devices_comes_on_top_of_predictions_and_of_the_time_out() -> None:
    times = Durations(Pace(), predicted)
    for took_s, wait_s in ((200.0, 300.0), (200.0, 500.0)):
        times.add(spec(1), MEASURE, took_s, wait_s)
    assert times.expected_s(spec(2), MEASURE) == 400 + 400
    assert times.expected_s(spec(32), MEASURE) == 1000 + 400
    times.announce()
    assert times.announced_s(spec(2), MEASURE) == 800
