"""Predictions before measuring: of a whole space, and of a trial that a hard limit may forbid."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from wattune.api.results import AnyStudy, folder_of
from wattune.api.spaces import GUIDED, Space, StudyPlan, plan
from wattune.api.studies import find_recording, find_study
from wattune.arrays import Floats
from wattune.catalog.hardware import DeviceSpec
from wattune.catalog.hardware import device as catalog_device
from wattune.cost.defaults import default_coefficients
from wattune.cost.estimate import Coefficients, Column, Find
from wattune.cost.estimate import Estimates as Predictions
from wattune.cost.estimate import estimate as estimate_specs
from wattune.cost.sweep import TABLE
from wattune.errors import PlanError, TelemetryError
from wattune.fidelity import is_burst, is_soak
from wattune.fitting.device import MeasuredTrial, add_sweep, fit_device
from wattune.fitting.estimate_and_result import Beside, beside
from wattune.fitting.links import SweepFit, fit_sweep
from wattune.fitting.memory import measured_excess
from wattune.fitting.store import FITS, LINKS, StoredFit, read_fit, write_fit
from wattune.objective import Constraint
from wattune.orchestrate.scheduling.controller import LIMIT_METRICS
from wattune.plans.engines import COMMAND
from wattune.plans.program import is_command
from wattune.ranking.evidence import Compared, split_reference
from wattune.run import RunStatus
from wattune.search.forecast import CoefficientSource, Forecast, duration_s, forecast
from wattune.search.strategies.protocol import Estimates, Observation, Strategy
from wattune.storage.files import named_path, require_writable, storage_path
from wattune.storage.parquet import read_table
from wattune.storage.study import StudyFolder, TrialFolder
from wattune.trial import Measure, TrialSpec

CPU: Final = "cpu"

MOST_EARLIER: Final = 500
"""Most results of earlier studies that a search starts from, and most trials of a study that its surrogates learn
from for a question: fitting costs time with the cube of their number."""


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
    if COMMAND in spec.engines:
        raise PlanError(
            "engine: command has no analytic estimate: nobody knows what the command computes; leave out --estimate, "
            "or estimate the space with a built-in engine"
        )
    limits = [
        Constraint(metric=LIMIT_METRICS[name], operator="<=", factor=bound) for name, bound in spec.limits.items()
    ]
    find = coefficients_in(storage_path(storage), apart_from=planned.name)
    bounds = dict.fromkeys([*spec.constraints, *limits])  # a bound that is a limit too counts once
    return forecast(planned.candidates, spec.objective, list(bounds), find)


def coefficients_in(storage: Path, *, apart_from: str = "") -> Find:
    """Returns a search for a device's coefficients: its fit in the storage, and defaults where that has none.

    Where trials in the storage held more memory than their prediction's interval, predictions of that engine and model
    hold it too.

    Args:
        storage: The local folder of studies and fits.
        apart_from: A study whose trials do not count, since it is what is predicted.
    """

    @cache
    def find(device: DeviceSpec) -> Coefficients:
        default, fit = default_coefficients(device), read_fit(storage, device.name)
        memory = fit.memory if fit is not None and fit.memory is not None else default.memory
        peaks = [
            (spec, result.metrics["memory_peak_bytes"])
            for spec, result in _results(storage, [device], apart_from)
            if spec.cluster.simulate_sensors_of is None and "memory_peak_bytes" in result.metrics
            if not is_command(spec)
        ]
        memory = replace(memory, excess_bytes=measured_excess(peaks, memory))
        if fit is None:
            return replace(default, memory=memory)
        return Coefficients(
            memory=memory,
            step_time=fit.step_time or default.step_time,
            power=fit.power or default.power,
            thermal=fit.thermal or default.thermal,
            fit=fit.label,
        )

    return find


def fit(
    studies: Sequence[AnyStudy] = (), *, links: str | None = None, storage: str | None = None
) -> list[tuple[Path, StoredFit]]:
    """Fits the coefficients of predictions to the trials of studies, and keeps them for later plans of the storage.

    Args:
        studies: Studies, their names, or their folders. Without any, a table of links is added to the stored fits.
        links: The table of `calibrate_links`; None is the newest of each kind of device in the storage, if any.
        storage: The place studies are kept in; fits are written under `fits` there.

    Returns:
        For each kind of device the file that was written, and its content.

    Raises:
        PlanError: There is no such study or table, no trial can be fitted to, or nothing can be written.
    """
    place = storage_path(storage)
    require_writable(place / FITS)
    sweeps = {one.device: one for one in _sweeps(place, links)}
    if not studies:
        if not sweeps:
            raise PlanError(
                f"there is nothing to fit: no study was named and {place / LINKS} has no table of a device with "
                "estimates; name studies, or give --links FILE of `wattune calibrate --links`"
            )
        found = [add_sweep(read_fit(place, name), one, _default(name)) for name, one in sweeps.items()]
        return [(write_fit(place, one), one) for one in found]
    folders = [folder_of(study, storage=storage) for study in studies]
    by_device: dict[str, list[MeasuredTrial]] = defaultdict(list)
    uuids: dict[str, set[str]] = defaultdict(set)
    for folder in folders:
        for spec, result in folder.results():
            if is_burst(result) or is_command(spec):  # the model of predictions does not know its work
                continue
            by_device[spec.cluster.device].append((spec, result))
            uuids[spec.cluster.device] |= _uuids(folder.trial(result.trial_id, result.repeat))
    if not by_device:
        raise PlanError("the studies have no finished trial of a built-in engine; run one first")
    names = [each.name for each in folders]
    return [
        (write_fit(place, one), one)
        for name, measured in by_device.items()
        for one in [
            fit_device(
                name, measured, _default(name), studies=names, device_uuids=[*uuids[name]], sweep=sweeps.get(name)
            )
        ]
    ]


def _default(device: str) -> Coefficients:
    return default_coefficients(catalog_device(device))


def _sweeps(storage: Path, named: str | None) -> list[SweepFit]:
    """Fits the named table of links, or the newest of each kind of device in the storage.

    Raises:
        PlanError: The named file is not such a table, or its device has no estimates.
    """
    paths = [named_path(named)] if named else sorted((storage / LINKS).glob(f"*/{TABLE}"))
    tables: dict[str, pa.Table] = {}
    for path in paths:
        try:
            table = read_table(path)
            devices = pc.unique(table["device"]).to_pylist()
        except (TelemetryError, KeyError) as error:
            raise PlanError(f"{path} is not a table of `wattune calibrate --links`: {error}") from error
        tables |= {str(name): table.filter(pc.equal(table["device"], name)) for name in devices}
    found = []
    for name, table in tables.items():
        try:
            found.append(fit_sweep(table, catalog_device(name), _default(name).step_time))
        except PlanError:
            if named:
                raise
    return found


def beside_result(trial: str, *, storage: str | None = None, metrics: Mapping[str, float] | None = None) -> Beside:
    """Lays the estimate of a measured trial beside its result: figures, and parts of the step by the same names.

    Args:
        trial: The trial, as `STUDY:TRIAL_ID` or the path of its folder; the first digits of the id are enough.
        storage: The place of studies and fits.
        metrics: The trial's metrics as they were computed again; None takes those of its result.

    Raises:
        PlanError: There is no such trial, it is a recording, its sensors were simulated, or its device has no
            estimates.
    """
    if find_recording(trial, storage=storage):
        raise PlanError(f"{trial} is a recording, whose configuration is not known; name a trial, as STUDY:TRIAL_ID")
    folder = named_path(trial)
    reference = str(folder.resolve()) if folder.is_dir() else trial  # its study is named by the path
    place, (name, wanted) = storage_path(storage), split_reference(reference)
    study = find_study(name, storage=storage, whole=True)
    side = Compared(study).side(wanted)
    spec = side.spec
    assert spec is not None, "a trial has its specification"
    if is_command(spec):
        raise PlanError(f"{side.name} ran a command, which has no analytic estimate; name a trial of a built-in engine")
    if side.simulated:
        raise PlanError(
            f"{side.name} ran on processors with simulated sensors: its device has no estimate; name a measured trial"
        )
    device = spec.cluster.sensed_device
    coefficients = coefficients_in(place, apart_from=study.name)(device).on(spec.cluster.num_nodes)
    fit = read_fit(place, device.name)
    return beside(
        side.name,
        spec,
        side.result if metrics is None else replace(side.result, metrics=metrics),
        coefficients,
        source=CoefficientSource(clusters=(spec.cluster.label,), device=device, coefficients=coefficients).text,
        was_fitted=fit is not None and study.name in fit.studies,
    )


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
    find = coefficients_in(storage, apart_from=planned.name)

    def lowest(spec: TrialSpec) -> Mapping[str, float]:
        if spec.cluster.simulate_sensors_of is not None or is_command(spec):
            return {}
        try:
            found = estimate_specs([spec], find)
        except PlanError:  # the catalog does not know its peaks: the limit is watched while it runs
            return {}
        return {name: figure["low"] for name, figure in found.one(0).items()}

    return lowest


def host_bound_trials(planned: StudyPlan, storage: Path) -> Callable[[TrialSpec], bool]:
    """Returns the predictor of trials whose step a slow host makes longer. What has no estimate is taken as steady.

    Args:
        planned: The study.
        storage: The local folder of studies and fits.
    """
    find = coefficients_in(storage, apart_from=planned.name)

    def waits(spec: TrialSpec) -> bool:
        found = _predicted([spec], find)
        if found is None:
            return False
        step = found.columns["step_time_s"]
        return bool(step.high[0] - step.value[0] > 1.01 * (step.value[0] - step.low[0]))

    return waits


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
    same devices. Others get nothing. Trials on processors have no estimates: what they take is not in the catalog. Nor
    have commands, whose earlier results are those of the same command.

    Args:
        planned: The study.
        storage: The local folder of studies and fits.
    """
    if planned.spec.search.strategy != GUIDED:
        return planned.strategy()
    estimates, warm = known_before(planned, storage)
    return planned.strategy(estimates=estimates, warm=warm)


def known_before(
    planned: StudyPlan, storage: Path, specs: Sequence[TrialSpec] | None = None
) -> tuple[Estimates | None, list[Observation]]:
    """Returns estimates of a study's candidates, None where there are none, and the results of earlier studies.

    Args:
        planned: The study.
        storage: The local folder of studies and fits.
        specs: Instead of the candidates.
    """
    specs = planned.candidates.specs if specs is None else specs
    find = coefficients_in(storage, apart_from=planned.name)
    devices = [cluster.rank_device for cluster in planned.spec.clusters]
    seen = _results(storage, devices, planned.name, each_once=True)
    programs = {_program(spec) for spec in specs}
    seen = [(spec, result) for spec, result in seen if _program(spec) in programs]
    estimated = _predicted([*specs, *(spec for spec, _ in seen)], find)
    if estimated is None:
        return None, [Observation(spec=spec, result=result) for spec, result in seen]
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
    return own, warm


def _predicted(specs: Sequence[TrialSpec], find: Find) -> Predictions | None:
    """Predicts metrics of specifications; None where one of them runs on a device without estimates."""
    if any(spec.cluster.simulate_sensors_of is not None or is_command(spec) for spec in specs):
        return None
    try:
        return estimate_specs(specs, find)
    except PlanError:
        return None


def _program(spec: TrialSpec) -> tuple[str, ...]:
    """Returns the command that a trial runs; empty for built-in engines, whose work is one another's."""
    return spec.program.command if spec.program is not None else ()


def _log_std(column: Column) -> Floats:
    """Computes the standard deviation of log(measured / predicted) from a 95 % interval."""
    low = np.maximum(column.low, 1e-3 * np.abs(column.value) + 1e-300)
    spread: Floats = np.log(np.maximum(column.high, low) / low) / (2 * 1.96)
    return spread


def _results(
    storage: Path, devices: Collection[DeviceSpec], apart_from: str, *, each_once: bool = False
) -> list[MeasuredTrial]:
    """Reads the results that studies in a folder have of some devices, newest first, at most `MOST_EARLIER`.

    A study that cannot be read is left out: it is another one's.

    Args:
        storage: The folder.
        devices: The devices. One of a study's own is another one where its figures are, whatever its name.
        apart_from: Name of a study that is left out.
        each_once: True for one ordinary result of each trial, a completed one where there is one. Repeats of a trial
            are no other plans that agree with it, and those of a reference trial would crowd out the rest.
    """
    found: list[MeasuredTrial] = []
    places: dict[TrialSpec, int] = {}
    names, wanted = {one.name for one in devices}, {one.counted for one in devices}
    paths = [path.parent for path in storage.glob("*/study.yaml") if path.parent.name != apart_from]
    for path in sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True):
        with suppress(PlanError):
            results = StudyFolder(path).finished().results
            full = ((spec, result) for spec, result in results if result.metrics and not is_burst(result))
            for spec, result in full:
                if spec.cluster.device not in names or (each_once and is_soak(result)):
                    continue
                if spec.cluster.own_device is not None and spec.cluster.rank_device.counted not in wanted:
                    continue
                place = places.get(spec) if each_once else None
                if place is None:
                    places[spec] = len(found)
                    found.append((spec, result))
                elif found[place][1].status is not RunStatus.COMPLETED and result.status is RunStatus.COMPLETED:
                    found[place] = spec, result
        if len(found) >= MOST_EARLIER:
            break
    return found[:MOST_EARLIER]
