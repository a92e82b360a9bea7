"""Conditions on configurations: the fields they may name, and a trial's value of each."""

from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeAlias

from wattune.objective import Condition, Constraint, Field, field_of, parse_condition
from wattune.plans.axes import AXES
from wattune.plans.engines import CAPABILITIES, MODES
from wattune.plans.program import FlagValue, text_of
from wattune.trial import TrialSpec

Where: TypeAlias = Constraint | Condition
"""Bound on a metric, or condition on a configuration, that a trial must keep to be ranked."""

_COUNT: Final = Field(kind=int)
_NAME: Final = Field(kind=str)


_OTHERS: Final[Mapping[str, tuple[Field, Callable[[TrialSpec], int | str]]]] = {
    "dp": (_COUNT, lambda spec: spec.plan.dp(spec.cluster.world_size)),
    "layout": (_NAME, lambda spec: "-".join(map(str, spec.plan.layout)) or "even"),
    "rank_order": (_NAME, lambda spec: o if isinstance(o := spec.plan.rank_order, str) else "-".join(map(str, o))),
    "engine": (Field(kind=str, choices=tuple(CAPABILITIES)), lambda spec: spec.engine),
    "model": (_NAME, lambda spec: spec.model.name),
    "device": (_NAME, lambda spec: spec.cluster.device),
    "num_nodes": (_COUNT, lambda spec: spec.cluster.num_nodes),
    "devices_per_node": (_COUNT, lambda spec: spec.cluster.devices_per_node),
    "mode": (Field(kind=str, choices=MODES), lambda spec: spec.workload.mode),
    "seq_len": (_COUNT, lambda spec: spec.workload.seq_len),
    "global_batch_size": (_COUNT, lambda spec: spec.workload.global_batch_size),
}
"""Fields that are not a plain axis."""

FIELDS: Final[Mapping[str, Field]] = {
    **{name: Field(kind=str, choices=axis.choices) if axis.choices else _COUNT for name, axis in AXES.items()},
    **{name: field for name, (field, _) in _OTHERS.items()},
}
"""Every field that a condition may name: the axes, `dp`, and those of model, cluster, engine and workload. Flags of the
trials come on top (`flag_fields`)."""

NO_FIELDS: Final[Mapping[str, Field]] = {}


def flag_fields(specs: Iterable[TrialSpec]) -> dict[str, Field]:
    """Returns the flags of trials as fields, by their values."""
    values: dict[str, list[FlagValue]] = {}
    for spec in specs:
        for name, value in spec.flags:
            values.setdefault(name, []).append(value)
    return {name: field_of(own) for name, own in values.items()}


def parse_where(text: str, flags: Mapping[str, Field] = NO_FIELDS) -> Where:
    """Reads a condition on a field of `FIELDS`, on a flag of the trials that are asked for, or on a metric.

    Raises `SpaceError`: it cannot be used as written; see `wattune.objective.parse_condition`.
    """
    return parse_condition(text, {**flags, **FIELDS})


def value_of(spec: TrialSpec, field: str) -> int | float | str | None:
    """Returns a trial's value of a field of `FIELDS`, or of a flag; None where it has no such flag."""
    if field in _OTHERS:
        return _OTHERS[field][1](spec)
    if field not in FIELDS:
        flag = dict(spec.flags).get(field)
        return text_of(flag) if isinstance(flag, bool | tuple) else flag
    value: int | str | None = getattr(spec.plan, field)
    return value


def keeps(condition: Condition, spec: TrialSpec) -> bool:
    """Tells whether a trial keeps a condition. One without the flag keeps none on it."""
    value = value_of(spec, condition.field)
    if value is None:
        return False
    return condition.holds(str(value) if isinstance(condition.value, str) else value)


def unmet(where: Iterable[Where], specs: Iterable[TrialSpec]) -> list[str]:
    """Describes conditions with a name that no trial has: likely a slip, and else an answer."""
    listed, lines = list(specs), []
    for one in where:
        if isinstance(one, Condition) and isinstance(one.value, str) and listed:
            there = sorted({str(value_of(spec, one.field)) for spec in listed})
            if one.value not in there:
                lines.append(f'no trial has {one.field} "{one.value}": there is {", ".join(there[:8])}')
    return lines
