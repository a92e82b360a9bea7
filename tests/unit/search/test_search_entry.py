"""`search` of a space: a ladder and an early stop are refused where they cannot help."""

import pytest

from wattune.search.search_entry import Search, ladder_problems

BURST = {"burst": {"min_steps": 5, "min_seconds": 2.0}}


@pytest.mark.parametrize(
    ("min_steps", "min_seconds", "is_refused"), [(5, 2.0, True), (4, 1.0, True), (6, 2.0, False), (5, 2.5, False)]
)
def test_a_burst_is_shorter_than_a_full_measurement(min_steps: int, min_seconds: float, is_refused: bool) -> None:
    search = Search.model_validate({"ladder": BURST})
    found = ladder_problems(search, min_steps, min_seconds)
    assert [path for path, _ in found] == [("search", "ladder", "burst")] * is_refused
    assert ladder_problems(Search(), min_steps, min_seconds) == []
