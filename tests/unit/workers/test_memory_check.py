"""The memory that a trial left in its worker."""

import subprocess
import sys

import pytest
import torch

from wattune.workers.memory_check import TENSOR_GROWTH_BYTES, Leftovers, clean_up, leak, leftovers

MIB = 2**20


def test_tensors_somebody_still_holds_are_seen_and_gone_ones_are_not() -> None:
    clean_up("cpu")
    before = leftovers("cpu", 0)
    held = [torch.zeros(TENSOR_GROWTH_BYTES // 4 + 1024)]
    view = held[0][:10]
    problem = leak(before, leftovers("cpu", 0))
    assert problem is not None and "64 MiB of host tensors more than before (at most 64)" in problem
    del held, view
    clean_up("cpu")
    assert leak(before, leftovers("cpu", 0)) is None


def test_a_cycle_is_no_leak() -> None:
    clean_up("cpu")
    before = leftovers("cpu", 0)
    cycle: list[object] = [torch.zeros(TENSOR_GROWTH_BYTES // 4 + 1024)]
    cycle.append(cycle)
    del cycle
    clean_up("cpu")
    assert leak(before, leftovers("cpu", 0)) is None


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (Leftovers(device_allocated_bytes=65 * MIB), "65 MiB of device memory allocated"),
        (Leftovers(device_reserved_bytes=300 * MIB), "300 MiB of device memory reserved"),
        (Leftovers(host_bytes=2148 * MIB), "1148 MiB of resident memory more than before"),
    ],
)
def test_every_kind_of_memory_has_its_bound(after: Leftovers, said: str) -> None:
    before = Leftovers(host_bytes=1000 * MIB)
    problem = leak(before, after)
    assert problem is not None and said in problem
    assert leak(before, Leftovers(host_bytes=2000 * MIB, device_allocated_bytes=63 * MIB)) is None


def test_a_first_trial_may_bring_libraries_to_life_and_no_more() -> None:
    before = Leftovers(host_bytes=500 * MIB)
    grown = Leftovers(host_bytes=4000 * MIB)
    assert leak(before, grown, is_first=True) is None and leak(before, grown) is not None
    assert leak(before, Leftovers(host_bytes=4600 * MIB), is_first=True) is not None
    assert leak(before, Leftovers(device_allocated_bytes=65 * MIB), is_first=True) is not None


def test_memory_outside_of_tensors_is_seen_too() -> None:
    code = """
from wattune.workers.memory_check import clean_up, leak, leftovers
clean_up("cpu"); before = leftovers("cpu", 0)
held = bytearray(1300 * 2**20)
held[::4096] = b"x" * len(held[::4096])
clean_up("cpu"); print(leak(before, leftovers("cpu", 0)))
del held
clean_up("cpu"); print(leak(before, leftovers("cpu", 0)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    first, second = done.stdout.splitlines()
    assert "MiB of resident memory more than before (at most 1024)" in first and second == "None"
