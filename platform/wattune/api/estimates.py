"""Predictions before measuring: of a whole space, and of a trial that a hard limit may forbid."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from wattune.api.beforehand import OtherStudies
from wattune.api.results import AnyStudy, folder_of
from wattune.api.spaces import Space, plan
from wattune.api.studies import find_recording, find_study
from wattune.catalog.hardware import device as catalog_device
from wattune.cost.batch import batches
from wattune.cost.defaults import coefficients_of_software, default_coefficients
from wattune.cost.estimate import Coefficients
from wattune.cost.estimate import estimate as estimate_specs
from wattune.cost.stage_clocks import StageClocks, clock_frontier
from wattune.cost.step_time.facts import SOFTWARE
from wattune.cost.sweep import TABLE
from wattune.errors import PlanError, SpaceError, TelemetryError, closest
from wattune.fidelity import is_burst
from wattune.fitting.device import MeasuredTrial, add_sweep, fit_device
from wattune.fitting.estimate_and_result import Beside, beside
from wattune.fitting.links import SweepFit, fit_sweep
from wattune.fitting.store import FITS, LINKS, StoredFit, read_fit, write_fit
from wattune.objective import Constraint
from wattune.orchestrate.power_limit import NODE_POWER_PEAK
from wattune.plans.engines import CAPABILITIES, runs_program
from wattune.plans.program import is_command
from wattune.ranking.comparison import Side
from wattune.ranking.evidence import Compared, split_reference
from wattune.search.draft import usual_workload
from wattune.search.forecast import CoefficientSource, Estimate, Forecast, estimate_one
from wattune.search.forecast import forecast as forecast_of
from wattune.search.grammar import WorkloadEntry
from wattune.search.model_entry import model_in_short
from wattune.search.space import parse_space
from wattune.storage.files import named_path, require_writable, storage_path
from wattune.storage.parquet import read_table
from wattune.storage.study import StudyFolder, TrialFolder
from wattune.trial import TrialSpec


def estimate(
    *,
    model: Any,
    cluster: Any,
    engine: str = "torch",
    leave_out: Sequence[str] = (),
    storage: str | None = None,
    **settings: Any,
) -> Estimate:
    """Predicts memory, step time, power and temperature of one plan. Starts nothing, needs no GPU.

    Args:
        model: Catalog name, path of a `config.json`, or the mapping that a space has for a model.
        cluster: A text such as `4x8 h200_sxm`, or the mapping that a space has for a cluster.
        engine: Engine that trains, or software that wattune estimates and does not run: `nemo` (NeMo and
            Megatron-Bridge, by their performance recipes), `maxtext`, `automodel`, `llm_foundry`, `torchtitan`,
            `torchtitan_2024`. Its plan follows the rules of the engine in `wattune.cost.step_time.facts.SOFTWARE`,
            whose memory stands for its own.
        leave_out: Features of the `config.json` to train without.
        storage: The place whose stored fits are used; see `wattune.storage.files.find_storage`.
        **settings: Axes of the plan (`tp=8, pp=2`) and keys of a space's `workload` (`seq_len`, `mode`). `seq_len` is
            4,096 unless given, or the longest the model can have. `global_batch_size` is the least of 16 or more that
            every rank gets in micro-batches of one and of two.

    Raises:
        SpaceError: Some of it cannot be used; every problem is in the message.
        PlanError: The device has no estimates, or its stored fit cannot be read.
    """
    _refuse_command([engine])
    wrong = list[str]()
    if engine not in CAPABILITIES and engine not in SOFTWARE:
        able = [name for name in (*CAPABILITIES, *SOFTWARE) if not runs_program(name)]
        wrong, engine = [f'engine: unknown engine "{engine}"; {closest(engine, able)}'], able[0]
    software = engine if engine in SOFTWARE else ""
    entry = model_in_short(model, leave_out)
    workload = {name: settings.pop(name) for name in [*settings] if name in WorkloadEntry.model_fields}
    document = {
        "study": "estimate",
        "model": entry,
        "cluster": cluster,
        "engine": SOFTWARE.get(engine, engine),
        "workload": {"seq_len": 1, "global_batch_size": 1, **workload},
        "space": {name: [value] for name, value in ({"tp": 1} | settings).items()},
        "objective": "maximize tokens_per_s",
    }
    try:
        spec = parse_space(document, "estimate")
    except SpaceError as error:  # nobody wrote a file: an argument has no place in one
        wrong += [re.sub(r"^(?:space|workload)\.([^:[]*)(?:\[0\])?", r"\1", one) for one in error.problems]
    if wrong:
        raise SpaceError.from_problems("estimate", wrong)
    usual = usual_workload(spec.models[0], spec.clusters[0])
    sizes: dict[str, Any] = {name: usual[name] for name in usual.keys() - workload.keys()}
    spec = replace(spec, workloads=tuple(replace(one, **sizes) for one in spec.workloads))
    if spec.num_combinations > 1:
        raise SpaceError("estimate: got a list of values, allowed: one plan; `wattune plan --estimate` takes a space")
    if SOFTWARE.get(software) == "megatron":  # it always trains with that library, which allows plans of its own
        spec = replace(spec, clusters=tuple(replace(one, transformer_engine=True) for one in spec.clusters))
    if software:
        return estimate_one(spec, partial(coefficients_of_software, software=software))
    return estimate_one(spec, OtherStudies(storage_path(storage)).coefficients)


def _refuse_command(engines: Iterable[str]) -> None:
    if any(map(runs_program, engines)):
        raise PlanError(
            "engine: command has no analytic estimate: nobody knows what the command computes; estimate with a "
            "built-in engine"
        )


def forecast(space: Space, *, storage: str | None = None) -> Forecast:
    """Predicts memory, step time, power and temperature of every plan of a space. Starts nothing, needs no GPU.

    Raises `SpaceError`: the space is not valid, `PlanError`: a device has no estimates, or its stored fit cannot be
    read.

    Args:
        space: The path of a YAML file, its content, or what `plan` returned.
        storage: The place whose stored fits are used; see `wattune.storage.files.find_storage`.
    """
    planned = plan(space)
    spec = planned.spec
    _refuse_command(spec.engines)
    limits = [Constraint(metric=NODE_POWER_PEAK, operator="<=", factor=limit_w) for limit_w in spec.limits.values()]
    find = OtherStudies(storage_path(storage), apart_from=planned.name).coefficients
    bounds = dict.fromkeys([*spec.constraints, *limits])  # a bound that is a limit too counts once
    return forecast_of(planned.candidates, spec.objective, list(bounds), find)


def fit(
    studies: Sequence[AnyStudy] = (), *, links: str | None = None, storage: str | None = None
) -> list[tuple[Path, StoredFit]]:
    """Fits the coefficients of predictions to the trials of studies, and keeps them for later plans of the storage.

    Returns for each kind of device the file that was written, and its content. Raises `PlanError`: there is no such
    study or table, no trial can be fitted to, or nothing can be written.

    Args:
        studies: Studies, their names, or their folders. Without any, a table of links is added to the stored fits.
        links: The table of `calibrate_links`; None is the newest of each kind of device in the storage, if any.
        storage: The place studies are kept in; fits are written under `fits` there.
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

    Raises `PlanError` where the named file is not such a table, or its device has no estimates.
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

    Raises `PlanError`: there is no such trial, it is a recording, its sensors were simulated, or its device has no
    estimates.

    Args:
        trial: The trial, as `STUDY:TRIAL_ID` or the path of its folder; the first digits of the id are enough.
        storage: The place of studies and fits.
        metrics: The trial's metrics as they were computed again; None takes those of its result.
    """
    study, side, spec, coefficients = _measured(trial, storage)
    if side.simulated:
        raise PlanError(
            f"{side.name} ran on processors with simulated sensors: its device has no estimate; name a measured trial"
        )
    device = spec.cluster.sensed_device
    fit = read_fit(storage_path(storage), device.name)
    return beside(
        side.name,
        spec,
        side.result if metrics is None else replace(side.result, metrics=metrics),
        coefficients,
        source=CoefficientSource(clusters=(spec.cluster.label,), device=device, coefficients=coefficients).text,
        was_fitted=fit is not None and study.name in fit.studies,
    )


def stage_clocks(
    trial: str, *, storage: str | None = None, listener: Callable[[str, float], None] = lambda *_: None
) -> list[StageClocks]:
    """Predicts the least energy of a step as long as a trial's and longer, by clocks of every pass.

    `trial` and `storage` are those of `beside_result`. The first is the trial as it is. What was measured over what is
    predicted scales all, unless its sensors are simulated. `listener` hears what is done, and how much of all. Raises
    `PlanError`: there is no such trial, it is no pipeline of a built-in engine, or its device lacks estimates.
    """
    _, side, spec, coefficients = _measured(trial, storage)
    found = estimate_specs([spec], lambda _: coefficients).columns
    energy_j = float(found["energy_per_token_j"].value[0]) * spec.workload.tokens_per_step
    ((_, batch),) = batches([spec])
    points = clock_frontier(batch, coefficients, energy_j, listener)
    got = {} if side.simulated else side.result.metrics
    slower = (got.get("step_time_s") or points[0].step_time_s) / points[0].step_time_s
    hungrier = (got.get("energy_per_step_j") or energy_j) / energy_j
    return [
        replace(one, step_time_s=slower * one.step_time_s, energy_per_step_j=hungrier * one.energy_per_step_j)
        for one in points
    ]


def _measured(trial: str, storage: str | None) -> tuple[StudyFolder, Side, TrialSpec, Coefficients]:
    """Finds a trial of a built-in engine by name or folder, and the coefficients of its device."""
    if find_recording(trial, storage=storage):
        raise PlanError(f"{trial} is a recording, whose configuration is not known; name a trial, as STUDY:TRIAL_ID")
    folder = named_path(trial)
    reference = str(folder.resolve()) if folder.is_dir() else trial  # its study is named by the path
    name, wanted = split_reference(reference)
    study = find_study(name, storage=storage, whole=True)
    side = Compared(study).side(wanted)
    spec = side.spec
    assert spec is not None, "a trial has its specification"
    if is_command(spec):
        raise PlanError(f"{side.name} ran a command, which has no analytic estimate; name a trial of a built-in engine")
    others = OtherStudies(storage_path(storage), apart_from=study.name)
    return study, side, spec, others.coefficients(spec.cluster.sensed_device).on(spec.cluster)


def _uuids(trial: TrialFolder) -> set[str]:
    """Returns the uuids of the devices a trial ran on, as its sensors gave them."""
    devices = [one for manifest in trial.manifests().values() for one in manifest.get("devices", {}).values()]
    return {str(one["uuid"]) for one in devices if one.get("uuid")}
