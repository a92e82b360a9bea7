#!/usr/bin/env python3
"""Prints the accuracy of `wattune plan --estimate` against measured trials, with baselines beside it, and its speed.

    python benchmarks/prediction.py               # measured trials and speed; writes nothing
    python benchmarks/prediction.py --csv FILE    # every trial, predicted and measured; --svg FILE draws them
    python benchmarks/prediction.py --parts       # then the parts: memory, step time (published steps too), power
    python benchmarks/prediction.py --links FILE  # then step times with a measured table of links, and without

The whole chain is judged: coefficients are fitted as `wattune fit` does to all other configurations, and nothing that
was measured of a trial goes into its estimate. Repeats of a configuration are left out together. First all trials, in
folds. Then those on two devices by coefficients fitted to four devices alone: another day, other devices, other models.
"""

import argparse
import csv
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow.parquet as pq
from measured_tables import ordered, trials
from step_time_baselines import at_rate, calculon_s, model_flop, roofline_s

from wattune.catalog.hardware import DEVICES, DeviceSpec
from wattune.cost.coefficients import PUBLISHED_STEP_TIME
from wattune.cost.defaults import default_coefficients
from wattune.cost.estimate import Coefficients, estimate
from wattune.fitting.device import MeasuredTrial, add_sweep, fit_device
from wattune.fitting.links import SweepFit, fit_sweep
from wattune.fitting.power import H200_PRIOR
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
OTHERS: Final = "*_h200x2*.parquet"
"""Tables of trials on two devices."""
Predicted = dict[str, float]
"""Figures of one trial: predicted metrics, `<metric> low` and `<metric> high`, and baselines of the step time."""
LINKS: Final = {
    "no table": "as above",
    "added": "added to the fit (`wattune fit --links FILE`)",
    "first": "the fit begins with it (`wattune fit STUDY --links FILE`)",
}
"""Ways to use a table of links."""
PARTS: Final = ("predict_memory.py", "predict_step_time.py", "predict_power.py")


def held_out(
    measured: Sequence[MeasuredTrial], sweep: SweepFit | None = None, way: str = "no table"
) -> list[Predicted]:
    """Predicts every trial with coefficients fitted without its configuration; adds baselines of the step time."""
    names = sorted({spec.trial_id for spec, _ in measured})
    fold_of = {name: place % FOLDS for place, name in enumerate(names)}
    predicted: list[Predicted] = [{} for _ in measured]
    for fold in range(FOLDS):
        rest = [one for one in measured if fold_of[one[0].trial_id] != fold]
        places = [place for place, (spec, _) in enumerate(measured) if fold_of[spec.trial_id] == fold]
        found = predictions(rest, [measured[place][0] for place in places], sweep, way)
        for place, one in zip(places, found, strict=True):
            predicted[place] = one
    return predicted


def unfitted() -> Coefficients:
    """Returns the coefficients that a fit begins with: the shipped ones were fitted to the trials it leaves out."""
    return replace(default_coefficients(DEVICES["h200_sxm"]), step_time=PUBLISHED_STEP_TIME, power=H200_PRIOR)


def predictions(
    rest: Sequence[MeasuredTrial], specs: Sequence[TrialSpec], sweep: SweepFit | None = None, way: str = "no table"
) -> list[Predicted]:
    """Predicts specifications with coefficients fitted to `rest`, which has none of them.

    Args:
        rest: Trials to fit to.
        specs: What is predicted.
        sweep: A table of links.
        way: How it is used, a key of `LINKS`.
    """
    default = unfitted()
    fit = fit_device("h200_sxm", rest, default, studies=["benchmarks/data"], sweep=sweep if way == "first" else None)
    if sweep is not None and way == "added":
        fit = add_sweep(fit, sweep, default)
    fitted = Coefficients(
        memory=fit.memory or default.memory,
        step_time=fit.step_time or default.step_time,
        power=fit.power or default.power,
        thermal=default.thermal,
    )
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


def links(path: Path, measured: Sequence[MeasuredTrial]) -> None:
    """Prints errors of step times with a measured table of links, everything else unchanged."""
    first, fresh = apart(measured)
    sweep = fit_sweep(pq.read_table(path), DEVICES["h200_sxm"], unfitted().step_time)
    print(f"\nstep time with the links of {path.name}:\n")
    print("| trials | table | median | p90 | worst | signed median | within the interval | pairs in order |")
    print("|---|---|---|---|---|---|---|---|")
    for way, text in LINKS.items():
        for name, group, found in (
            ("held out", measured, held_out(measured, sweep, way)),
            ("four to two", fresh, predictions(first, [spec for spec, _ in fresh], sweep, way)),
        ):
            actual = np.array([result.metrics["step_time_s"] for _, result in group])
            guess, low, high = (np.array([one[f"step_time_s{end}"] for one in found]) for end in ("", " low", " high"))
            error = guess / actual - 1
            figures = [np.median(abs(error)), np.quantile(abs(error), 0.9), abs(error).max(), np.median(error)]
            inside = np.mean((low <= actual) & (actual <= high))
            right, total = ordered(group, guess.tolist())
            row = [f"{len(group)} {name}", text, *(f"{one:.2%}" for one in figures), f"{inside:.0%}"]
            print("| " + " | ".join([*row, f"{right} of {total}"]) + " |", flush=True)


def print_accuracy(measured: Sequence[MeasuredTrial], predicted: Sequence[Predicted]) -> None:
    """Prints errors by metric, and the order of step times."""
    engines, models = ({getattr(spec, name) for spec, _ in measured} for name in ("engine", "model"))
    configurations = len({spec.trial_id for spec, _ in measured})
    print(f"{len(measured)} trials, {configurations} configurations, {len(engines)} engines, {len(models)} models\n")
    print("| metric | by | median | p90 | worst | within the interval | bar |\n|---|---|---|---|---|---|---|")
    for metric, (median_bar, tail_bar) in BARS.items():
        chosen = [place for place, (_, result) in enumerate(measured) if metric in result.metrics]
        actual = np.array([measured[place][1].metrics[metric] for place in chosen])
        bar = f"{median_bar:.0%}" + (f", {tail_bar:.0%}" if tail_bar else "")
        low, high = (np.array([predicted[place][f"{metric} {end}"] for place in chosen]) for end in ("low", "high"))
        inside = f"{np.mean((low <= actual) & (actual <= high)):.0%}"
        print(
            line(metric, "wattune", np.array([predicted[place][metric] for place in chosen]) / actual - 1, inside, bar)
        )
        for baseline in (
            ("constant MFU", "datasheet roofline", "Calculon's equations") if metric == "step_time_s" else ()
        ):
            print(
                line(metric, baseline, np.array([predicted[place][baseline] for place in chosen]) / actual - 1, "", "")
            )
    print("\norder of pairs that differ by more than 5 %, of one model and engine:")
    for name in ("step_time_s", "constant MFU", "datasheet roofline", "Calculon's equations"):
        right, total = ordered(measured, [one[name] for one in predicted])
        print(f"  {name}: {right / max(total, 1):.1%} of {total}")


def line(metric: str, by: str, errors: np.ndarray, inside: str, bar: str) -> str:
    """Formats one row of the table."""
    size = np.abs(errors)
    figures = " | ".join(f"{value:.1%}" for value in (np.median(size), np.quantile(size, 0.9), size.max()))
    return f"| {metric} | {by} | {figures} | {inside} | {bar} |"


def speed(num_nodes: int) -> None:
    """Prints candidates a second on one core, from a space to sorted estimates, and the memory that it took."""
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
    found = forecast(candidates, parse_objective("maximize tokens_per_s"), [], default_of)
    total_s = time.process_time() - begun_s
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    number = space.num_combinations
    print(
        f"\n{number:,} candidates, {len(candidates.kept):,} kept by the rules, {len(found.kept):,} fit: "
        f"{number / total_s:,.0f} a second on one core (rules alone {number / enumerated_s:,.0f}, estimates "
        f"{len(candidates.kept) / (total_s - enumerated_s):,.0f} kept ones a second), peak {peak_bytes / 1e9:.2f} GB"
    )


def default_of(device: DeviceSpec) -> Coefficients:
    """Finds coefficients as a plan without a fit does."""
    return default_coefficients(device)


def write(path: Path, groups: dict[str, tuple[Sequence[MeasuredTrial], Sequence[Predicted]]]) -> None:
    """Writes every trial of the groups: figures measured and predicted."""
    columns: dict[str, str] = {"step_time_s": "step_time_s", "memory_peak_bytes": "memory_peak_gb"}
    columns |= {name: name for name in BARS if name not in columns}
    with path.open("w", newline="") as file:
        writer: Any = csv.writer(file, lineterminator="\n")
        writer.writerow(
            [
                "trials",
                "trial",
                "model",
                "engine",
                "plan",
                *(f"{kind}_{name}" for name in columns.values() for kind in ("measured", "predicted")),
            ]
        )
        for group, (measured, predicted) in groups.items():
            for (spec, result), guess in zip(measured, predicted, strict=True):
                row: list[str] = [group, spec.trial_id, spec.model.name, spec.engine, spec.label]
                for name in columns:
                    scale = 1e-9 if name == "memory_peak_bytes" else 1.0
                    row += [f"{scale * value:.6g}" for value in (result.metrics.get(name, float("nan")), guess[name])]
                writer.writerow(row)


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


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--svg", type=Path, help="draw predicted against measured")
    parser.add_argument("--links", type=Path, help="a table of `wattune calibrate --links`")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--num-nodes", type=int, default=16)
    arguments = parser.parse_args()
    speed(arguments.num_nodes)
    measured = trials()
    predicted = held_out(measured)
    print_accuracy(measured, predicted)
    first, fresh = apart(measured)
    print("\ntrials on two devices, fitted to those on four alone:", end=" ")
    foreseen = predictions(first, [spec for spec, _ in fresh])
    print_accuracy(fresh, foreseen)
    if arguments.csv is not None:
        write(arguments.csv, {"held_out": (measured, predicted), "four_to_two": (fresh, foreseen)})
    if arguments.svg is not None:
        draw(arguments.svg, measured, predicted)
    if arguments.links is not None:
        links(arguments.links, measured)
    for script in PARTS if arguments.parts else ():
        print(f"\n{script}\n", flush=True)
        subprocess.run([sys.executable, HERE / script], check=True)


if __name__ == "__main__":
    main()
