"""Difference of two trials in one metric, tested as a difference.

The error of a difference follows from the model of all runs (`wattune.ranking.scatter`), not from two intervals side
by side. Drift and node offsets that both trials share cancel. If the trials' runs alternate in time, each run is
compared with its neighbour, so that slow changes of the machine cancel too.

The model's prior says that runs scatter by a share of their value. That means little for a metric that can be 0, such
as a share of time throttled. Its scatter comes from repeats alone, and without repeats it is not tested.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from wattune.arrays import Floats
from wattune.fidelity import measuring, ordinary
from wattune.intervals import CONFIDENCE_FRAC, Interval, t_cumulative, t_quantile
from wattune.metrics import METRICS
from wattune.ranking.scatter import factor
from wattune.ranking.spreads import Fitted, Spreads
from wattune.run import Run

LEAST_PAIRS: Final = 4
"""Fewest pairs whose own scatter is known well enough. Our choice."""

PAIRS_PRIOR: Final = 1.0
"""Degrees of freedom that the pooled variance of runs is worth for differences of neighbouring runs. Our choice."""

_SAME_STATISTIC: Final = 9
"""Digits by which two test statistics are the same one: metrics that differ by a constant factor are one test."""

DEGREES: Final = "degC"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """B minus A in one metric."""

    metric: str
    a: Interval
    b: Interval
    change: float
    """B minus A, in the metric's unit; of temperatures in kelvin."""
    low: float | None = None
    """The 95 % interval of `change`; None without a test."""
    high: float | None = None
    change_frac: float | None
    """The change as a fraction of A; None for temperatures, and for metrics that can be 0."""
    low_frac: float | None = None
    high_frac: float | None = None
    statistic: float | None = None
    """The difference in standard errors; None without a test."""
    p_value: float | None = None
    """Two-sided probability of a difference this large between equal trials."""
    num_pairs: int
    """Pairs of neighbouring runs that were compared; 0 where runs do not alternate."""
    untested: str = ""
    """The reason there is no test; empty if there is one."""
    told_apart: bool = False
    """True if the trials differ, at the error of `tell_apart`."""

    @property
    def verdict(self) -> str:
        """The verdict in words."""
        return self.untested or ("told apart" if self.told_apart else "not told apart")

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for `json.dumps`."""
        unit = METRICS[self.metric].unit
        return {**asdict(self), "unit": "K" if unit == DEGREES else unit, "verdict": self.verdict}


@dataclass(frozen=True, slots=True)
class Counted:
    """The runs of a trial that are compared, and the scatter of its study."""

    runs: Sequence[Run]
    spreads: Spreads


def difference(metric: str, a: Counted, b: Counted) -> Difference | None:
    """Tests the difference of trials, of one study or two, in a metric; None if a run of either did not measure it."""
    a, b = (replace(one, runs=measuring(one.runs, metric)) for one in (a, b))
    of_a, of_b = a.spreads.interval(a.runs, metric), b.spreads.interval(b.runs, metric)
    fitted_a, fitted_b = a.spreads.fitted(metric), b.spreads.fitted(metric)
    if of_a is None or of_b is None or fitted_a is None or fitted_b is None:
        return None
    logarithmic = fitted_a.logarithmic and fitted_b.logarithmic
    variance, degrees, num_pairs, untested = _error(metric, a, b, (of_a, of_b), logarithmic=logarithmic)
    change = of_b.value - of_a.value
    apart = math.log(of_b.value / of_a.value) if logarithmic else change
    tested: dict[str, float] = {}
    if not untested:
        size = math.sqrt(variance)
        reach, statistic = t_quantile(degrees) * size, abs(apart) / size
        p_value = 2.0 * (1.0 - t_cumulative(statistic, degrees))
        tested = {"low": apart - reach, "high": apart + reach, "statistic": statistic, "p_value": p_value}
        if logarithmic:
            low_frac, high_frac = _share(apart - reach), _share(apart + reach)
            tested |= {"low_frac": low_frac, "high_frac": high_frac}
            tested |= {"low": of_a.value * low_frac, "high": of_a.value * high_frac}
    return Difference(
        metric=metric,
        a=of_a,
        b=of_b,
        change=change,
        change_frac=_share(apart) if logarithmic else None,
        num_pairs=num_pairs,
        untested=untested,
        **tested,  # type: ignore[arg-type]  # all of them are numbers
    )


def _share(log_change: float) -> float:
    """Returns a change on the logarithmic scale as a share; exact where it is small."""
    return math.expm1(log_change) if log_change < 1.0 else factor(log_change) - 1.0


def tell_apart(found: Iterable[Difference], first: str) -> tuple[Difference, ...]:
    """Decides which metrics tell two trials apart, by their differences.

    The metric that was asked for, `first`, is tested alone. Of all others together at most one verdict in 20
    comparisons of equal trials is wrong: the step-down procedure of Holm (1979, "A simple sequentially rejective
    multiple test procedure", Scandinavian Journal of Statistics 6). Metrics with the same statistic are one test.
    """
    listed, level = list(found), 1.0 - CONFIDENCE_FRAC
    tests: dict[float, float] = {}
    for one in listed:
        if one.metric != first and one.statistic is not None and one.p_value is not None:
            tests.setdefault(round(one.statistic, _SAME_STATISTIC), one.p_value)
    apart: set[float] = set()
    for rank, (statistic, p_value) in enumerate(sorted(tests.items(), key=lambda test: test[1])):
        if p_value > level / (len(tests) - rank):
            break
        apart.add(statistic)
    return tuple(
        replace(
            one,
            told_apart=one.statistic is not None
            and one.p_value is not None
            and (one.p_value <= level if one.metric == first else round(one.statistic, _SAME_STATISTIC) in apart),
        )
        for one in listed
    )


def _error(
    metric: str, a: Counted, b: Counted, values: tuple[Interval, Interval], *, logarithmic: bool
) -> tuple[float, float, int, str]:
    """Returns the variance of a difference, on the logarithmic scale or in the metric's unit.

    Then its degrees of freedom, the number of pairs, and the reason why it is not tested, empty where it is.
    """
    parts = [_Part.of(metric, side) for side in (a, b)]
    runs_a, runs_b = (part.runs for part in parts)
    if not any(run.metrics[metric] for run in (*runs_a, *runs_b)):
        return 0.0, 1.0, 0, "both are 0"
    same_study = a.spreads is b.spreads
    if same_study and {run.repeat for run in runs_a} == {run.repeat for run in runs_b} and _one_trial(a, b):
        return 0.0, 1.0, 0, "the same runs"
    # A study on the logarithmic scale beside one that is not is taken to the metric's unit.
    sizes = [
        abs(one.value) if part.fitted.logarithmic and not logarithmic else 1.0
        for part, one in zip(parts, values, strict=True)
    ]
    unknown = any(part.repeats_variance is None for part in parts if not part.fitted.logarithmic)
    if unknown and METRICS[metric].unit != DEGREES:
        return 0.0, 1.0, 0, "not tested: no repeat shows its scatter"
    degrees = min(part.degrees_of_freedom for part in parts)
    own = sum(size**2 * part.variance_of_mean for size, part in zip(sizes, parts, strict=True))
    pairs: list[tuple[Run, Run]] = []
    if same_study and _one_trial(a, b):
        overlap = len({run.repeat for run in runs_a} & {run.repeat for run in runs_b})
        counts = 1 / len(runs_a) + 1 / len(runs_b) - 2 * overlap / (len(runs_a) * len(runs_b))
        own = parts[0].variance * counts
    elif same_study and logarithmic and (pairs := _pairs(runs_a, runs_b)):
        own, degrees = _of_pairs(metric, pairs, sum(part.pooled_variance for part in parts))
    effects = [size * part.shared for size, part in zip(sizes, parts, strict=True)]
    if same_study:
        common = _spread(effects[0] - effects[1], parts[0].fitted)
    else:
        common = sum(_spread(effect, part.fitted) for effect, part in zip(effects, parts, strict=True))
    return own + common, degrees, len(pairs), ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One side of a difference, with its share of the error."""

    runs: Sequence[Run]
    fitted: Fitted
    variance: float
    """Of one run."""
    variance_of_mean: float
    degrees_of_freedom: float
    repeats_variance: float | None
    """Variance of one run by the study's repeats without the prior; None if they show none."""
    pooled_variance: float
    """Variance of one run as of all such trials."""
    shared: Floats

    @classmethod
    def of(cls, metric: str, side: Counted) -> "_Part":
        placed = side.spreads.placed(side.runs, metric)
        assert placed is not None, "a side with an interval has a model"
        fitted, number = placed
        found, runs = fitted.scatter, ordinary(side.runs)
        variance, degrees = float(found.variance[number]), float(found.degrees_of_freedom[number])
        of_mean = variance / len(runs) if len(runs) < found.num_runs[number] else 1.0 / float(found.weight[number])
        alone, pooled = None, float(found.pooled_variance[number])
        if found.typical is not None:
            prior = fitted.prior.degrees_of_freedom
            pool = found.pool(number)
            free = pool.degrees_of_freedom - prior
            squares = pooled * pool.degrees_of_freedom - prior * pooled / pool.ratio
            alone = squares / free if free >= 0.5 and squares > 1e-12 * found.typical**2 else None
            if alone is not None and METRICS[metric].unit != DEGREES:
                variance, degrees = max(variance, alone), max(free, 1.0)
                of_mean = variance / len(runs)
        return cls(
            runs=runs,
            fitted=fitted,
            variance=variance,
            variance_of_mean=of_mean,
            degrees_of_freedom=degrees,
            repeats_variance=alone,
            pooled_variance=pooled,
            shared=found.shared[number],
        )


def _one_trial(a: Counted, b: Counted) -> bool:
    return a.runs[0].trial_id == b.runs[0].trial_id


def _spread(effect: Floats, fitted: Fitted) -> float:
    """Returns the variance that shared effects add to a difference."""
    return max(float(effect @ fitted.scatter.shared_covariance @ effect), 0.0)


def _pairs(runs_a: Sequence[Run], runs_b: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Pairs runs that alternate in time on the same nodes, A first; empty if they do not."""
    if not LEAST_PAIRS <= len(runs_a) == len(runs_b) or not all(run.start_wall_ns for run in (*runs_a, *runs_b)):
        return []
    of_a = {id(run) for run in runs_a}
    ordered = sorted((*runs_a, *runs_b), key=lambda run: run.start_wall_ns)
    pairs = []
    for first, second in zip(ordered[::2], ordered[1::2], strict=True):
        if (id(first) in of_a) == (id(second) in of_a) or first.tags.get("nodes") != second.tags.get("nodes"):
            return []
        pairs.append((first, second) if id(first) in of_a else (second, first))
    return pairs


def _of_pairs(metric: str, pairs: Sequence[tuple[Run, Run]], pooled_variance: float) -> tuple[float, float]:
    """Computes the variance of the mean difference of pairs, and its degrees of freedom.

    It is moderated by the pooled variances of one run of each trial together. Those have the machine's slow changes in
    them, so they count `PAIRS_PRIOR` degrees of freedom only.
    """
    apart = np.array([math.log(b.metrics[metric] / a.metrics[metric]) for a, b in pairs])
    degrees = PAIRS_PRIOR + len(apart) - 1
    squares = float(((apart - apart.mean()) ** 2).sum())
    return (PAIRS_PRIOR * pooled_variance + squares) / degrees / len(apart), degrees
