"""Values that are well written and cannot be meant: bounds that nothing can hold, that hold always, or that contradict.

A kilowatt typed for a watt costs a night of trials that are all infeasible. So such a value is a problem of the file,
with the value that may have been meant.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from wattune.catalog.hardware import ClusterSpec
from wattune.metrics import METRICS
from wattune.objective import Constraint, Objective
from wattune.plans.engines import runs_program
from wattune.search.problems import Path

LEAST_POWER_FRAC: Final = 0.05
"""Share of the power limits below which no device runs: an idle H200 draws 77 W of 700 W (`wattune.simulation`)."""

MOST_POWER_TIMES: Final = 10.0
"""Times the power limits above which a bound is a slip of the unit. The highest sample ever seen is 1.4 times the limit
(benchmarks/results/nvml_check.md)."""

TEMPERATURES_C: Final = (15.0, 150.0)
"""Temperatures that a bound on a device can mean: cooler than any inlet, hotter than silicon survives."""

LEAST_MEMORY_BYTES: Final = 10**6
"""Bound on memory below which a number is in gigabytes by mistake."""

OF_HOST: Final = ("host_bound_frac", "device_bound_step_time_s")
"""Metrics that need the kernels of GPUs in a profiled pass."""

_NEVER_NEGATIVE: Final = frozenset({"W", "J", "s", "B", "1/s", "1/J", "J*s", "W/s", "B/s", "1"})
_MAY_BE_NEGATIVE: Final = frozenset({"memory_headroom_frac", "excursion_peak_over_limit_frac"})


def implausible(
    objective: Objective, constraints: Sequence[Constraint], power_w: float | None, clusters: Sequence[ClusterSpec]
) -> list[tuple[Path, str]]:
    """Finds the bounds and the objective that cannot be meant on any of the clusters, with their paths in the file."""
    found: list[tuple[Path, str]] = []
    if (text := _objective_problem(objective)) is not None:
        found.append((("objective",), text))
    for index, bound in enumerate(constraints):
        if (text := _bound_problem(bound, clusters)) is not None:
            found.append((("constraints", index), text))
    if power_w is not None:
        limit = Constraint(metric="node_device_power_peak_1s_w", operator="<=", factor=power_w)
        if (text := _power_problem(limit, clusters, "node_device_power_w")) is not None:
            found.append((("limits", "node_device_power_w"), text))
    return [*found, *_contradictions(constraints)]


def never_measured(
    objective: Objective,
    constraints: Sequence[Constraint],
    *,
    engines: Sequence[str],
    clusters: Sequence[ClusterSpec],
    profile_steps: int | None,
) -> list[tuple[Path, str]]:
    """Finds an objective and bounds on metrics that no trial of the space will have: all would end as unknown."""
    if all(cluster.rank_device.name == "cpu" for cluster in clusters):
        lacks = "ranks on processors have no kernels"
    elif all(map(runs_program, engines)):
        lacks = "kernels of a command are not profiled"
    elif profile_steps == 0:
        lacks = "measure.profile_steps is 0"
    else:
        return []
    return [
        (path, f"{metric} is of a profiled pass over kernels of GPUs, and {lacks}; use step_time_s")
        for path, metric in asked_for(objective, constraints)
        if metric in OF_HOST
    ]


def asked_for(objective: Objective, constraints: Sequence[Constraint]) -> list[tuple[Path, str]]:
    """Lists the metrics that an objective and bounds are about, with their paths in the file."""
    of_bounds = [
        (("constraints", at), name) for at, one in enumerate(constraints) for name in (one.metric, one.limit_metric)
    ]
    return [(("objective",), objective.metric), *((path, name) for path, name in of_bounds if name)]


def _objective_problem(objective: Objective) -> str | None:
    better = METRICS[objective.metric].better
    wanted = "higher" if objective.maximize else "lower"
    if better in ("none", wanted):
        return None
    verb = "minimize" if objective.maximize else "maximize"
    return f'"{objective}" asks for the worst trial: {better} is better; write "{verb} {objective.metric}"'


def _bound_problem(bound: Constraint, clusters: Sequence[ClusterSpec]) -> str | None:
    """Says why a bound cannot be meant; None where it can, or where it is a share of another metric."""
    if bound.limit_metric is not None:
        return _share_problem(bound)
    metric, unit = METRICS[bound.metric], METRICS[bound.metric].unit
    upper = bound.operator.startswith("<")
    if upper and unit in _NEVER_NEGATIVE and metric.name not in _MAY_BE_NEGATIVE:
        below = bound.factor < 0 or (bound.factor == 0 and bound.operator == "<")
        if below:
            return f'"{bound}": {metric.name} is never below 0, so nothing holds it; write the bound that is meant'
    if unit == "W" and metric.name != "device_power_limit_w":
        return _power_problem(bound, clusters, f'"{bound}"')
    if unit == "degC" and "margin" not in metric.name and "spread" not in metric.name:
        return _temperature_problem(bound)
    if unit == "B" and 0 <= bound.factor < LEAST_MEMORY_BYTES and upper:
        return f'"{bound}" is in bytes; for gigabytes write {bound.factor * 1e9:.0f}'
    return None


def _share_problem(bound: Constraint) -> str | None:
    assert bound.limit_metric is not None
    own, other = METRICS[bound.metric].unit, METRICS[bound.limit_metric].unit
    if own != other:
        return f'"{bound}" compares {own} with {other}; use a metric of the same unit'
    if bound.metric == bound.limit_metric:
        return f'"{bound}" compares {bound.metric} with itself; name the metric that bounds it'
    return None


def _temperature_problem(bound: Constraint) -> str | None:
    low, high = TEMPERATURES_C
    value, upper = bound.factor, bound.operator.startswith("<")
    if low <= value <= high:
        return None
    reason = "no device gets there" if value > high else "no room is that cold"
    effect = "it holds always" if (value > high) == upper else "nothing holds it"
    celsius = (value - 32) * 5 / 9
    fahrenheit = f"; for {value:g} degrees Fahrenheit write {celsius:.0f}" if high < value <= 250 else ""
    return f'"{bound}" is in degrees Celsius: {reason}, so {effect}; allowed: {low:g} to {high:g}{fahrenheit}'


def _power_problem(bound: Constraint, clusters: Sequence[ClusterSpec], said: str) -> str | None:
    """Says why a bound is beyond what devices draw; None where it fits one of the clusters, or no limit is known."""
    known = [(limit, cluster) for cluster in clusters if (limit := _limit_w(bound.metric, cluster)) is not None]
    if not known:
        return None
    value = bound.factor
    if any(LEAST_POWER_FRAC * limit <= value <= MOST_POWER_TIMES * limit for limit, _ in known):
        return None
    limit, cluster = known[0]
    meant = next(
        (
            f"; for {value:g} {name} write {value * scale:g}"
            for name, scale in _OTHER_UNITS
            if LEAST_POWER_FRAC * limit <= value * scale <= 2 * limit
        ),
        "",
    )
    of = f"the power limits of {cluster.label} are {limit:,.0f} W"
    if value < LEAST_POWER_FRAC * limit:
        least = LEAST_POWER_FRAC * limit
        return f"{said} is in watts: {of}, and idle devices draw more than {least:,.0f} W{meant or '; raise it'}"
    return f"{said} is in watts: {of}, so it is beyond anything they draw{meant or '; lower it, or leave it out'}"


_OTHER_UNITS: Final = (("kW", 1e3), ("MW", 1e6), ("mW", 1e-3))


def _limit_w(metric: str, cluster: ClusterSpec) -> float | None:
    """Returns the power limits of the devices that a metric sums over; None where unknown, or where hosts count too."""
    limit_w = cluster.sensed_device.power_limit_w
    if limit_w is None or metric.startswith("node_power") or "swing" in metric:
        return None
    if metric.startswith("device_"):
        return limit_w
    return limit_w * (cluster.devices_per_node if metric.startswith("node_") else cluster.world_size)


def _contradictions(constraints: Sequence[Constraint]) -> Iterator[tuple[Path, str]]:
    """Finds bounds that leave no value between them, and repeated ones."""
    for index, bound in enumerate(constraints):
        for earlier_index, earlier in enumerate(constraints[:index]):
            if (bound.metric, bound.limit_metric) != (earlier.metric, earlier.limit_metric):
                continue
            if bound == earlier:
                yield ("constraints", index), f"the same as entry {earlier_index}; remove one"
                break
            if _excludes(bound, earlier):
                yield ("constraints", index), f'"{bound}" and "{earlier}" (entry {earlier_index}) exclude each other'
                break


def _excludes(one: Constraint, other: Constraint) -> bool:
    upper, lower = (one, other) if one.operator.startswith("<") else (other, one)
    if not upper.operator.startswith("<") or not lower.operator.startswith(">"):
        return False
    strict = "=" not in upper.operator or "=" not in lower.operator
    return upper.factor < lower.factor or (strict and upper.factor == lower.factor)
