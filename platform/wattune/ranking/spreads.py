"""Scatter of the metrics of one study: intervals of trials, and what the next run of one is likely to measure.

All completed runs of a metric enter one model (`wattune.ranking.scatter`). The long run of a finalist is a measurement
of a hot machine, so the model takes it as a trial of its own. It counts for bounds, and for the objective only where
there is no ordinary run.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from wattune.analysis.metrics.step_breakdown import HOST_BOUND_FRAC
from wattune.arrays import Floats, Indices
from wattune.fidelity import by_length, is_burst, is_soak, is_unprofiled, measuring, ordinary
from wattune.intervals import NORMAL_95, Interval, t_quantile
from wattune.metrics import METRICS
from wattune.ranking.heat import heat_left, judged_metric
from wattune.ranking.scatter import MOST_LOG, Prior, Runs, Scatter, factor, fit, learned
from wattune.run import NO_NUMBERS, Numbers, Run, RunStatus
from wattune.trial import TrialSpec
from wattune.units import NS_PER_S, format_quantity

Results: TypeAlias = Sequence[tuple[TrialSpec, Run]]
"""Specification and result of every repeat of a study's trials, in any order."""

AnyResults: TypeAlias = Sequence[tuple[TrialSpec | None, Run]]
"""Results of which some have no specification, as of recordings."""

PRIOR: Final = Prior()
"""Scatter that is expected of runs of which nothing is known: on processors, with simulated sensors, of recordings."""

PRIORS: Final = {
    "power": Prior(spread=0.0026, degrees_of_freedom=3.7, similar_degrees=4.0, drift=0.01, elsewhere=0.012),
    "speed": Prior(spread=0.0037, degrees_of_freedom=3.0, similar_degrees=4.0, drift=0.01, elsewhere=0.02),
    "energy": Prior(spread=0.0035, degrees_of_freedom=4.0, similar_degrees=4.0, drift=0.01, elsewhere=0.009),
}
"""Scatter that is expected of trials with measured sensors, by group of metrics. Repeats of ten plans on H100 and H200
have a scale of 0.26 % (power) and 0.37 % (step time) at 3.7 and 3 degrees of freedom (Smyth 2004, section 6.2).
Energy has 0.47 %, root mean square: 0.35 % at 4 degrees. So trials scatter unlike, by three to four degrees of
freedom, and one tells little of another.

The seven studies of `benchmarks/data` whose runs tell their drift to 0.5 % drifted by 0.35 % (power), 0.5 % (speed) and
0.65 % (energy), root mean square, in 6 to 85 minutes: seven of them do not exclude 1 % (chi-square, 95 %). Plans that
do not wait for their host and ran in two studies, on another day or device, differ by 1.2, 2.0 and 0.8 % a study, root
mean square, with medians of 0.14, 0.40 and 0.39 % (30 pairs of `dense_gpt_1b_h200*`, `dense_llama_*h100x2` and
`moe_ep_h200x2*`: `tests/golden/test_host_bound.py`)."""

_TELLING: Final = {"power": "node_device_power_peak_1s_w", "speed": "step_time_s", "energy": "energy_per_step_j"}
"""Metric by which studies tell the scatter of each group of `PRIORS`: those that the priors come from."""

_BESIDE: Final = {"power": _TELLING["speed"], "energy": _TELLING["speed"], "speed": _TELLING["power"]}
"""Metric by whose scatter that of a group is told too: what disturbs a run does so in all of them."""

_UNCERTAINTIES: Final = {
    **dict.fromkeys(
        ("step_time_s", "tokens_per_s", "tokens_per_s_per_device", "mfu_frac"), "step_time_uncertainty_frac"
    ),
    **dict.fromkeys(("energy_per_step_j", "energy_per_token_j", "tokens_per_j"), "energy_per_step_uncertainty_frac"),
}
"""Metrics that are a mean over steps or its inverse, with the metric that has the uncertainty of one run's mean."""

_LOGARITHMIC: Final = ("speed", "energy", "power", "memory")
"""Groups of metrics that scatter in proportion to their value. Others can be 0, and scatter on their own scale."""

HOST_SPREAD: Final = {"speed": 0.15, "power": 0.05, "energy": 0.05}
"""Standard deviation of one run, by group of metrics, that is expected where devices wait for their host: root mean
square over six plans with two to four runs each on one H200 that wait for 16 to 62 % of a step (0.15, 0.10 and 0.04;
`benchmarks/data/dense_llama_1b_h200.parquet` and its ladder). A few of them scatter most: at three degrees of freedom
power has a scale of 3.3 %. Their host was a virtual machine. A steadier one scatters less, and the study's repeats of
such trials show it."""

_WITHOUT_HOST: Final = "device_bound_step_time_s"
"""Metric of a group of `HOST_SPREAD` that the host's pace is taken out of. Runs of one plan on one H200 that waited for
9 to 39 % of a step, and of another for 37 to 55 %, scatter by 0.2 and 0.9 % in it, and by 16 and 13 % in `step_time_s`
(`benchmarks/data/dense_gpt_1b_h200.parquet` and `..._guided.parquet`)."""

_ALL_HOST_FRAC: Final = 0.25
"""Share of a step from which on the host's pace is that of the step; from `HOST_BOUND_FRAC` on it is so in part."""

_DEGREES: Final = "degC"
_TYPICAL_TEMPERATURE_C: Final = 100.0
"""Size that a temperature's prior is a fraction of: 1 % is 1 K. Fractions of a temperature in Celsius mean nothing."""

CLEAR_FRAC: Final = 0.005
"""Least drift or node offset that is worth a message."""


@cache
def resolution(metric: str) -> float:
    """Returns the step of a metric's sensor, 0 where it is fine: NVML and AMD SMI give whole degrees."""
    return float(METRICS[metric].unit == _DEGREES or metric == "excursion_count")


@dataclass(frozen=True, slots=True)
class Fitted:
    """The model of one metric, with the numbers of its trials and node sets."""

    scatter: Scatter
    means: Floats
    """Mean of each number's runs, as they were measured."""
    number: Mapping[tuple[str, bool], int]
    """Number of a trial by its id, and true for its long runs."""
    of_all: Indices
    """The same trials' numbers among all runs of the study."""
    node_sets: tuple[str, ...]
    num_zeros: int
    """Runs of the study if the metric was 0 in each of them, else 0."""
    num_host_bound: int
    """Trials that wait for their host so long that it widens what is known of the metric."""
    group: str
    """The metric's group in `wattune.schema`."""
    prior: Prior
    """Scatter that was expected before the study."""

    @property
    def logarithmic(self) -> bool:
        """True if effects and errors are on the logarithmic scale."""
        return self.scatter.typical is None

    @property
    def host_bound_spread_frac(self) -> float | None:
        """Pooled standard deviation of one run whose pace is its host's, as a fraction; None if no trial is so."""
        if not self.num_host_bound:
            return None
        expected = math.hypot(self.prior.spread, HOST_SPREAD[self.group])
        return expected * math.sqrt(self.scatter.widened.ratio)

    def reading_error(self, runs: Sequence[Run], metric: str) -> float:
        """Returns the standard deviation, on the model's scale, of reading a trial's runs as those of a large one."""
        error = max([run.reading_errors.get(metric, 0.0) for run in runs], default=0.0)
        return error / _mean(runs, metric) if error and self.logarithmic else error

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for `json.dumps`: what all trials of the study share."""
        found = self.scatter
        return {
            "spread_frac": found.spread_frac,
            "num_repeats": found.steady.num_repeats,
            "host_bound_spread_frac": self.host_bound_spread_frac,
            "host_bound_num_repeats": found.widened.num_repeats,
            "prior_spread_frac": self.prior.spread,
            "prior_degrees_of_freedom": self.prior.degrees_of_freedom,
            "drift": found.drift,
            "drift_error": found.drift_error,
            "node_sets": {
                name: {
                    "offset": float(found.node_offset[index]),
                    "error": float(found.node_offset_error[index]),
                    "tied": bool(found.tied[index]),
                }
                for index, name in enumerate(self.node_sets)
            },
        }


class NextRun(NamedTuple):
    """Distribution of what the next run of a trial measures: Student's t on the model's scale, at each place."""

    mean: float
    """Mean of the runs, as they were measured."""
    run_variance: float
    """Variance of a run about the trial's true mean."""
    degrees_of_freedom: float
    num_runs: int
    num_zeros: int
    """Runs that were 0 and none that was not: of the whole study, else of the trial alone, else 0."""
    zero_everywhere: bool
    """True if those are all runs of the study."""
    logarithmic: bool
    heat_variance: float
    """Variance of heat that the runs do not tell and no repeat of their length shows (`wattune.ranking.heat`), and that
    of reading a small trial as a large one."""
    elsewhere_variance: float
    """Variance that a run on another day or device of the kind has beyond one in the study."""
    scatter: Scatter
    """The model of its study."""
    number: int
    """Number of the trial in it."""

    @property
    def own_variance(self) -> float:
        """Variance of a run and of the mean of `num_runs`."""
        return self.run_variance * (1.0 + 1.0 / self.num_runs)


class Spreads:
    """Scatter of every metric of one study, computed at first use."""

    def __init__(self, results: AnyResults) -> None:
        """Keeps the runs of one study that completed, without bursts: a few steps scatter otherwise."""
        self._runs: list[Run] = []
        self._known: dict[tuple[str, bool], tuple[int, Fitted | None]] = {}
        self._numbers: dict[tuple[str, bool], int] = {}
        self._node_sets: dict[str, int] = {}
        self._trials: dict[str, int] = {}
        self._data = array("d")
        """Of each run number, node set, trial, start, share of waits (NaN where unknown), and 1 if it was measured."""
        self._own: dict[tuple[str, bool], Floats] = {}
        self._all = np.empty((0, 0))
        for run in sorted((run for _, run in results), key=lambda run: (run.trial_id, run.repeat)):  # however read
            self.add(run)

    def add(self, run: Run) -> None:
        """Adds a run that ended: models that are asked for again take it in, and nothing that came before it."""
        if run.status is not RunStatus.COMPLETED or is_burst(run):
            return
        self._runs.append(run)
        frac = run.metrics.get("host_bound_frac", math.nan)
        own = (
            self._numbers.setdefault((run.trial_id, is_soak(run)), len(self._numbers)),
            self._node_sets.setdefault(run.tags.get("nodes", ""), len(self._node_sets)),
            self._trials.setdefault(run.trial_id, len(self._trials)),
            run.start_wall_ns / NS_PER_S,
            frac if math.isfinite(frac) else math.nan,
            _is_measured(run),
        )
        self._data.extend(own)

    def fitted(self, metric: str, *, alone: bool = False) -> Fitted | None:
        """Returns the model of a metric, None if no run measured it; `alone` without what others tell of scatter."""
        seen, found = self._known.get((metric, alone), (0, None))
        if seen < len(self._runs):
            values = self._measured(metric, seen)
            if len(new := np.flatnonzero(~np.isnan(values))) or (found is not None and not alone):
                found = self._fitted(metric, new + seen, values[new], alone=alone)
            self._known[metric, alone] = len(self._runs), found
        return found

    def _beside(self, group: str, of_all: Indices) -> Floats:
        """Returns what another group's telling metric says of the scatter of some numbers, see `Runs.beside`."""
        other, beside = self.fitted(_BESIDE[group], alone=True), np.zeros((2, len(self._numbers)))
        if other is not None and other.logarithmic:
            beside[:, other.of_all] = other.scatter.squares / other.scatter.expected, other.scatter.free
        return np.asarray(beside[:, of_all])

    def figures(self, metric: str) -> Floats:
        """Returns the mean of each number's runs as `middle` has it: [trials], in the metric's unit."""
        fitted = self.fitted(metric)
        assert fitted is not None, "a metric that was measured"
        change, raw = fitted.scatter.mean - fitted.scatter.raw_mean, fitted.means
        factors = map(math.exp, np.minimum(change, MOST_LOG).tolist())  # bit for bit as `factor`
        return np.asarray(raw * np.array([*factors]) if fitted.logarithmic else raw + change)

    def _measured(self, metric: str, seen: int) -> Floats:
        """Returns what the runs from a place on measured of a metric; NaN where one did not."""
        if self._all.shape == (len(self._runs), len(METRICS)):
            return self._all[seen:, [*METRICS].index(metric)]
        return np.array([run.metrics.get(metric, math.nan) for run in self._runs[seen:]], np.float64)

    def _fitted(self, metric: str, places: Indices, new: Floats, *, alone: bool) -> Fitted:
        """Fits the model of a metric, with some runs more that measured it: figures by their places."""
        within = np.zeros(len(new))
        if (steps := _UNCERTAINTIES.get(metric)) and len(places):
            within = np.nan_to_num(self._measured(steps, int(places[0]))[places - places[0]]) / NORMAL_95
        added = np.stack([places.astype(np.float64), new, within])
        self._own[metric, alone] = np.concatenate([self._own.get((metric, alone), added[:, :0]), added], axis=1)
        runs, value, within = self._own[metric, alone]
        columns = np.array(self._data).reshape(-1, 6)[runs.astype(np.intp)].T
        number, node_set, trial, time_s, frac, measured = columns.copy()
        number, node_set, trial = number.astype(np.intp), node_set.astype(np.intp), trial.astype(np.intp)
        numbers: Mapping[tuple[str, bool], int] = self._numbers
        of_all = np.arange(len(numbers))
        if len(runs) < len(self._runs):  # numbers without a gap, by the first run of each
            keys, (old, first, which) = [*numbers], np.unique(number, return_index=True, return_inverse=True)
            order = np.argsort(first)
            number, of_all = np.argsort(order)[which], old[order]
            numbers = {keys[key]: place for place, key in enumerate(of_all.tolist())}
        names = [*self._node_sets]
        node_sets = tuple(sorted(names[each] for each in np.unique(node_set).tolist()))
        place = np.array([node_sets.index(name) if name in node_sets else -1 for name in names], np.intp)
        latest = self._runs[int(runs[time_s.argmax()])]
        if (time_s > 0).any():
            time_s[time_s <= 0] = time_s[time_s > 0].mean()  # a run at an unknown time has no part in the drift
        described = METRICS[metric]
        logarithmic = described.group in _LOGARITHMIC and float(value.min()) > 0.0
        expected = logarithmic and bool(measured.all())
        prior = _expected(latest, described.group) if expected else PRIOR
        telling = expected and described.group in _BESIDE and metric != _WITHOUT_HOST and not alone
        num_host_bound, wider = 0, np.zeros(len(value))
        if described.group in HOST_SPREAD and metric != _WITHOUT_HOST:
            # A run whose profiled pass failed waits for its host as the others of its trial do.
            known = ~np.isnan(frac)
            of_trial = np.bincount(trial, np.where(known, frac, 0.0)) / np.maximum(np.bincount(trial, known), 1.0)
            shares = np.clip((of_trial - HOST_BOUND_FRAC) / (_ALL_HOST_FRAC - HOST_BOUND_FRAC), 0.0, 1.0)
            wider, num_host_bound = HOST_SPREAD[described.group] * shares[trial], int((shares > 0).sum())
        typical = _TYPICAL_TEMPERATURE_C if described.unit == _DEGREES else float(np.abs(value).mean()) or 1.0
        found = fit(
            Runs(
                value=value,
                trial=number,
                node_set=place[node_set],
                time_s=time_s,
                within=within if logarithmic else within * np.abs(value),
                wider=wider if logarithmic else wider * np.abs(value),
                typical=None if logarithmic else typical,
                resolution=resolution(metric),
                beside=self._beside(described.group, of_all) if telling else None,
            ),
            prior,
        )
        num_zeros = 0 if value.any() else len(value)
        means = np.bincount(number, value) / np.bincount(number)
        return Fitted(found, means, numbers, of_all, node_sets, num_zeros, num_host_bound, described.group, prior)

    def placed(self, counted: Sequence[Run], metric: str) -> tuple[Fitted, int] | None:
        """Returns a metric's model and the trial's number in it, None if one of its repeats did not measure it."""
        soaks, is_measured = True, False
        for result in counted:  # one pass: a user waits for ten thousand trials
            if metric in result.metrics:
                soaks, is_measured = soaks and is_soak(result), True
            elif not is_unprofiled(result):
                return None
        fitted = self.fitted(metric)
        return None if fitted is None or not is_measured else (fitted, fitted.number[counted[0].trial_id, soaks])

    def middles(self, each: Sequence[Sequence[Run]]) -> Callable[[str], Floats]:
        """Returns what computes the middle of `interval` alone, of all repeats of many trials, for tables.

        It is NaN where `interval` is None. A run's figures lie together in memory, so they are read together.
        """
        self._all = np.array([[*map(run.metrics.get, METRICS)] for run in self._runs], np.float64)
        single = [(at, self._numbers[r.trial_id, is_soak(r)]) for at, rs in enumerate(each) if len(rs) == 1 for r in rs]
        alone, numbers = np.array(single, np.intp).reshape(-1, 2).T
        several = [(at, runs) for at, runs in enumerate(each) if len(runs) > 1]

        def middles(metric: str) -> Floats:
            found = np.full(len(each), math.nan)
            if (fitted := self.fitted(metric)) is not None:
                of_one = np.full(len(self._numbers), math.nan)
                of_one[fitted.of_all] = self.figures(metric)
                found[alone] = of_one[numbers]
                for at, runs in several:
                    if placed := self.placed(runs, metric):
                        found[at] = middle(*placed, measuring(runs, metric), metric)
            return found

        return middles

    def interval(self, counted: Sequence[Run], metric: str) -> Interval | None:
        """Computes a metric over completed repeats of one trial, None if one of them did not measure it.

        The middle is the mean of the runs, as it would be on the study's most used nodes at the middle of its time.
        Some of a trial's repeats alone have the interval of so many.
        """
        if (placed := self.placed(counted, metric)) is None:
            return None
        (fitted, number), counted = placed, measuring(counted, metric)
        runs, found, value = ordinary(counted), fitted.scatter, middle(fitted, number, counted, metric)
        error = float(found.standard_error[number])
        if len(runs) < found.num_runs[number]:
            error = math.sqrt(error**2 + float(found.variance[number]) / len(runs) - 1.0 / float(found.weight[number]))
        reach = t_quantile(float(found.degrees_of_freedom[number])) * error
        reach = math.hypot(reach, NORMAL_95 * fitted.reading_error(runs, metric))
        method = "repeats" if found.num_runs[number] > 1 else "pooled" if found.pool(number).num_repeats else "prior"
        ends = (value * factor(-reach), value * factor(reach)) if fitted.logarithmic else (value - reach, value + reach)
        return Interval(value=value, low=ends[0], high=ends[1], method=method, num_runs=len(runs))

    def next_runs(self, counted: Sequence[Run], metric: str) -> list[NextRun]:
        """Returns what the next run is likely to measure: an ordinary one, and a long one where there was one.

        Drift and the node set stay in: a bound is on what is measured, and the next run may be at any time. A
        temperature is the settled one: where runs were long enough for that, short ones do not count.
        """
        metric = judged_metric(metric, counted)
        if (placed := self.placed(counted, metric)) is None:
            return []
        (fitted, _), counted = placed, measuring(counted, metric)
        found, nexts = fitted.scatter, []
        for soak, runs in by_length(counted).items():
            number = fitted.number[counted[0].trial_id, soak]
            mean, (left_k, variance_k2) = _mean(runs, metric), heat_left(metric, runs)
            nexts.append(
                NextRun(
                    mean=math.log(mean) if fitted.logarithmic else mean + left_k,
                    run_variance=float(found.variance[number]),
                    degrees_of_freedom=float(found.degrees_of_freedom[number]),
                    num_runs=len(runs),
                    num_zeros=fitted.num_zeros or (0 if any(run.metrics[metric] for run in runs) else len(runs)),
                    zero_everywhere=fitted.num_zeros > 0,
                    logarithmic=fitted.logarithmic,
                    heat_variance=variance_k2 + fitted.reading_error(runs, metric) ** 2,
                    elsewhere_variance=2.0 * found.elsewhere**2,
                    scatter=found,
                    number=number,
                )
            )
        least = min((one.heat_variance for one in nexts), default=0.0)
        return [one for one in nexts if one.heat_variance == least]

    def scatter_text(self, metric: str) -> str:
        """Describes the scatter from run to run and what it rests on; empty if nothing was measured."""
        fitted = self.fitted(metric)
        if fitted is None:
            return ""
        found, texts = fitted.scatter, []
        other = _BESIDE.get(fitted.group) if fitted.prior is not PRIOR and metric != _WITHOUT_HOST else None
        also = f", their {other} too," if other is not None and self.fitted(other, alone=True) else ""
        if not found.is_widened.all():
            size = f"{100 * found.spread_frac:.2g} %"
            if found.typical is not None:
                size = format_quantity(metric, found.spread_frac * found.typical)
            learned = fitted.prior not in (PRIOR, PRIORS.get(fitted.group))
            expected = f"{'earlier studies' if learned else 'a prior'} of {100 * fitted.prior.spread:.2g} %"
            texts.append(_scatter_text(size, fitted.prior, expected, found.steady.num_repeats, also))
        if (frac := fitted.host_bound_spread_frac) is not None:
            expected = f"a prior of {100 * HOST_SPREAD[fitted.group]:g} %"
            text = _scatter_text(f"{100 * frac:.2g} %", fitted.prior, expected, found.widened.num_repeats, also)
            texts.append(f"where devices wait for their host {text}")
        return f"run-to-run scatter: {'; '.join(texts)}"

    def corrections(self, metric: str) -> list[str]:
        """Describes hosts that widen a metric, drift and node offsets taken out of it, and node sets not tied."""
        fitted = self.fitted(metric)
        if fitted is None or not len(fitted.node_sets):
            return []
        found, lines = fitted.scatter, []
        if fitted.num_host_bound:
            lines.append(
                f"{fitted.num_host_bound} trial(s) wait for their host (host_bound) and run at its pace: repeats or "
                f"larger micro-batches decide; {_WITHOUT_HOST} leaves it out"
            )

        def size(value: float) -> str:
            return f"{100 * value:+.1f} %" if fitted.logarithmic else format_quantity(metric, value)

        least = CLEAR_FRAC * (found.typical or 1.0)
        if abs(found.drift) > max(least, 2.0 * found.drift_error):
            lines.append(
                f"{metric} drifted by {size(found.drift)} ± {size(2 * found.drift_error).lstrip('+')} over the study: "
                "removed from the objective, not from the bounds"
            )
        base = int(np.flatnonzero((found.node_offset == 0.0) & (found.node_offset_error == 0.0))[0])
        main = fitted.node_sets[base] or "unnamed nodes"
        for index, name in enumerate(fitted.node_sets):
            offset, error = float(found.node_offset[index]), float(found.node_offset_error[index])
            shown = name or "unnamed nodes"
            if not found.tied[index]:
                lines.append(
                    f"{shown}: not tied to {main}, no trial ran on both. {metric} there is compared with the prior's "
                    f"width for nodes, ± {size(2 * error).lstrip('+')}; run the reference trial on both"
                )
            elif index != base and abs(offset) > max(least, 2.0 * error):
                lines.append(
                    f"{shown}: {metric} is {size(offset)} ± {size(2 * error).lstrip('+')} of that on {main}, by the "
                    "trials that ran on both: removed from the objective, not from the bounds"
                )
        return lines


def learned_scatter(studies: Iterable[Results]) -> Numbers:
    """Learns from studies how runs with measured sensors scatter, as the numbers that the runs of a next study carry.

    So a study's answer rests on what was known when it ran: a storage that grows, or a copy elsewhere, changes none.
    """
    each = [Spreads([(spec, run) for spec, run in one if _is_measured(run)]) for one in studies]
    found: dict[str, float] = {}
    for group, metric in _TELLING.items():
        fits = [own.scatter for one in each if (own := one.fitted(metric, alone=True)) and own.logarithmic]
        if any(one.free.any() for one in fits):
            prior = learned(PRIORS[group], fits)
            found |= {f"{group}_spread_frac": prior.spread, f"{group}_similar_degrees": prior.similar_degrees}
    return replace(NO_NUMBERS, **found)  # type: ignore[arg-type]  # these are fractions and degrees of freedom


def _expected(last: Run, group: str) -> Prior:
    """Returns what was expected of scatter when the last run began: by the storage's other studies, else as shipped."""
    shipped, known = PRIORS.get(group, PRIOR), last.numbers.known
    spread, alike = known.get(f"{group}_spread_frac"), known.get(f"{group}_similar_degrees")
    if spread is None or alike is None or not (1e-6 < spread < 1.0 < alike < math.inf):
        return shipped  # a file may be edited
    return replace(shipped, spread=spread, similar_degrees=alike)


def _is_measured(run: Run) -> bool:
    return run.tags.get("simulated") == "false"


def _scatter_text(size: str, prior: Prior, expected: str, num_repeats: int, also: str) -> str:
    """Describes the scatter of runs of one kind and what it rests on."""
    rests = f"{expected}, {prior.degrees_of_freedom:g} degrees of freedom"
    told = (
        f"pooled from {num_repeats} repeats{also} and {rests}" if num_repeats else f"by {rests}; nothing was repeated"
    )
    return f"{size} {told}"


def middle(fitted: Fitted, number: int, counted: Sequence[Run], metric: str) -> float:
    """Computes the mean of a trial's ordinary runs, as on the most used nodes at the middle of the study's time."""
    change = float(fitted.scatter.mean[number] - fitted.scatter.raw_mean[number])
    value = _mean(ordinary(counted), metric)
    return value * factor(change) if fitted.logarithmic else value + change


def _mean(runs: Sequence[Run], metric: str) -> float:
    return math.fsum(run.metrics[metric] for run in runs) / len(runs)
