"""Objectives, constraints and conditions: a small grammar, parsed and never evaluated as code.

`maximize METRIC`, `minimize METRIC`; `METRIC OP NUMBER` and `METRIC OP NUMBER * METRIC`, with OP one of `<= < >= >`. A
bound at several values is `METRIC OP LOW..HIGH step STEP`, with `* METRIC` after it where it is a share of a limit.
Bounds are on readings. `sensor_gain_frac=0.05` after a bound on watts or joules puts it on their true size.
Conditions choose trials by their configuration: `FIELD OP VALUE`, with `==` and `!=` too.
"""

import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from wattune.errors import SpaceError, closest
from wattune.metrics import METRICS

NUMBER: Final = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_OBJECTIVE: Final = re.compile(r"\s*(maximize|minimize)\s+(\w+)\s*", re.ASCII)
_CONSTRAINT: Final = re.compile(
    rf"\s*(\w+)\s*(<=|>=|<|>)\s*({NUMBER})\s*(?:\*\s*(\w+)\s*)?(?:\bsensor_gain_frac\s*=\s*({NUMBER})\s*)?", re.ASCII
)
_RANGE: Final = re.compile(rf"({NUMBER})\s*\.\.\s*({NUMBER})\s+step\s+({NUMBER})(?![\w.])", re.ASCII)
_CONDITION: Final = re.compile(r"\s*(\w+)\s*(<=|>=|==|!=|<|>)\s*([\w.\-]+)\s*", re.ASCII)
LONGEST_TEXT: Final = 200
"""Most characters of one objective, constraint or condition."""

MOST_VALUES: Final = 100
"""Most values of a varied bound."""

COMPARE: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
"""The comparison of each operator of the grammar."""

SENSOR_ACCURACY_FRAC: Final = 0.05
"""Largest gain error of a board's power sensor. NVML's documentation of `nvmlDeviceGetPowerUsage`: "accurate to within
+/- 5% of current power draw". It says so of Fermi and Kepler, and names no figure for later devices. Yang et al.
compare the sensors of over 70 GPUs up to Hopper with an external meter ("Part-time Power Measurements: nvidia-smi's
Lack of Attention", SC24)."""

RISK: Final = 0.05
"""Probability of a wrong verdict on a bound that is accepted unless another is asked for."""

MOST_RISK: Final = 0.5
"""A larger risk would call a bound both held and broken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The metric that is largest, or smallest, in the best trial."""

    metric: str
    maximize: bool

    def __str__(self) -> str:
        """The text it was parsed from, in canonical form."""
        return f"{'maximize' if self.maximize else 'minimize'} {self.metric}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """A bound on a metric: a number, or a number times another metric such as a limit."""

    metric: str
    operator: str
    factor: float
    limit_metric: str | None = None
    sensor_gain_frac: float = 0.0
    """Largest gain error of the sensor that the verdict allows for; 0 puts the bound on readings."""

    def __str__(self) -> str:
        """The text it was parsed from, in canonical form."""
        times = f" * {self.limit_metric}" if self.limit_metric else ""
        gain = f" sensor_gain_frac={self.sensor_gain_frac:g}" if self.sensor_gain_frac else ""
        return f"{self.metric} {self.operator} {repr(self.factor).removesuffix('.0')}{times}{gain}"

    def bound(self, metrics: Mapping[str, float]) -> float | None:
        """Computes the number that the metric is held to; None where the limit's metric is absent."""
        if self.limit_metric is None:
            return self.factor
        limit = metrics.get(self.limit_metric)
        return None if limit is None else self.factor * limit

    def missing(self, metrics: Mapping[str, float]) -> list[str]:
        """Lists the metrics that it needs and that were not measured."""
        needed = [self.metric, *([self.limit_metric] if self.limit_metric else [])]
        return [name for name in needed if name not in metrics]

    def slack(self, metrics: Mapping[str, float]) -> float | None:
        """Computes the distance of the metric to its bound, in the metric's unit. Negative means violated.

        None where a metric is absent or not finite. The constraint is then unknown, neither held nor violated.
        """
        value, bound = metrics.get(self.metric), self.bound(metrics)
        if value is None or bound is None:
            return None
        slack = bound - value if self.operator.startswith("<") else value - bound
        return slack if math.isfinite(slack) else None

    def excess_frac(self, metrics: Mapping[str, float]) -> float | None:
        """Computes how far past its bound the metric is, as a share of it: negative within it, None where unknown."""
        slack, bound = self.slack(metrics), self.bound(metrics)
        return None if slack is None or bound is None else -slack / max(abs(bound), 1e-9)

    def holds(self, metrics: Mapping[str, float]) -> bool | None:
        """Tells whether the metric is within the bound; None where that is unknown."""
        slack = self.slack(metrics)
        return None if slack is None else self.keeps(slack)

    def keeps(self, slack: float) -> bool:
        """Tells whether a metric at a distance from its bound is within it."""
        return slack > 0 if self.operator in ("<", ">") else slack >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The question that is asked of trials: which of them is the best one that keeps every bound."""

    objective: Objective
    constraints: tuple[Constraint, ...] = ()
    risk: float = RISK
    """Accepted probability that a verdict on a bound is wrong: above 0 and below `MOST_RISK`."""

    def __post_init__(self) -> None:
        """Checks the risk. Raises `SpaceError`: it is out of range."""
        if not 0.0 < self.risk < MOST_RISK:
            raise SpaceError(
                f"got risk {self.risk:g}; give the accepted probability of a wrong verdict, above 0 and below 0.5"
            )

    @classmethod
    def of(cls, objective: str, *constraints: str, risk: float = RISK) -> "Question":
        """Reads a question from its texts. Raises `SpaceError` where one of them cannot be used as written."""
        bounds = tuple(map(parse_constraint, constraints))
        return cls(objective=parse_objective(objective), constraints=bounds, risk=risk)

    @property
    def needed(self) -> tuple[str, ...]:
        """The metrics that objective and bounds need, each once."""
        bounded = (name for one in self.constraints for name in one.missing({}))
        return tuple(dict.fromkeys((self.objective.metric, *bounded)))

    def kept(self, metrics: Mapping[str, float]) -> bool | None:
        """Tells whether one measurement is within every bound; None where a bound's metric was not measured.

        This is the one rule for a bound that was not measured: it is unknown, neither kept nor broken. False needs a
        bound that was measured and broken. What follows from None:

        - The ranking calls the trial unknown (`wattune.ranking.assessment.Verdict`): it has no rank.
        - `model_guided` learns what was measured of it, and never takes it for the plan to beat.
        - Optuna's samplers and Ray's searchers know only kept and broken: they are told nothing of it.
        - The ladder holds a burst back where a bound is broken: a full measurement may find what a short one lacks.
        """
        held = [one.holds(metrics) for one in self.constraints]
        return False if False in held else None if None in held else True


@dataclass(frozen=True, slots=True)
class VariedBound:
    """A bound at several values."""

    bound: Constraint
    """With any of the values. A text has no gain of a sensor, and takes that of the bound that it stands for."""
    values: tuple[float, ...]
    """The tightest first."""

    @classmethod
    def rising(cls, bound: Constraint, values: Iterable[float]) -> "VariedBound":
        """Varies a bound over values that rise."""
        tightest_first = tuple(values)[:: 1 if bound.operator.startswith("<") else -1]
        return cls(bound, tightest_first)

    def at(self, value: float) -> Constraint:
        """Returns the bound at one value."""
        return replace(self.bound, factor=value)

    def replaces(self, constraint: Constraint) -> bool:
        """Returns whether a constraint bounds the same metric on the same side, so that this one stands for it."""
        return constraint.metric == self.bound.metric and constraint.operator[0] == self.bound.operator[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A condition on one field of a configuration: a count against a number, or a name against a name."""

    field: str
    operator: str
    value: int | float | str

    def __str__(self) -> str:
        """The text it was parsed from, in canonical form."""
        return f"{self.field} {self.operator} {self.value}"

    def holds(self, value: int | float | str) -> bool:
        """Tells whether a configuration with this value of the field keeps the condition."""
        return COMPARE[self.operator](value, self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A field of a configuration that conditions may name."""

    kind: type[int] | type[float] | type[str]
    """`int` for counts, `float` for other numbers, `str` for names."""
    choices: tuple[str, ...] = ()
    """Every name it can have; empty where any name may stand."""


_EVERYDAY: Final = {
    "throughput": "tokens_per_s",
    "speed": "tokens_per_s",
    "performance": "tokens_per_s",
    "time": "step_time_s",
    "latency": "step_time_s",
    "efficiency": "tokens_per_j",
    "temperature": "device_temp_max_c",
    "energy": "energy_per_token_j",
    "power": "node_device_power_peak_1s_w",
    "memory": "memory_peak_bytes",
    "mfu": "mfu_frac",
}
"""Metrics that people mean by everyday words."""


def _wanted(metric: str, text: str) -> str:
    """Returns a metric, with the verb of an objective where the text is one."""
    if not _OBJECTIVE.fullmatch(text):
        return metric
    return f"{'minimize' if METRICS[metric].better == 'lower' else 'maximize'} {metric}"


def _metric(name: str, text: str, names: Collection[str] = METRICS) -> str:
    if name in names:
        return name
    word = name.lower()
    if _EVERYDAY.get(word) in names:
        remedy = f'did you mean "{_wanted(_EVERYDAY[word], text)}"? `wattune metrics` lists all'
    else:
        remedy = closest(name, names)
    raise SpaceError(f'unknown metric "{name}" in "{text}"; {remedy}')


def _is_share(metric: str) -> bool:
    """Tells whether a metric is a part of a whole. Fractions of excursions and measurement quality may be above 1."""
    group = METRICS[metric].group if metric in METRICS else ""
    return metric.endswith("_frac") and group not in ("excursion", "measurement_quality")


def is_sensed(metric: str) -> bool:
    """Tells whether a metric comes from a power sensor, whose gain is in it: measured watts, and energy."""
    described = METRICS[metric]
    watts = described.group == "power" and described.unit == "W" and metric != "device_power_limit_w"
    return watts or described.group == "energy"


def parse_objective(text: str) -> Objective:
    """Reads the objective that a text states.

    Raises `SpaceError` where the text has another form, or names an unknown metric.
    """
    match = _OBJECTIVE.fullmatch(text) if len(text) <= LONGEST_TEXT else None
    if match is None:
        named = [METRICS[word] for word in re.findall(r"\w+", text[:LONGEST_TEXT]) if word in METRICS]
        verb = "minimize" if named and named[0].better == "lower" else "maximize"
        form = f'"{verb} {named[0].name}"' if len(named) == 1 else '"maximize METRIC" or "minimize METRIC"'
        raise SpaceError(f'"{text[:LONGEST_TEXT]}" is not an objective; write {form}')
    return Objective(metric=_metric(match[2], text), maximize=match[1] == "maximize")


_WITH_UNIT: Final = re.compile(rf"\s*(\w+)\s*(<=|>=|<|>)\s*({NUMBER})\s*([A-Za-z%°/*]+)\s*", re.ASCII)
_TURNED: Final = re.compile(rf"\s*({NUMBER})\s*(<=|>=|<|>)\s*(\w+)\s*", re.ASCII)
_OTHER_OPERATOR: Final = re.compile(rf"\s*(\w+)\s*(==|=<|=>|=|≤|≥|is|below|under|above|over)\s*({NUMBER})\s*")
_OPERATORS: Final = {
    "=<": "<=",
    "≤": "<=",
    "below": "<",
    "under": "<",
    "=>": ">=",
    "≥": ">=",
    "above": ">",
    "over": ">",
}
_TURN: Final = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
_PREFIXES: Final = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY: Final = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


def _meant(text: str) -> str | None:
    """Says how a constraint is written that was written otherwise: with a unit, turned round, or with another sign."""
    if (found := _WITH_UNIT.fullmatch(text)) is not None:
        name, operator, number, unit = found.groups()
        if name not in METRICS:
            return None
        value = _in_unit_of(name, float(number), unit)
        own = METRICS[name].unit
        said = f"{name} is a number without a unit" if own == "1" else f"values of {name} are in {own}"
        said = f'{said}, so drop the unit "{unit}"'
        return said if value is None else f'{said}: write "{name} {operator} {value}"'
    if (found := _TURNED.fullmatch(text)) is not None:
        number, operator, name = found.groups()
        return f'the metric comes first: write "{name} {_TURN[operator]} {number}"'
    if (found := _OTHER_OPERATOR.fullmatch(text)) is not None:
        name, operator, number = found.groups()
        meant = _OPERATORS.get(operator)
        if meant is not None:
            return f'write "{name} {meant} {number}"'
        return f'a measured value is never exactly {number}; write "{name} <= {number}" or "{name} >= {number}"'
    return None


def _in_unit_of(metric: str, value: float, unit: str) -> str | None:
    """Converts a value to a metric's unit; None where the unit is none of it."""
    own = METRICS[metric].unit or ""
    if unit == "%" and own == "1":
        return f"{value / 100:g}"
    if own == "degC":
        return f"{value:g}" if unit in ("C", "°C", "degC", "celsius") else None
    names = {"W": ("W", "watt", "watts"), "J": ("J",), "s": ("s", "sec", "seconds"), "B": ("B",)}.get(own, (own,))
    scales = _PREFIXES | (_BINARY if own == "B" else {})
    for prefix, scale in scales.items():
        if unit in [prefix + name for name in names]:
            return f"{value * scale:.12g}"
    return None


def parse_constraint(text: str, names: Collection[str] = METRICS) -> Constraint:
    """Reads the constraint that a text states, on a metric, or on another figure if `names` are others.

    Raises `SpaceError` where the text has another form or names an unknown metric. Or its number is not finite, or is a
    percentage where the metric is a fraction. Or `sensor_gain_frac` is neither 0 nor `SENSOR_ACCURACY_FRAC`, or stands
    at a metric without a power sensor.
    """
    match = _CONSTRAINT.fullmatch(text) if len(text) <= LONGEST_TEXT else None
    if match is None:
        remedy = _meant(text) if len(text) <= LONGEST_TEXT else None
        form = 'write "METRIC OP NUMBER" or "METRIC OP NUMBER * METRIC" with OP one of <= < >= >'
        raise SpaceError(f'"{text[:LONGEST_TEXT]}" is not a constraint; {remedy or form}')
    factor = float(match[3])
    if not math.isfinite(factor):
        raise SpaceError(f'the bound of "{text}" is not a finite number; write one that is')
    metric = _metric(match[1], text, names)
    if match[4] is None and factor > 1 and _is_share(metric):
        raise SpaceError(f'"{text}": {metric} is at most 1, a fraction; write {factor / 100:g} for {factor:g} %')
    gain = float(match[5] or 0.0)
    if gain not in (0.0, SENSOR_ACCURACY_FRAC):
        raise SpaceError(
            f'"{text}": sensor_gain_frac is {match[5]}; write 0 for a bound on readings, or {SENSOR_ACCURACY_FRAC:g} '
            "for one on true figures"
        )
    if match[5] and not (metric in METRICS and is_sensed(metric)):
        raise SpaceError(
            f'"{text}": {metric} does not come from a power sensor, so leave sensor_gain_frac out; bounds on watts and '
            "joules take it"
        )
    return Constraint(
        metric=metric,
        operator=match[2],
        factor=factor,
        limit_metric=_metric(match[4], text, names) if match[4] else None,
        sensor_gain_frac=gain,
    )


def parse_varied(text: str) -> VariedBound:
    """Reads a bound at several values, such as `node_device_power_peak_1s_w <= 2000..2800 step 100`.

    Raises `SpaceError` where the text has another form or names an unknown metric. Or its values are not a range that
    rises by a positive step, are more than `MOST_VALUES`, or are percentages where the metric is a fraction.
    """
    found = _RANGE.search(text) if len(text) <= LONGEST_TEXT else None
    at_high = "" if found is None else f"{text[: found.start()]}{found[2]} {text[found.end() :]}"
    if found is None or not _CONSTRAINT.fullmatch(at_high) or "sensor_gain_frac" in at_high:
        raise SpaceError(
            f'"{text[:LONGEST_TEXT]}" is not a range of a bound; write "METRIC OP LOW..HIGH step STEP" with OP one of '
            '<= < >= >, such as "node_device_power_peak_1s_w <= 2000..2800 step 100"'
        )
    low, high, step = map(float, found.groups())
    if not all(map(math.isfinite, (low, high, step))) or step <= 0 or high < low:
        raise SpaceError(f'"{text}": got {low:g}..{high:g} step {step:g}; give LOW <= HIGH and a step above 0')
    if (high - low) / step >= MOST_VALUES:
        raise SpaceError(f'"{text}" has more than {MOST_VALUES} values; give a larger step')
    count = math.floor((high - low) / step * (1 + 1e-12) + 1e-9) + 1
    values = (float(f"{low + number * step:.12g}") for number in range(count))
    return VariedBound.rising(parse_constraint(at_high), values)


def parse_condition(text: str, fields: Mapping[str, Field]) -> Constraint | Condition:
    """Reads a condition that chooses trials: on a field of their configuration, or on a metric like a constraint.

    Such as `tp <= 2`, `engine == torch` or `mfu_frac > 0.3`. Raises `SpaceError` where the text has another form, names
    neither a field nor a metric, or compares a field with what it cannot have.
    """
    match = _CONDITION.fullmatch(text) if len(text) <= LONGEST_TEXT else None
    if match is None or match[1] not in fields:
        if match is not None and match[1] not in METRICS:
            raise SpaceError(
                f'"{match[1]}" in "{text}" is neither a metric nor a field of a configuration; '
                f"{closest(match[1], [*fields, *METRICS])}"
            )
        if match is not None and match[2] in ("==", "!="):
            raise SpaceError(f'"{text}": a metric is measured and never equal; use one of <= < >= >')
        if match is None and not _CONSTRAINT.fullmatch(text[:LONGEST_TEXT]):
            raise SpaceError(
                f'"{text[:LONGEST_TEXT]}" is not a condition; write "FIELD OP VALUE" such as "tp <= 2" or '
                '"engine == torch", or "METRIC OP NUMBER" such as "mfu_frac > 0.3"'
            )
        return parse_constraint(text)
    name, sign, value = match[1], match[2], match[3]
    field = fields[name]
    if field.kind is int:
        if not re.fullmatch(r"\d{1,9}", value, re.ASCII):
            raise SpaceError(f'"{text}": {name} is a whole number, got "{value}"; write such as "{name} {sign} 2"')
        return Condition(field=name, operator=sign, value=int(value))
    if field.kind is float:
        if not re.fullmatch(NUMBER, value, re.ASCII):
            raise SpaceError(f'"{text}": {name} is a number, got "{value}"; write such as "{name} {sign} 0.5"')
        return Condition(field=name, operator=sign, value=float(value))
    if sign not in ("==", "!="):
        raise SpaceError(f'"{text}": {name} is a name, which has no order; use == or !=')
    if field.choices and value not in field.choices:
        raise SpaceError(f'"{text}": {name} is never "{value}"; {closest(value, field.choices)}')
    return Condition(field=name, operator=sign, value=value)


def field_of(values: Iterable[object]) -> Field:
    """Returns the field that a flag is in conditions, by its values: a count, a number, or a name."""
    listed = list(values)
    kinds = {type(value) for value in listed}
    if kinds == {int} and all(value >= 0 for value in listed if isinstance(value, int)):
        return Field(kind=int)
    return Field(kind=float) if kinds and kinds <= {int, float} else Field(kind=str)
