"""A burst is told by its tag, and its least length is what quality accepts."""

import pytest

from wattune.analysis.quality import assess_quality
from wattune.fidelity import (
    BURST,
    FIDELITY,
    FIRST_BURST_REPEAT,
    FIRST_REFERENCE_REPEAT,
    FIRST_SOAK_REPEAT,
    LEAST_BURST_STEPS,
    STOPPED_EARLY,
    is_burst,
    role_of,
    role_tags,
)
from wattune.run import INDICATIVE, Numbers, Run, RunStatus


def test_a_burst_is_told_by_its_tag():
    burst = Run(trial_id="0" * 12, repeat=FIRST_BURST_REPEAT, status=RunStatus.COMPLETED, tags={FIDELITY: BURST})
    full = Run(trial_id="0" * 12, repeat=0, status=RunStatus.COMPLETED)
    assert is_burst(burst) and not is_burst(full)
    assert FIRST_BURST_REPEAT > FIRST_REFERENCE_REPEAT


@pytest.mark.parametrize(
    ("role", "repeat"),
    [
        ("trial", 2),
        ("reference", FIRST_REFERENCE_REPEAT),
        ("burst", FIRST_BURST_REPEAT),
        ("finalist", FIRST_SOAK_REPEAT),
    ],
)
def test_a_runs_role_shows_in_its_number_and_in_its_tags(role, repeat):
    tagged = Run(trial_id="0" * 12, repeat=repeat, status=RunStatus.COMPLETED, tags=role_tags(role))
    cut_off = Run(trial_id="0" * 12, repeat=repeat, status=RunStatus.INTERRUPTED)
    assert role_of(tagged) == role_of(cut_off) == role
    raced = Run(
        trial_id="0" * 12, repeat=repeat, status=RunStatus.COMPLETED, numbers=Numbers(race_until_probability=0.95)
    )
    assert (role_of(raced) == "race") == (role == "trial") and role_tags("race") == {}


def test_however_long_a_burst_or_a_shortened_measurement_is_never_publishable():
    long = {"few_steps": 100, "energy_disagrees": 0.001}
    assert assess_quality(long)[0] == "publishable"
    for code in (BURST, STOPPED_EARLY):
        quality, reasons, _ = assess_quality(long | {code: True})
        assert (quality, reasons) == (INDICATIVE, (code,))


def test_the_shortest_burst_is_not_invalid():
    assert assess_quality({"few_steps": LEAST_BURST_STEPS, BURST: True})[0] == INDICATIVE
