"""Predictions before measuring: of a whole space, and of a trial that a hard limit may forbid."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np

from wattune.api.results import AnyStudy, folder_of
from wattune.api.spaces import Space, StudyPlan, plan
from wattune.catalog.hardware import DeviceSpec
from wattune.catalog.hardware import device as catalog_device
from wattune.cost.batch import Floats
from wattune.cost.defaults import default_coefficients
from wattune.cost.estimate import Coefficients, Column, Find
from wattune.cost.estimate import Estimates as Predictions
from wattune.cost.estimate import estimate as estimate_specs
from wattune.errors import PlanError
from wattune.fitting.device import Measured, fit_device
from wattune.fitting.store import FITS, StoredFit, read_fit, write_fit
from wattune.objective import Constraint
from wattune.orchestrate.scheduling.controller import LIMIT_METRICS
from wattune.search.forecast import Forecast, duration_s, forecast
from wattune.search.strategies.protocol import Estimates, Observation, Strategy
from wattune.storage.files import require_writable, storage_path
from wattune.storage.study import StudyFolder, TrialFolder
from wattune.trial import Measure, TrialSpec

GUIDED: Final = "model_guided"
"""The strategy that uses estimates and earlier results."""

CPU: Final = "cpu"

MOST_EARLIER: Final = 500
"""Most results of earlier studies that a search starts from: fitting costs time with the cube of their number."""


def estimate(space: Space, *, storage: str | None = None) -> Forecast:
    """Predicts memory, step time, power and temperature of every plan of a space. Starts nothing, needs no GPU.

    Args:
        space: The path of a YAML file, its content, or what `plan` returned.
        storage: The place whose stored fits are used; see `wattune.storage.files.find_storage`.

    Raises:
        SpaceError: The space is not valid.
        PlanError: A device has no estimates, or its stored fit cannot be read.
    """
    planned = plan(space)
    spec = planned.spec
    limits = [
        Constraint(metric=LIMIT_METRICS[name], operator="<=", factor=bound) for name, bound in spec.limits.items()
    ]
    bounds = dict.fromkeys([*spec.constraints, *limits])  # a bound that is a limit too counts once
    return forecast(planned.candidates, spec.objective, list(bounds), coefficients_in(storage_path(storage)))


def coefficients_in(storage: Path) -> Find:
    """Returns a search for a device's coefficients: its fit in the storage, and defaults where that has none."""

    def find(device: DeviceSpec) -> Coefficients:
        default, fit = default_coefficients(device), read_fit(storage, device.name)
        if fit is None:
            return default
        return Coefficients(
            memory=fit.memory or default.memory,
            step_time=fit.step_time or default.step_time,
            power=fit.power or default.power,
            thermal=fit.thermal or default.thermal,
            fit=fit.label,
        )

    return find


def fit(studies: Sequence[AnyStudy], *, storage: str | None = None) -> list[tuple[Path, StoredFit]]:
    """Fits the coefficients of predictions to the trials of studies, and keeps them for later plans of the storage.

    Args:
        studies: Studies, their names, or their folders.
        storage: The place studies are kept in; fits are written under `fits` there.

    Returns:
        For each kind of device the file that was written, and its content.

    Raises:
        PlanError: There is no such study, no trial can be fitted to, or nothing can be written.
    """
    place = storage_path(storage)
    require_writable(place / FITS)
    folders = [folder_of(study, storage=storage) for study in studies]
    by_device: dict[str, list[Measured]] = defaultdict(list)
    uuids: dict[str, set[str]] = defaultdict(set)
    for folder in folders:
        for spec, result in folder.results():
            by_device[spec.cluster.device].append((spec, result))
            uuids[spec.cluster.device] |= _uuids(folder.trial(result.trial_id, result.repeat))
    if not by_device:
        raise PlanError("the studies have no finished trial; run them first")
    found = []
    for name, measured in by_device.items():
        default = default_coefficients(catalog_device(name))
        one = fit_device(name, measured, default, studies=[each.name for each in folders], device_uuids=[*uuids[name]])
        found.append((write_fit(place, one), one))
    return found


def _uuids(trial: TrialFolder) -> set[str]:
    """Returns the uuids of the devices a trial ran on, as its sensors gave them."""
    devices = [one for manifest in trial.manifests().values() for one in manifest.get("devices", {}).values()]
    return {str(one["uuid"]) for one in devices if one.get("uuid")}


def lowest_figures(planned: StudyPlan, storage: Path) -> Callable[[TrialSpec], Mapping[str, float]] | None:
    """Returns the estimator of hard limits: the low end of every figure of a trial. None where nothing is limited.

    A trial is refused only where even the low end is above a limit. Trials with simulated sensors have no estimate:
    their ranks run on processors, so their power is not that of a device at work.
    """
    if not planned.spec.limits:
        return None
    find = coefficients_in(storage)

    def lowest(spec: TrialSpec) -> Mapping[str, float]:
        if spec.cluster.simulate_sensors_of is not None:
            return {}
        try:
            found = estimate_specs([spec], find)
        except PlanError:  # the catalog does not know its peaks: the limit is watched while it runs
            return {}
        return {name: figure["low"] for name, figure in found.one(0).items()}

    return lowest


def expected_durations(planned: StudyPlan, storage: Path) -> Callable[[TrialSpec, Measure], float | None] | None:
    """Returns the predictor of how long a trial takes. None where a device of the study has no estimates.

    It knows the trials that fit. One that does not ends while it is built, and nothing predicts when.
    """
    specs = planned.candidates.specs
    found = _predicted(specs, coefficients_in(storage))
    if found is None:
        return None
    times_s = found.columns["step_time_s"].value
    step_times_s = dict(zip(specs, times_s.tolist(), strict=True))

    def expected(spec: TrialSpec, measure: Measure) -> float | None:
        step_time_s = step_times_s.get(spec)
        on_cpu = spec.cluster.device == CPU
        return None if step_time_s is None else duration_s(step_time_s, measure, on_cpu=on_cpu)

    return expected


def informed_strategy(planned: StudyPlan, storage: Path) -> Strategy:
    """Makes a study's strategy with all that is known before its first trial.

    `model_guided` gets estimates of all candidates, and the results that earlier studies in the storage have of the
    same devices. Others get nothing. Trials on processors have no estimates: what they take is not in the catalog.

    Args:
        planned: The study.
        storage: The local folder of studies and fits.
    """
    specs = planned.candidates.specs
    if planned.spec.search.strategy != GUIDED:
        return planned.strategy()
    find, seen = coefficients_in(storage), _earlier(planned, storage)
    estimated = _predicted([*specs, *(spec for spec, _ in seen)], find)
    if estimated is None:
        return planned.strategy(warm=[Observation(spec=spec, result=result) for spec, result in seen])
    own = Estimates(
        values={name: c.value[: len(specs)] for name, c in estimated.columns.items()},
        log_std={name: _log_std(c)[: len(specs)] for name, c in estimated.columns.items()},
    )
    warm = [
        Observation(
            spec=spec,
            result=result,
            estimate={name: float(c.value[len(specs) + place]) for name, c in estimated.columns.items()},
        )
        for place, (spec, result) in enumerate(seen)
    ]
    return planned.strategy(estimates=own, warm=warm)


def _predicted(specs: Sequence[TrialSpec], find: Find) -> Predictions | None:
    """Predicts metrics of specifications; None where one of them runs on a device without estimates."""
    if any(spec.cluster.simulate_sensors_of is not None for spec in specs):
        return None
    try:
        return estimate_specs(specs, find)
    except PlanError:
        return None


def _log_std(column: Column) -> Floats:
    """Computes the standard deviation of log(measured / predicted) from a 95 % interval."""
    low = np.maximum(column.low, 1e-3 * np.abs(column.value) + 1e-300)
    spread: Floats = np.log(np.maximum(column.high, low) / low) / (2 * 1.96)
    return spread


def _earlier(planned: StudyPlan, storage: Path) -> list[Measured]:
    """Reads the results that other studies in a folder have of a study's devices, newest first, at most `MOST_EARLIER`.

    A study that cannot be read is left out: it is another one's.
    """
    devices = {cluster.device for cluster in planned.spec.clusters}
    found: list[Measured] = []
    paths = [path.parent for path in storage.glob("*/study.yaml") if path.parent.name != planned.name]
    for path in sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True):
        with suppress(PlanError):
            results = StudyFolder(path).finished().results
            found += [(spec, result) for spec, result in results if spec.cluster.device in devices and result.metrics]
        if len(found) >= MOST_EARLIER:
            break
    return found[:MOST_EARLIER]
