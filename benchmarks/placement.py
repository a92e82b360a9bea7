"""Placement against its bars: the paper's signs, brute force, and simulated maps with measured scatter.

    python benchmarks/placement.py --maps 100            # of 1,000: some 700 s of CPU; no GPU

Two real GPUs, one of them slowed: `benchmarks/placement_on_gpus.py`.
"""

import itertools
from argparse import ArgumentParser, Namespace
from dataclasses import replace

import numpy as np
from harness import Found, Rows, benchmark

from wattune.arrays import Floats, Ints
from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import model
from wattune.placement.gain import Move, Pipe, PlacementAdvice, place_plan
from wattune.placement.min_max import min_max
from wattune.placement.slots import SlotReading, fit_map
from wattune.plans.axes import Plan
from wattune.trial import TrialSpec
from wattune.workload import Workload

PUBLISHED = {"Llama-3 70B 21/19": (20, 4, 64), "GPT-3 175B 13/11": (12, 8, 128)}
"""Layers a stage, stages and micro-batches of the paper's two placements."""


def trial(layers: int, pp: int, dp: int, num_micro: int) -> TrialSpec:
    """A plan of a pipeline on one node."""
    return TrialSpec(
        model=replace(model("llama3_8b"), num_layers=layers * pp),
        cluster=ClusterSpec(device="h200_sxm", devices_per_node=pp * dp),
        engine="torch",
        workload=Workload(seq_len=4096, global_batch_size=num_micro * dp),
        plan=Plan(pp=pp),
    )


def published_gain(name: str, ratio: float) -> float:
    """Gain of one layer moved from each hot stage to a cold one, where cold clocks are `ratio` times hot ones."""
    layers, stages, micro_batches = PUBLISHED[name]
    slowness = np.repeat([1.0, ratio], stages // 2)
    pipe = Pipe(trial(layers, stages, 1, micro_batches), np.full((1, stages), float(layers)), slowness[None], 2 / 3)
    moved = np.repeat([layers + 1, layers - 1], stages // 2)[None]
    return float((pipe.step_s() / pipe.step_s(moved))[0]) - 1.0


def brute_force(slowness: Floats, unit_s: float, fixed_s: Floats, total: int, blocks: Ints) -> float:
    """The least longest stage by trying every order and layout."""
    size = len(slowness)
    layouts = [one for one in itertools.product(range(1, total + 1), repeat=size - 1) if sum(one) < total]
    orders = [o for o in itertools.permutations(range(size)) if all(blocks[i] == blocks[o[i]] for i in range(size))]
    counts = np.array([(*one, total - sum(one)) for one in layouts])
    return min(float(((unit_s * counts + fixed_s) * slowness[list(o)]).max(1).min()) for o in orders)


def num_exact(numbers: range) -> int:
    """Random maps on which the solver's longest stage is that of brute force, bit for bit."""
    same = 0
    for number in numbers:
        draw = np.random.default_rng([7, number])
        size = int(draw.integers(2, 6))
        total = int(draw.integers(size, 13))
        slowness, unit_s = draw.uniform(0.9, 1.6, size), float(draw.uniform(0.5, 2))
        fixed_s, blocks = draw.choice([0.0, 0.4, 1.3], size), draw.integers(0, 2, size)
        found = min_max(slowness, unit_s, fixed_s, total, blocks=blocks)[2]
        same += found == brute_force(slowness, unit_s, fixed_s, total, blocks)
    return same


def simulated(draw: np.random.Generator) -> tuple[PlacementAdvice, list[Move], Pipe, float]:
    """One plan on one machine: its placement from noisy runs, the moves that run, the machine as it is, the scatter."""
    pp, dp = int(draw.choice([2, 4, 8])), int(draw.choice([1, 2]))
    each, head, size = int(draw.integers(4, 21)), float(draw.uniform(0, 0.8)), pp * dp
    spec = trial(each, pp, dp, 16)
    slowness = np.exp(draw.normal(0, draw.choice([0.005, 0.02]), size))
    if draw.random() < 0.6:
        slowness[draw.integers(size)] *= 1 + draw.uniform(0.02, 0.3)
    works_s = np.full(pp, 0.01 * each) + 0.01 * head * (np.arange(pp) == pp - 1)
    noise, num_runs = float(draw.choice([0.002, 0.005, 0.01])), int(draw.integers(2, 5)) * 2
    readings = []
    for run, rank in itertools.product(range(num_runs), range(size)):
        slot = (rank + run * dp) % size
        time_s = works_s[rank // dp] * slowness[slot] * float(np.exp(draw.normal(0, noise)))
        readings.append(SlotReading(str(run), ("a", slot, ""), ("plan", rank // dp), 60.0 * run, time_s))
    truth = Pipe(spec, works_s[None], slowness[None], 2 / 3)
    times_s = float(truth.step_s()[0]), 60.0, 86400.0
    found = place_plan(
        spec, fit_map(readings), [one for one in readings if one.run == "0"], (2 / 3, 0.0, 0.0, 0.0, 0.0), times_s
    )
    return found, [one for one in found.moves if not one.needs], truth, noise


def true_gain(truth: Pipe, move: Move, strange: float) -> float:
    """Gain of a move on the machine as it is, `strange` standard errors of what real devices do beside their map."""
    there = Pipe(replace(truth.spec, plan=move.plan), truth.measured_s, truth.slowness, truth.backward_frac)
    beside = float(np.exp(strange * truth.unsure(there.layers, there.order)))
    return float((truth.step_s() / truth.step_s(there.layers, there.order))[0]) * beside - 1.0


COLUMNS = (
    "num_map", "num_stages", "scatter_frac", "predicted_gain_frac", "low_frac", "high_frac", "true_gain_frac",
    "probability_frac", "recommended_true_gain_frac", "recommended_probability_frac",
)  # fmt: skip


def of_maps(num_maps: int) -> Rows:
    """Figures of every simulated map: of the best move, and of the recommended one."""
    rows = Rows(*COLUMNS)
    for number in range(num_maps):
        draw = np.random.default_rng([11, number])
        found, moves, truth, noise = simulated(draw)
        strange, row = float(draw.normal()), list[float | None]([None] * 7)
        if moves:
            best = moves[0]
            row[:4] = best.gain_frac, best.low_frac, best.high_frac, true_gain(truth, best, strange)
            row[4] = best.probability
        if found.chosen is not None:
            row[5:] = true_gain(truth, found.chosen, strange), found.chosen.probability
        rows.add(number, truth.spec.plan.pp, noise, *row)
    return rows


def _options(parser: ArgumentParser) -> None:
    parser.add_argument("--maps", type=int, default=1000, help="random and simulated maps (1000)")


@benchmark(
    claim="Placements are exact on their map, and recommended only where they gain.",
    bar="published signs; brute force; losses within the stated probability; 88 to 97 % inside the interval",
    options=_options,
)
def main(given: Namespace) -> Found:
    """Asks for the signs, for brute force, and for placements on simulated machines; `--csv` has the machines."""
    ratios, notes = np.arange(1.0501, 1.0831, 0.0001), []
    gains = {name: np.array([published_gain(name, one) for one in ratios]) for name in PUBLISHED}
    signs = bool((gains["Llama-3 70B 21/19"] > 0).all() and (gains["GPT-3 175B 13/11"] < 0).all())
    for name, each in gains.items():
        notes.append(f"{name}: {each[0]:+.2%} at a clock ratio of 1.0501, {each[-1]:+.2%} at 1.083")
    notes.append(f"sign as published at {len(ratios)} clock ratios from 1.050 to 1.083: {signs}")
    same = num_exact(range(given.maps))
    notes.append(f"equal to brute force on {same} of {given.maps} random maps (bar: all)")
    maps = of_maps(given.maps)
    low, high, told, true, gained, sure = (
        np.array([row[COLUMNS.index(name)] for row in maps.cells], float)
        for name in ("low_frac", "high_frac", "predicted_gain_frac", "true_gain_frac", *COLUMNS[-2:])
    )
    moved, taken = ~np.isnan(low), ~np.isnan(gained)
    inside = float(((low <= true) & (true <= high))[moved].mean())
    lag = (3.92 * (true - told) / (high - low))[moved]
    losses, stated = int((gained[taken] < -1e-9).sum()), float((1 - sure[taken]).sum())
    allowed = stated + 2 * stated**0.5
    notes += [
        f"recommended on {taken.sum()} of {given.maps} simulated maps",
        f"of those {losses} lose, {stated:.1f} by the stated probabilities (bar: at most {allowed:.1f})",
        f"not recommended although it gains more than 0.5 %: {((true > 0.005) & ~taken).sum()}",
        f"true gain of the best move inside its 95 % interval: {inside:.1%} (bar: 88 to 97 %)",
        f"true less predicted gain: {lag.mean():+.2f} standard errors (± {lag.std() / len(lag) ** 0.5:.2f})",
    ]
    missed = [] if signs else ["a published sign"]
    missed += [f"equal to brute force on {same}"] if same < given.maps else []
    missed += [f"{losses} lose"] if losses > allowed else []
    missed += [f"{inside:.1%} inside"] if not 0.88 <= inside <= 0.97 else []
    return Found(maps, notes, missed)


if __name__ == "__main__":
    main()
