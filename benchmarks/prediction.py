#!/usr/bin/env python3
"""Prints the accuracy of estimates against measured trials and published steps, with baselines beside it, and speed.

    python benchmarks/prediction.py                   # all of it; writes nothing
    python benchmarks/prediction.py --only published  # or: own, speed
    python benchmarks/prediction.py --trials FILE     # every trial, predicted and measured

The whole chain is judged, as a user asks for it: published steps by `wattune.estimate`, own trials by coefficients
fitted as `wattune fit` does to others, speed by what `wattune plan --estimate` calls. Nothing that was measured of a
trial goes into its estimate. Own trials are left out in folds of configurations, then whole families (a model and
engine on a number of devices), then all on two devices; those on H100 and on filled H200 are told by what ships.
"""

import resource
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from harness import Found, Rows, benchmark
from measured_tables import DATA, fitted_to, held_trials, ordered, trials, trials_of
from published_steps import at_rate, calculon_s, errors, model_flop, read

import wattune
from wattune.cost.defaults import default_coefficients
from wattune.cost.estimate import Estimates, estimate
from wattune.cost.tables import EstimatedMetric
from wattune.fitting.device import MeasuredTrial
from wattune.objective import parse_objective
from wattune.search.forecast import forecast
from wattune.search.prune import prune
from wattune.search.space import parse_space
from wattune.search.strategies.features import make_features
from wattune.search.strategies.surrogate import Surrogate
from wattune.trial import TrialSpec

FOLDS: Final = 5
BARS: Final = {
    "step_time_s": (0.05, 0.20, 0.12),
    "node_device_power_peak_1s_w": (0.03, 0.10, 0.06),
    "memory_peak_bytes": (0.01, 0.03, 0.03),
    "device_power_mean_w": (0.03, 0.10, None),
    "energy_per_token_j": (0.06, None, None),
}
"""Bars of the median error, of its 95th percentile, and of the median half width of the interval."""
TOLD, DRAWS = 4, 20
"""Plans of a family that a search is told, drawn so many times."""
TOLD_BARS: Final = {"step_time_s": 0.08, "node_device_power_peak_1s_w": 0.05, "memory_peak_bytes": 0.02}
"""Bars of the median half width of the next run then."""
PUBLISHED_BARS: Final = (0.08, 0.20)
"""Bars of the median error of published steps, and of its 90th percentile."""
GROUP_BAR: Final = 0.20
"""Bar of the median of each source, precision, device and kind."""
INSIDE: Final = (0.92, 0.97)
"""Share of measurements that intervals should hold."""
LEAST_SPEED: Final = 20_000
"""Candidates a CPU second, enumerated and estimated."""
NUM_NODES: Final = 16
"""Of the cluster whose plans are estimated for it."""
COLUMNS: Final = (
    "what", "figure", "by", "num_cases", "median_frac", "p90_frac", "p95_frac", "worst_frac", "inside_frac",
    "half_width_frac",
)  # fmt: skip
MEAN: Final = "device_power_mean_w"
BASELINES: Final = {
    "step_time_s": ("constant MFU", "Calculon's equations"),
    MEAN: ("constant share of the limit",),
}
ON_H100: Final = "*_h100x*.parquet"
PARTS: Final = ("published", "own", "speed")
ENDS: Final = {"": "value", " low": "low", " high": "high"}
"""Endings of a metric's name in `Predicted`, by the estimate's field."""
Predicted = dict[str, float]
"""Figures of one trial: predicted metrics, `<metric> low` and `<metric> high`, and baselines of the step time."""


def left_out(
    measured: Sequence[MeasuredTrial], every: Sequence[MeasuredTrial], group: Callable[[TrialSpec], object]
) -> list[Predicted]:
    """Predicts every trial with coefficients fitted to those of other groups; adds baselines."""
    groups = [group(spec) for spec, _ in measured]
    predicted: list[Predicted] = [{} for _ in measured]
    for own in dict.fromkeys(groups):
        rest = [one for one in every if group(one[0]) != own]
        places = [place for place, name in enumerate(groups) if name == own]
        for place, one in zip(places, predictions(rest, [measured[place][0] for place in places]), strict=True):
            predicted[place] = one
    return predicted


def predictions(rest: Sequence[MeasuredTrial], specs: Sequence[TrialSpec]) -> list[Predicted]:
    """Predicts specifications with coefficients fitted to `rest`, which has none of them."""
    fitted = fitted_to(rest, ["benchmarks/data"])
    found = estimate(specs, lambda _device: fitted)
    rate = np.median(
        [model_flop(spec) / spec.cluster.world_size / result.metrics["step_time_s"] for spec, result in rest]
    )
    mean_w = float(np.mean([run.metrics[MEAN] for _, run in rest if MEAN in run.metrics]))
    return [
        {
            **figures,
            "constant MFU": at_rate(spec, float(rate)),
            "Calculon's equations": calculon_s(spec),
            "constant share of the limit": mean_w,
        }
        for spec, figures in zip(specs, _figures(found, len(specs)), strict=True)
    ]


def family_of(spec: TrialSpec) -> tuple[str, int, str, int]:
    """Returns a model, its layers, its engine and a number of devices."""
    return spec.model.name, spec.model.num_layers, spec.engine, spec.cluster.world_size


def shipped(specs: Sequence[TrialSpec]) -> list[Predicted]:
    """Predicts specifications as `wattune plan --estimate` does without a fit."""
    return _figures(estimate(specs, default_coefficients), len(specs))


def _figures(found: Estimates, size: int) -> list[Predicted]:
    columns = {name: found.columns[name] for name in BARS}
    return [
        {f"{name}{end}": float(getattr(one, of)[at]) for name, one in columns.items() for end, of in ENDS.items()}
        for at in range(size)
    ]


def waits(guess: Predicted) -> bool:
    """Tells whether a slower host would make a step longer: its interval is then wider above."""
    value, low, high = (guess[f"step_time_s{end}"] for end in ENDS)
    return high - value > 1.01 * (value - low)


def add(rows: Rows, what: str, figure: str, by: str, size: np.ndarray, *interval: float) -> tuple[float, ...]:
    """Adds a row of absolute errors; returns their median, 90th and 95th percentile."""
    found = tuple(float(one) for one in np.quantile(size, (0.5, 0.9, 0.95)))
    inside, half = interval or (None, None)
    rows.add(what, figure, by, len(size), *found, float(size.max()), inside, half)
    return found


def judge(
    rows: Rows, group: str, measured: Sequence[MeasuredTrial], predicted: Sequence[Predicted], *, by_class: bool = False
) -> list[str]:
    """Adds the errors of a group by metric, with baselines of the step time; returns what is beyond its bar."""
    missed = []
    for metric, (median_bar, tail_bar, half_bar) in BARS.items():
        chosen = [place for place, (_, result) in enumerate(measured) if metric in result.metrics]
        actual = np.array([measured[place][1].metrics[metric] for place in chosen])
        value, low, high = (np.array([predicted[place][f"{metric}{end}"] for place in chosen]) for end in ENDS)
        waiting = np.array([waits(predicted[place]) for place in chosen])
        parts = {"": np.full(len(chosen), True)}
        parts |= {", waits for its host": waiting, ", bound by its device": ~waiting} if by_class else {}
        for name, of in parts.items():
            if not of.any():
                continue
            inside = float(np.mean((low <= actual)[of] & (actual <= high)[of]))
            half = float(np.median(((high - low) / 2 / value)[of]))
            middle, _, tail = add(rows, group + name, metric, "wattune", np.abs(value / actual - 1)[of], inside, half)
            wide = half_bar is not None and (half > half_bar or inside > INSIDE[1])
            if middle > median_bar or (tail_bar and tail > tail_bar) or inside < INSIDE[0] or wide:
                missed.append(f"{group}{name}: {metric} {middle:.1%}, {tail:.1%}, {inside:.0%} in ±{half:.0%}")
        for by in (one for one in BASELINES.get(metric, ()) if one in predicted[0]):
            add(rows, group, metric, by, np.abs(np.array([predicted[place][by] for place in chosen]) / actual - 1))
    return missed


def told_few(rows: Rows, measured: Sequence[MeasuredTrial], predicted: Sequence[Predicted]) -> list[str]:
    """Adds the next runs of a family's plans once a search's surrogate was told `TOLD` of them, by estimates before."""
    names, missed = [family_of(spec) for spec, _ in measured], []
    for metric, bar in TOLD_BARS.items():
        size, inside, half = list[float](), list[bool](), list[float]()
        for family in dict.fromkeys(names):
            of = {spec.trial_id: at for at, (spec, _) in enumerate(measured) if names[at] == family}
            places = [at for at in of.values() if metric in measured[at][1].metrics]
            if len(places) < TOLD + 2:
                continue
            value, low, high = (np.array([predicted[at][f"{metric}{end}"] for at in places]) for end in ENDS)
            actual = np.array([measured[at][1].metrics[metric] for at in places])
            features = make_features([measured[at][0] for at in places])
            for seed in range(DRAWS):
                known = np.random.default_rng(seed).permutation(len(places))[:TOLD].tolist()
                log_std = EstimatedMetric(value=value, low=low, high=high).log_std
                model = Surrogate(features, value, log_std, is_exact=metric == "memory_peak_bytes")
                for at in known:
                    model.tell(at, actual[at])
                model.update()
                found = model.believe(model.process(np.zeros(0, np.intp)), slice(None))
                rest = np.setdiff1d(np.arange(len(places)), known)
                size += np.abs(found.value / actual - 1)[rest].tolist()
                inside += ((found.low <= actual) & (actual <= found.high))[rest].tolist()
                half += ((found.high - found.low) / 2 / found.value)[rest].tolist()
        middle = float(np.median(half))
        add(rows, f"{TOLD} plans of a family told", metric, "wattune", np.array(size), float(np.mean(inside)), middle)
        missed += [f"{TOLD} plans told: {metric} in ±{middle:.1%}"] if middle > bar else []
    return missed


def published(rows: Rows) -> tuple[list[str], list[str]]:
    """Adds errors of published steps by group and of all; returns notes, and what is beyond its bar."""
    steps, reasons = read()
    groups = errors(steps)
    missed, every = [], np.array([one for each in groups.values() for one in each])
    for key, each in {("all",): every, **groups}.items():
        both = np.abs(np.array(each))
        name = f"published, {' '.join(key)}"
        middle, tail, _ = add(rows, name, "step_time_s", "wattune", both[:, 0])
        if np.isfinite(both[:, 1]).any():
            add(rows, name, "step_time_s", "constant MFU", both[:, 1][np.isfinite(both[:, 1])])
        bars = PUBLISHED_BARS if key == ("all",) else (GROUP_BAR, np.inf)
        if middle > bars[0] or tail > bars[1]:
            missed.append(f"{name}: {middle:.1%}, {tail:.1%}")
    left_out = [f"{count} left out: {reason}" for reason, count in sorted(reasons.items(), key=lambda one: -one[1])]
    return [f"{len(steps)} of {len(steps) + sum(reasons.values())} published rows.", *left_out], missed


def in_order(measured: Sequence[MeasuredTrial], predicted: Sequence[Predicted]) -> str:
    """Says how many pairs that differ by more than 5 %, of one model and engine, are predicted in order."""
    counts = {
        by: ordered(measured, [one[by] for one in predicted]) for by in ("step_time_s", *BASELINES["step_time_s"])
    }
    return "Pairs in order: " + ", ".join(f"{by} {right} of {total}" for by, (right, total) in counts.items()) + "."


def speed() -> tuple[str, list[str]]:
    """Says candidates a second on one core, from a space to sorted estimates, memory, and the time of one estimate."""
    degrees = [1, 2, 4, 8, 16]
    space = parse_space(
        {
            "study": "speed",
            "model": [{"name": "mixtral_8x7b"}, {"name": "llama3_70b"}],
            "cluster": {"device": "h200_sxm", "num_nodes": NUM_NODES, "devices_per_node": 8},
            "engine": ["torch", "megatron", "deepspeed"],
            "workload": {"seq_len": 4096, "global_batch_size": 512},
            "space": {
                **dict.fromkeys(("tp", "pp", "ep"), degrees),
                "vpp": [1, 2, 4, 8],
                "micro_batch_size": [1, 2, 4, 8, 16, 32, 64, 128],
                "sharding": ["none", "zero1", "zero2", "zero3"],
                "recompute": ["none", "selective", "full"],
                "overlap": ["none", "grad", "grad_param"],
            },
            "objective": "maximize tokens_per_s",
        }
    )
    begun_s = time.process_time()
    candidates = prune(space)
    enumerated_s = time.process_time() - begun_s
    found = forecast(candidates, parse_objective("maximize tokens_per_s"), [], default_coefficients)
    total_s = time.process_time() - begun_s
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    number, asked = space.num_combinations, {"model": "llama3_70b", "cluster": "4x8 h200_sxm", "engine": "megatron"}
    begun_s = time.process_time()
    for tp in (1, 2, 4, 8) * 5:
        wattune.estimate(**asked, tp=tp, pp=2)
    one_s = (time.process_time() - begun_s) / 20
    each_s = number / total_s
    text = (
        f"{number:,} candidates, {len(candidates.kept):,} kept by the rules, {len(found.kept):,} fit: "
        f"{each_s:,.0f} a CPU-s (rules alone {number / enumerated_s:,.0f}, estimates "
        f"{len(candidates.kept) / (total_s - enumerated_s):,.0f} kept ones), peak {peak_bytes / 1e9:.2f} GB. "
        f"One call of wattune.estimate: {1e3 * one_s:.1f} ms."
    )
    slow = [] if each_s >= LEAST_SPEED else [f"{each_s:,.0f} candidates a CPU-s"]
    return text, slow + ([] if one_s <= 0.05 else [f"one estimate {1e3 * one_s:.0f} ms"])


def write(path: Path, groups: dict[str, tuple[Sequence[MeasuredTrial], Sequence[Predicted]]]) -> None:
    """Writes every trial of the groups: figures measured and predicted."""
    names = {name: name.replace("_bytes", "_gb") for name in BARS}
    figures = [f"{kind}_{name}" for name in names.values() for kind in ("measured", "predicted")]
    rows = Rows("trials", "trial", "model", "engine", "plan", *figures)
    for group, (measured, predicted) in groups.items():
        for (spec, result), guess in zip(measured, predicted, strict=True):
            scales = {name: 1e-9 if name == "memory_peak_bytes" else 1.0 for name in names}
            pairs = [(result.metrics.get(name, float("nan")) * by, guess[name] * by) for name, by in scales.items()]
            known = (group, spec.trial_id, spec.model.name, spec.engine, spec.label)
            rows.add(*known, *(float(value) for pair in pairs for value in pair))
    rows.write(path)


def _options(parser: ArgumentParser) -> None:
    parser.add_argument("--only", action="append", choices=PARTS, help="one part; may be repeated")
    parser.add_argument("--trials", type=Path, help="CSV file for every trial, predicted and measured")


@benchmark(
    claim="Step time, memory, power and energy of a trial are known before it runs.",
    bar="; ".join(
        f"{name} {middle:.0%}" + (f" (95th percentile {tail:.0%})" if tail else "")
        for name, (middle, tail, _) in BARS.items()
    )
    + f"; published steps {PUBLISHED_BARS[0]:.0%} (90th percentile {PUBLISHED_BARS[1]:.0%}); "
    f"{LEAST_SPEED:,} candidates a CPU-s",
    options=_options,
)
def main(given: Namespace) -> Found:
    """Published steps, own trials, speed."""
    rows, notes, missed = Rows(*COLUMNS), [], []
    wanted = given.only or PARTS
    if "published" in wanted:
        said, beyond = published(rows)
        notes, missed = notes + said, missed + beyond
    if "own" in wanted:
        said, beyond = own(rows, given)
        notes, missed = notes + said, missed + beyond
    if "speed" in wanted:
        text, slow = speed()
        notes, missed = [*notes, text], missed + slow
    return Found(rows, notes, missed)


def own(rows: Rows, given: Namespace) -> tuple[list[str], list[str]]:
    """Leaves configurations out, then families, then all trials on two devices; H100 by what ships."""
    every, measured = trials(), trials(full_before=False)
    folds = {name: at % FOLDS for at, name in enumerate(sorted({spec.trial_id for spec, _ in measured}))}
    predicted = left_out(measured, every, lambda spec: folds.get(spec.trial_id))
    judge(rows, "held out", measured, predicted)
    apart_from = left_out(measured, every, family_of)
    missed = judge(rows, "families left out", measured, apart_from, by_class=True)
    missed += told_few(rows, measured, apart_from)
    two = trials("*_h200x2*.parquet")
    ids = {spec.trial_id for spec, _ in two}
    told = predictions([one for one in every if one[0].trial_id not in ids], [spec for spec, _ in two])
    judge(rows, "four to two", two, told)
    later = trials_of(DATA / "nodes" / "h200x4" / "slice.parquet")
    judge(rows, "a later slice on four", later, shipped([spec for spec, _ in later]), by_class=True)
    other, with_full, full = trials(ON_H100, full_before=False), trials(ON_H100), held_trials()
    missed += judge(rows, "H100 without a fit", other, shipped([spec for spec, _ in other]), by_class=True)
    judge(rows, "H100, outdated rows that fill it too", with_full, shipped([spec for spec, _ in with_full]))
    judge(rows, "filled H200", full, shipped([spec for spec, _ in full]))
    calm = [one for one in full if one[1].metrics["memory_retries_per_step_count"] == 0]
    judge(rows, "filled H200, no memory given back", calm, shipped([spec for spec, _ in calm]))
    if given.trials is not None:
        write(given.trials, {"held_out": (measured, predicted), "four_to_two": (two, told)})
    text = f"{len(measured)} trials of {len(folds)} configurations; {len(other)} on H100."
    return [text, in_order(measured, predicted)], missed


if __name__ == "__main__":
    main()
