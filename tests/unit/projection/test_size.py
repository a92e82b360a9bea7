"""Sizes of projections: what is one, and what is refused in one line."""

import pytest

from wattune.catalog.hardware import parse_cluster_label
from wattune.errors import PlanError
from wattune.projection.size import enlarged


def test_a_size_keeps_devices_and_fabrics() -> None:
    measured = parse_cluster_label("2x8 h100_sxm over roce_400")
    assert enlarged(measured, "1024x8").label == "1024x8 h100_sxm over roce_400"


@pytest.mark.parametrize(
    "text", ["", "8", "0x8", "-4x8", "4x-8", "4 x 8", "1e3x8", "4x8x2", "x8", "\u0664x8", "1024x4"]
)
def test_what_is_no_size_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(PlanError, match="--to: got") as refused:
        enlarged(parse_cluster_label("2x8 h100_sxm"), text)
    assert "\n" not in str(refused.value)
