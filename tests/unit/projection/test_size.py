"""Sizes of projections: what is one, and what is refused in one line."""

import pytest

from wattune.errors import PlanError
from wattune.projection.size import nodes_and_devices


@pytest.mark.parametrize(
    "text", ["", "8", "0x8", "-4x8", "4x-8", "4 x 8", "1e3x8", "4x8x2", "x8", "\u0664x8", "8x8 mi300x"]
)
def test_what_is_no_size_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(PlanError, match="--to: got") as refused:
        nodes_and_devices(text)
    assert "\n" not in str(refused.value)
    assert nodes_and_devices(" 1024x8 ") == (1024, 8)
