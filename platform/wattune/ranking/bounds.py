"""Verdict on one bound of one trial: the probability that the next run keeps it, and what follows at a stated risk.

The next run is Student's t about the mean of the runs, with their scatter and that of their mean (Gelman et al.,
Bayesian Data Analysis, 3rd edition, section 3.2). A bound is on readings, since that is what an operator's meter says.
The step of a sensor that rounds is added, as uniform within its limits (JCGM 100:2008, GUM, 4.3.7).

The gain of a power sensor is the same in every run, so no repeat shows it. Agreement of integrated power with the
energy counter does not bound it, because both come from that sensor. It is told once, of the leader (`true_text`). It
counts in the verdict where a bound asks for it (`Constraint.sensor_gain_frac`), uniform within that fraction.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache, partial
from operator import itemgetter
from statistics import NormalDist
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from wattune.arrays import Floats
from wattune.fidelity import by_length, measuring
from wattune.intervals import t_cumulatives
from wattune.metrics import METRICS
from wattune.objective import SENSOR_ACCURACY_FRAC, Constraint, is_sensed
from wattune.ranking import shares
from wattune.ranking.dice import NUM_DRAWS, happens, normal_quantiles, order, scatter_quantiles
from wattune.ranking.heat import stays_cool_probability, unsettled_text
from wattune.ranking.scatter import Scatter
from wattune.ranking.shares import normal_cumulative, waiting_share
from wattune.ranking.spreads import NextRun, Spreads, resolution
from wattune.run import Run

LIMIT: Final = "device_power_limit_w"  # what is enforced does not scatter

_NORMAL: Final = NormalDist()


class Holds(StrEnum):
    """Verdict on a bound."""

    HOLDS = "holds"
    """The next run breaks it with a probability of at most the risk, whether or not a run so far did."""
    BREAKS = "breaks"
    """The next run keeps it with a probability below the risk."""
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """Distance of a trial to one bound, in the repeat that is closest to it or furthest past it."""

    constraint: Constraint
    got: float
    bound: float
    slack: float
    """Distance to the bound on the allowed side, in the metric's unit; negative if violated."""
    slack_frac: float | None
    """The slack as a fraction of the bound; None where it is 0, and for temperatures, whose zero is arbitrary."""
    repeat: int
    num_runs: int
    """Repeats that measured it."""
    num_past: int
    """Those of them that passed the bound. The verdict counts them as part of the scatter, not by themselves: of 20
    runs of a plan that keeps its bound at a risk of 5 % one passes it."""
    holds_probability: float | None
    """Probability that the next run keeps the bound; None if a repeat did not measure the metric."""
    elsewhere_probability: float | None
    """The same of a run on another day or device of the kind, of a bound that holds; None where it is not known, as
    for shares, and where sensors are simulated."""
    verdict: Holds
    unsettled: str = ""
    """Text that says why an undecided bound waits for heat and what would settle it; empty where it does not."""

    @property
    def metric(self) -> str:
        """The bounded metric."""
        return self.constraint.metric

    @property
    def holds(self) -> bool:
        """True if every measured repeat kept the bound."""
        return not self.num_past

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for `json.dumps`."""
        known = {
            name: getattr(self, name) for name in self.__dataclass_fields__ if name != "unsettled" or self.unsettled
        }
        return {**known, "constraint": str(self.constraint), "metric": self.metric}


def margins(
    constraint: Constraint, each: Sequence[Sequence[Run]], spreads: Spreads, *, risk: float, simulated: Sequence[bool]
) -> list[Margin | None]:
    """Computes the margin of each trial's worst repeat and the verdict on the bound, None if no repeat can be checked.

    Repeats are those that completed, long runs of a finalist too. `risk` is the accepted probability of a wrong
    verdict. Simulated sensors have no gain error, whatever a bound asks for.
    """
    metric, below = constraint.metric, constraint.operator.startswith("<")
    known = [[(own, one) for one in runs if (own := constraint.slack(one.metrics)) is not None] for runs in each]
    worst = [min(own, key=itemgetter(0), default=None) for own in known]
    bounds = [0.0 if one is None else constraint.bound(one[1].metrics) or 0.0 for one in worst]
    modelled, in_degrees = metric != LIMIT and not shares.is_share(metric), METRICS[metric].unit == "degC"
    nexts = [spreads.next_runs(own, metric) if modelled and one else [] for own, one in zip(each, worst, strict=True)]
    gains = [0.0 if one else _gain(constraint) for one in simulated]
    likely = _probabilities(nexts, metric, bounds, gains, below=below)
    for place, runs in enumerate(each):
        found = likely[place]
        if metric == LIMIT:
            found = min((float(constraint.keeps(own)) for own, _ in known[place]), default=None)
        elif not modelled and known[place]:
            keeps = partial(shares.keeps_probability, bound=bounds[place], below=below, size=shares.size_of(metric))
            found = min((keeps(own, waiting=part) for own, part in _shares(runs, metric)), default=None)
        if found is not None and below:
            # Heat to come is a doubt, never a proof: a share that was kept does not break before heat is there.
            found = max(found * stays_cool_probability(metric, runs), min(found, risk))
        likely[place] = found
    holding = [
        own if one is not None and one >= 1.0 - risk and not made_up else []
        for own, one, made_up in zip(nexts, likely, simulated, strict=True)
    ]
    away = _probabilities(holding, metric, bounds, gains, below=below, elsewhere=True)
    margins: list[Margin | None] = []
    for own, one, bound, probability, elsewhere, runs in zip(known, worst, bounds, likely, away, each, strict=True):
        if one is None:
            margins.append(None)
            continue
        (slack, result), num_past, verdict = one, sum(not constraint.keeps(each) for each, _ in own), Holds.UNDECIDED
        if probability is not None and probability < risk:
            verdict = Holds.BREAKS
        elif probability is not None and probability >= 1.0 - risk:
            verdict = Holds.HOLDS
        elif probability is None and num_past:
            verdict = Holds.BREAKS  # not every repeat was measured, and one of those that were broke it
        margins.append(
            Margin(
                constraint=constraint,
                got=result.metrics[metric],
                bound=bound,
                slack=slack,
                slack_frac=slack / abs(bound) if bound and not in_degrees else None,
                repeat=result.repeat,
                num_runs=len(own),
                num_past=num_past,
                holds_probability=probability,
                elsewhere_probability=elsewhere,
                verdict=verdict,
                unsettled=unsettled_text(metric, bound, runs) if verdict is Holds.UNDECIDED else "",
            )
        )
    return margins


def kept_in_draws(
    margins: Sequence[Margin], repeats: Sequence[Run], spreads: Spreads, study: str, *, risk: float, simulated: bool
) -> npt.NDArray[np.bool_]:
    """Draws the verdict that repeats without end would give: true where every bound would hold at the risk.

    The mean and the scatter of each metric are drawn from what the completed repeats tell of them, by the dice of the
    trial; what trials share by those of its `study`. The sensor's gain and step are not drawn: no repeat shows them, so
    they stay a distance that the trial keeps from the bound. `risk` is the accepted probability that the next run
    breaks a bound. Simulated sensors have no gain error, whatever a bound asks for.
    """
    kept, least, trial = np.ones(NUM_DRAWS, np.bool_), _NORMAL.inv_cdf(1.0 - risk), repeats[0].trial_id
    for found in margins:
        metric, below = found.metric, found.constraint.operator.startswith("<")
        if (likely := stays_cool_probability(metric, repeats)) < 1.0:
            kept &= happens(likely, study, trial, metric, "cool")
        if shares.is_share(metric):
            settles = partial(shares.settles_probability, bound=found.bound, below=below, size=shares.size_of(metric))
            for number, (values, waiting) in enumerate(_shares(repeats, metric)):
                kept &= happens(settles(values, waiting=waiting, risk=risk), study, trial, metric, str(number))
            continue
        kept &= found.holds or metric != LIMIT
        for number, one in enumerate(() if metric == LIMIT else spreads.next_runs(repeats, metric)):
            if (one.num_zeros and (not found.bound or one.zero_everywhere)) or (one.logarithmic and found.bound <= 0.0):
                kept &= found.holds  # no scatter to draw from: every run said the same
                continue
            distance, systematic = _distance(one, metric, found.bound, 0.0 if simulated else _gain(found.constraint))
            effects, at_places, low, high = _drawn_effects(one.scatter, study, metric)
            wider = scatter_quantiles(one.degrees_of_freedom)[order(study, trial, metric, "scatter", str(number))]
            error = normal_quantiles()[order(study, trial, metric, "mean", str(number))] * wider
            away = one.scatter.shared[one.number] @ effects + distance
            away -= math.sqrt(one.run_variance / one.num_runs) * error
            size = np.sqrt(one.run_variance * wider**2 + systematic)
            holds = (away - high if below else low - away) >= least * size
            # Where the places disagree, their shares decide.
            some = np.flatnonzero(~holds & ((away - low if below else high - away) >= least * size))
            rooms = (away[some] - at_places[:, some]) * (1.0 if below else -1.0) / size[some]
            holds[some] = one.scatter.place_share @ normal_cumulative(rooms) >= 1.0 - risk
            kept &= holds
    return kept


@lru_cache(maxsize=8)
def _drawn_effects(scatter: Scatter, study: str, metric: str) -> tuple[Floats, Floats, Floats, Floats]:
    """Draws what a study's trials share: effects, their change at each place, and its least and greatest by draw."""
    root = np.linalg.cholesky(scatter.shared_covariance)
    normals = [normal_quantiles()[order(study, metric, "effect", str(number))] for number in range(len(root))]
    effects = scatter.effects[:, None] + root @ np.array(normals)
    at_places = scatter.places @ effects
    return effects, at_places, at_places.min(axis=0), at_places.max(axis=0)


def _shares(repeats: Sequence[Run], metric: str) -> list[tuple[list[float], float]]:
    """Returns what a trial's runs of each length measured of a share, and by how much they wait for their host."""
    if any(metric not in run.metrics for run in repeats):
        return []
    return [
        ([run.metrics[metric] for run in runs], waiting_share(runs))
        for runs in by_length(measuring(repeats, metric)).values()
    ]


def _distance(one: NextRun, metric: str, bound: float, gain: float) -> tuple[float, float]:
    """Returns the distance from a trial's mean up to a bound, and the variance that no repeat shows."""
    step = resolution(metric)
    distance, size = (math.log(bound) - one.mean, 1.0) if one.logarithmic else (bound - one.mean, one.mean)
    return distance, (gain * size) ** 2 + step**2 / 12.0 + one.heat_variance


def _gain(constraint: Constraint) -> float:
    """Returns the standard uncertainty of the sensor's gain that a bound asks for, as a fraction."""
    return constraint.sensor_gain_frac / math.sqrt(3.0)


def true_text(margins: Sequence[Margin]) -> str:
    """Says what a trial's bounds on readings tell of true watts and joules; empty where it has no such bound kept.

    The reading is r = (1 + g) true, with g uniform within `SENSOR_ACCURACY_FRAC`. The bound that fails first is told.
    """
    rooms = []
    for one in margins:
        if (
            one.constraint.sensor_gain_frac
            or not is_sensed(one.metric)
            or not one.holds
            or min(one.got, one.bound) <= 0
        ):
            continue
        low = one.constraint.operator.startswith("<")
        ratio = one.got / one.bound
        room = 1.0 - ratio if low else ratio - 1.0
        rooms.append((room, "low" if low else "high", "watts" if METRICS[one.metric].unit == "W" else "joules"))
    if not rooms:
        return ""
    room, side, unit = min(rooms)
    stated = f"{100 * SENSOR_ACCURACY_FRAC:g} %"
    if room >= SENSOR_ACCURACY_FRAC:
        return f"bounds are on readings; true {unit} hold too if the sensor is within ±{stated}"
    likely = 0.5 + room / (2.0 * SENSOR_ACCURACY_FRAC)
    return (
        f"bounds are on readings; true {unit} hold too unless the sensor reads more than {100 * room:.1f} % {side} "
        f"(P {likely:.2f} if it is within ±{stated})"
    )


def _probabilities(
    nexts: Sequence[Sequence[NextRun]],
    metric: str,
    bounds: Sequence[float],
    gains: Sequence[float],
    *,
    below: bool,
    elsewhere: bool = False,
) -> list[float | None]:
    """Computes each trial's least probability that a next run keeps its bound, here or on another day or device."""
    found: list[list[float]] = [[] for _ in nexts]
    models: dict[int, tuple[Scatter, list[tuple[float, ...]]]] = {}  # of a temperature two: as read, and settled
    for place, (each, bound, gain) in enumerate(zip(nexts, bounds, gains, strict=True)):
        for one in each:
            if one.num_zeros and (not bound or one.zero_everywhere):
                # A count that was always 0 shows no scatter to model, and it scatters to one side only: Jeffreys'
                # estimate of a share that was never seen (Brown, Cai and DasGupta 2001, "Interval estimation for a
                # binomial proportion").
                zero = (one.num_zeros + 0.5) / (one.num_zeros + 1.0)
                at_most = zero if bound >= 0.0 else 0.0
                found[place].append(at_most if below else (1.0 if bound <= 0.0 else 1.0 - zero))
            elif one.logarithmic and bound <= 0.0:
                found[place].append(0.0 if below else 1.0)
            else:
                distance, systematic = _distance(one, metric, bound, gain)
                systematic += one.elsewhere_variance if elsewhere else 0.0
                _, rows = models.setdefault(id(one.scatter), (one.scatter, []))
                rows.append((place, one.number, distance, systematic, one.own_variance, one.degrees_of_freedom))
    for scatter, rows in models.values():
        places, at = (column.astype(np.intp) for column in np.array(rows).T[:2])
        distances, systematics, own, degrees = (column[:, None] for column in np.array(rows).T[2:])
        # Change from the mean to a run at each place like those of the study, and its variance: [next runs, places].
        variance = own + systematics + scatter.away_variance[at]
        # Welch and Satterthwaite: the systematic part is known, the scatter is estimated.
        squares = np.array([one**2 for one in (variance / own).ravel().tolist()]).reshape(variance.shape)
        away = (distances - scatter.away[at]) / np.sqrt(variance)
        told = t_cumulatives(away.ravel(), (degrees * squares).ravel()).reshape(variance.shape)
        kept = np.zeros(len(rows))
        for share, column in zip(scatter.place_share.tolist(), told.T, strict=True):
            kept += share * column
        for place, at_most in zip(places.tolist(), kept.tolist(), strict=True):
            found[place].append(at_most if below else 1.0 - at_most)
    return [min(each, default=None) for each in found]
