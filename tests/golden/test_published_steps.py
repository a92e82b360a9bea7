"""Kernel tables and datasheets predict published steps within the bars, whatever their source and precision."""

from collections import defaultdict

import numpy as np
import predict_step_time as script
import published_steps as rows
import pytest

Errors = dict[tuple[str, str, str, str], list[float]]


@pytest.fixture(scope="module")
def errors() -> Errors:
    """Error of each configuration by source, precision, device and kind."""
    with rows.published_world():
        steps, _ = rows.read()
        times_s = script.published(steps)
    found: dict[tuple[str, str, str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for step, time_s in zip(steps, times_s, strict=True):
        found[script.group(step)][step.configuration].append(time_s / step.measured_s - 1)
    return {key: [float(np.mean(one)) for one in each.values()] for key, each in found.items()}


def median(errors: list[float]) -> float:
    return float(np.median(np.abs(errors)))


def test_bf16_dense_steps_on_h100_are_within_12_percent(errors: Errors) -> None:
    dense = [one for (_, *rest), each in errors.items() if rest == ["bf16", "h100_sxm", "dense"] for one in each]
    assert len(dense) >= 95 and median(dense) < 0.12
    for (source, *rest), each in errors.items():
        assert rest != ["bf16", "h100_sxm", "dense"] or median(each) < 0.12, source


def test_every_other_source_precision_and_device_is_within_20_percent(errors: Errors) -> None:
    missed = {key: round(median(each), 3) for key, each in errors.items() if median(each) >= 0.20}
    assert len(errors) >= 30 and not missed
