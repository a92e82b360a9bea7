"""Estimates of a measured table's trials, by coefficients that are fitted without that table."""

from functools import cache
from pathlib import Path
from typing import Any, Final

from measured_tables import fitted_to, trials_of

from wattune.cost.estimate import estimate
from wattune.errors import PlanError
from wattune.trial import TrialSpec

DEVICE: Final = "h200_sxm"


@cache
def held_out_estimates(table: Path, specs: tuple[TrialSpec, ...]) -> dict[str, dict[str, float]]:
    """Predicts a table's trials with coefficients fitted, as `wattune fit` does, to the other tables beside it.

    Args:
        table: The table, of H200 trials.
        specs: Its specifications.

    Returns:
        For each trial id, columns `estimated_METRIC` and `estimated_METRIC_log_std`.

    Raises:
        PlanError: The table is of another device, or of simulated sensors.
    """
    if any(spec.cluster.device != DEVICE for spec in specs):
        raise PlanError(f"{table}: held-out estimates are of {DEVICE} only; leave `held_out` away")
    others = [path for path in sorted(table.parent.glob("*_h200x4.parquet")) if path.name != table.name]
    rest = [one for path in others for one in trials_of(path)]
    fitted = fitted_to(rest, [path.stem for path in others])
    found = estimate(specs, lambda _device: fitted)
    rows: dict[str, dict[str, Any]] = {spec.trial_id: {} for spec in specs}
    for name, column in found.columns.items():
        log_std = column.log_std
        for number, spec in enumerate(specs):
            rows[spec.trial_id][f"estimated_{name}"] = float(column.value[number])
            rows[spec.trial_id][f"estimated_{name}_log_std"] = float(log_std[number])
    return rows
