"""A stored fit of the H200, and power coefficients in round numbers."""

from typing import Any, Final

from wattune.cost.coefficients import PowerCoefficients
from wattune.fitting.store import StoredFit

POWER: Final = PowerCoefficients(
    idle_w=80.0,
    active_w=120.0,
    matrix_w=900.0,
    memory_w=250.0,
    link_w=60.0,
    exponent=2.2,
    origin="published kernels",
    error_frac=0.3,
)


def stored_fit(**changes: Any) -> StoredFit:
    """A fit of twelve trials of ten configurations, without coefficients unless they are given."""
    facts = {"device": "h200_sxm", "fitted_at": "2026-11-22T12:00:00+00:00", "num_trials": 12, "num_configurations": 10}
    lists = {"device_uuids": (), "studies": ("a",), "hold_out": {}, "sharpen": ()}
    return StoredFit(**{**facts, **lists, "memory": None, "step_time": None, "power": None, **changes})
