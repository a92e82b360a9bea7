"""Predicted against measured gain of one layer moved off a slow device: two stages on two GPUs, one of them slowed.

    python benchmarks/placement_on_gpus.py                # the table's last call, as told before it ran, and by now
    python benchmarks/placement_on_gpus.py --calls 5 6    # these calls together, by turns

The calls are over: `9964064:benchmarks/placement_on_gpus.py` ran them, by the protocol that it states, and wrote
`results/placement_on_gpus.csv`. Every case of a call counts: 20 signs and 20 errors. A prediction as told is what the
call printed before it measured; one of now is by the code that is here.
"""

import csv
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from harness import Found, Rows, benchmark

from wattune.api.placement import FREE_BELOW
from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import model
from wattune.cost.power import power_coefficients
from wattune.placement.gain import Pipe, strain_of_waiting
from wattune.plans.axes import Plan
from wattune.trial import TrialSpec
from wattune.workload import Workload

TABLE: Final = Path(__file__).parent / "results" / "placement_on_gpus.csv"
STEADY_FRAC: Final = 0.01
"""Largest difference of the slow stage's time between the first and the last half of a case that is not named."""
GAINS: Final = ("measured_gain_frac", "predicted_gain_frac")
"""The latter as told before it was measured, where a table has it."""
Row = dict[str, Any]
"""Numbers by the table's columns, and the kind of `device`; rows from before that had one are of H100."""


def read(path: Path) -> list[Row]:
    """Reads a table."""
    with open(path, newline="") as file:
        found = [{"device": "h100_sxm", **row} for row in csv.DictReader(file)]
    return [{key: text if key == "device" else float(text or "nan") for key, text in row.items()} for row in found]


def specification(layers: int, device: str) -> TrialSpec:
    """The dense model of two even stages that was trained."""
    width = {"hidden_size": 2048, "ffn_hidden_size": 8192, "num_heads": 16, "num_kv_heads": 8, "vocab_size": 4096}
    return TrialSpec(
        model=replace(model("llama3_8b"), num_layers=2 * layers, **width),
        cluster=ClusterSpec(device=device, devices_per_node=2),
        engine="torch",
        workload=Workload(seq_len=4096, global_batch_size=12),
        plan=Plan(pp=2, micro_batch_size=3, recompute="full", dtype="bf16"),
    )


def pipe_of(row: Row, strain: float, held_strain: float | None) -> Pipe:
    """Returns the even layout of a row's reference, as `place` takes it.

    `strain` is that of `Pipe`, and `held_strain` what a device has of it while it is held; None is as much.
    """
    free, held, optimizer, backward = (
        np.array([row[one.format("first")], row[one.format("last")]])
        for one in ("free_{}_s", "held_{}_s", "optimizer_{}_s", "backward_{}_frac")
    )
    works = free[1] / held[1]  # share of the time that the held device computes
    of_last = strain if held_strain is None else works * strain + (1 - works) * held_strain
    strains, behind_s = np.array([strain, of_last]), np.nan_to_num(row["behind_s"])
    spec = specification(int(row["num_layers_a_stage"]), row["device"])
    return Pipe(spec, free[None], (held / free)[None], backward, optimizer, strains, behind_s=behind_s)


def predicted_gain(row: Row, strain: float = 0.0, held_strain: float | None = None) -> float:
    """Predicts the gain of one layer moved to the first stage, by the placement room alone."""
    pipe = pipe_of(row, strain, held_strain)
    pipe.rest_s = row["held_step_s"] - float(pipe.step_s()[0])
    return float((pipe.step_s() / pipe.step_s(pipe.layers + np.array([[1, -1]])))[0]) - 1.0


def strain_of(rows: list[Row]) -> tuple[float, float | None]:
    """Computes what the devices draw without their limit, over what it leaves above idle: computing, and held.

    Computing as `place` does, of the first device where it waits: the median of such cases, each solved with its own
    power. Held by what the joules of a step grow with the time that the last device is held; None where nobody kept
    them.
    """
    c = power_coefficients(specification(1, rows[0]["device"]).cluster.sensed_device)
    assert c is not None, "H100 and H200 have coefficients"
    room_w = c.regulated_frac * c.limit_w - c.idle_w
    depths = np.array([one["num_layers_a_stage"] for one in rows])
    busy_s, energy_j = np.array([[4 * o["held_last_s"], o["held_last_w"] * o["held_step_s"]] for o in rows]).T
    for each in (busy_s, energy_j):
        each -= [each[depths == one].mean() for one in depths]
    held_w = float(busy_s @ energy_j / (busy_s @ busy_s))
    held_strain = None if np.isnan(held_w) else (held_w - c.idle_w) / room_w
    found = []
    for row in (one for one in rows if one["held_first_s"] < FREE_BELOW * one["held_last_s"]):
        busy = 4 * row["held_first_s"] / row["held_step_s"]
        drawn = (row["held_first_w"] - c.idle_w - (1 - busy) * c.wait_w) / busy / room_w
        found.append(strain_of_waiting(drawn, [0], partial(pipe_of, row, held_strain=held_strain)))
    strain = float(np.median(found)) if found else 0.0
    return 0.0 if np.isnan(strain) else strain, held_strain


def joined(rows: list[Row]) -> list[Row]:
    """Takes rows of one case, of several calls, together: means of its gains by turns, and their standard error."""
    cases, found = defaultdict[tuple[float, float], list[Row]](list), list[Row]()
    for row in rows:
        cases[row["num_layers_a_stage"], round(row["asked_slower_frac"], 6)].append(row)
    for each in cases.values():
        turns = np.nan_to_num([one["num_turns"] for one in each], nan=1.0)
        share = turns / turns.sum()
        means = {name: float(share @ [one.get(name, np.nan) for one in each]) for name in (*GAINS, "now")}
        error = float(np.linalg.norm(share * [one["measured_error_frac"] for one in each]))
        found.append(each[0] | means | {"measured_error_frac": error})
    return found


def of_calls(every: list[Row], calls: list[float]) -> tuple[list[Row], list[str]]:
    """Predicts the cases of some calls, taken together, by the code of now; returns them, and what they draw."""
    rows, notes = list[Row](), list[str]()
    for call in calls:
        own = [one for one in every if one["num_call"] == call]
        strain = strain_of(own)
        drawn = ", ".join("not known" if one is None else f"{one:.3f}" for one in strain)
        notes.append(
            f"Call {call:g}: without its limit a device would draw so much of the room, computing, held: {drawn}."
        )
        rows += [one | {"now": predicted_gain(one, *strain)} for one in own]
    return joined(rows), notes


def _options(parser: ArgumentParser) -> None:
    parser.add_argument("--calls", type=float, nargs="+", help="calls to judge together, by turns (the last)")


@benchmark(
    claim="Moving a layer off a slow device gains what the map predicts, also where it loses.",
    bar="sign right in 19 of 20 cases, error of the gain at most 1 point",
    options=_options,
)
def main(given: Namespace) -> Found:
    """Judges what was told of some calls, and what is told of them now."""
    every = read(TABLE)
    rows, notes = of_calls(every, given.calls or [every[-1]["num_call"]])
    table = Rows(
        "num_layers_a_stage", "slower_frac", "told_gain_frac", "now_gain_frac", "measured_gain_frac", "interval_frac"
    )
    for row in rows:
        slower = row["held_last_s"] / row["free_last_s"] - 1
        table.add(
            row["num_layers_a_stage"],
            slower,
            row[GAINS[1]],
            row["now"],
            row[GAINS[0]],
            1.96 * row["measured_error_frac"],
        )
        if abs(drift := row["reference_drift_frac"]) > STEADY_FRAC:
            notes.append(
                f"{row['num_layers_a_stage']:.0f} layers, {slower:.1%} slower: its reference drifted by {drift:+.1%}."
            )
    measured, told, now, error = (
        np.array([one[name] for one in rows]) for name in (*GAINS, "now", "measured_error_frac")
    )
    num, loses, missed = len(rows), int((measured < 0).sum()), list[str]()
    sure = np.abs(measured) > 1.96 * error
    notes.append(f"Standard error of a gain: median {np.median(error):.2%}, largest {error.max():.2%}.")
    notes.append(f"Always the same sign would be right in {max(loses, num - loses)}.")
    is_told = not np.isnan(told).any()
    for what, gains in [("as told when it ran", told)] * is_told + [("by the code of now", now)]:
        right, off = np.sign(gains) == np.sign(measured), 100 * np.abs(gains - measured)
        notes.append(
            f"{what}: sign right in {right.sum()} of {num} (of the {sure.sum()} whose interval excludes nothing in "
            f"{(right & sure).sum()}); error of the gain: median {np.median(off):.2f}, largest {off.max():.2f} points, "
            f"on average {100 * (gains - measured).mean():+.2f}"
        )
        if what.startswith("as told") or not is_told:
            missed += [f"sign right in {right.sum()} of {num}"] if right.sum() < 0.95 * num or num < 20 else []
            missed += [f"largest error {off.max():.2f} points"] if off.max() > 1.0 else []
    return Found(table, notes, missed)


if __name__ == "__main__":
    main()
