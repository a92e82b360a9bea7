"""Folders of other tools, as docs/judging_a_recording.md asks for them: healthy ones, and ones that lie in one way.

Everything random comes from the generator that is passed in, so that a seed gives the same folder.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

NS = 1_000_000_000
EPOCH_NS = 1_700_000_000 * NS
Rows = dict[str, np.ndarray]


class Trace:
    """Columns by node, tier and device, with the manifests: what a recorder of somebody else wrote."""

    def __init__(self, dice: np.random.Generator) -> None:
        self.dice = dice
        self.tables: dict[str, dict[str, dict[str, Rows]]] = {}
        self.devices: dict[str, dict[str, Any]] = {}
        self.window = (0, 0)

    def rows(self, tier: str) -> list[Rows]:
        """Every device's rows of a tier, over all nodes."""
        return [rows for tiers in self.tables.values() for rows in tiers.get(tier, {}).values()]

    def each(self, tier: str, column: str, change: Callable[[np.ndarray], np.ndarray], only: int | None = None) -> None:
        """Changes a column of every device, or of one."""
        for number, rows in enumerate(self.rows(tier)):
            if column in rows and only in (None, number):
                rows[column] = change(rows[column])

    def write(self, folder: Path) -> Path:
        """Writes the folder and returns it."""
        for node, tiers in self.tables.items():
            place = folder / "telemetry" / node
            place.mkdir(parents=True)
            for tier, devices in tiers.items():
                parts = [
                    pa.table({"node": [node] * len(rows["mono_ns"]), "device": [name] * len(rows["mono_ns"]), **rows})
                    for name, rows in devices.items()
                ]
                pq.write_table(pa.concat_tables(parts), place / f"{tier}.parquet")
            (place / "manifest.json").write_text(json.dumps({"devices": self.devices[node]}))
        window = {"start_mono_ns": int(self.window[0]), "end_mono_ns": int(self.window[1])}
        (folder / "manifest.json").write_text(json.dumps({"node": next(iter(self.tables)), "window": window}))
        return folder


KINDS = {
    "h100": (700.0, 70.0),
    "mi300x": (750.0, 130.0),
    "a100": (400.0, 50.0),
    "l4": (72.0, 12.0),
    "rtx": (450.0, 9.0),
}
"""Limit and idle power of devices [W]."""


def loads(dice: np.random.Generator, time_s: np.ndarray, limit_w: float, idle_w: float, kind: str) -> np.ndarray:
    """Power of one device over time, as one of several kinds of work draws it."""
    noise = dice.normal(0, 0.004 * limit_w, len(time_s))
    if kind == "steps":
        period_s, duty = dice.uniform(0.15, 4.0), dice.uniform(0.4, 0.9)
        busy = ((time_s / period_s + dice.uniform()) % 1.0) < duty
        return np.where(busy, 0.95 * limit_w, 0.4 * limit_w) + 4 * noise
    if kind == "capped":
        return 0.99 * limit_w + dice.normal(0, 0.01 * limit_w, len(time_s))
    if kind == "slow":
        period_s = dice.uniform(8, 40)
        return (0.6 + 0.25 * np.sin(2 * np.pi * time_s / period_s)) * limit_w + noise
    if kind == "sine":  # a formula, without any noise
        return (0.7 + 0.12 * np.sin(time_s / 0.35)) * limit_w
    if kind == "flat":
        return np.full(len(time_s), 0.8 * limit_w)
    if kind == "begins":
        return np.where(time_s < time_s.min() + 0.3 * np.ptp(time_s), idle_w, 0.9 * limit_w) + noise
    return np.full(len(time_s), idle_w) + np.abs(dice.normal(0, 0.02 * idle_w, len(time_s)))  # idle


WORK = ("steps", "capped", "slow", "sine", "flat", "begins", "idle")


def healthy(
    dice: np.random.Generator, *, work: str = "", nodes: int = 1, gpus: int = 0, counter: bool | None = None
) -> Trace:
    """A recording without a fault, of some device, rate, load, resolution and length."""
    trace = Trace(dice)
    limit_w, idle_w = KINDS[str(dice.choice(list(KINDS)))]
    period_s = float(dice.choice([0.01, 0.02, 0.05, 0.1, 0.2]))
    refresh_s = max(float(dice.choice([0.0, 0.1])), period_s)
    length_s = float(dice.uniform(40, 120))
    gpus = gpus or int(dice.choice([1, 2, 4]))
    step_w = float(dice.choice([0.001, 0.01, 1.0]))
    work = work or str(dice.choice(WORK))
    counter = bool(dice.uniform() < 0.7) if counter is None else counter
    boot_ns = int(dice.choice([0, 1, 1]) * dice.integers(NS * 3600, NS * 3600 * 24 * 60))  # 0: one clock only
    origin_ns = EPOCH_NS + int(dice.integers(0, 10**9)) * 100
    fine_s = np.arange(-2.0, length_s + 2.0, 0.005)
    for node in range(nodes):
        ahead_ns = int(dice.integers(-20_000_000, 20_000_000)) if node else 0
        name = f"node{node}"
        mono_0 = origin_ns if boot_ns == 0 else boot_ns + node * 7_777_777_777
        trace.tables[name] = {"fast": {}} | ({"slow": {}} if counter else {})
        trace.devices[name] = {}
        for gpu in range(gpus):
            own = work if gpu == 0 or work in ("steps", "capped", "slow") or dice.uniform() < 0.5 else "idle"
            power_w = loads(dice, fine_s, limit_w, idle_w, own)
            energy_j = np.concatenate([[0.0], np.cumsum(power_w[:-1] * 0.005)]) + dice.uniform(1e3, 1e6)
            at_s = np.arange(-1.5, length_s + 1.5, period_s) + gpu * 0.001
            at_s = at_s + np.sort(dice.uniform(0, 0.2 * period_s, len(at_s)))
            shown_s = np.floor(at_s / refresh_s) * refresh_s if refresh_s > period_s else at_s
            warm_c = 45 + 25 * power_w.mean() / limit_w - 8 * np.exp(-(fine_s + 2) / 20.0)

            def stamps(seconds: np.ndarray, mono_0: int = mono_0, ahead_ns: int = ahead_ns) -> Rows:
                whole = np.round(seconds * NS).astype(np.int64)
                return {"mono_ns": mono_0 + whole, "wall_ns": origin_ns + ahead_ns + whole}

            trace.tables[name]["fast"][f"gpu{gpu}"] = {
                **stamps(at_s),
                "power_instant_w": np.round(np.interp(shown_s, fine_s, power_w) / step_w) * step_w,
                "gpu_temp_c": np.round(np.interp(at_s, fine_s, warm_c)),
                "sm_clock_mhz": np.where(np.interp(at_s, fine_s, power_w) > 2 * idle_w, 1700, 345).astype(np.int64),
            }
            if counter:
                slow_s = np.arange(-1.5, length_s + 1.5, 1.0) + gpu * 0.02
                trace.tables[name]["slow"][f"gpu{gpu}"] = {
                    **stamps(slow_s),
                    "energy_j": np.interp(slow_s, fine_s, energy_j),
                }
            trace.devices[name][f"gpu{gpu}"] = {"power_limit_w": limit_w, "sm_clock_max_mhz": 1980.0}
        if node == 0:
            trace.window = mono_0, mono_0 + round(length_s * NS)
    return trace


def scaled_times(trace: Trace, per: int, *, columns: tuple[str, ...] = ("mono_ns", "wall_ns")) -> Trace:
    """Writes times in another unit."""
    for tier in ("fast", "slow"):
        for column in columns:
            trace.each(tier, column, lambda t: t // per)
    if "mono_ns" in columns:
        trace.window = trace.window[0] // per, trace.window[1] // per
    return trace


def one_clock(trace: Trace) -> Trace:
    """Writes the wall clock into both columns, as a logger without another does."""
    shift = int(trace.rows("fast")[0]["wall_ns"][0] - trace.rows("fast")[0]["mono_ns"][0])
    for tier in ("fast", "slow"):
        trace.each(tier, "mono_ns", lambda t: t + shift)
    trace.window = trace.window[0] + shift, trace.window[1] + shift
    return trace


def from_zero(trace: Trace) -> Trace:
    """Counts times from the start of the log, in both columns."""
    first = int(min(rows["mono_ns"][0] for tier in ("fast", "slow") for rows in trace.rows(tier)))
    for tier in ("fast", "slow"):
        for rows in trace.rows(tier):
            rows["mono_ns"] = rows["wall_ns"] = rows["mono_ns"] - first
    trace.window = trace.window[0] - first, trace.window[1] - first
    return trace


def smoothed(trace: Trace, how: str) -> Trace:
    """Tells means of a second as instant power."""
    for rows in trace.rows("fast"):
        at_s = (rows["mono_ns"] - rows["mono_ns"][0]) / NS
        fine = np.arange(0, at_s[-1], 0.005)
        power = np.interp(fine, at_s, rows["power_instant_w"])
        n = 200
        if how == "held":
            whole = power[: len(power) // n * n].reshape(-1, n).mean(1)
            shown = whole[np.clip((at_s - 1.0).astype(int), 0, len(whole) - 1)]
        elif how == "boxcar":
            total = np.cumsum(np.concatenate([[power[0]] * n, power]))
            shown = np.interp(at_s, fine, (total[n:] - total[:-n]) / n)
        else:
            out, level = np.empty(len(power)), power[0]
            for i, value in enumerate(power):
                level += (value - level) * 0.005 / 1.0
                out[i] = level
            shown = np.interp(at_s, fine, out)
        rows["power_instant_w"] = np.round(shown, 3)
    return trace


def frozen(trace: Trace, tier: str, column: str) -> Trace:
    """One sensor sticks at its last value from somewhere in the first half on."""
    rows = trace.rows(tier)[0]
    at = int(len(rows[column]) * trace.dice.uniform(0.1, 0.5))
    rows[column] = rows[column].copy()
    rows[column][at:] = rows[column][at]
    return trace


def wrapped(trace: Trace, most_j: float) -> Trace:
    """Energy counters of a register that holds less than the run needs."""
    for rows in trace.rows("slow"):
        rise = rows["energy_j"] - rows["energy_j"][0]
        start = most_j - trace.dice.uniform(0.2, 0.8) * min(rise[-1], most_j)
        rows["energy_j"] = (start + rise) % most_j
    return trace


def second_die(trace: Trace, second: str) -> Trace:
    """Two dies of a package: the first tells the power of both."""
    for tiers in trace.tables.values():
        names = list(tiers["fast"])
        for a, b in zip(names[::2], names[1::2], strict=False):
            both = tiers["fast"][a], tiers["fast"][b]
            both[1]["power_instant_w"] = both[0]["power_instant_w"] * (0 if second == "zero" else 1)
    return trace


def clock_steps(trace: Trace, step_s: float) -> Trace:
    """The wall clock is set in the middle."""
    half = sum(trace.window) // 2
    for tier in ("fast", "slow"):
        for rows in trace.rows(tier):
            rows["wall_ns"] = rows["wall_ns"] + np.where(rows["mono_ns"] > half, round(step_s * NS), 0)
    return trace


def zone(trace: Trace, hours: float) -> Trace:
    """The second node keeps another time zone's wall clock."""
    for tier in trace.tables["node1"].values():
        for rows in tier.values():
            rows["wall_ns"] = rows["wall_ns"] + round(hours * 3600 * NS)
    return trace


def doubled(trace: Trace, share: float) -> Trace:
    """Some rows stand there twice."""
    for tier in ("fast", "slow"):
        for rows in trace.rows(tier):
            order = np.arange(len(rows["mono_ns"]))
            order = np.sort(np.concatenate([order, order[trace.dice.uniform(size=len(order)) < share]]))
            rows.update({name: column[order] for name, column in rows.items()})
    return trace


def dropouts(trace: Trace, share: float) -> Trace:
    """Failed reads are written as 0."""
    trace.each("fast", "power_instant_w", lambda p: np.where(trace.dice.uniform(size=len(p)) < share, 0.0, p))
    return trace


def swapped(trace: Trace) -> Trace:
    """Power stands under the names of other devices than the counters do."""
    for tiers in trace.tables.values():
        names = list(tiers["fast"])
        first, last = tiers["fast"][names[0]], tiers["fast"][names[-1]]
        first["power_instant_w"], last["power_instant_w"] = (
            np.resize(last["power_instant_w"], len(first["mono_ns"])),
            np.resize(first["power_instant_w"], len(last["mono_ns"])),
        )
    return trace


def shuffled(trace: Trace) -> Trace:
    """Rows stand in any order."""
    for rows in trace.rows("fast"):
        order = trace.dice.permutation(len(rows["mono_ns"]))
        rows.update({name: column[order] for name, column in rows.items()})
    return trace


def drifting(trace: Trace) -> Trace:
    """The monotonic column is no clock: it runs at another pace."""
    first = trace.rows("fast")[0]["wall_ns"][0]
    pace = trace.dice.choice([0.5, 0.9, 1.1, 2.0])
    for tier in ("fast", "slow"):
        trace.each(tier, "wall_ns", lambda t: first + ((t - first) * pace).astype(np.int64))
    return trace


def uneven(dice: np.random.Generator) -> Trace:
    """Two devices of which one works and one idles, with counters."""
    trace = healthy(dice, work="steps", gpus=2, counter=True)
    for rows, factor in zip(trace.rows("fast"), (1.0, 0.5), strict=True):
        rows["power_instant_w"] = rows["power_instant_w"] * factor
    for rows, factor in zip(trace.rows("slow"), (1.0, 0.5), strict=True):
        rows["energy_j"] = rows["energy_j"][0] + (rows["energy_j"] - rows["energy_j"][0]) * factor
    return trace


def reset(trace: Trace) -> Trace:
    """The driver is loaded again: counters begin at 0."""
    for rows in trace.rows("slow"):
        at = int(len(rows["energy_j"]) * trace.dice.uniform(0.3, 0.7))
        rows["energy_j"] = rows["energy_j"] - np.where(np.arange(len(rows["energy_j"])) >= at, rows["energy_j"][at], 0)
    return trace


def _busy(dice: np.random.Generator, **more: Any) -> Trace:
    return healthy(dice, work=str(dice.choice(["steps", "capped", "slow", "begins"])), **more)


LIES: dict[str, Callable[[np.random.Generator], Trace]] = {
    "milliseconds": lambda d: scaled_times(one_clock(healthy(d)), 10**6),
    "microseconds": lambda d: scaled_times(one_clock(healthy(d)), 10**3),
    "second_die_zero": lambda d: second_die(_busy(d, gpus=2), "zero"),
    "wraps_mj": lambda d: wrapped(_busy(d, counter=True), 2**32 / 1e3),
    "wraps_uj": lambda d: wrapped(_busy(d, counter=True), 2**32 / 1e6),
    "frozen_power": lambda d: frozen(_busy(d, gpus=2), "fast", "power_instant_w"),
    "held_averages": lambda d: smoothed(healthy(d, work="steps"), "held"),
    "zone_hours": lambda d: zone(_busy(d, nodes=2), float(d.choice([-8, -1, 1, 2, 9]))),
    "clock_step": lambda d: clock_steps(healthy(d), float(d.choice([-3, -0.2, 0.1, 30]))),
    "kilowatts": lambda d: _scaled(_busy(d), "power_instant_w", 1e-3),
    "fahrenheit": lambda d: _fahrenheit(_busy(d)),
    "zero_degrees": lambda d: _scaled(_busy(d), "gpu_temp_c", 0.0),
    "doubled_rows": lambda d: doubled(healthy(d), float(d.uniform(0.05, 1.0))),
    "percent": lambda d: _percent(healthy(d)),
}
"""Lies that the checks were written with."""

KEPT_ASIDE: dict[str, Callable[[np.random.Generator], Trace]] = {
    "seconds": lambda d: scaled_times(one_clock(healthy(d)), 10**9),
    "milliseconds_from_zero": lambda d: scaled_times(from_zero(healthy(d)), 10**6),
    "microseconds_from_zero": lambda d: scaled_times(from_zero(healthy(d)), 10**3),
    "mono_in_milliseconds": lambda d: scaled_times(healthy(d), 10**6, columns=("mono_ns",)),
    "wall_in_milliseconds": lambda d: scaled_times(healthy(d), 10**6, columns=("wall_ns",)),
    "zeros_as_dropouts": lambda d: dropouts(_busy(d), float(d.uniform(0.01, 0.3))),
    "second_die_the_same": lambda d: second_die(_busy(d, gpus=2), "same"),
    "sum_of_two": lambda d: _scaled(healthy(d, work="capped"), "power_instant_w", 2.0),
    "reset": lambda d: reset(_busy(d, counter=True)),
    "frozen_counter": lambda d: frozen(_busy(d, counter=True), "slow", "energy_j"),
    "boxcar": lambda d: smoothed(healthy(d, work="steps"), "boxcar"),
    "exponential": lambda d: smoothed(healthy(d, work="steps"), "exponential"),
    "zone_half_hours": lambda d: zone(_busy(d, nodes=2), float(d.choice([-3.5, 5.5, 9.5]))),
    "swapped": lambda d: swapped(uneven(d)),
    "shuffled": lambda d: shuffled(healthy(d)),
    "another_pace": lambda d: drifting(healthy(d)),
    "millidegrees": lambda d: _scaled(healthy(d), "gpu_temp_c", 1e3),
    "milliwatts": lambda d: _scaled(healthy(d), "power_instant_w", 1e3),
    "counter_in_millijoules": lambda d: _scaled(_busy(d, counter=True), "energy_j", 1e3, tier="slow"),
    "counter_in_watt_hours": lambda d: _scaled(_busy(d, counter=True), "energy_j", 1 / 3600, tier="slow"),
}
"""Lies that were written with the others and looked at only once the checks stood."""


def _scaled(trace: Trace, column: str, factor: float, tier: str = "fast") -> Trace:
    trace.each(tier, column, lambda values: values * factor)
    return trace


def _fahrenheit(trace: Trace) -> Trace:
    trace.each("fast", "gpu_temp_c", lambda c: np.round(c * 1.8 + 32))
    return trace


def _percent(trace: Trace) -> Trace:
    for tiers in trace.tables.values():
        tiers["counter"] = {
            name: {
                "mono_ns": rows["mono_ns"],
                "wall_ns": rows["wall_ns"],
                "sm_active_frac": trace.dice.uniform(60, 95, len(rows["mono_ns"])),
            }
            for name, rows in tiers["fast"].items()
        }
    return trace
