"""An estimate beside a result: the same names, columns apart, parts that add up."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from stored_tables import results_of

from wattune.catalog.hardware import DEVICES
from wattune.cost.defaults import default_coefficients
from wattune.fitting.estimate_and_result import UNDIVIDED, Beside, Figure, beside
from wattune.metrics import METRICS
from wattune.run import Run
from wattune.trial import TrialSpec

DATA = Path(__file__).parents[3] / "benchmarks" / "data" / "moe_ep_h200x4.parquet"


def measured(number: int = 0) -> tuple[TrialSpec, Run]:
    return [one for one in results_of("moe_ep_h200x4") if "step_time_s" in one[1].metrics][number]


@pytest.fixture(scope="module")
def found() -> Beside:
    spec, result = measured()
    coefficients = default_coefficients(DEVICES["h200_sxm"])
    return beside("a:1", spec, result, coefficients, source="h200_sxm: defaults", was_fitted=False)


def test_every_estimated_metric_stands_beside_the_measured_one(found: Beside) -> None:
    _, result = measured()
    step = next(one for one in found.metrics if one.name == "step_time_s")
    assert step.measured == result.metrics["step_time_s"]
    assert step.estimated is not None
    assert step.error_frac == pytest.approx(step.estimated / result.metrics["step_time_s"] - 1)
    assert abs(step.error_frac) < 0.3


def test_parts_of_both_sides_add_up_to_their_own_step(found: Beside) -> None:
    step = next(one for one in found.metrics if one.name == "step_time_s")
    assert sum(one.estimated or 0.0 for one in found.parts) == pytest.approx(step.estimated, rel=1e-6)
    assert sum(one.measured or 0.0 for one in found.parts) == pytest.approx(step.measured, rel=2e-3)
    assert {"compute", "other"} <= {one.name for one in found.parts}
    assert {f"{one.name}_frac" for one in found.parts if one.name != UNDIVIDED} <= METRICS.keys()


def test_a_figure_that_was_not_measured_has_no_error() -> None:
    alone = Figure(name="step_time_s", estimated=1.0, low=0.9, high=1.1)
    assert alone.error_frac is None
    assert alone.is_inside is None
    assert Figure(name="x", estimated=1.0, low=0.9, high=1.1, measured=1.2).is_inside is False


def test_it_is_plain_data(found: Beside) -> None:
    assert json.loads(json.dumps(asdict(found)))["metrics"][0]["name"]
