"""Power coefficients come back from trials that were made of them."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from specs import trial_spec

from wattune.cost.clock import compute_w, working_clock_frac
from wattune.cost.power import ROOM_FRAC, predict
from wattune.fitting.power import (
    FITTED,
    FULL_MATRIX_FRAC,
    FULL_TENSOR_FRAC,
    H200_PRIOR,
    TRIAL_FRAC,
    fit_power,
    has_activity,
    measured_steps,
    with_intervals,
)

TRUE = replace(H200_PRIOR, active_w=110.0, matrix_w=800.0, memory_w=430.0, link_w=60.0, wait_w=70.0, exponent=1.7)
LIMIT_W = 700.0


def row(
    matrix: float, memory: float, collective: float, straggler: float, pp: int = 1, limit_w: float = LIMIT_W
) -> dict[str, Any]:
    """A trial's metrics, without power, from shares of its step."""
    spec = trial_spec("llama3_70b", batch=8, pp=pp)
    work = {"matrix_s": np.array([matrix]), "memory_s": np.array([memory]), "overlapped_s": np.zeros(1)}
    dynamic_w = compute_w(TRUE, **work, matrix_frac=np.full(1, FULL_MATRIX_FRAC))
    clock = working_clock_frac(
        TRUE, dynamic_w, *(np.array([s]) for s in (matrix + memory, collective + straggler)), limit_w
    )[0]
    return {
        "trial_id": spec.trial_id,
        "status": "completed",
        "spec": json.dumps(spec.to_json()),
        "step_time_s": 0.5,
        "compute_frac": matrix + memory,
        "exposed_comm_frac": collective,
        "exposed_comm_dp_frac": collective,
        **{f"exposed_comm_{name}_frac": None for name in ("tp", "pp", "cp", "ep")},
        "straggler_frac": straggler,
        "bubble_frac": 1 - matrix - memory - collective - straggler,
        "tensor_active_frac": matrix * FULL_TENSOR_FRAC,
        "dram_active_frac": TRUE.matrix_memory_frac * matrix + TRUE.memory_frac * memory,
        "nvlink_of_peak_frac": 0.0,
        "clock_deficit_frac": (matrix + memory) * (1 - clock),
    }


def made(limit_w: float, seed: int = 0, waits: float = 1.0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(40):
        matrix, memory, collective, straggler, _ = rng.dirichlet([4, 2, waits, waits, waits])
        rows.append(row(matrix, memory, collective, straggler, limit_w=limit_w))
    for positions, batch, step in measured_steps(rows):
        power = predict(replace(batch, limit_w=np.full(len(batch), limit_w)), step, TRUE)
        for place, watts in zip(positions, power["device_power_mean_w"].value, strict=True):
            rows[place]["device_power_mean_w"] = float(watts)
        for place, watts in zip(positions, power["node_device_power_peak_1s_w"].value, strict=True):
            rows[place]["node_device_power_peak_1s_w"] = float(watts)
    return rows


@pytest.fixture
def trials() -> list[dict[str, Any]]:
    return made(LIMIT_W)


def test_shares_of_a_trial_become_seconds_of_every_stage() -> None:
    rows = [row(0.5, 0.2, 0.1, 0.05, pp=2), row(0.3, 0.3, 0.0, 0.0)]
    ((_, _, step),) = measured_steps(rows)
    assert step.step_time_s == pytest.approx([0.5, 0.5])
    a = step.activity
    assert a.matrix_s == pytest.approx(np.array([[0.25, 0.25], [0.15, 0.15]]))
    assert a.memory_s[:, 0] == pytest.approx([0.1, 0.15])
    assert a.collective_s[:, 0] == pytest.approx([0.05, 0])
    assert step.parts_s["straggler_s"] == pytest.approx([0.025, 0])
    total = a.matrix_s + a.memory_s + a.collective_s + a.idle_s
    assert total == pytest.approx(np.full((2, 2), 0.5))
    assert (a.matrix_frac == FULL_MATRIX_FRAC).all()
    lost = (1 - a.clock_frac[:, 0]) * (a.matrix_s + a.memory_s)[:, 0] / 0.5
    assert lost == pytest.approx([each["clock_deficit_frac"] for each in rows])


def test_memory_traffic_outside_compute_is_work_too() -> None:
    quiet = row(0.3, 0.2, 0.1, 0.0) | {"bubble_frac": 0.1}
    busy = quiet | {"dram_active_frac": quiet["dram_active_frac"] + 0.1 * TRUE.memory_frac}
    ((_, _, step),) = measured_steps([quiet, busy])
    assert np.diff(step.activity.memory_s[:, 0]) == pytest.approx(0.05)
    assert np.diff(step.activity.idle_s[:, 0]) == pytest.approx(-0.05)


def test_a_fit_predicts_trials_that_it_never_saw(trials: list[dict[str, Any]]) -> None:
    found = fit_power(trials[:30], H200_PRIOR, limit_w=LIMIT_W)
    errors, before = [], []
    for positions, batch, step in measured_steps(trials[30:]):
        actual = np.array([trials[30 + place]["device_power_mean_w"] for place in positions])
        for c, each in ((found, errors), (H200_PRIOR, before)):
            each.extend(np.abs(predict(batch, step, c)["device_power_mean_w"].value / actual - 1))
    assert max(errors) < 0.03
    assert np.median(errors) < np.median(before) / 3
    assert found.origin == "measured here" and found.idle_w == H200_PRIOR.idle_w


def test_without_trials_to_tell_the_prior_stays(trials: list[dict[str, Any]]) -> None:
    few = fit_power(trials[:1], H200_PRIOR, limit_w=LIMIT_W)
    for name in FITTED:
        assert getattr(few, name) == pytest.approx(getattr(H200_PRIOR, name), rel=0.35)


def test_intervals_hold_what_no_fit_has_seen() -> None:
    """Of 40 configurations the widest but one counts, peaks that fill the limit apart; repeats count once."""
    random = np.random.default_rng(1)
    mean, peak, full = random.uniform(0.05, 0.1, 40), random.uniform(0.05, 0.1, 40), np.arange(40) % 2 == 0
    room = np.where(full, 0.0, random.uniform(0.025, 0.3, 40))
    of = [str(number) for number in range(40)]
    found = with_intervals(H200_PRIOR, mean, peak, room, of)
    assert found.error_frac == pytest.approx(np.sort(mean)[-2])
    assert found.full_peak_error_frac == pytest.approx(peak[full].max())
    wide = found.full_peak_error_frac + (found.peak_error_frac - found.full_peak_error_frac) * room / ROOM_FRAC
    assert np.all(peak <= wide + 1e-12) and np.isclose(peak, wide)[~full].any(), "as wide as one of them needs"
    again = [np.repeat(each, 2) for each in (mean, peak, room)]
    assert with_intervals(H200_PRIOR, *again, [name for name in of for _ in range(2)]) == found


def test_few_configurations_leave_what_was_believed() -> None:
    needed = np.full(18, 0.05)
    few = with_intervals(H200_PRIOR, needed, needed, 0 * needed, ["a", "b", "c"] * 6)
    assert few == H200_PRIOR
    room = np.where(np.arange(18) < 9, 0.0, 0.1)
    some = with_intervals(H200_PRIOR, needed, needed, room, [str(number) for number in range(18)])
    assert some.full_peak_error_frac is None, "nine configurations say nothing of a class of them"
    assert some.peak_error_frac == pytest.approx(0.05)


def test_no_interval_is_surer_than_trials_scatter() -> None:
    needed = np.zeros(40)
    found = with_intervals(H200_PRIOR, needed, needed, needed + 0.1, [str(number) for number in range(40)])
    assert (found.error_frac, found.peak_error_frac) == (TRIAL_FRAC, TRIAL_FRAC)


def test_a_trial_without_a_metric_says_nothing(trials: list[dict[str, Any]]) -> None:
    assert has_activity(trials[0])
    assert not has_activity(trials[0] | {"dram_active_frac": None})
    assert not has_activity(trials[0] | {"status": "out_of_memory"})
