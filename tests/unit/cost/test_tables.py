"""Predictions as columns add up."""

import numpy as np

from wattune.cost.tables import Memory, StepTime


def test_parts_of_memory_add_up_to_the_peak() -> None:
    one, two = np.array([1.0, 2.0]), np.array([10.0, 20.0])
    found = Memory(parts_bytes={"weights": one, "logits": two}, stage=np.zeros(2), error_frac=np.zeros(2))
    assert found.peak_bytes.tolist() == [11, 22]


def test_parts_of_a_step_add_up_to_it() -> None:
    parts = {"compute_s": np.array([1.0, 2.0]), "bubble_s": np.array([0.5, 0.0])}
    activity = None  # the sum looks at the parts alone
    found = StepTime(parts_s=parts, activity=activity, error_frac=np.zeros(2), longer_frac=np.zeros(2))  # type: ignore[arg-type]
    assert found.step_time_s.tolist() == [1.5, 2.0]
