"""Cost of a limit of power, against published runs that no fit of a step or of a load has."""

import numpy as np
from power_limits import HBM2E, OWN_W, exponent, measured_s, ratio, read, room, settings, step

from wattune.cost.clock import LIMIT_ERROR, LIMIT_EXPONENT


def test_the_law_is_the_one_of_the_pairs_and_each_is_known_from_the_others() -> None:
    pairs = [one for one in read("pair") if one["at_limit"] == "yes"]
    assert round(exponent(pairs), 2) == LIMIT_EXPONENT
    for one in pairs:
        share = room(float(one["limit_w"]))
        guess = share ** (1 / exponent([other for other in pairs if other is not one]))
        assert abs(guess - ratio(one)) < 0.03
        assert abs(np.log(ratio(one) / guess)) < LIMIT_ERROR * abs(np.log(guess))


def test_steps_at_500_w_are_known_within_8_percent() -> None:
    rows = [one for one in read("step") if one["device"] == "hbm2e"]
    errors = [step(one, 500.0)[0] / measured_s(one) - 1 for one in rows]
    assert np.median(np.abs(errors)) < 0.08
    free = [step(one, OWN_W)[0] / measured_s(one) - 1 for one in rows]
    assert np.median(np.abs(free)) > 0.12, "without the limit they are not"
    others = [step(one, 500.0)[0] / measured_s(one) - 1 for one in read("other")]
    assert len(others) == 9 and np.median(np.abs(errors + others)) < 0.08, (
        "tensor parallel and long sequences with them"
    )
    rings = [error for error, one in zip(others, read("other"), strict=True) if int(settings(one).get("cp", 1)) > 2]
    assert len(rings) == 2 and max(rings) < -0.3, "torch's ring attention over four and eight is not known"
    assert HBM2E["like"] == "h100_sxm"


def test_what_a_program_of_2024_does_more_is_known_of_the_one_of_2025_too() -> None:
    """The rows of H200 are of 2025: loss compiled, AdamW fused. No fact of either was fitted to a step."""
    rows = [one for one in read("step") if one["device"] != "hbm2e"]
    errors = [step(one, OWN_W)[0] / measured_s(one) - 1 for one in rows]
    older = [step(one, OWN_W, "torchtitan_2024")[0] / measured_s(one) - 1 for one in rows]
    assert len(rows) == 2 and max(map(abs, errors)) < 0.07
    assert all(0.005 < more - less < 0.02 for more, less in zip(older, errors, strict=True))
