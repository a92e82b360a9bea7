"""Progress of a measurement: whole rounds of warm-up, then enough steps and seconds."""

import pytest

from wattune.steps.files import Step
from wattune.trial import Measure
from wattune.workers.command.measuring import Measuring

MEASURE = Measure(warmup_steps=4, min_steps=10, min_seconds=1.0)


def steps(times_s):
    found, at_ns = [], 10**12
    for index, time_s in enumerate(times_s):
        found.append(Step(index, at_ns, at_ns + int(time_s * 1e9), None))
        at_ns = found[-1].end_mono_ns
    return found


def test_before_the_first_step_it_builds():
    assert Measuring(MEASURE).look([]).part == "build"


@pytest.mark.parametrize(("step_s", "enough"), [(0.2, 10), (0.05, 20)])
def test_it_is_finished_after_enough_steps_and_seconds(step_s, enough):
    measuring = Measuring(MEASURE)
    early = measuring.look(steps([step_s] * (4 + enough - 1)))
    assert (early.part, early.finished, early.done) == ("measure", False, enough - 1)
    assert early.total == pytest.approx(enough, abs=1)
    done = measuring.look(steps([step_s] * (4 + enough)))
    assert done.finished and done.steady
    assert (done.first_index, done.end_index, done.num_measured) == (4, 4 + enough, enough)


def test_a_loser_is_finished_as_soon_as_its_steps_prove_it():
    long = Measure(warmup_steps=4, min_steps=18, min_seconds=100.0)
    times_s = [0.2 + 0.001 * (index % 3) for index in range(24)]
    look = Measuring(long, stop_above_s=0.1).look(steps(times_s))
    assert look.finished and "above 0.1 s it loses" in look.stopped_early
    assert not Measuring(long, stop_above_s=0.3).look(steps(times_s)).finished
    assert not Measuring(long).look(steps(times_s)).finished


def test_a_command_that_ended_before_its_steps_were_stable_has_the_warm_up_that_was_asked():
    restless = steps([0.1 * 1.2**index for index in range(12)])
    assert Measuring(MEASURE).look(restless).part == "warmup"
    found = Measuring(MEASURE).look(restless, ended=True)
    assert (found.part, found.first_index, found.num_measured, found.steady) == ("measure", 4, 8, False)
    assert Measuring(MEASURE).look(restless[:4], ended=True).num_measured == 0
