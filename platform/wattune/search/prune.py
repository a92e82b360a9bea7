"""From a space to candidates: each combination is kept, rejected by a named rule, or equivalent to a kept one."""

import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from wattune.errors import NothingToTryError, SpaceError
from wattune.plans.axes import SETTINGS, Plan
from wattune.plans.effective import effective
from wattune.plans.engines import runs_program
from wattune.plans.parallel import padding_of
from wattune.plans.program import FlagValue, Program, is_command, shown_axes, text_of, values_of
from wattune.plans.rules import BEFORE_SIZES, Violation, violations, world_size
from wattune.scale_down.choice import KEEPS, choose
from wattune.search.command_entry import Products
from wattune.search.space import StudySpec, is_of
from wattune.storage.space_changes import plain_value
from wattune.trial import TrialSpec
from wattune.workload import OF_WORK

Config = Mapping[str, Any]
"""One combination as the file writes it: axis values. Model, cluster, engine and sizes of the workload too where the
study has several."""


class _Combination(Mapping[str, Any]):
    """A configuration that shares its names with all others: there may be a million of them."""

    __slots__ = ("_names", "_values")

    def __init__(self, names: tuple[str, ...], values: tuple[Any, ...]) -> None:
        self._names, self._values = names, values

    def __getitem__(self, name: str) -> Any:
        try:
            return self._values[self._names.index(name)]
        except ValueError:
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return repr(dict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A combination that is kept: a trial."""

    spec: TrialSpec
    """The effective specification. It may differ from `config` in settings that do nothing there."""
    config: Config

    @property
    def trial_id(self) -> str:
        """The trial's id."""
        return self.spec.trial_id

    @property
    def notes(self) -> tuple[str, ...]:
        """Ways in which an engine runs it otherwise than written."""
        model, rows = self.spec.model, padding_of(self.spec)
        if not rows:
            return ()
        size = model.vocab_size
        return (f"tp={self.spec.plan.tp} pads the vocabulary of {model.name} from {size:,} to {size + rows:,} tokens",)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A combination that is no trial: it cannot run, or does the same work as a kept one."""

    config: Config
    reason: str
    rule: str = ""
    """The first rule of `wattune.plans.rules.RULES` that it breaks, or `REQUIRES`; empty where it could run."""
    into: str = ""
    """Id of the trial that stands for it; empty where it cannot run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """All combinations of a space. Each is in exactly one of three lists, in the order of the space."""

    kept: tuple[Candidate, ...]
    rejected: tuple[LeftOut, ...]
    equivalent: tuple[LeftOut, ...]

    @property
    def specs(self) -> list[TrialSpec]:
        """Specifications of the kept combinations: the trials."""
        return [candidate.spec for candidate in self.kept]

    def rejected_by_rule(self) -> Counter[str]:
        """Counts rejected combinations by rule."""
        return Counter(rejected.rule for rejected in self.rejected)

    def require_kept(self) -> None:
        """Makes sure that something is kept.

        Raises `NothingToTryError` where every combination is rejected. The message counts the rules and shows each
        once. Raises `SpaceError` where no small run stands for any of the plans that the large cluster can have.
        """
        if self.kept:
            return
        if scaled := [one.reason for one in self.rejected if one.rule == SCALE_DOWN]:
            told = sorted(scaled, key=lambda reason: (KEEPS not in reason, len(reason)))
            raise SpaceError(f"no small run stands for any of {len(scaled)} plans; {told[0]}")
        counts = ", ".join(f"{rule} {count}" for rule, count in self.rejected_by_rule().most_common())
        examples = {rejected.rule: rejected for rejected in self.rejected}.values()
        shown = "\n".join(f"  {example.rule}: {example.reason}" for example in examples)
        total = len(self.rejected)
        which = "the only combination" if total == 1 else f"every one of {total} combinations"
        raise NothingToTryError(f"space: {which} is rejected ({counts}); change it by the remedies, such as\n{shown}")

    def to_json(self) -> dict[str, list[dict[str, Any]]]:
        """Returns plain data for `wattune plan --json`."""
        return {
            "kept": [
                {"trial_id": k.trial_id, "config": dict(k.config), "plan": k.spec.label, "notes": list(k.notes)}
                for k in self.kept
            ],
            "rejected": [{"config": dict(r.config), "rule": r.rule, "reason": r.reason} for r in self.rejected],
            "equivalent": [{"config": dict(f.config), "into": f.into, "reason": f.reason} for f in self.equivalent],
        }

    def rows(self) -> list[dict[str, str]]:
        """Returns flat rows for `StudyFolder.commit`. A column that does not apply is an empty text."""

        def row(status: str, config: Config, trial_id: str = "", rule: str = "", reason: str = "") -> dict[str, str]:
            named = {"status": status, "trial_id": trial_id, "rule": rule, "reason": reason}
            return named | {"config": json.dumps(dict(config))}

        return [
            *(row("kept", one.config, one.trial_id) for one in self.kept),
            *(row("rejected", one.config, "", one.rule, one.reason) for one in self.rejected),
            *(row("equivalent", one.config, one.into, "", one.reason) for one in self.equivalent),
        ]


def prune(study: StudySpec) -> Candidates:
    """Sorts every combination of a study's space.

    Settings that do nothing are set to neutral values first. Then the rules judge the rest. So a switch without effect
    neither rejects a combination nor makes it a trial of its own. Of equal combinations the one that is written as it
    runs is kept.
    """
    kept: dict[TrialSpec, tuple[Candidate, tuple[str, ...]]] = {}
    same: list[tuple[TrialSpec, Config, tuple[str, ...]]] = []
    rejected = []
    products = study.products
    acting: dict[tuple[object, ...], tuple[Plan, tuple[str, ...]]] = {}  # each plan once, whatever its sizes of work
    judged: dict[tuple[object, ...], Violation | None] = {}
    for written, config in combinations(study):
        kind = written.workload.mode, written.workload.lora, written.workload.routing
        place = (id(written.plan), id(written.model), id(written.cluster), written.engine, *kind)
        plan, of_plan = acting.get(place) or acting.setdefault(place, effective(written))
        spec, equivalences = _without_unused(products, replace(written, plan=plan) if of_plan else written)
        equivalences, is_judged = (*of_plan, *equivalences), place in judged and written.program is None
        violation = judged[place] if is_judged and judged[place] else next(violations(spec, of_sizes=is_judged), None)
        if violation is None or violation.rule in BEFORE_SIZES:
            judged[place] = violation
        violation = violation or _other_dp(spec, config) or _unmet(study, written)
        if violation:
            reason = sys.intern(violation.reason)  # few differ among very many
            rejected.append(LeftOut(config=config, rule=violation.rule, reason=reason))
        elif spec not in kept:
            kept[spec] = Candidate(spec=spec, config=config), equivalences
        elif equivalences:
            same.append((spec, config, equivalences))
        else:
            earlier, earlier_equivalences = kept[spec]
            same.append((spec, earlier.config, earlier_equivalences))
            kept[spec] = Candidate(spec=spec, config=config), equivalences
    ids = {spec: spec.trial_id for spec in dict.fromkeys(spec for spec, _, _ in same)}
    found = Candidates(
        kept=tuple(candidate for candidate, _ in kept.values()),
        rejected=tuple(rejected),
        equivalent=tuple(
            LeftOut(config=config, into=ids[spec], reason="; ".join(equivalences))
            for spec, config, equivalences in same
        ),
    )
    return _scaled_down(study, found) if study.targets else found


def _scaled_down(study: StudySpec, found: Candidates) -> Candidates:
    """Puts the small trial that stands for each large one in its place, and rejects those that none stands for."""
    small: dict[str, TrialSpec] = {}
    why: dict[str, str] = {}
    for model, target in study.targets.items():
        larges = [one for one in found.specs if one.model == model]
        for large, one in zip(larges, choose(larges, target), strict=True):
            if isinstance(one, str):
                why[large.trial_id] = one
            else:
                small[large.trial_id] = one.small
    each = [(one.config, one.trial_id) for one in found.kept] + [(one.config, one.into) for one in found.equivalent]
    refused = (LeftOut(config=config, rule=SCALE_DOWN, reason=why[own]) for config, own in each if own in why)
    into = {own: spec.trial_id for own, spec in small.items()}
    return Candidates(
        kept=tuple(replace(k, spec=small.get(k.trial_id, k.spec)) for k in found.kept if k.trial_id not in why),
        rejected=(*found.rejected, *refused),
        equivalent=tuple(replace(e, into=into.get(e.into, e.into)) for e in found.equivalent if e.into not in why),
    )


def _without_unused(products: Products, spec: TrialSpec) -> tuple[TrialSpec, tuple[str, ...]]:
    """Drops what a trial's program does not use, in a study of several engines; with a text for every such setting."""
    program = spec.program
    if program is None:
        return spec, ()
    names = program.names
    idle = [name for name, _ in program.flags if name not in names]
    notes = [f"{name}={text_of(dict(program.flags)[name])} does nothing in engine {spec.engine}" for name in idle]
    plan = spec.plan
    if is_command(spec):
        shown = {*shown_axes(names), *SETTINGS}  # those are set on devices, whatever runs there
        neutral = Plan(dtype=spec.cluster.rank_device.dtypes[0])
        # One value says what the command does anyway; of several each would be a trial that does the same.
        each = [axes for axes, _ in products]
        spoken = dict.fromkeys(axis for axes in each for axis in axes)
        values = {axis: {value for axes in each for value in axes.get(axis, (None,))} for axis in spoken}
        several = [axis for axis in spoken if axis not in shown and len(values[axis]) > 1]
        written = [axis for axis in several if getattr(plan, axis) != getattr(neutral, axis)]
        notes += [
            f"{axis}={getattr(plan, axis)} does nothing in the command, which has no {{{axis}}}" for axis in written
        ]
        # Left out, `etp` has followed `tp`; a command that shows neither would run once for each.
        followed = ["etp"] if "tp" in several and "etp" not in spoken and "etp" not in shown else []
        plan = replace(plan, **{axis: getattr(neutral, axis) for axis in (*several, *followed)})
    flags = tuple((name, value) for name, value in program.flags if name in names)
    used: Program | None = replace(program, flags=flags)
    if not program.command and not program.environment:
        used = None
    return (replace(spec, plan=plan, program=used), tuple(notes)) if notes or used is None else (spec, ())


def _other_dp(spec: TrialSpec, config: Config) -> Violation | None:
    """Returns the rule that a plan breaks whose `dp`, if it says one, is not what its other degrees leave."""
    world, dp = spec.cluster.world_size, spec.plan.dp(spec.cluster.world_size)
    if (stated := config.get("dp", dp)) == dp:
        return None
    ranks = world // dp * stated
    reason = f"tp*pp*cp*dp={ranks} with dp={stated} is not world_size={world} of {spec.cluster.label}"
    return Violation(rule=world_size.__name__, reason=f"{reason}; use dp={dp}, or a cluster of {ranks} devices")


def _unmet(study: StudySpec, written: TrialSpec) -> Violation | None:
    """Returns the first requirement of a space that a combination does not keep."""
    if not study.requires:
        return None
    flags = () if written.program is None else written.program.flags
    values = {name: value if type(value) in (int, float) else text_of(value) for name, value in _fields(written, flags)}
    broken = next((one for one in study.requires if not one.holds(values)), None)
    reason = None if broken is None else broken.problem(values)
    return None if reason is None else Violation(rule=REQUIRES, reason=reason)


def _fields(spec: TrialSpec, flags: Sequence[tuple[str, FlagValue]]) -> Iterator[tuple[str, Any]]:
    yield from values_of(spec, flags).items()
    yield from (("engine", spec.engine), ("device", spec.cluster.device))


SCALE_DOWN: Final = "scale_down"
"""Name of the rule of large trials that no small one stands for."""

REQUIRES: Final = "requires"
"""Name of the rule of combinations that break a requirement of their space."""


def combinations(study: StudySpec) -> Iterator[tuple[TrialSpec, Config]]:
    """Yields the specification and configuration of every combination, as written and in the order of the file."""
    labels = zip(
        itertools.product(
            _labels([model.name for model in study.models], study.models),
            _labels([cluster.label for cluster in study.clusters], study.clusters),
            study.engines,
            study.workloads,
        ),
        study.places,
        strict=True,
    )
    several = {name for name in OF_WORK if len({getattr(one, name) for one in study.workloads}) > 1}
    each = [(*product, plan) for product, plan in zip(study.products, study.plans or [{}], strict=True)]
    plans: dict[tuple[Any, ...], Plan] = {}  # each once, whatever the places and workloads it stands beside
    for (model_label, cluster_label, _, _), place in labels:
        model, cluster, engine, of_all = place
        workload = of_all if model.is_moe else replace(of_all, routing=None)
        where: dict[str, Any] = {
            **({"model": model_label} if len(study.models) > 1 else {}),
            **({"cluster": cluster_label} if len(study.clusters) > 1 else {}),
            **({"engine": engine} if len(study.engines) > 1 else {}),
            **{name: getattr(workload, name) for name in OF_WORK if name in several},
        }
        neutral = {"dtype": cluster.rank_device.dtypes[0]}
        program = _program(study, engine)
        for number, (axes, flags, in_mind) in enumerate(each):
            if not is_of(in_mind, place):
                continue
            stated = {"dp": in_mind["dp"]} if "dp" in in_mind else {}
            names, outside = (*where, *stated, *axes, *flags), (*where.values(), *stated.values())
            plain = [[plain_value(value) for value in values] for values in axes.values()]
            written = itertools.product(*plain, *flags.values())
            for values in itertools.product(*axes.values()):
                if (plan := plans.get(key := (number, neutral["dtype"], *values))) is None:
                    chosen = dict(zip(axes, values, strict=True))
                    plan = plans[key] = Plan(**{**neutral, "etp": chosen.get("tp", 1), **chosen})
                spec = TrialSpec(
                    model=model, cluster=cluster, engine=engine, workload=workload, plan=plan, program=program
                )
                for own_flags in itertools.product(*flags.values()):
                    pairs = tuple(zip(flags, own_flags, strict=True))
                    own = spec if program is None else replace(spec, program=replace(program, flags=pairs))
                    yield own, _Combination(names, (*outside, *next(written)))


def _program(study: StudySpec, engine: str) -> Program | None:
    """Returns the program of an engine's trials: a command is of its own engine alone, variables are of all."""
    if study.program is None or runs_program(engine):
        return study.program
    return Program(environment=study.program.environment)


def _labels(names: Sequence[str], specs: Sequence[Any]) -> list[str]:
    """Returns a short name for each model or cluster. Where names repeat, the fields that differ are added."""
    fields = [name for name in specs[0].__dataclass_fields__ if len({getattr(spec, name) for spec in specs}) > 1]
    if len(set(names)) == len(names):
        return list(names)
    return [
        " ".join([name, *(f"{field}={getattr(spec, field)}" for field in fields)])
        for name, spec in zip(names, specs, strict=True)
    ]
