"""Goodput in closed form, against failures drawn one by one."""

import numpy as np
import pytest

from wattune.projection.failures import (
    DEVICE_HOURS,
    best_work_s,
    down_frac,
    failures_apart_s,
    goodput_frac,
)


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
    assert failures_apart_s(16_384, DEVICE_HOURS["Llama 3"]) == pytest.approx(54 * 86_400 / 419)
    assert failures_apart_s(16_384, DEVICE_HOURS["RSC-1"]) == pytest.approx(1.8 * 3600, rel=0.01)


def test_a_job_that_never_gets_to_its_checkpoint_has_no_goodput() -> None:
    assert goodput_frac(1.0, 1e6, 60.0, 600.0) == 0.0
