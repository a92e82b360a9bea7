"""Settled temperatures from short windows, against what a long run reads: errors, and verdicts on bounds.

Two sources. The worlds have the model's form with other constants; the chassis came into both at once, and the soak was
looked at while the widths were chosen. So neither is a test on cases that nobody had seen:

- worlds: nodes of four devices whose temperature is computed from their power by a ladder of stages. Inlet,
  resistances, time constants, preheating and power differ from the given ones, and so do what ran before and when
  telemetry began. Half of them have air and a chassis that warm over 150 to 600 s, by up to 4 K (10 K) at 700 W.
  Readings are whole degrees, 20 a second. The truth is the hottest reading of a minute, an hour later;
- recorded: 155 s at 691 W on two H200s after rest (`benchmarks/data/temperature/soak_llama_h200x2.parquet`). The truth
  is the hottest second of its last 75 s.

A verdict is asked for every bound within 15 K of the truth, a degree apart, at the risk of 5 %. "readings" judges the
highest reading with a scatter of 1 K, as if it were settled.

Ends with 1 if more than 5 % of the verdicts decided on the settled value are contradicted in any row.
"""

import math
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow.parquet as pq
from harness import Found, Rows, benchmark

from wattune.analysis.metrics.settled import Settled, settle
from wattune.analysis.signals.series import Series, series
from wattune.arrays import Floats
from wattune.cost.coefficients import ThermalCoefficients
from wattune.cost.temperature import H200, lagged, scaled
from wattune.objective import RISK, parse_constraint
from wattune.ranking.bounds import Holds, margins
from wattune.ranking.heat import HOTTEST, SETTLED, UNCERTAINTY
from wattune.ranking.spreads import Spreads
from wattune.run import Numbers, Run, RunStatus
from wattune.schema import DeviceKey

WINDOWS_S: Final = (2.0, 5.0, 15.0, 60.0, 300.0)
LIMIT_W: Final = 700.0
READ_S: Final = 0.05
STEP_S: Final = 0.25
NUM_DEVICES: Final = 4
NEAR_K: Final = 15
MOST_CONTRADICTED_FRAC: Final = 0.05
SOAK: Final = Path(__file__).parent / "data" / "temperature" / "soak_llama_h200x2.parquet"
SOAK_START: Final = 35
"""First second of full power in the recording."""
SOAK_TRUTH: Final = 149

Curves = dict[DeviceKey, tuple[Series, Series]]


@dataclass(frozen=True)
class Case:
    """One run: what is judged, and the truth."""

    found: dict[DeviceKey, Settled]
    read_c: float
    truth_c: float

    @property
    def hottest(self) -> Settled:
        """The device that is predicted to get hottest."""
        return max(self.found.values(), key=lambda one: one.settled_c)


def world(
    rng: np.random.Generator, window_s: float, ladder: ThermalCoefficients, model_error: float, chassis_k: float
) -> Case:
    """Makes one node and runs a plan on it for a window, then for an hour."""
    step_s = STEP_S
    before_s, lead_s = rng.uniform(30.0, 300.0), rng.uniform(2.0, 25.0)
    mean_w = rng.uniform(250.0, 690.0) * rng.normal(1.0, 0.02, NUM_DEVICES)[:, None]
    num_before, num_lead, num_window = (round(each / step_s) for each in (before_s, lead_s, window_s))
    old_w = rng.choice([H200.rest_w, rng.uniform(120.0, 690.0)])
    ready_w = rng.uniform(90.0, 130.0)
    warm_up = round(rng.uniform(1.0, lead_s) / step_s)
    shape = np.concatenate([np.full(num_lead - warm_up, ready_w / mean_w.mean()), np.ones(warm_up + num_window)])
    ripple = 1.0 + rng.uniform(0.0, 0.15) * np.sin(2 * np.pi * np.arange(len(shape)) * step_s / rng.uniform(0.6, 4.0))
    power_w = np.concatenate(
        [np.full((NUM_DEVICES, num_before), old_w), mean_w * shape * np.where(shape == 1.0, ripple, 1.0)], axis=1
    )
    true = (ladder.inlet_c + rng.normal(0.0, 4.0), *np.exp(rng.normal(0.0, model_error, 2)))
    resistances = np.array(ladder.resistances_k_per_w) * (1.0, true[2]) * true[1]
    taus = np.array(ladder.time_constants_s) * np.exp(rng.normal(0.0, 0.2, 2))
    chassis_s, chassis_k_per_w = rng.uniform(150.0, 600.0), rng.choice([0.0, rng.uniform(0.0, chassis_k / LIMIT_W)])
    preheat = rng.uniform(0.2, 1.0, NUM_DEVICES)[:, None] * ladder.preheat_k_per_w
    tau_air = ladder.preheat_time_constant_s * math.exp(rng.normal(0.0, 0.2))

    def temperatures(power: Floats) -> Floats:
        others = (power.sum(0) - power) / (NUM_DEVICES - 1)
        own = sum(r * lagged(power, tau, step_s) for r, tau in zip(resistances, taus, strict=True))
        return np.asarray(
            true[0]
            + own
            + preheat * lagged(others, tau_air, step_s)
            + chassis_k_per_w * lagged(power.mean(0), chassis_s, step_s)
        )

    later = round(3600.0 / step_s)
    going = np.tile(power_w[:, -num_window:], (1, math.ceil(later / num_window)))[:, :later]
    exact = temperatures(np.concatenate([power_w, going], axis=1))
    at_s = (np.arange(exact.shape[1]) + 0.5) * step_s - before_s - lead_s
    read_s = np.arange(-lead_s, window_s, READ_S)
    curves: Curves = {}
    for number in range(NUM_DEVICES):
        value = np.round(np.interp(read_s, at_s, exact[number]) + rng.normal(0.0, 0.3, len(read_s)))
        warm, drawn = series(read_s, value), series(at_s, np.append(power_w[number], going[number]))
        assert warm is not None and drawn is not None
        whole = drawn.clip(-lead_s, window_s)
        assert whole is not None
        curves["n0", f"gpu{number}"] = warm, whole
    last = exact[:, -round(60.0 / step_s) :]
    noise = rng.normal(0.0, 0.3, (NUM_DEVICES, round(60.0 / READ_S)))
    truth_c = float(np.round(np.repeat(last, round(step_s / READ_S), axis=1) + noise).max())
    read_c = max(float(warm.value[warm.time_s >= 0].max()) for warm, _ in curves.values())
    return Case(settle(curves, window_s, ladder, LIMIT_W), read_c, truth_c)


def recorded(window_s: float) -> Iterator[Case]:
    """Cuts windows of a length out of the recorded soak, each with up to 20 s of what was before it."""
    table = pq.read_table(SOAK).sort_by([("device", "ascending"), ("second", "ascending")])
    temp_c, power_w = (table[name].to_numpy().reshape(2, -1).astype(float) for name in ("gpu_temp_c", "power_w"))
    truth_c = float(np.nanmax(temp_c[:, SOAK_TRUTH:]))
    for start in range(SOAK_START, SOAK_TRUTH, 5):
        end, first = start + round(window_s), max(start - 20, 0)
        if end > temp_c.shape[1]:
            break
        at_s = np.arange(first, end) + 0.5 - start
        curves: Curves = {}
        for number in range(2):
            warm, drawn = (series(at_s, each[number, first:end]) for each in (temp_c, power_w))
            assert warm is not None and drawn is not None
            curves["n0", f"gpu{number}"] = warm, drawn
        read_c = float(np.nanmax(temp_c[:, start:end]))
        yield Case(settle(curves, window_s, H200, LIMIT_W), read_c, truth_c)


def verdicts(case: Case, *, settled: bool) -> list[tuple[Holds, bool]]:
    """Judges bounds near the truth: the ranking's verdict on each, and whether the truth keeps it."""
    metrics = {HOTTEST: case.read_c}
    if settled:
        metrics |= {SETTLED: case.hottest.settled_c, UNCERTAINTY: case.hottest.uncertainty_k}
    window = Numbers() if settled else Numbers(window_s=1000.0)
    run = Run(trial_id="t", repeat=0, status=RunStatus.COMPLETED, metrics=metrics, quality="indicative", numbers=window)
    spreads, found = Spreads([(None, run)]), []
    for away in range(-NEAR_K, NEAR_K):
        bound_c = case.truth_c + away + 0.5
        bound = parse_constraint(f"{HOTTEST} <= {bound_c:g}")
        (one,) = margins(bound, [[run]], spreads, risk=RISK, simulated=[False])
        assert one is not None
        found.append((one.verdict, case.truth_c <= bound_c))
    return found


def shares(cases: list[Case], *, settled: bool) -> tuple[float, float]:
    """Returns the share of undecided verdicts, and that of contradicted ones among the decided."""
    said = [one for case in cases for one in verdicts(case, settled=settled)]
    decided = [(verdict is Holds.HOLDS) == kept for verdict, kept in said if verdict is not Holds.UNDECIDED]
    return 1.0 - len(decided) / len(said), 1.0 - sum(decided) / max(len(decided), 1)


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the number of worlds."""
    parser.add_argument("--worlds", type=int, default=200, help="simulated runs in each row")


SOURCES: Final = {"worlds, own fit": (H200, 0.15, 4.0), "worlds, scaled fit": (scaled(LIMIT_W), 0.4, 10.0)}


@benchmark(
    claim="A short window's verdict on a temperature is that of a long one, or none.",
    bar=f"contradicted <= {MOST_CONTRADICTED_FRAC:.0%} of decided in every row",
    options=add_arguments,
)
def main(given: Namespace) -> Found:
    """Judges short windows and compares them with long ones."""
    rows = Rows(
        "source",
        "window_s",
        "num_runs",
        "error_median_k",
        "error_p95_k",
        "half_width_k",
        "covered_frac",
        "undecided_frac",
        "contradicted_frac",
        "readings_undecided_frac",
        "readings_contradicted_frac",
    )
    missed = []
    for number, window_s in enumerate(WINDOWS_S):
        sources = {
            name: [world(np.random.default_rng([number, run]), window_s, *setting) for run in range(given.worlds)]
            for name, setting in SOURCES.items()
        }
        sources["recorded soak, two H200"] = list(recorded(window_s))
        for name, cases in sources.items():
            if not cases:
                continue
            error_k = np.array([case.hottest.settled_c - case.truth_c for case in cases])
            width_k = np.array([case.hottest.uncertainty_k for case in cases])
            undecided, wrong = shares(cases, settled=True)
            rows.add(
                name,
                window_s,
                len(cases),
                *(float(each) for each in np.percentile(np.abs(error_k), (50, 95))),
                float(np.median(width_k)),
                float(np.mean(np.abs(error_k) <= width_k)),
                undecided,
                wrong,
                *shares(cases, settled=False),
            )
            if wrong > MOST_CONTRADICTED_FRAC:
                missed.append(f"{name}, {window_s:g} s: {wrong:.1%} contradicted")
    return Found(rows, missed=missed)


if __name__ == "__main__":
    main()
