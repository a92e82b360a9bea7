"""The memory that a trial left in its worker."""

import json
from pathlib import Path

import pytest
import torch
from warm_ranks import run_ranks

from wattune.workers.memory_check import TENSOR_GROWTH_BYTES, clean_up, leak, leftovers

MIB = 2**20
NONE = {"allocated": 0, "reserved": 0, "tensors": 0, "resident": 0}


def test_tensors_somebody_still_holds_are_seen_and_gone_ones_are_not() -> None:
    clean_up("cpu")
    before = leftovers("cpu")
    held = [torch.zeros(TENSOR_GROWTH_BYTES // 4 + 1024)]
    view = held[0][:10]
    problem = leak(before, leftovers("cpu"))
    assert problem is not None and "64 MiB of host tensors more than before (at most 64)" in problem
    del held, view
    clean_up("cpu")
    assert leak(before, leftovers("cpu")) is None


def test_a_cycle_is_no_leak() -> None:
    clean_up("cpu")
    before = leftovers("cpu")
    cycle: list[object] = [torch.zeros(TENSOR_GROWTH_BYTES // 4 + 1024)]
    cycle.append(cycle)
    del cycle
    clean_up("cpu")
    assert leak(before, leftovers("cpu")) is None


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ({"allocated": 65 * MIB}, "65 MiB of device memory allocated"),
        ({"reserved": 300 * MIB}, "300 MiB of device memory reserved"),
        ({"resident": 2148 * MIB}, "1148 MiB of resident memory more than before"),
    ],
)
def test_every_kind_of_memory_has_its_bound(after: dict[str, int], said: str) -> None:
    before = NONE | {"resident": 1000 * MIB}
    problem = leak(before, NONE | after)
    assert problem is not None and said in problem
    assert leak(before, NONE | {"resident": 2000 * MIB, "allocated": 63 * MIB}) is None


def test_a_first_trial_may_bring_libraries_to_life_and_no_more() -> None:
    before = NONE | {"resident": 500 * MIB}
    grown = NONE | {"resident": 4000 * MIB}
    assert leak(before, grown, is_first=True) is None and leak(before, grown) is not None
    assert leak(before, NONE | {"resident": 4600 * MIB}, is_first=True) is not None
    assert leak(before, NONE | {"allocated": 65 * MIB}, is_first=True) is not None


def _hold_what_is_no_tensor(_rank: int, told: Path) -> None:
    clean_up("cpu")
    before = leftovers("cpu")
    held = bytearray(1300 * MIB)
    held[::4096] = b"x" * len(held[::4096])
    clean_up("cpu")
    problems = [leak(before, leftovers("cpu"))]
    del held
    clean_up("cpu")
    told.write_text(json.dumps([*problems, leak(before, leftovers("cpu"))]))


def test_memory_outside_of_tensors_is_seen_too(tmp_path: Path) -> None:
    """In a process of its own: this one's memory is also other tests'."""
    run_ranks(_hold_what_is_no_tensor, tmp_path / "told", count=1)
    first, second = json.loads((tmp_path / "told").read_text())
    assert "MiB of resident memory more than before (at most 1024)" in first and second is None
