"""Estimates: finite for all that is kept, the same in any order, each inside its interval, never without a source."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from specs import trial_spec

from wattune.catalog.hardware import DEVICES
from wattune.cost.batch import batches
from wattune.cost.defaults import default_coefficients
from wattune.cost.estimate import ESTIMATED, LIMITS, ROWS, estimate, predict
from wattune.cost.power import FULL_FRAC, H200, HELD_FRAC
from wattune.cost.step_time.facts import FACTS
from wattune.cost.tables import FULL_MEMORY_LONGER_FRAC, EstimatedMetric
from wattune.errors import PlanError
from wattune.search.prune import prune
from wattune.search.space import load_space

SPACES = sorted((Path(__file__).parents[3] / "search_spaces").glob("*.yaml"))


def spec(device="h200_sxm", model="llama3_8b", engine="torch", nodes=1, **plan):
    return trial_spec(model, on=f"{nodes}x8 {device}", engine=engine, seq_len=2048, batch=64, **plan)


@pytest.mark.parametrize("path", SPACES, ids=lambda path: path.stem)
def test_every_kept_plan_of_every_shipped_space_has_finite_estimates(path):
    specs = prune(load_space(path)).specs
    found = estimate(specs, default_coefficients)
    assert len(found) == len(specs) > 0
    for name in ESTIMATED:
        column = found.columns[name]
        assert np.isfinite(column.value).all() and np.isfinite(column.low).all() and np.isfinite(column.high).all(), (
            name
        )
        # Ends are kept in single precision.
        assert (column.low <= column.value + 1e-6 * abs(column.value)).all(), name
        assert (column.high >= column.value - 1e-6 * abs(column.value)).all(), name
    positive = [name for name in ESTIMATED if name not in ("memory_headroom_frac", "clock_deficit_frac")]
    assert all((found.columns[name].value > 0).all() for name in positive)


def test_the_order_of_candidates_changes_nothing():
    specs = prune(load_space(next(path for path in SPACES if path.stem == "moe_ep_h200x4"))).specs
    order = list(range(len(specs)))
    random.Random(3).shuffle(order)
    straight, shuffled = (
        estimate(specs, default_coefficients),
        estimate([specs[i] for i in order], default_coefficients),
    )
    for name in ESTIMATED:
        np.testing.assert_allclose(shuffled.columns[name].value, straight.columns[name].value[order], rtol=1e-12)
    assert (shuffled.limited_by == straight.limited_by[order]).all() and (shuffled.stage == straight.stage[order]).all()


def test_figures_agree_with_each_other():
    found = estimate([spec(tp=2), spec(pp=2, micro_batch_size=2)], default_coefficients)
    value = {name: column.value for name, column in found.columns.items()}
    np.testing.assert_allclose(value["tokens_per_s"] * value["step_time_s"], 2048 * 64)
    np.testing.assert_allclose(value["tokens_per_s_per_device"] * 8, value["tokens_per_s"])
    np.testing.assert_allclose(
        value["energy_per_token_j"] * value["tokens_per_s"], 8 * value["device_power_mean_w"], rtol=1e-6
    )
    np.testing.assert_allclose(sum(found.memory_parts_bytes.values()), value["memory_peak_bytes"], rtol=1e-5)
    assert {LIMITS[place] for place in found.limited_by} <= set(LIMITS)


def test_less_trusted_sources_have_wider_intervals():
    def width(device):
        (column,) = (estimate([spec(device, sharding="zero3")], default_coefficients).columns["step_time_s"],)
        return float((column.high - column.low)[0] / column.value[0])

    assert default_coefficients(spec("b200_sxm").cluster.sensed_device).origin == "datasheet"
    assert width("b200_sxm") > width("h100_sxm")


@pytest.mark.parametrize("device", ["h100_sxm", "h100_pcie", "h100_nvl", "b200_sxm", "mi250_gcd", "mi300x"])
def test_devices_nobody_here_has_are_estimated(device):
    found = estimate([spec(device, nodes=2, tp=8)], default_coefficients)
    assert all(np.isfinite(found.columns[name].value).all() for name in ESTIMATED)


def test_more_candidates_than_are_predicted_at_once_are_predicted_as_one_is():
    found = estimate([spec("h200_sxm")] * (ROWS + 3), default_coefficients)
    assert len(found) == ROWS + 3
    for name, column in found.columns.items():
        assert len(set(column.value.tolist())) == 1, name


def test_a_device_without_peaks_is_refused_with_a_remedy():
    with pytest.raises(PlanError, match=r'"cpu" has no estimates.*simulate_sensors_of'):
        estimate([spec("cpu")], default_coefficients)


def under(**settings):
    """Step time, mean power, energy a token, lost clock and its interval of one plan, at each limit or locked clock."""
    count = len(next(iter(settings.values())))
    ((_, batch),) = batches([spec("h200_sxm", model="llama3_8b", micro_batch_size=4)] * count)
    batch = replace(batch, **{name: np.array(values, float) for name, values in settings.items()})
    found = predict(batch, default_coefficients(batch.device))
    drawn = found.power
    return (
        found.step.step_time_s,
        *(drawn[name].value for name in ("device_power_mean_w", "energy_per_token_j", "clock_deficit_frac")),
        found.step.error_frac,
    )


def test_fewer_watts_are_never_faster_and_are_kept():
    limits_w = [1000, 700, 600, 500, 400, 300]
    step_s, mean_w, energy_j, lost, error_frac = under(limit_w=limits_w)
    assert (np.diff(step_s) > 0).all() and (np.diff(energy_j) < 0).all() and (np.diff(lost) > 0).all()
    assert (mean_w <= 0.99 * np.array(limits_w) + 1e-6).all()
    assert error_frac[0] == error_frac[1] and (np.diff(error_frac[1:]) > 0).all()


def test_a_locked_clock_stretches_products_and_saves_watts_where_it_binds():
    free, high, low, lower = (np.array(each) for each in zip(*under(clock_mhz=[np.inf, 1975, 1200, 900]), strict=True))
    np.testing.assert_allclose(high, free)  # the limit of 700 W leaves less than that
    assert free[0] < low[0] < lower[0] < free[0] * 1975 / 900 and free[1] > low[1] > lower[1]


def test_a_power_profile_widens_what_it_may_change_and_nothing_else():
    """NVIDIA says up to 3 % of speed and 15 % of energy; which profile does what to a plan, nobody said."""
    found = estimate([spec("b200_sxm"), spec("b200_sxm", power_profile="max_q")], default_coefficients).columns
    for name, column in found.items():
        low, high = column.low / column.value, column.high / column.value
        assert column.value[0] == column.value[1] > 0, name
        if "memory" in name or "temp" in name:
            assert low[0] == low[1] and high[0] == high[1], name
        else:
            assert low[1] < low[0] and high[1] >= high[0], name  # no power is above what a limit holds
    step, energy = (found[name].high / found[name].value for name in ("step_time_s", "energy_per_token_j"))
    assert step[1] - step[0] == pytest.approx(0.03, abs=1e-5) and energy[1] - energy[0] == pytest.approx(0.15, abs=1e-5)


def test_a_board_with_a_lower_limit_is_its_chip_under_that_limit():
    h200 = DEVICES["h200_sxm"]
    board = replace(h200, name="ours", power_limit_w=500.0, source="like h200_sxm")
    assert default_coefficients(board).power.limit_w == 700.0
    assert default_coefficients(board).power.matrix_w == default_coefficients(h200).power.matrix_w
    other = replace(board, peak_bf16_flop_per_s=8e14)
    assert default_coefficients(other).origin == "datasheet"


def test_one_candidate_as_plain_data_and_all_as_arrow():
    found = estimate([spec(), spec(tp=2)], default_coefficients)
    one = found.one(1)
    assert one.keys() == set(ESTIMATED) and one["step_time_s"].keys() == {"value", "low", "high"}
    table = found.table()
    assert table.num_rows == 2 and all(name.startswith("estimate.") for name in table.column_names)
    assert table["estimate.step_time_s"][1].as_py() == one["step_time_s"]["value"]
    turned = found.take(np.array([1, 0]))
    assert turned.one(0) == one and turned.one(1) == found.one(0)


def test_the_limit_ends_what_a_second_may_draw():
    """A plan that fills the limit is surer than one below it: what its steps wait longer comes back as clock."""
    found = estimate([spec(micro_batch_size=4, sharding="zero1"), spec(tp=8)], default_coefficients).columns
    for name, devices in (
        ("device_power_mean_w", 1),
        ("device_power_peak_1s_w", 1),
        ("node_device_power_peak_1s_w", 8),
    ):
        assert (found[name].high <= np.maximum(found[name].value, HELD_FRAC * 700 * devices) * (1 + 1e-6)).all()
    assert found["device_power_peak_20ms_w"].high.max() > HELD_FRAC * 700
    peak = found["device_power_peak_1s_w"]
    assert peak.value[0] >= FULL_FRAC * 700 > peak.value[1]
    below = 1 - peak.low / peak.value
    assert below[0] == pytest.approx(H200.full_peak_error_frac, rel=1e-4) and below[1] > H200.peak_error_frac


def test_the_probability_to_be_above_a_bound_follows_the_interval():
    column = EstimatedMetric(
        value=np.array([100.0]), low=np.array([90.0], np.float32), high=np.array([110.0], np.float32)
    )
    assert column.probability_above(100.0)[0] == pytest.approx(0.5)
    assert column.probability_above(110.0)[0] == pytest.approx(0.025, abs=1e-4)
    assert column.probability_above(90.0)[0] == pytest.approx(0.975, abs=1e-4)


def test_a_device_that_is_nearly_full_may_take_longer_and_draw_less():
    """Of plans that differ in what they store alone; nothing tells whether the allocator finds room."""
    specs = prune(load_space(next(path for path in SPACES if path.stem == "moe_ep_h200x4"))).specs
    found = estimate(specs, default_coefficients)
    step, mean = found.columns["step_time_s"], found.columns["device_power_mean_w"]
    full = found.columns["memory_headroom_frac"].value <= 1 - FACTS["torch"].full_memory_frac
    assert full.any() and not full.all()
    assert ((step.high / step.value)[full] >= 1 + FULL_MEMORY_LONGER_FRAC - 1e-6).all()
    lower = (1 - mean.low / mean.value)[full], (1 - mean.low / mean.value)[~full]
    assert np.median(lower[0]) > 1.2 * np.median(lower[1])
