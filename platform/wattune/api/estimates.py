"""Predictions before measuring: of a whole space, and of a trial that a hard limit may forbid."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from wattune.api.results import AnyStudy, folder_of
from wattune.api.spaces import Space, StudyPlan, plan
from wattune.catalog.hardware import DeviceSpec
from wattune.catalog.hardware import device as catalog_device
from wattune.cost.defaults import default_coefficients
from wattune.cost.estimate import Coefficients, Find
from wattune.cost.estimate import estimate as estimate_specs
from wattune.errors import PlanError
from wattune.fitting.device import Measured, fit_device
from wattune.fitting.store import FITS, StoredFit, read_fit, write_fit
from wattune.objective import Constraint
from wattune.orchestrate.scheduling.controller import LIMIT_METRICS
from wattune.search.forecast import Forecast, forecast
from wattune.storage.files import require_writable, storage_path
from wattune.storage.study import TrialFolder
from wattune.trial import TrialSpec


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
