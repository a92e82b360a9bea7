"""Plans at limits of power: measured where they ran so, else their nearest run read as that limit by estimates."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final

import numpy as np

from wattune.cost.clock import LIMIT_ERROR
from wattune.cost.estimate import Find, estimate
from wattune.cost.transfer import read_as
from wattune.objective import Constraint, VariedBound
from wattune.plans.program import is_command
from wattune.ranking.bounds import LIMIT
from wattune.ranking.spreads import Results
from wattune.run import Run
from wattune.trial import TrialSpec, limit_of

STEP_W: Final = 50.0
FIGURES: Final = ("tokens_per_s", "device_power_mean_w", "energy_per_token_j")

LimitRows = list[dict[str, Any]]


def every_50_w(specs: Sequence[TrialSpec], *, to_least: bool = False) -> VariedBound:
    """Varies the limit by 50 W from the highest of these trials to the lowest, `to_least` of one to the devices'."""
    limits = [limit for one in specs if np.isfinite(limit := limit_of(one))] or [0.0]
    least = min(limits)
    if to_least and least == max(limits):
        least = max((one.cluster.sensed_device.power_limit_least_w or least for one in specs), default=least)
    values = np.arange(max(limits), least - 1e-6, -STEP_W)[::-1]
    return VariedBound.rising(Constraint(metric=LIMIT, operator="<=", factor=0.0), map(float, values))


def by_limit(pairs: Results, varied: VariedBound, find: Find) -> list[LimitRows]:
    """Reads the five fastest plans and each model's at each limit: `measured`, or predicted from their nearest run.

    A row has `plan` and `job`, `limit_w`, `num_devices`, `FIGURES` as `value`, `low` and `high`, and `buys_frac`: the
    gain in tokens a second over the limit below. A plan that lacks a figure, and a command, have none. Raises
    `PlanError`: a device cannot be predicted.
    """
    groups: dict[TrialSpec, list[tuple[TrialSpec, Run]]] = defaultdict(list)
    unlimited = cache(lambda plan: replace(plan, power_limit_w=None))  # thousands of trials have hundreds of plans
    for spec, run in pairs if varied.bound.metric == LIMIT and varied.bound.limit_metric is None else ():
        if not is_command(spec) and all(run.metrics.get(name) for name in FIGURES):
            groups[replace(spec, plan=unlimited(spec.plan))].append((spec, run))

    top_w = varied.values[-1]
    there = {base: _nearest(ran, top_w) for base, ran in groups.items()}
    speeds = {base: _mean(groups[base], near, "tokens_per_s") for base, near in there.items()}
    left = [base for base, near in there.items() if limit_of(near) != top_w]
    found = estimate([*(_at(base, top_w) for base in left), *(there[base] for base in left)], find)
    of_top, of_nearest = np.split(found.columns["tokens_per_s"].value, 2)
    for base, at, by in zip(left, of_top.tolist(), of_nearest.tolist(), strict=True):
        speeds[base] = at * speeds[base] / by
    fastest = sorted(groups, key=speeds.__getitem__, reverse=True)
    of_jobs = {base.model.name: base for base in reversed(fastest)}.values()  # a rack is split over all of them
    first = sorted(dict.fromkeys([*of_jobs, *fastest[:5]]), key=fastest.index)
    return _of_plans({base: groups[base] for base in first}, varied.values, find)


def _nearest(ran: Results, limit_w: float) -> TrialSpec:
    return min((one for one, _ in ran), key=lambda one: abs(limit_of(one) - limit_w))


def _at(base: TrialSpec, limit_w: float) -> TrialSpec:
    return replace(base, plan=replace(base.plan, power_limit_w=round(limit_w)))


def _mean(ran: Results, near: TrialSpec, name: str) -> float:
    return float(np.mean([run.metrics[name] for one, run in ran if one == near]))


def _of_plans(groups: Mapping[TrialSpec, Results], values_w: Sequence[float], find: Find) -> list[LimitRows]:
    """Reads plans, each with what ran of it, at each limit. They are estimated at once."""
    asked = [_at(base, one) for base in groups for one in values_w]
    nearest = [_nearest(ran, value) for ran in groups.values() for value in values_w]
    columns, found = estimate([*asked, *nearest], find).columns, list[LimitRows]()
    for number, (base, ran) in enumerate(groups.items()):
        rows: LimitRows = []
        found.append(rows)
        for place, value in enumerate(values_w, number * len(values_w)):
            near = nearest[place]
            row: dict[str, Any] = {"plan": base.label, "job": base.model.name, "limit_w": value}
            row |= {"num_devices": base.cluster.world_size, "measured": limit_of(near) == value}
            for name in FIGURES:
                got = _mean(ran, near, name)
                at, by = columns[name].value[[place, len(asked) + place]]
                off = 100 * LIMIT_ERROR * abs(np.log(at / by))
                read = read_as(got, by, at, measured_log_std=0.0, distance_percent=off)
                ends = {end: float(getattr(read, end)[0]) for end in ("value", "low", "high")}
                row[name] = dict.fromkeys(ends, got) if row["measured"] else ends
            over = row["device_power_mean_w"]["value"] / value  # a driver keeps its limit
            for name in () if row["measured"] or over <= 1.0 else ("device_power_mean_w", "energy_per_token_j"):
                row[name] = {end: figure / over for end, figure in row[name].items()}
            gain = row["tokens_per_s"]["value"] / rows[-1]["tokens_per_s"]["value"] - 1 if rows else None
            rows.append(row | {"buys_frac": gain})
    return found


def split(plans: Sequence[LimitRows]) -> LimitRows:
    """Splits the watts of a rack over jobs, one of each model, for the largest sum of rates over their highest.

    From all at their lowest limit on, the next step goes where it adds most for its watts: the best of all splits as
    each rate is concave in watts. Empty for one job.
    """
    jobs = list({plan[0]["job"]: plan for plan in reversed(plans)}.values())
    rates = [[row["tokens_per_s"]["value"] / plan[-1]["tokens_per_s"]["value"] for row in plan] for plan in jobs]
    watts = [[row["limit_w"] * row["num_devices"] for row in plan] for plan in jobs]
    at, rows = [0] * len(jobs), []
    while len(jobs) > 1:
        budget_w = sum(each[n] for each, n in zip(watts, at, strict=True))
        limits_w = {plan[n]["job"]: plan[n]["limit_w"] for plan, n in zip(jobs, at, strict=True)}
        rate = sum(each[n] for each, n in zip(rates, at, strict=True)) / len(jobs)
        rows.append({"budget_w": budget_w, "limits_w": limits_w, "rate_frac": rate})
        left = [job for job, n in enumerate(at) if n + 1 < len(rates[job])]
        steps = [(np.diff(rates[job])[at[job]] / np.diff(watts[job])[at[job]], job) for job in left]
        if not steps:
            break
        at[max(steps)[1]] += 1
    return rows
