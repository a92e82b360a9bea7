"""A job over its days: goodput in closed form against failures drawn one by one, and how far intervals reach."""

import numpy as np
import pytest
from node_loads import load_of_phases

from wattune.catalog.hardware import parse_cluster_label
from wattune.intervals import Interval
from wattune.projection.cluster_power import NodeLoad
from wattune.projection.operation import (
    DEVICE_HOURS,
    RESTART_S,
    best_work_s,
    down_frac,
    goodput_frac,
    operated,
)

CLUSTER = parse_cluster_label("1024x8 h100_sxm")
LOAD = load_of_phases([(0.5, 5600.0), (0.5, 2400.0)])
"""Of 1 s and 4,000 W."""


def near(value: float, frac: float = 0.0) -> Interval:
    return Interval(value=value, low=value * (1 - frac), high=value * (1 + frac), method="projected", num_runs=1)


FIGURES = {"step_time_s": near(1.2), "node_device_power_mean_w": near(4400.0), "energy_per_token_j": near(2.0)}


def test_a_job_costs_what_its_stops_and_failures_say() -> None:
    found = operated(FIGURES, LOAD, CLUSTER, apart_h=6.0, checkpoint_s=30.0)
    useful = goodput_frac(6 * 3600.0, best_work_s(6 * 3600.0, 30.0), 30.0, RESTART_S)
    assert found["goodput_frac"].value == pytest.approx(useful)
    assert found["cluster_power_mean_w"].value < 1024 * 4400.0
    ratio = found["cluster_power_mean_w"].value / (1024 * 4400.0)
    assert found["energy_per_useful_token_j"].value == pytest.approx(2.0 * ratio / useful)
    assert found["cluster_power_peak_100ms_w"].value == pytest.approx(1024 * 5600 * 1.1, rel=0.01)
    assert found["cluster_line_1_hz"].value == pytest.approx(1 / 1.2, rel=0.01), "the line is at the projected step"


def test_intervals_hold_the_range_of_failures_and_of_the_step() -> None:
    sure = operated(FIGURES, LOAD, CLUSTER, apart_h=None, checkpoint_s=30.0)
    wide = {name: near(one.value, 0.1) for name, one in FIGURES.items()}
    unsure = operated(wide, LOAD, CLUSTER, apart_h=None, checkpoint_s=30.0)
    for apart_h, end in ((29_538, sure["goodput_frac"].low), (82_051, sure["goodput_frac"].high)):
        apart_s = 3600 * apart_h / 8192
        assert goodput_frac(apart_s, best_work_s(apart_s, 30.0), 30.0, RESTART_S) == pytest.approx(end, rel=1e-4)
    for name, one in sure.items():
        assert one.low <= one.value <= one.high, name
        assert unsure[name].low <= one.low * (1 + 1e-9) and one.high <= unsure[name].high * (1 + 1e-9), name
    assert unsure["cluster_power_mean_w"].half_width_frac > 0.09


def test_a_node_s_power_is_that_of_the_highest() -> None:
    low, high = (load_of_phases([(1.0, watts)]).parts_w[0] for watts in (3000.0, 5000.0))
    pair = NodeLoad(parts_w=np.array([low, high]), step_s=1.0, num_nodes=2)
    found = operated(FIGURES, pair, CLUSTER, apart_h=1e6, checkpoint_s=1e-3)
    assert found["cluster_power_mean_w"].value == pytest.approx(1024 * 4400 * 4000 / 5000, rel=1e-3)


def test_without_power_nothing_is_said() -> None:
    figures = {"step_time_s": near(1.2)}
    assert operated(figures, LOAD, CLUSTER, apart_h=None) == {}


def drawn(apart_s: float, work_s: float, save_s: float, restart_s: float) -> tuple[float, float]:
    """Draws failures until 3,000 parts are saved; returns the shares of time of work and of starts."""
    rng = np.random.default_rng(0)
    now = starting = 0.0
    saved, needs_start = 0, False
    while saved < 3000:
        left_s = rng.exponential(apart_s)
        while True:
            take_s = restart_s if needs_start else work_s + save_s
            now += min(take_s, left_s)
            starting += min(take_s, left_s) if needs_start else 0.0
            if left_s < take_s:
                needs_start = True
                break
            left_s -= take_s
            saved += not needs_start
            needs_start = False
    return saved * work_s / now, starting / now


@pytest.mark.parametrize("apart_s", [2000.0, 20_000.0])
def test_closed_form_is_what_drawn_failures_cost(apart_s: float) -> None:
    useful, starting = drawn(apart_s, 1500.0, 60.0, 300.0)
    assert goodput_frac(apart_s, 1500.0, 60.0, 300.0) == pytest.approx(useful, rel=0.04)
    assert down_frac(apart_s, 300.0) == pytest.approx(starting, rel=0.12)


def test_rare_failures_cost_what_the_first_order_says() -> None:
    apart_s, work_s, save_s, restart_s = 1e6, 3600.0, 30.0, 600.0
    first_order = 1 / (1 + restart_s / apart_s + save_s / work_s + work_s / (2 * apart_s))
    assert goodput_frac(apart_s, work_s, save_s, restart_s) == pytest.approx(first_order, rel=1e-4)


@pytest.mark.parametrize("apart_s", [3e3, 3e4, 3e6])
def test_no_other_interval_has_more_goodput(apart_s: float) -> None:
    best = best_work_s(apart_s, 60.0)
    at = [goodput_frac(apart_s, best * k, 60.0, 600.0) for k in np.geomspace(0.2, 5.0, 41)]
    assert goodput_frac(apart_s, best, 60.0, 600.0) >= max(at) * (1 - 2e-3)


def test_published_rates() -> None:
    hours = {name: each / 16_384 for name, each in DEVICE_HOURS.items()}
    assert hours["Llama 3"] == pytest.approx(54 * 24 / 419)
    assert hours["RSC-1"] == pytest.approx(1.8, rel=0.01), "as its authors say of 16,384 devices"


def test_a_job_that_never_gets_to_its_checkpoint_has_no_goodput() -> None:
    assert goodput_frac(1.0, 1e6, 60.0, 600.0) == 0.0
