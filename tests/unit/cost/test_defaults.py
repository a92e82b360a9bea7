"""Coefficients without a fit: which source each device gets."""

import pytest

from wattune.catalog.hardware import DEVICES, parse_cluster_label
from wattune.cost.defaults import WITH_CHIP_OF_H200, default_coefficients
from wattune.errors import PlanError


@pytest.mark.parametrize("name", [name for name in DEVICES if name != "cpu"])
def test_every_accelerator_has_coefficients_with_an_origin(name):
    found = default_coefficients(DEVICES[name])
    expected = "same chip" if name in WITH_CHIP_OF_H200 else "datasheet"
    expected = "measured here" if name == "h200_sxm" else expected
    assert found.step_time.origin == expected and found.fit == ""
    assert set(found.origins) == {"memory", "step time", "power", "temperature"}


def test_a_processor_has_none():
    with pytest.raises(PlanError, match='"cpu" has no estimates'):
        default_coefficients(DEVICES["cpu"])


def test_a_device_with_the_chip_of_a_measured_one_takes_its_fit_with_wider_intervals():
    measured, found = default_coefficients(DEVICES["h200_sxm"]), default_coefficients(DEVICES["h100_sxm"])
    assert found.origins["step time"] == found.origins["power"] == "same chip"
    assert found.step_time.kernel.matmul_frac == measured.step_time.kernel.matmul_frac
    assert found.power.matrix_w == measured.power.matrix_w
    assert found.step_time.error_frac_of("torch llama3_8b 8 layers, 2 devices") > measured.step_time.error_frac
    assert found.power.error_frac > measured.power.error_frac
    # Of the network between nodes a fit within one says nothing, on whichever device.
    across = found.on(parse_cluster_label("2x8 h100_sxm")).step_time
    assert across.link.origin == "published kernels" and across.kernel.origin == "same chip"
