"""Values that a catalog lets a plan set on devices."""

import pytest

from wattune.catalog.hardware import DEVICES, ClusterSpec
from wattune.plans.axes import AXES, SETTINGS
from wattune.plans.settings import setting_problem


def cluster(device: str, on_node: int = 8) -> ClusterSpec:
    return ClusterSpec(device=device, devices_per_node=on_node)


@pytest.mark.parametrize(
    ("device", "axis", "fits", "not_these"),
    [
        ("h200_sxm", "power_limit_w", (200, 450, 700), (199, 701, 10_000)),
        ("mi250_gcd", "power_limit_w", (1, 250), (251,)),
        ("h200_sxm", "clock_mhz", (15, 1500, 1980), (1, 1501, 1995)),
        ("mi300x", "clock_mhz", (15, 1501, 2100), (14, 2101)),
        ("gb200", "clock_mhz", (15, 3000), (3001,)),
        ("b200_sxm", "power_profile", ("max_q", "llm_training"), ("compute",)),
        ("mi300x", "power_profile", ("compute",), ("max_q",)),
    ],
)
def test_values_are_those_of_the_device(device: str, axis: str, fits: tuple, not_these: tuple) -> None:
    assert [setting_problem(cluster(device), axis, value) for value in fits] == [None] * len(fits)
    for value in not_these:
        said = setting_problem(cluster(device), axis, value)
        assert said is not None and said.startswith(f"{axis}={value} is ") and "; use " in said


def test_dies_of_one_package_are_limited_together_and_a_processor_not_at_all() -> None:
    assert "2 of mi250_gcd share one limit" in str(setting_problem(cluster("mi250_gcd", 3), "power_limit_w", 200))
    assert setting_problem(cluster("mi250_gcd", 3), "clock_mhz", 1500) is None, "each die has a clock of its own"
    for axis in SETTINGS:
        assert "whose driver sets nothing; leave it out" in str(setting_problem(cluster("cpu"), axis, 1))


def test_every_device_can_have_what_it_has_by_default() -> None:
    for device in (one for one in DEVICES.values() if one.power_limit_w):
        assert setting_problem(cluster(device.name), "power_limit_w", device.power_limit_w) is None
        assert (device.power_limit_least_w or 1) < device.power_limit_w
    assert set(SETTINGS) == {name for name, axis in AXES.items() if axis.kind == "setting"}
