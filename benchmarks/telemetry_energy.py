"""Finds the loads on which the driver's ring and the energy counter differ, with the counter read as fast as possible.

    python benchmarks/telemetry_energy.py [--seconds 12] [--json] [--out FOLDER]    # one NVIDIA GPU, about 100 s
    python benchmarks/telemetry_energy.py --redo FOLDER                             # the figures of files kept before

The loads are square waves of 0.2 and 0.5 s, and of 0.23 and 0.53 s, which are not multiples of the ring's 20 ms. The
sampler records at its default rates. After the first two waves another process reads the energy counter all the time,
about every 5 ms, so that its own updates are seen. For each wave the ring is integrated over the counter's span and
held against its rise

- by four rules: trapezoid; each sample as the mean of the time since the one before (`past`), or until the one after
  (`future`); and every sample the same weight (`equal`);
- with the ring's stamps moved by -20 to +20 ms;
- between readings once a second as a study has them (`polled`), and between updates of the counter (`updates`), each
  from rest to rest and inside the wave alone.

Over all updates of all waves a fit then says which delay, and which place of a sample in its interval, leave least. The
script prints the rows of benchmarks/results/telemetry_energy.md.
"""

import argparse
import contextlib
import json
import multiprocessing
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.synchronize import Event
from pathlib import Path
from queue import Empty
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from wattune.calibration.run import REST_S, find_devices, load, sampling
from wattune.storage.files import write_table
from wattune.telemetry.files.segments import read_tables
from wattune.units import NS_PER_S

QUIET_S: Final = (0.5, 0.23)
"""Periods of the waves during which only the sampler reads the counter, once a second: does reading it change it?"""
WATCHED_S: Final = (0.2, 0.5, 0.23, 0.53)
"""Periods of the waves during which it is read all the time."""
ENERGY_WITHIN_FRAC: Final = 0.005
POLL_PAUSE_S: Final = 0.002
"""Between two reads of the counter, each of which takes 3 ms or more (measured on H200)."""
LAST_DRAIN_S: Final = 1.5
POLLER_START_S: Final = 0.6
"""Until the polling process reads for the first time: it starts so much before the rest it is to begin in ends."""
SHIFTS_MS: Final = (-20, -10, 0, 10, 20)
RULES: Final[dict[str, float | None]] = {"trapezoid": None, "past": 1.0, "future": 0.0}
"""By name, the share of the time since the last sample that a sample stands for; of the time to the next, the rest."""

Floats = npt.NDArray[np.float64]
Polls = list[tuple[int, ...]]


def poll(uuid: str, stop: Event, queue: "multiprocessing.Queue[Polls]") -> None:
    """Every reading of the energy counter: wall time before and after, value, the driver's stamp and latency."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    found: Polls = []
    while not stop.wait(POLL_PAUSE_S):
        before_ns = time.time_ns()
        field = pynvml.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION])[0]
        after_ns = time.time_ns()
        if field.nvmlReturn == 0:
            found.append((before_ns, after_ns, field.value.ullVal, field.timestamp, field.latencyUsec))
    queue.put(found)


def record(folder: Path, seconds: float) -> dict[str, Any]:
    """Runs the waves, and writes `ring`, `slow`, `spans` and `polls` as Parquet; says on what."""
    info = find_devices("nvml")[0]
    assert info.uuid is not None, "find_devices leaves out those without"
    context = multiprocessing.get_context("spawn")
    stop: Event = context.Event()
    queue: multiprocessing.Queue[Polls] = context.Queue()
    poller = context.Process(target=poll, args=(info.uuid, stop, queue))
    waves = [(period_s, round(seconds / period_s)) for period_s in (*QUIET_S, *WATCHED_S)]
    options = [str(part) for wave in waves for part in ("--wave", *wave)]
    quiet_s = REST_S + sum(period_s * count + REST_S for period_s, count in waves[: len(QUIET_S)]) - POLLER_START_S
    node = platform.node()
    polls: Polls = []
    with tempfile.TemporaryDirectory() as scratch:
        spool = Path(scratch)
        with sampling(spool / "sampler", node, ["nvml", "host"], {}) as sampler:
            with load(info, node, spool / "spans.parquet", options) as process:
                start_s = time.monotonic()
                while process.poll() is None:
                    sampler.renew()
                    if poller.pid is None and time.monotonic() - start_s > quiet_s:
                        poller.start()
                    time.sleep(0.1)
            assert process.returncode == 0, "the load failed"
            time.sleep(LAST_DRAIN_S)
            stop.set()
            with contextlib.suppress(Empty):  # the rest is worth keeping without it, and says that it is without
                polls = queue.get(timeout=20)
            poller.terminate()
        tables, _ = read_tables(spool / "sampler")
        for tier in ("ring", "slow"):
            write_table(folder / f"{tier}.parquet", tables[tier])
        write_table(folder / "spans.parquet", pq.read_table(spool / "spans.parquet"))
    names = ("before_ns", "after_ns", "energy_mj", "driver_us", "latency_us")
    columns = zip(*polls, strict=True) if polls else [()] * len(names)
    arrays = [pa.array(column, pa.int64()) for column in columns]
    write_table(folder / "polls.parquet", pa.table(arrays, list(names)))
    facts = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "device": info.to_json(),
        "python": platform.python_version(),
        "waves": waves,
    }
    (folder / "facts.json").write_text(json.dumps(facts))
    return facts


@dataclass(frozen=True, slots=True)
class Ring:
    """The driver's samples: seconds from an origin, and watts."""

    time_s: Floats
    power_w: Floats

    def cumulative(self, at_s: Floats, rule: str | float) -> Floats:
        """Joules up to each time.

        Args:
            at_s: Seconds, inside the series.
            rule: `trapezoid`, `equal`, or the share of the time since the sample before that each sample stands for.
        """
        gaps_s = np.diff(self.time_s)
        if rule == "trapezoid":
            # Between samples the power is a straight line, so the energy is a parabola.
            sums_j = np.concatenate([[0.0], np.cumsum(gaps_s * (self.power_w[1:] + self.power_w[:-1]) / 2)])
            left = np.clip(np.searchsorted(self.time_s, at_s, side="right") - 1, 0, len(gaps_s) - 1)
            inside_s = at_s - self.time_s[left]
            slope = np.diff(self.power_w)[left] / gaps_s[left]
            whole: Floats = sums_j[left] + inside_s * (self.power_w[left] + slope * inside_s / 2)
            return whole
        if rule == "equal":
            even_s = np.concatenate([[0.0], np.full(len(gaps_s), (self.time_s[-1] - self.time_s[0]) / len(gaps_s))])
            equal: Floats = np.interp(at_s, self.time_s, np.cumsum(even_s * self.power_w))
            return equal
        share = float(rule)
        # Sample i holds from `share` of the gap before it to the rest of the gap after it.
        edges_s = np.concatenate([self.time_s[:1], self.time_s[1:] - share * gaps_s, self.time_s[-1:]])
        sums_j = np.concatenate([[0.0], np.cumsum(np.diff(edges_s) * self.power_w)])
        held: Floats = np.interp(at_s, edges_s, sums_j)
        return held


@dataclass(frozen=True, slots=True)
class Counter:
    """Readings of a cumulative counter: seconds from the same origin, and joules."""

    time_s: Floats
    energy_j: Floats


def updates(polls: pa.Table, origin_ns: int) -> tuple[Counter, dict[str, float]]:
    """Finds the times at which the counter moved: halfway from the old value's last reading to the new one's first.

    Returns:
        The updates, and how often they come and how well they are known, in milliseconds.
    """
    before_ns, after_ns, energy_mj = (polls[name].to_numpy() for name in ("before_ns", "after_ns", "energy_mj"))
    new = np.flatnonzero(np.diff(energy_mj)) + 1
    early_ns, late_ns = before_ns[new - 1], after_ns[new]
    time_s = ((early_ns - origin_ns) + (late_ns - origin_ns)) / 2 / NS_PER_S
    between_ms = np.diff(time_s) * 1e3
    facts = {
        "readings": len(energy_mj),
        "updates": len(new),
        "period_ms_median": float(np.median(between_ms)),
        "period_ms_p5": float(np.percentile(between_ms, 5)),
        "period_ms_p95": float(np.percentile(between_ms, 95)),
        "known_within_ms_median": float(np.median(late_ns - early_ns) / 2e6),
        "call_ms_median": float(np.median(after_ns - before_ns) / 1e6),
    }
    if "driver_us" in polls.column_names:
        stamp_s = (polls["driver_us"].to_numpy()[new] * 1000 - origin_ns) / NS_PER_S
        facts["driver_stamp_minus_update_ms_median"] = float(np.median(stamp_s - time_s) * 1e3)
        facts["driver_stamp_period_ms_median"] = float(np.median(np.diff(stamp_s)) * 1e3)
    return Counter(time_s, energy_mj[new] / 1e3), facts


def spans(counter: Counter, start_s: float, end_s: float, *, rest: bool) -> tuple[float, float, float] | None:
    """Two readings around a wave (from rest to rest) or inside it, and the rise between them."""
    if rest:
        first = np.flatnonzero((counter.time_s <= start_s) & (counter.time_s > start_s - 1.5))[-1:]
        last = np.flatnonzero((counter.time_s >= end_s + 0.2) & (counter.time_s < end_s + 1.9))[:1]
    else:
        inside = np.flatnonzero((counter.time_s >= start_s) & (counter.time_s <= end_s))
        first, last = inside[:1], inside[-1:]
    if not len(first) or not len(last) or first[0] >= last[0]:
        return None
    ends = counter.time_s[[first[0], last[0]]]
    return float(ends[0]), float(ends[1]), float(counter.energy_j[last[0]] - counter.energy_j[first[0]])


def error_frac(ring: Ring, span: tuple[float, float, float], rule: str | float, shift_s: float = 0.0) -> float:
    """The ring's integral over a counter's rise, minus 1; `shift_s` is added to the ring's stamps."""
    at = ring.cumulative(np.array(span[:2]) - shift_s, rule)
    return float((at[1] - at[0]) / span[2] - 1)


def wave_bounds(spans: pa.Table, waves: Sequence[tuple[float, int]], origin_ns: int) -> Iterator[tuple[float, float]]:
    """Start of the first and end of the last stretch of work of each wave, in seconds of wall time from an origin."""
    spans = spans.sort_by("step")
    start_s, end_s = ((spans[f"{edge}_wall_ns"].to_numpy() - origin_ns) / NS_PER_S for edge in ("start", "end"))
    first = 0
    for _, count in waves:
        yield float(start_s[first]), float(end_s[first + count - 1])
        first += count


def fit_updates(ring: Ring, counter: Counter, bounds: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Fits the delay of the counter and the place of samples that explain every single update best.

    Over all pairs of neighbouring updates inside waves: `delay_s` is how long before its update the counter's energy
    is of, `share` the place of a sample in its interval (1: mean of the time before its stamp, 0: after it).

    Returns:
        The best of each rule: delay, root mean square of what is left (J an update), slope of integral over counter.
    """
    inside = np.zeros(len(counter.time_s), bool)
    for start_s, end_s in bounds:
        inside |= (counter.time_s >= start_s) & (counter.time_s <= end_s)
    index = np.flatnonzero(inside[1:] & inside[:-1])
    rise_j = counter.energy_j[index + 1] - counter.energy_j[index]

    def left_j(rule: str | float, delay_s: float) -> tuple[float, float]:
        whole_j = ring.cumulative(counter.time_s - delay_s, rule)
        seen_j = whole_j[index + 1] - whole_j[index]
        return float(np.sqrt(np.mean((seen_j - rise_j) ** 2))), float(seen_j @ rise_j / (rise_j @ rise_j))

    delays_s = np.arange(-0.06, 0.1605, 0.002)
    found: dict[str, Any] = {}
    for name, share in RULES.items():
        rule = name if share is None else share
        best = min((*left_j(rule, delay_s), delay_s) for delay_s in delays_s)
        found[name] = {"left_j": best[0], "slope": best[1], "delay_ms": 1e3 * best[2]}
    shares = np.arange(-0.5, 1.51, 0.1)
    best_share = min((left_j(share, delay_s)[0], share, delay_s) for share in shares for delay_s in delays_s[::2])
    found["best share"] = {"left_j": best_share[0], "share": best_share[1], "delay_ms": 1e3 * best_share[2]}
    found["mean_rise_j"], found["pairs"] = float(rise_j.mean()), len(index)
    return found


def analyse(folder: Path) -> dict[str, Any]:
    """All figures from the files of `record`."""
    facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    rows, slow, polls = (pq.read_table(folder / f"{name}.parquet") for name in ("ring", "slow", "polls"))
    stamps_ns, first = np.unique(rows["sensor_ns"].to_numpy(), return_index=True)
    origin_ns = int(stamps_ns[0])
    ring = Ring((stamps_ns - origin_ns) / NS_PER_S, rows["power_w"].to_numpy()[first])
    polled = Counter((slow["wall_ns"].to_numpy() - origin_ns) / NS_PER_S, slow["energy_j"].to_numpy())
    moved, counter_facts = updates(polls, origin_ns) if polls.num_rows else (None, {})
    bounds = list(wave_bounds(pq.read_table(folder / "spans.parquet"), facts["waves"], origin_ns))
    found: dict[str, Any] = {**facts, "counter": counter_facts, "waves": []}
    gaps_ms = np.diff(ring.time_s) * 1e3
    found["ring"] = {f"spacing_ms_p{p}": float(np.percentile(gaps_ms, p)) for p in (0, 1, 50, 99, 100)}
    if moved is not None:
        found["updates_fit"] = fit_updates(ring, moved, bounds)
    for (period_s, count), (start_s, end_s) in zip(facts["waves"], bounds, strict=True):
        wave: dict[str, Any] = {"period_s": period_s, "periods": count, "errors": {}}
        for how, counter in (("polled", polled), ("updates", moved)):
            for where, rest in (("rest to rest", True), ("inside", False)):
                span = None if counter is None else spans(counter, start_s, end_s, rest=rest)
                if span is None:
                    continue
                errors = {name: error_frac(ring, span, name if s is None else s) for name, s in RULES.items()}
                errors["equal"] = error_frac(ring, span, "equal")
                errors |= {f"trapezoid {ms:+d} ms": error_frac(ring, span, "trapezoid", ms / 1e3) for ms in SHIFTS_MS}
                wave["errors"][f"{how}, {where}"] = {"span_s": span[1] - span[0], "rise_j": span[2], **errors}
        inside = (ring.time_s >= start_s) & (ring.time_s <= end_s)
        wave["swing_w"] = float(np.ptp(np.percentile(ring.power_w[inside], [5, 95])))
        wave["missing_slots"] = round((end_s - start_s) / 0.02) - int(inside.sum())
        found["waves"].append(wave)
    return found


def told(found: dict[str, Any]) -> list[str]:
    """The figures as a Markdown text."""
    device, spacing = found["device"], [found["ring"][f"spacing_ms_p{p}"] for p in (0, 1, 50, 99, 100)]
    names = [*RULES, "equal", *(f"trapezoid {ms:+d} ms" for ms in SHIFTS_MS if ms)]
    lines = [
        "# The ring against the energy counter",
        "",
        f"{found['date']}, {device['name']}, driver {device.get('driver')}; bf16 8192^3 products, half of each period.",
        f"Ring spacing 0, 1, 50, 99, 100 %: {', '.join(format(one, '.1f') for one in spacing)} ms.",
    ]
    if counter := found["counter"]:
        lines.append(
            f"The counter moved {counter['updates']} times in {counter['readings']} readings, every "
            f"{counter['period_ms_median']:.1f} ms (5 to 95 %: {counter['period_ms_p5']:.1f} to "
            f"{counter['period_ms_p95']:.1f}), each time known within ±{counter['known_within_ms_median']:.1f} ms."
        )
    lines += [
        "",
        "Integral over counter, minus 1:",
        "",
        "| wave | counter read | span | " + " | ".join(names) + " |",
        "|" + "---|" * (3 + len(names)),
    ]
    for wave in found["waves"]:
        for how, errors in wave["errors"].items():
            cells = [f"{wave['period_s']:g} s", how, f"{errors['span_s']:.1f} s"]
            lines.append("| " + " | ".join([*cells, *(f"{errors[name]:+.2%}" for name in names)]) + " |")
    if "updates_fit" not in found:
        return [*lines, "", "The counter's own updates were not seen: its polling process gave nothing.", ""]
    fitted = found["updates_fit"]
    lines += [
        "",
        f"Every one of {fitted['pairs']} updates inside waves, {fitted['mean_rise_j']:.1f} J each, told by the ring:",
        "",
        "| rule | counter is late by | left, root mean square | integral over counter |",
        "|---|---|---|---|",
    ]
    for name, best in fitted.items():
        if isinstance(best, dict):
            title = f"{name} = {best['share']:.1f}" if "share" in best else name
            slope = f"{best['slope']:.4f}" if "slope" in best else ""
            lines.append(f"| {title} | {best['delay_ms']:.0f} ms | {best['left_j']:.2f} J | {slope} |")
    how = "updates, inside"
    worst = {
        name: max((abs(w["errors"][how][name]) for w in found["waves"] if how in w["errors"]), default=None)
        for name in names
    }
    met = [name for name, error in worst.items() if error is not None and error <= ENERGY_WITHIN_FRAC]
    verdict = ", ".join(met) if met else "none"
    return [*lines, "", f"Within {ENERGY_WITHIN_FRAC:.1%} on every wave, between updates inside it: {verdict}.", ""]


def main() -> None:
    """Measures, or reads what was measured; prints a text or one JSON object, and keeps everything in `--out`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=12.0, help="length of a wave")
    parser.add_argument("--redo", type=Path, help="a folder that --out made")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    parser.add_argument("--out", type=Path, help="where readings and figures go")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder: Path = given.redo or given.out or Path(scratch)
        if given.redo is None:
            folder.mkdir(parents=True, exist_ok=True)
            record(folder, given.seconds)
            # What was read is worth more than what is made of it here.
            size_mb = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
            print(f"recorded: {size_mb:.1f} MB", file=sys.stderr, flush=True)
        found = analyse(folder)
        lines = told(found)
        print(json.dumps(found) if given.json else "\n".join(lines), flush=True)
        if given.out:
            (given.out / "telemetry_energy.md").write_text("\n".join(lines))
            (given.out / "telemetry_energy.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
