"""Shapes of kernels of one plan."""

import numpy as np

from wattune.cost.step_time.work import KernelShapes

ALONE = {"tp": 1, "cp": 1, "ep": 1, "etp": 1, "tokens": 4096, "recompute": 0, "gathers": 0, "loss_again": 0}


def shapes(**degrees: float) -> KernelShapes:
    """One row: a rank alone with 4,096 tokens, but for what is given."""
    return KernelShapes(**{name: np.array([float(value)]) for name, value in (ALONE | degrees).items()})
