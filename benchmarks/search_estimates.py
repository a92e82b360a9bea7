"""Estimates of a measured table's trials, by coefficients that are fitted without that table."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from measured_tables import trials_of

from wattune.catalog.hardware import DEVICES
from wattune.cost.coefficients import PUBLISHED_STEP_TIME
from wattune.cost.defaults import default_coefficients
from wattune.cost.estimate import Coefficients, estimate
from wattune.errors import PlanError
from wattune.fitting.device import fit_device
from wattune.fitting.power import H200_PRIOR
from wattune.trial import TrialSpec

DEVICE: Final = "h200_sxm"


@cache
def held_out_estimates(table: Path, specs: tuple[TrialSpec, ...]) -> dict[str, dict[str, float]]:
    """Predicts a table's trials with coefficients fitted, as `wattune fit` does, to the other tables beside it.

    The shipped coefficients were fitted to these tables too, so the fit begins with published ones.

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
    default = replace(default_coefficients(DEVICES[DEVICE]), step_time=PUBLISHED_STEP_TIME, power=H200_PRIOR)
    fit = fit_device(DEVICE, rest, default, studies=[path.stem for path in others])
    fitted = Coefficients(
        memory=fit.memory or default.memory,
        step_time=fit.step_time or default.step_time,
        power=fit.power or default.power,
        thermal=default.thermal,
    )
    found = estimate(specs, lambda _device: fitted)
    rows: dict[str, dict[str, Any]] = {spec.trial_id: {} for spec in specs}
    for name, column in found.columns.items():
        log_std = column.log_std
        for number, spec in enumerate(specs):
            rows[spec.trial_id][f"estimated_{name}"] = float(column.value[number])
            rows[spec.trial_id][f"estimated_{name}_log_std"] = float(log_std[number])
    return rows
