"""Published steps, asked for as a user asks, are within the bars, whatever their source, precision and device."""

import numpy as np
import published_steps as rows
import pytest

Errors = dict[tuple[str, ...], list[tuple[float, float]]]


@pytest.fixture(scope="module")
def errors() -> Errors:
    """Error of each configuration by source, precision, device and kind: ours, and that of a constant rate."""
    return rows.errors(rows.read()[0])


def median(errors: list[tuple[float, float]], which: int = 0) -> float:
    return float(np.nanmedian(np.abs([one[which] for one in errors])))


def test_all_are_within_8_percent_where_a_constant_rate_is_not(errors: Errors) -> None:
    every = [one for each in errors.values() for one in each]
    assert len(every) >= 350 and median(every) < 0.08 < median(every, 1)


def test_bf16_dense_steps_on_h100_are_within_12_percent(errors: Errors) -> None:
    dense = [one for (_, *rest), each in errors.items() if rest == ["bf16", "h100_sxm", "dense"] for one in each]
    assert len(dense) >= 95 and median(dense) < 0.12
    for (source, *rest), each in errors.items():
        assert rest != ["bf16", "h100_sxm", "dense"] or len(each) < 2 or median(each) < 0.12, source


def test_every_other_source_precision_and_device_is_within_20_percent(errors: Errors) -> None:
    missed = {key: round(median(each), 3) for key, each in errors.items() if median(each) >= 0.20}
    assert len(errors) >= 28 and not missed


def test_steps_tuned_by_nemo_are_told_from_those_of_our_own_engine(errors: Errors) -> None:
    """Through our own engine's habits these rows are missed by 22 % in fp8: they are not its habits."""
    tuned = [one for key, each in errors.items() if key[0] == "DGXC" and "h100_sxm" in key for one in each]
    assert len(tuned) >= 50 and median(tuned) < 0.06
