"""Coefficients without a fit: which source each device gets."""

import pytest

from wattune.catalog.hardware import DEVICES
from wattune.cost.defaults import WITH_KERNELS, default_coefficients
from wattune.errors import PlanError


@pytest.mark.parametrize("name", [name for name in DEVICES if name != "cpu"])
def test_every_accelerator_has_coefficients_with_an_origin(name):
    found = default_coefficients(DEVICES[name])
    expected = "published kernels" if name in WITH_KERNELS else "datasheet"
    expected = "measured here" if name == "h200_sxm" else expected
    assert found.step_time.origin == expected and found.fit == ""
    assert set(found.origins) == {"memory", "step time", "power", "temperature"}


def test_a_processor_has_none():
    with pytest.raises(PlanError, match='"cpu" has no estimates'):
        default_coefficients(DEVICES["cpu"])
