"""The map of the slots: what is planted is found, and what cannot be told is said."""

import numpy as np
import pytest

from wattune.errors import PlanError
from wattune.placement.slots import SlotMap, SlotReading, fit_map

SLOWNESS = {0: 1.0, 1: 1.1, 2: 0.98, 3: 1.02}


def readings(num_runs=8, *, noise=1e-4, turn=1, drift=0.0, chips=lambda _, slot: f"c{slot}", heat=None, seed=3, **more):
    """Four stages, turned over four slots by `turn` from run to run."""
    draw, found = np.random.default_rng(seed), []
    for run in range(num_runs):
        power_w = draw.uniform(300, 700, 4)
        for stage in range(4):
            slot = (stage + run * turn) % 4
            slow = SLOWNESS[slot] * (1 + drift * run * (slot == 1)) * np.exp(draw.normal(0, noise))
            found.append(
                SlotReading(
                    run=f"r{run}", device=("a", slot, chips(run, slot)), work=("t", stage), at_s=3600.0 * run,
                    time_s=0.1 * (1 + 0.3 * stage) * slow,
                    temp_c=None if heat is None else float(heat[slot] @ np.array([1.0, *power_w])),
                    power_w=None if heat is None else float(power_w[slot]),
                    **more,
                )
            )  # fmt: skip
    return found


def slower(found: SlotMap, row: int) -> tuple[float, float]:
    return found.rows[row]["slower_frac"], found.rows[row]["slower_half_frac"]


def told(found: SlotMap, part: str) -> list[str]:
    return [one for one in found.notes if part in one]


def test_a_turned_trial_tells_slow_devices_from_large_stages() -> None:
    found = fit_map(readings(noise=0.002))
    assert {one["group"] for one in found.rows} == {0} and not told(found, "drift") and not told(found, "look alike")
    for slot, slowness in SLOWNESS.items():
        value, half = slower(found, slot)
        others = np.mean([one for number, one in SLOWNESS.items() if number != slot])
        assert value == pytest.approx(slowness / others - 1, abs=2 * half) and 0 < half < 0.01
    stages = found.work_s[0] / found.work_s[0, 0]
    assert stages == pytest.approx(1 + 0.3 * np.arange(4), rel=0.01)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    inside = []
    for seed in range(200):
        draw = np.random.default_rng(seed)
        noisy = [
            SlotReading(run=f"{run}", device=("a", (rank + run) % 2, ""), work=("t", rank), at_s=run,
                        time_s=(1.0 + rank) * (1 + 0.05 * ((rank + run) % 2)) * np.exp(draw.normal(0, 0.01)))
            for run in range(4) for rank in range(2)
        ]  # fmt: skip
        value, half = slower(fit_map(noisy, seed), 1)
        inside.append(abs(value - 0.05) <= half)
    assert 0.88 <= np.mean(inside) <= 0.99


def test_one_run_a_slot_says_that_chip_and_stage_look_alike() -> None:
    found = fit_map(readings(turn=0))
    assert told(found, "look alike") and len({one["group"] for one in found.rows}) == 4
    assert "slower_frac" not in found.rows[0]
    assert told(fit_map(readings(1)), "not known") and fit_map(readings(1)).degrees == 0
    with pytest.raises(PlanError, match="no run has the times"):
        fit_map([])


def test_drift_is_flagged_where_it_is() -> None:
    steady = [told(fit_map(readings(8, noise=0.003, seed=seed)), "drift") for seed in range(60)]
    assert sum(map(bool, steady)) <= 1
    assert told(fit_map(readings(24, drift=0.002, noise=3e-4)), "drift: a/1 became")


def test_chips_are_told_from_slots_where_they_were_exchanged() -> None:
    together = fit_map(readings(16))
    assert told(together, "chip and slot are told together")
    moved = fit_map(readings(16, chips=lambda run, slot: f"c{(slot + run // 4) % 4}"))
    (text,) = told(moved, "apart:")
    assert "slot a/1 +7." in text and "chip c1 +0.0%" in text.replace("-0.0%", "+0.0%")


def test_ranks_that_wait_for_each_other_tell_of_the_slowest_alone() -> None:
    apart = readings()
    group_s = 0.2 * SLOWNESS[1]
    joint = [
        SlotReading(run="g", device=("a", slot, f"c{slot}"), work=("g", 0), at_s=9e4, time_s=group_s, alone=False)
        for slot in range(4)
    ]
    found = fit_map([*apart, *joint])
    there_s = found.work_s[0, found.works.index(("g", 0))] * found.slowness[0, 1]
    assert there_s == pytest.approx(group_s, rel=1e-6)
    assert slower(found, 1)[0] == pytest.approx(slower(fit_map(apart), 1)[0], rel=1e-3)


def test_air_and_cooler_of_a_slot_are_found() -> None:
    heat = {slot: np.array([30.0 + slot, 0.01, 0.002, 0.0, 0.005]) for slot in range(4)}
    for slot in range(4):
        heat[slot][1 + slot] = 0.04
    found = fit_map(readings(20, heat=heat))
    assert [one["inlet_c"] for one in found.rows] == pytest.approx([30, 31, 32, 33])
    assert [one["resistance_k_per_w"] for one in found.rows] == pytest.approx([0.04] * 4)
    assert found.rows[2]["coupling_k_per_w"] == pytest.approx({"0": 0.01, "1": 0.002, "3": 0.005})
    assert told(fit_map(readings(3, heat=heat)), "coupling of a/0, a/1, a/2, a/3 cannot be told")


def test_an_inlet_is_told_as_unsure_where_powers_are_nearly_alike() -> None:
    """Two slots, 8 runs at 477 to 483 W: the truth lies inside an interval that is wide."""
    inside = []
    for seed in range(40):
        draw, found = np.random.default_rng(seed), []
        for run in range(8):
            for slot, power_w in enumerate(draw.uniform(477, 483, 2)):
                temp_c = 27.0 + 0.04 * power_w + draw.normal(0, 0.1)
                found.append(
                    SlotReading(f"r{run}", ("a", slot, ""), ("t", slot), run, 1.0, temp_c=temp_c, power_w=power_w)
                )
        rows = fit_map(found, seed).rows
        inside += [abs(one["inlet_c"] - 27.0) < one["inlet_half_k"] for one in rows if "inlet_c" in one]
    assert len(inside) > 60 and np.mean(inside) > 0.9
