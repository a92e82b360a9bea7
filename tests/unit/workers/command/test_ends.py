"""Ends of programs as they stand in public reports, and what becomes of each."""

from pathlib import Path

import pytest

from wattune.workers.command.causes import (
    DEVICE,
    DEVICE_MEMORY,
    HOST_MEMORY,
    KILLED,
    NETWORK,
    PLAN,
    SURROUNDINGS,
)
from wattune.workers.command.failure import INVALID_FLAG, Told, failure

ENDS = Path(__file__).parents[3] / "fixtures" / "ends"
KINDS = {
    "plan": PLAN,
    "flag": PLAN,
    "memory": DEVICE_MEMORY,
    "host memory": HOST_MEMORY,
    "device": DEVICE,
    "network": NETWORK,
    "killed": KILLED,
    "surroundings": SURROUNDINGS,
}


def ends(*names: str) -> list[tuple[str, str, str, str, list[str]]]:
    """Reads ends: name, exit code, kind, what is said, and the lines of output."""
    found = []
    for name in names:
        for block in (ENDS / f"{name}.txt").read_text().split("\n== ")[1:]:
            head, _, output = block.partition("\n")
            found.append((*map(str.strip, head.split(" | ")[:4]), output.splitlines()))
    return found


@pytest.mark.parametrize(("name", "code", "kind", "said", "lines"), ends("seen"), ids=lambda one: str(one)[:30])
def test_an_end_is_judged_by_what_ended_the_program(name, code, kind, said, lines):
    found, reason = failure(int(code), lines, Told())
    assert (found, said in reason) == (KINDS[kind], True), (found, reason)
    assert reason.startswith(INVALID_FLAG) == (kind == "flag")
