"""Jumps of a wall clock against the monotonic one, beyond what stamps are rounded to."""

import numpy as np
import pyarrow as pa
import pytest

from wattune.analysis.signals.clock_check import clock_step_s


def tables(wall_ns: np.ndarray) -> dict[str, pa.Table]:
    """Readings ten times a second."""
    count = len(wall_ns)
    mono_ns = np.arange(count) * 10**8
    places = {"node": ["n0"] * count, "device": ["gpu0"] * count}
    return {"fast": pa.table({**places, "mono_ns": mono_ns, "wall_ns": wall_ns})}


@pytest.mark.parametrize(("unit_ns", "step_ns", "expected_s"), [(1, 0, 0.0), (10**9, 0, 0.0), (1, 3 * 10**9, 3.0)])
def test_a_step_is_told_and_a_rounded_stamp_is_none(unit_ns: int, step_ns: int, expected_s: float) -> None:
    wall_ns = 1_790_000_000_000_000_123 + np.arange(400) * 10**8 + step_ns * (np.arange(400) >= 200)
    assert clock_step_s(tables(wall_ns // unit_ns * unit_ns)) == pytest.approx(expected_s, abs=1e-6)


def test_a_step_of_rounded_stamps_is_what_is_beyond_their_unit() -> None:
    wall_ns = 1_790_000_000_000_000_123 + np.arange(400) * 10**8 + 30 * 10**9 * (np.arange(400) >= 200)
    assert 29.0 <= clock_step_s(tables(wall_ns // 10**9 * 10**9)) <= 30.0
