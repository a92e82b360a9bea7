"""Stored fits: one JSON file for each kind of device, under `fits` in the storage folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from wattune.arrays import Floats
from wattune.cost.coefficients import MemoryCoefficients, PowerCoefficients, StepTimeCoefficients
from wattune.errors import PlanError
from wattune.storage.files import read_json_object, write_json

FITS: Final = "fits"
"""Folder of stored fits inside the storage."""

LINKS: Final = "calibration/links"
"""Folder of tables of `wattune calibrate --links` inside the storage."""


class HoldOut(BaseModel):
    """Errors of one figure on configurations that the fit did not see, relative to what was measured."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    median_frac: float | None
    """Of the absolute errors; None where only the interval was kept."""
    p95_frac: float
    """95 % of the absolute errors are smaller."""
    num_configurations: int


def note(hold_out: dict[str, HoldOut], metric: str, errors: Floats, num_configurations: int) -> None:
    """Keeps the held-out errors of a metric, where anything was held out."""
    known = np.abs(errors[np.isfinite(errors)])
    if known.size:
        median, p95 = np.quantile(known, [0.5, 0.95]).tolist()
        hold_out[metric] = HoldOut(median_frac=median, p95_frac=p95, num_configurations=num_configurations)


class StoredFit(BaseModel):
    """Coefficients fitted to the trials of one kind of device. Parts without data are None, and defaults stand in."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: str
    """Catalog name."""
    device_uuids: tuple[str, ...]
    """Devices that the trials ran on, where they said so."""
    fitted_at: str
    """Date and time of the fit, ISO 8601, UTC."""
    studies: tuple[str, ...]
    num_trials: int
    num_configurations: int
    """Different trials, repeats not counted."""
    memory: MemoryCoefficients | None
    step_time: StepTimeCoefficients | None
    power: PowerCoefficients | None
    hold_out: dict[str, HoldOut]
    """Errors by metric."""
    sharpen: tuple[str, ...]
    """Data that would sharpen the coefficients most, most first."""
    links: str = ""
    """Sweep of collectives and kernels that it holds, such as `links of 2026-11-22`; empty where none was given."""

    @property
    def label(self) -> str:
        """Short text of the fit, such as `2026-11-22, 46 trials`."""
        trials = f"{self.num_trials} trials" if self.num_trials else ""
        return ", ".join(part for part in (self.fitted_at[:10], trials, self.links) if part)


def fit_path(storage: Path, device: str) -> Path:
    """Returns the file of a device's fit."""
    return storage / FITS / f"{device}.json"


def write_fit(storage: Path, fit: StoredFit) -> Path:
    """Writes the fit of a device over an older one and returns the file."""
    path = fit_path(storage, fit.device)
    write_json(path, fit.model_dump(mode="json"))
    return path


def read_fit(storage: Path, device: str) -> StoredFit | None:
    """Reads the fit of a device; None where there is none. Raises `PlanError` where the file is damaged."""
    path = fit_path(storage, device)
    if not path.exists():
        return None
    try:
        return StoredFit.model_validate(read_json_object(path, "wattune fit"))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise PlanError(f"{path}: {place}: {first['msg']}; fit anew with `wattune fit`, or remove the file") from error


def missing_data(seen: Sequence[dict[str, int | str]], longest_s: float) -> tuple[str, ...]:
    """Lists data that would sharpen a fit most: what the trials never had more than one value of, and long runs."""
    wanted = []
    for axis, why in _DEGREES.items():
        if not any(int(one[axis]) > 1 for one in seen):
            wanted.append(f"trials with {axis} above 1: {why} comes from elsewhere")
    for axis, why in _CHOICES.items():
        if len({one[axis] for one in seen}) < 2:
            wanted.append(f"trials with another {axis} than {seen[0][axis] if seen else 'none'}: {why}")
    if longest_s < _STEADY_S:
        wanted.append(f"a run of at least {_STEADY_S:.0f} s: temperatures of {longest_s:.0f} s are not steady")
    return tuple(wanted)


_STEADY_S: Final = 180.0
"""Shortest window in which a device's temperature settles."""

_DEGREES: Final = {
    "tp": "the rate of its collectives",
    "pp": "sends between stages and the wait of stages",
    "ep": "the rate of the exchange of tokens",
    "vpp": "the cost of interleaving",
}
_CHOICES: Final = {
    "engine": "overheads of engines differ",
    "sharding": "gathering and reducing weigh differently",
    "recompute": "it decides activations and a quarter of the work",
    "overlap": "the slowdown of compute beside communication",
}
