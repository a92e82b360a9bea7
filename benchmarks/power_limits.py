#!/usr/bin/env python
"""Holds what a limit of power costs, as estimates say, against published runs under one.

    python benchmarks/power_limits.py

`data/power_limits.csv` has three kinds of rows: one load under two limits, steps of torchtitan under one, and further
such steps of longer sequences and tensor parallel plans; the medians of the former and of all are judged. The law of a
limit (`wattune.cost.clock.LIMIT_EXPONENT`) was fitted to the loads that draw the whole limit; each is predicted here
by the others alone. Beside it stands the rule of thumb that a clock follows the cube root of the limit.
"""

import csv
from argparse import Namespace
from pathlib import Path
from typing import Any, Final

import numpy as np
from harness import Found, Rows, benchmark

import wattune
from wattune.cost.clock import LIMIT_EXPONENT
from wattune.cost.power import H200

TABLE: Final = Path(__file__).parent / "data" / "power_limits.csv"
NOWHERE: Final = str(TABLE.parent / "no_studies")
OWN_W: Final = 700.0
LIMITS_W: Final = (700, 650, 600, 550, 500, 450, 400, 350, 300)

HBM2E: Final = {
    "name": "h100_hbm2e",
    "like": "h100_sxm",
    "memory_bytes": 96 * 10**9,
    "memory_bandwidth_bytes_per_s": 2.4e12,
}
"""torchtitan's part, as its page describes it: its peak lies between those of SXM and NVL and is not known."""


def read(kind: str) -> list[dict[str, str]]:
    """Reads the rows of one kind."""
    with TABLE.open(newline="") as lines:
        return [row for row in csv.DictReader(lines) if row["kind"] == kind]


def room(limit_w: float) -> float:
    """Returns the share of the watts above idle that a limit leaves."""
    return (H200.regulated_frac * limit_w - H200.idle_w) / (H200.regulated_frac * OWN_W - H200.idle_w)


def exponent(pairs: list[dict[str, str]]) -> float:
    """Fits the exponent to pairs: least squares of the rate that a limit leaves."""
    grid = np.arange(1.5, 4.0, 0.01)
    rooms = np.array([room(float(one["limit_w"])) for one in pairs])
    errors = rooms ** (1 / grid[:, None]) - [ratio(one) for one in pairs]
    return float(grid[(errors**2).sum(1).argmin()])


def ratio(pair: dict[str, str]) -> float:
    """Returns the rate under the limit over that under the device's own."""
    return float(pair["per_s"]) / float(pair["at_700_w_per_s"])


def step(row: dict[str, str], limit_w: float, engine: str = "") -> tuple[float, float]:
    """Estimates seconds of a step and watts of a device of a row of torchtitan, or of the same plan of an engine."""
    world = int(row["workload"].rsplit(" ", 1)[1])
    device = {**HBM2E, "power_limit_w": limit_w} if row["device"].startswith("hbm2e") else row["device"]
    plan = {"recompute": "selective", "micro_batch_size": 2, "seq_len": 8192, "tp": 1, "cp": 1} | settings(row)
    found = wattune.estimate(
        model="llama3_70b" if "70B" in row["workload"] else "llama3_8b",
        cluster={"device": device, "num_nodes": world // 8, "devices_per_node": 8},
        engine=engine or ("torchtitan_2024" if row["device"] == "hbm2e" else "torchtitan"),
        storage=NOWHERE,
        dtype="fp8" if "fp8" in row["workload"] else "bf16",
        sharding="zero3",
        overlap="grad_param",
        global_batch_size=plan["micro_batch_size"] * world // (plan["tp"] * plan["cp"]),
        **plan,
    ).figures
    return found["step_time_s"]["value"], found["device_power_mean_w"]["value"]


def settings(row: dict[str, str]) -> dict[str, Any]:
    """Reads what a row's plan has otherwise than the first rows."""
    pairs = (one.split("=") for one in row["settings"].split())
    return {name: int(text) if text.isdigit() else text for name, text in pairs}


def measured_s(row: dict[str, str]) -> float:
    """Returns the measured seconds of a step of a row of torchtitan."""
    plan = {"micro_batch_size": 2, "seq_len": 8192, "tp": 1, "cp": 1} | settings(row)
    return plan["micro_batch_size"] * plan["seq_len"] / (plan["tp"] * plan["cp"] * float(row["per_s"]))


@benchmark(
    claim="The cost of a limit of power is known before anybody sets it.",
    bar="rate under a limit within 3 points (median); steps at 500 W within 8 % (median, and of all); thumb worse",
)
def main(_: Namespace) -> Found:
    """Predicts pairs, steps, and one plan at each limit."""
    ratios = ("measured_ratio", "ours_ratio", "cube_root_ratio", "no_limit_ratio", "torch_ratio")
    rows = Rows("what", "workload", "limit_w", *ratios)
    pairs = read("pair")
    fitted = [one for one in pairs if one["at_limit"] == "yes"]
    points, thumb = [], []
    for one in pairs:
        limit_w = float(one["limit_w"])
        of_others = exponent([other for other in fitted if other is not one])
        ours, cube = room(limit_w) ** (1 / of_others), (limit_w / OWN_W) ** (1 / 3)
        rows.add("rate over that at 700 W", one["workload"], limit_w, ratio(one), ours, cube, 1.0, None)
        if one in fitted:
            points.append(abs(ours - ratio(one)))
            thumb.append(abs(cube - ratio(one)))
    errors: dict[str, list[float]] = {"ours": [], "cube": [], "none": [], "torch": []}
    others: dict[str, list[float]] = {"ours": [], "cube": []}
    for one in read("step") + read("other"):
        limit_w = float(one["limit_w"])
        free_s, _w = step(one, OWN_W)
        ours_s, _w = step(one, limit_w)
        torch_s = step(one, limit_w, "torch")[0] if one["kind"] == "step" else None  # its rules refuse some
        cube_s = free_s * (OWN_W / limit_w) ** (1 / 3)
        rows.add(
            "step over the measured",
            " ".join((one["workload"], one["settings"])).strip(),
            limit_w,
            1.0,
            *(s and s / measured_s(one) for s in (ours_s, cube_s, free_s, torch_s)),
        )
        is_judged = limit_w < OWN_W and torch_s is not None
        for name, guess_s in (("ours", ours_s), ("cube", cube_s), ("none", free_s), ("torch", torch_s)):
            of = others if one["kind"] == "other" else errors if is_judged else {}
            if name in of and guess_s is not None:
                of[name].append(abs(guess_s / measured_s(one) - 1))
    tokens_row = read("step")[0]
    whole_s, whole_w = step(tokens_row, OWN_W)
    cost = [(limit_w, *step(tokens_row, float(limit_w))) for limit_w in LIMITS_W]
    lines = [
        f"{limit_w} W: {whole_s / s:.3f} of the rate, {w:.0f} W, energy {w * s / (whole_w * whole_s):.3f}"
        for limit_w, s, w in cost
    ]
    medians = {name: float(np.median(each)) for name, each in errors.items()}
    of_all = {name: float(np.median(errors[name] + each)) for name, each in others.items()}
    point, by_thumb = float(np.median(points)), float(np.median(thumb))
    notes = [
        f"exponent of all pairs at their limit: {exponent(fitted):.2f}, shipped {LIMIT_EXPONENT}",
        f"rate: ours off by {point:.3f} (median, worst {max(points):.3f}), cube root by {by_thumb:.3f}",
        "steps at 500 W, median error: " + ", ".join(f"{name} {value:.1%}" for name, value in medians.items()),
        f"all {len(errors['ours'] + others['ours'])} steps at 500 W, tensor parallel and long sequences too: "
        + ", ".join(f"{name} {value:.1%}" for name, value in of_all.items()),
        *lines,
    ]
    missed = [f"rate {point:.3f}"] if point > 0.03 or point >= by_thumb else []
    missed += [f"steps {medians['ours']:.1%}"] if medians["ours"] > 0.08 else []
    missed += [f"all steps {of_all['ours']:.1%}"] if of_all["ours"] > 0.08 else []
    return Found(rows, notes, missed)


if __name__ == "__main__":
    main()
