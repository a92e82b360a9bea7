#!/usr/bin/env python3
"""Prints the accuracy of `wattune plan --estimate` against measured trials, with baselines beside it, and its speed.

    python benchmarks/prediction.py               # measured trials and speed; writes nothing
    python benchmarks/prediction.py --trials FILE # every trial, predicted and measured; --svg FILE draws them

The whole chain is judged: coefficients are fitted as `wattune fit` does to all other configurations, and nothing that
was measured of a trial goes into its estimate. Repeats of a configuration are left out together. First all trials, in
folds. Then those on two devices by coefficients fitted to four devices alone: another day, other devices, other models.
"""

import resource
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from harness import Found, Rows, benchmark
from measured_tables import fitted_to, ordered, trials
from step_time_baselines import at_rate, calculon_s, model_flop, roofline_s

from wattune.cost.defaults import default_coefficients
from wattune.cost.estimate import estimate
from wattune.fitting.device import MeasuredTrial
from wattune.objective import parse_objective
from wattune.search.forecast import forecast
from wattune.search.prune import prune
from wattune.search.space import parse_space
from wattune.trial import TrialSpec

HERE: Final = Path(__file__).parent
FOLDS: Final = 5
BARS: Final = {
    "step_time_s": (0.05, 0.12),
    "memory_peak_bytes": (0.02, 0.05),
    "device_power_mean_w": (0.05, None),
    "node_device_power_peak_1s_w": (0.05, None),
    "energy_per_token_j": (0.06, None),
}
"""Bars of the median error, and of the 90th percentile (of memory: the worst)."""
BASELINES: Final = ("constant MFU", "datasheet roofline", "Calculon's equations")
OTHERS: Final = "*_h200x2*.parquet"
"""Tables of trials on two devices."""
Predicted = dict[str, float]
"""Figures of one trial: predicted metrics, `<metric> low` and `<metric> high`, and baselines of the step time."""


def held_out(measured: Sequence[MeasuredTrial]) -> list[Predicted]:
    """Predicts every trial with coefficients fitted without its configuration; adds baselines of the step time."""
    names = sorted({spec.trial_id for spec, _ in measured})
    fold_of = {name: place % FOLDS for place, name in enumerate(names)}
    predicted: list[Predicted] = [{} for _ in measured]
    for fold in range(FOLDS):
        rest = [one for one in measured if fold_of[one[0].trial_id] != fold]
        places = [place for place, (spec, _) in enumerate(measured) if fold_of[spec.trial_id] == fold]
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
    return [
        {
            **{name: float(found.columns[name].value[number]) for name in BARS},
            **{f"{name} low": float(found.columns[name].low[number]) for name in BARS},
            **{f"{name} high": float(found.columns[name].high[number]) for name in BARS},
            "constant MFU": at_rate(spec, float(rate)),
            "datasheet roofline": roofline_s(spec),
            "Calculon's equations": calculon_s(spec),
        }
        for number, spec in enumerate(specs)
    ]


def apart(measured: Sequence[MeasuredTrial]) -> tuple[list[MeasuredTrial], list[MeasuredTrial]]:
    """Returns the trials on four devices, and those on two: another day, other devices."""
    others = trials(OTHERS)
    ids = {spec.trial_id for spec, _ in others}
    return [one for one in measured if one[0].trial_id not in ids], others


def judge(rows: Rows, group: str, measured: Sequence[MeasuredTrial], predicted: Sequence[Predicted]) -> list[str]:
    """Adds the errors of a group by metric, with baselines of the step time; returns what is beyond its bar."""
    missed = []
    for metric, (median_bar, tail_bar) in BARS.items():
        chosen = [place for place, (_, result) in enumerate(measured) if metric in result.metrics]
        actual = np.array([measured[place][1].metrics[metric] for place in chosen])
        low, high = (np.array([predicted[place][f"{metric} {end}"] for place in chosen]) for end in ("low", "high"))
        inside = float(np.mean((low <= actual) & (actual <= high)))
        for by in (metric, *(BASELINES if metric == "step_time_s" else ())):
            size = np.abs(np.array([predicted[place][by] for place in chosen]) / actual - 1)
            middle, tail, worst = (float(one) for one in (np.median(size), np.quantile(size, 0.9), size.max()))
            is_ours = by == metric
            rows.add(group, metric, "wattune" if is_ours else by, middle, tail, worst, inside if is_ours else None)
            beyond = tail_bar and (worst if metric == "memory_peak_bytes" else tail) > tail_bar
            if is_ours and (middle > median_bar or beyond):
                missed.append(f"{group}: {metric} {middle:.1%}, {tail:.1%}, {worst:.1%}")
    return missed


def in_order(measured: Sequence[MeasuredTrial], predicted: Sequence[Predicted]) -> str:
    """Says how many pairs that differ by more than 5 %, of one model and engine, are predicted in order."""
    counts = {by: ordered(measured, [one[by] for one in predicted]) for by in ("step_time_s", *BASELINES)}
    return "Pairs in order: " + ", ".join(f"{by} {right} of {total}" for by, (right, total) in counts.items()) + "."


def speed(num_nodes: int) -> str:
    """Says candidates a second on one core, from a space to sorted estimates, and the memory that it took."""
    degrees = [1, 2, 4, 8, 16]
    space = parse_space(
        {
            "study": "speed",
            "model": [{"name": "mixtral_8x7b"}, {"name": "llama3_70b"}],
            "cluster": {"device": "h200_sxm", "num_nodes": num_nodes, "devices_per_node": 8},
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
    number = space.num_combinations
    return (
        f"{number:,} candidates, {len(candidates.kept):,} kept by the rules, {len(found.kept):,} fit: "
        f"{number / total_s:,.0f} a second on one core (rules alone {number / enumerated_s:,.0f}, estimates "
        f"{len(candidates.kept) / (total_s - enumerated_s):,.0f} kept ones a second), peak {peak_bytes / 1e9:.2f} GB."
    )


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


SHOWN: Final = {
    "step_time_s": ("step time, s", 1.0),
    "memory_peak_bytes": ("peak memory, GB", 1e-9),
    "device_power_mean_w": ("mean power of a device, W", 1.0),
    "node_device_power_peak_1s_w": ("1 s peak of a node, W", 1.0),
}
COLORS: Final = {"torch": "#4c78a8", "megatron": "#f58518", "deepspeed": "#54a24b"}
SIDE: Final = 300
"""Pixels of a panel."""


def draw(path: Path, measured: Sequence[MeasuredTrial], predicted: Sequence[Predicted]) -> None:
    """Draws predicted against measured figures, one panel a metric, both axes alike."""
    panels = [panel(number, measured, predicted, metric) for number, metric in enumerate(SHOWN)]
    legend = "".join(
        f'<circle cx="{30 + 110 * place}" cy="14" r="4" fill="{color}"/>'
        f'<text x="{40 + 110 * place}" y="18">{engine}</text>'
        for place, (engine, color) in enumerate(COLORS.items())
    )
    size = f'width="{2 * SIDE + 40}" height="{2 * SIDE + 60}"'
    style = '<style>text{font:12px sans-serif;fill:#444}</style><rect width="100%" height="100%" fill="white"/>'
    content = "\n".join([style, legend, *panels])
    path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{content}\n</svg>\n')


def panel(number: int, measured: Sequence[MeasuredTrial], predicted: Sequence[Predicted], metric: str) -> str:
    """Draws one panel: points, the line of no error, and the ends of the axes."""
    title, scale = SHOWN[metric]
    chosen = [place for place, (_, result) in enumerate(measured) if metric in result.metrics]
    actual = np.array([measured[place][1].metrics[metric] for place in chosen]) * scale
    guess = np.array([predicted[place][metric] for place in chosen]) * scale
    low, high = 0.0, 1.05 * max(actual.max(), guess.max())
    left, top, side = 60 + number % 2 * (SIDE + 10), 50 + number // 2 * (SIDE + 10), SIDE - 80

    def at(value: float) -> float:
        return side * (value - low) / (high - low)

    points = "".join(
        f'<circle cx="{left + at(x):.1f}" cy="{top + side - at(y):.1f}" r="3" fill-opacity="0.7" '
        f'fill="{COLORS[measured[place][0].engine]}"/>'
        for place, x, y in zip(chosen, actual, guess, strict=True)
    )
    return (
        f'<rect x="{left}" y="{top}" width="{side}" height="{side}" fill="none" stroke="#999"/>'
        f'<line x1="{left}" y1="{top + side}" x2="{left + side}" y2="{top}" stroke="#999" stroke-dasharray="4"/>'
        f'<text x="{left}" y="{top - 6}">{title}</text><text x="{left}" y="{top + side + 16}">0</text>'
        f'<text x="{left + side}" y="{top + side + 16}" text-anchor="end">measured {high:.4g}</text>'
        f'<text x="{left - 6}" y="{top + 10}" text-anchor="end">{high:.3g}</text>{points}'
    )


def _options(parser: ArgumentParser) -> None:
    parser.add_argument("--trials", type=Path, help="CSV file for every trial, predicted and measured")
    parser.add_argument("--svg", type=Path, help="draw predicted against measured")
    parser.add_argument("--num-nodes", type=int, default=16, help="of the cluster whose plans are estimated for speed")


@benchmark(
    claim="Step time, memory, power and energy of a trial are known before it runs.",
    bar="; ".join(f"{name} {middle:.0%}" + (f" ({tail:.0%})" if tail else "") for name, (middle, tail) in BARS.items())
    + " in the median (90th percentile; of memory the worst)",
    options=_options,
)
def main(given: Namespace) -> Found:
    """Leaves configurations out, then all trials on two devices."""
    rows = Rows("trials", "metric", "by", "median_frac", "p90_frac", "worst_frac", "inside_frac")
    measured = trials()
    predicted = held_out(measured)
    first, fresh = apart(measured)
    foreseen = predictions(first, [spec for spec, _ in fresh])
    missed = judge(rows, "held out", measured, predicted)
    judge(rows, "four to two", fresh, foreseen)
    if given.trials is not None:
        write(given.trials, {"held_out": (measured, predicted), "four_to_two": (fresh, foreseen)})
    if given.svg is not None:
        draw(given.svg, measured, predicted)
    configurations = len({spec.trial_id for spec, _ in measured})
    said = f"{len(measured)} trials of {configurations} configurations; {len(fresh)} on two devices."
    notes = [said, in_order(measured, predicted), in_order(fresh, foreseen), speed(given.num_nodes)]
    return Found(rows, notes, missed)


if __name__ == "__main__":
    main()
