"""Projections: figures of plans at another size, with what they rest on, and measurements of that size beside them."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import hypot, isfinite, log
from typing import Any, Final

from wattune.catalog.hardware import DEVICES, ClusterSpec, parse_cluster_label
from wattune.catalog.published_names import named
from wattune.cost.estimate import LIMITS, Estimates, Find
from wattune.cost.power import power_coefficients
from wattune.cost.transfer import read_as
from wattune.errors import PlanError
from wattune.field_types import LARGEST_WORLD
from wattune.intervals import NORMAL_95, Interval
from wattune.objective import Constraint
from wattune.plans.parallel import num_micro_batches
from wattune.plans.rules import violations
from wattune.projection.operation import OF_DAYS
from wattune.projection.runs import PLAN, TableRun, sized_runs, step_shares
from wattune.projection.scaling import SizedStep, at_size, behind, of_log
from wattune.ranking.assessment import RankedTrial
from wattune.run import Run
from wattune.scale_down.reading import SCALED
from wattune.trial import TrialSpec

FURTHEST: Final = 16
TRANSFERRED: Final = "transferred"
"""Label of what is more than `FURTHEST` times what was measured, or over a fabric that nobody measured."""
NODE_W: Final = "node_device_power_mean_w"
FIGURES: Final = ("step_time_s", "tokens_per_s", NODE_W, "energy_per_step_j", "energy_per_token_j", *OF_DAYS)
"""Figures of projections, which an operator may bound."""


@dataclass(frozen=True, slots=True)
class Projected:
    """One plan at another size."""

    name: str
    num_devices: int
    measured: Mapping[int, float] = field(default_factory=dict)
    """Seconds of a step that were measured, by the devices they were measured on."""
    figures: Mapping[str, Interval] = field(default_factory=dict)
    """By the names of metrics, with 90 % intervals; empty where nothing can be said."""
    prior: str = ""
    """Source of how a step's parts change: `cost model`, or `shape of the pipeline` where that cannot say the run."""
    limits: tuple[str, str] = ("", "")
    """Part of the step whose share grows most, and the largest use of the step there; empty where nothing tells."""
    untested: str = ""
    """Reason that it is `transferred`, or has no figures; empty where it is neither."""
    breaks: Sequence[str] | None = ()
    """Bounds that the projection breaks; None where it is neither ordered nor checked against them."""
    unsure: Sequence[str] = ()
    """Bounds that an end of an interval breaks, or that no figure speaks of, in words."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Warnings by kind: `scaled_down`, `figures of days` where there are none."""
    truth_s: float | None = None
    """Step that was measured at that size."""

    @property
    def label(self) -> str:
        """Kind of statement: `projected`, `transferred` or `left out`."""
        return "left out" if not self.figures else TRANSFERRED if self.untested else "projected"

    @property
    def error(self) -> tuple[float, bool] | None:
        """Projected over measured step, less 1, and whether the interval holds that step; None without either."""
        step = self.figures.get("step_time_s")
        if step is None or self.truth_s is None:
            return None
        return step.value / self.truth_s - 1, step.low <= self.truth_s <= step.high

    def judged(self, bounds: Sequence[Constraint]) -> "Projected":
        """Checks bounds at the projection and at both ends of its interval."""
        ends = [{name: getattr(one, end) for name, one in self.figures.items()} for end in ("value", "low", "high")]
        held = {str(one): [one.holds(end) for end in ends] for one in bounds}
        unsure = [
            f"does not tell {text}" if verdicts[0] is None else f"may break {text}"
            for text, verdicts in held.items()
            if verdicts[0] is None or (verdicts[0] and not all(verdicts))
        ]
        return replace(self, breaks=[text for text, verdicts in held.items() if verdicts[0] is False], unsure=unsure)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        error_frac, is_inside = self.error or (None, None)
        return asdict(self) | {"label": self.label, "error_frac": error_frac, "is_inside": is_inside}


def nodes_and_devices(text: str) -> tuple[int, int]:
    """Reads a size: nodes, and devices of each. Raises `PlanError` for what is none."""
    found = re.fullmatch(r"([1-9]\d{0,6})x([1-9]\d{0,3})", text.strip(), re.ASCII)
    if found is None or int(found[1]) * int(found[2]) > LARGEST_WORLD:
        raise PlanError(f'--to: got "{text}", allowed: nodes x devices of one kind, as 1024x8, up to {LARGEST_WORLD:,}')
    return int(found[1]), int(found[2])


def project_runs(
    runs: Sequence[TableRun], num_devices: int | None, truth: Sequence[TableRun], global_batch: float | None
) -> list[Projected]:
    """Projects runs of a table to the sizes of a truth, and what is not in it to a number of devices.

    Raises `PlanError` where a plan cannot run there, or no run is a smaller one.
    """
    families: dict[tuple[object, ...], list[TableRun]] = defaultdict(list)
    for one in sorted(runs, key=lambda one: one.numbers["gpus"]):
        families[one.family].append(one)
    told = {(one.family, one.numbers["gpus"]) for one in truth}
    more = [
        own[-1].resized(num_devices, global_batch)
        for family, own in families.items()
        if num_devices and (family, num_devices) not in told
    ]
    found = [_project_run(families[one.family], one) for one in [*truth, *more]]
    if not any(one.figures for one in found):
        raise PlanError(f"{found[0].name} on {found[0].num_devices}: {found[0].untested}, nor of any other; add one")
    return found


def _project_run(every: Sequence[TableRun], target: TableRun) -> Projected:
    n, own = target.numbers, [one for one in every if one.numbers["gpus"] < target.numbers["gpus"]]
    name, devices, truth_s = target.name, int(n["gpus"]), n["step_time_s"] if isfinite(n["step_time_s"]) else None
    if not own:
        return Projected(name, devices, untested="no smaller run of it is in the table", truth_s=truth_s)
    steps, known = sized_runs([*own, target])
    step, tokens = at_size(steps[:-1], steps[-1]), n["global_batch"] * n.get("seq_len", 0.0)
    figures = {"step_time_s": step} | ({"tokens_per_s": _over(tokens, step)} if tokens else {})
    untested = _untested(steps[-2].num_devices, devices)
    measured = {one.num_devices: one.step_time_s for one in steps[:-1]}
    limits = ("", "") if known is None else _limits(known, len(own) - 1, len(own))
    prior = "shape of the pipeline" if known is None else "cost model"
    return Projected(name, devices, measured, figures, prior, limits, untested, truth_s=truth_s)


def project_trials(trials: Sequence[tuple[RankedTrial, TrialSpec, ClusterSpec]], find: Find) -> list[Projected]:
    """Projects trials to their plans on other clusters, each with the cluster that it was measured on.

    That is smaller than the trial's own where it is read from a small run (`wattune.scale_down`): what such a run does
    not show widens its interval already, and distance counts from there. Raises `PlanError` where one cannot run there.
    """
    for row, target, _ in trials:
        if broken := next(violations(target), None):
            raise PlanError(f"--to: {row.label} cannot run there: {broken.reason}")
    specs = [*(row.spec for row, _, _ in trials), *(target for _, target, _ in trials)]
    found, work_s, fixed_s = step_shares(specs, find)
    each = zip(specs, work_s, fixed_s, strict=True)
    steps = [SizedStep(spec.cluster.world_size, work, fixed, _behind(spec)) for spec, work, fixed in each]
    return [_project_trial(*trial, found, steps, (row, row + len(trials))) for row, trial in enumerate(trials)]


def _behind(spec: TrialSpec) -> float:
    plan, world, work = spec.plan, spec.cluster.world_size, spec.workload
    if work.routing is None or work.routing.by != "learned":
        return 0.0
    return behind(world / (plan.pp * plan.ep * plan.etp), num_micro_batches(plan, world, work.global_batch_size))


def _project_trial(
    row: RankedTrial,
    target: TrialSpec,
    own: ClusterSpec,
    found: Estimates,
    steps: Sequence[SizedStep],
    places: tuple[int, int],
) -> Projected:
    step, power, waits = (row.interval(name) for name in ("step_time_s", NODE_W, "straggler_frac"))
    assert step is not None, "it completed"
    there, tokens = target.cluster, target.workload.tokens_per_step
    log_std, is_own = _log_std(step), own == row.spec.cluster
    measured = replace(steps[places[0]], num_devices=own.world_size, step_time_s=step.value, log_std=log_std)
    after = at_size([measured], steps[places[1]], straggler_frac=0.0 if waits is None else max(waits.value, 0.0))
    figures = {"step_time_s": after, "tokens_per_s": _over(tokens, after)}
    if power is not None:
        before_w, after_w = found.columns[NODE_W].value[[*places]]
        read = read_as(power.value, before_w, after_w, measured_log_std=_log_std(power))
        log_w, spread = log(read.value[0]), 1.645 * float(read.log_std[0])  # 90 %
        log_j, both = log_w + log(there.num_nodes * after.value), hypot(spread, log(after.high / after.low) / 2)
        figures |= {NODE_W: of_log(log_w, spread), "energy_per_step_j": of_log(log_j, both)}
        figures["energy_per_token_j"] = of_log(log_j - log(tokens), both)
    fabrics = [(one.network, one.num_domains > 1, one.devices_per_node) for one in (own, there)]
    untested = _untested(own.world_size, there.world_size, new_fabric=fabrics[0] != fabrics[1])
    seen, limits = {own.world_size: step.value} if is_own else {}, _limits(found, *places)
    notes = {} if is_own else {SCALED: f"read from {own.label}, {row.counted[0].tags[SCALED]}"}
    return Projected(row.label, there.world_size, seen, figures, "cost model", limits, untested, notes=notes)


def truth_of(spec: TrialSpec, truth: Sequence[TableRun]) -> float | None:
    """Returns the step of the row of this plan, model and batch on as many of its devices; None without one."""
    degrees = [float(getattr(spec.plan, name)) for name in (*PLAN[:-1], "micro_batch_size")]
    known = {"seq_len": spec.workload.seq_len, "global_batch": spec.workload.global_batch_size}
    known |= {"num_layers": spec.model.num_layers}
    for one in truth:
        is_own = one.family[:2] == (spec.model.name.lower(), spec.cluster.device) and degrees == [
            one.numbers[name] for name in PLAN
        ]
        alike = all(one.numbers.get(name) in (None, 0.0, value) for name, value in known.items())
        if is_own and alike and one.numbers["gpus"] == spec.cluster.world_size:
            return one.numbers["step_time_s"]
    return None


def project_recording(run: Run, num_nodes: int, devices_per_node: int) -> tuple[Projected, ClusterSpec | None]:
    """Projects a command whose plan nobody knows: more of it side by side, by its own share of communication.

    What a step gets longer by draws more than an idle device and at most what a device draws in the mean. Returns the
    cluster too, if the catalog has the device. Raises `PlanError` where the recording does not tell where its step
    goes, or ran on one device.
    """
    count, _, kind = (run.recorded.machine if run.recorded else {}).get("devices", "0").partition(" x ")
    own, num_devices = int(count) if count.isdecimal() else 0, num_nodes * devices_per_node
    step_s, share = run.metrics.get("step_time_s"), run.metrics.get("exposed_comm_frac")
    if step_s is None or share is None or not 2 <= own <= num_devices:
        got = f"{own} devices of one kind, step_time_s {step_s}, exposed_comm_frac {share}"
        needs = f"2 to {num_devices:,} devices and both figures"
        raise PlanError(f"{run.trial_id}: got {got}, allowed: {needs}; record several devices, with spans")
    here = SizedStep(own, step_s * (1 - share), step_s * max(share, 1e-4), step_time_s=step_s)
    waits = run.metrics.get("straggler_frac", 0.0)
    after = at_size([here], replace(here, num_devices=num_devices), straggler_frac=waits)
    figures, device = {"step_time_s": after}, named(kind, DEVICES)
    there = device and parse_cluster_label(f"{num_nodes}x{devices_per_node} {device}")
    idle = power_coefficients(there.sensed_device) if there else None
    if idle is not None and (device_w := run.metrics.get("device_power_mean_w")):
        least_w = min(idle.idle_w, device_w)
        middle, longest = (
            devices_per_node * (least_w + (device_w - least_w) * min(step_s / one, 1.0))
            for one in (after.value, after.high)
        )
        most_w = devices_per_node * device_w
        node_w = replace(after, value=(middle + most_w) / 2, low=longest, high=most_w)
        joules = {end: num_nodes * getattr(node_w, end) * getattr(after, end) for end in ("value", "low", "high")}
        figures |= {NODE_W: node_w, "energy_per_step_j": replace(after, **joules)}
    prior, untested = "its own share of communication", "nobody knows its plan: more of it side by side is assumed"
    return Projected(run.trial_id, num_devices, {own: step_s}, figures, prior, untested=untested), there or None


def _untested(measured: int, devices: int, *, new_fabric: bool = False) -> str:
    far = [f"{devices / measured:,.0f} times what was measured"] if devices > FURTHEST * measured else []
    return ", ".join([*far, *(["over a fabric that nobody measured"] if new_fabric else [])])


def _over(amount: float, step: Interval) -> Interval:
    return replace(step, value=amount / step.value, low=amount / step.high, high=amount / step.low)


def _log_std(found: Interval) -> float:
    """Returns the deviation of the logarithm of a measured figure, by its 95 % interval."""
    return max(log(found.high / found.low) / (2 * NORMAL_95), 1e-4) if found.high > found.low > 0 else 0.01


def _limits(found: Estimates, before: int, after: int) -> tuple[str, str]:
    """Returns the part whose share of a step grows most between two estimates, and the largest use there."""
    step_s = found.columns["step_time_s"].value
    share = {name: part / step_s for name, part in found.step_parts_s.items()}
    return max(share, key=lambda name: share[name][after] - share[name][before]), LIMITS[found.limited_by[after]]
