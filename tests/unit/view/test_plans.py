"""Estimates in a terminal of 80 columns."""

from known_fit import stored_fit
from screen import shown

from wattune.cost.defaults import default_coefficients
from wattune.fitting.store import HoldOut
from wattune.objective import parse_constraint
from wattune.search.forecast import forecast
from wattune.search.prune import prune
from wattune.search.space import parse_space
from wattune.view.plans import fit_view, forecast_view

SPACE = {
    "study": "x",
    "model": {"name": "gpt3_175b"},
    "cluster": {"device": "h200_sxm", "num_nodes": 4, "devices_per_node": 8},
    "engine": "megatron",
    "workload": {"seq_len": 2048, "global_batch_size": 128},
    "space": {"tp": [1, 4, 8], "pp": [4], "sharding": ["zero1"]},
    "objective": "maximize tokens_per_s",
}


def test_every_figure_has_its_interval_and_rows_fit_eighty_columns() -> None:
    space = parse_space(SPACE)
    bounds = [parse_constraint("node_device_power_peak_1s_w <= 1000")]
    found = forecast(prune(space), space.objective, bounds, default_coefficients)
    lines = shown(*forecast_view(found, top=1), width=80).splitlines()
    place = next(number for number, line in enumerate(lines) if line.startswith(found.kept[0].trial_id))
    figures = "\n".join(lines[place + 1 : place + 4])
    assert max(map(len, figures.splitlines())) <= 80
    assert figures.count("±") == 4 and "GiB" in figures and "°C" in figures and "limited by" in figures
    assert "breaks node_device_power_peak_1s_w <= 1000 (" in lines[place + 3]
    text = "\n".join(lines)
    assert "estimated for 4x8 h200_sxm: memory" in text
    assert "pads the vocabulary of gpt3_175b from 50,257" in text
    assert found.rejected and "memory" in text and "weights" in text


def test_a_space_of_limits_shows_the_clock_that_each_takes() -> None:
    limits = {"tp": [8], "pp": [4], "power_limit_w": ["found", 400], "clock_mhz": ["found", 900]}
    space = parse_space(SPACE | {"space": limits})
    found = forecast(prune(space), space.objective, [], default_coefficients)
    shares, text = found.estimates.columns["clock_deficit_frac"].value, shown(*forecast_view(found), width=300)
    assert len(shares) == 4 and all(f"{100 * one:.1f} % ±" in text for one in shares) and "clock lost" in text
    assert shares.min() < 0.3 < shares.max() < 1 - 900 / 1980


def test_sizes_of_the_workload_are_told_apart() -> None:
    space = parse_space(SPACE | {"workload": {"seq_len": [1024, 2048], "global_batch_size": 128}})
    found = forecast(prune(space), space.objective, [], default_coefficients)
    for width in (80, 300):
        text = shown(*forecast_view(found, top=100), width=width)
        for one in found.kept:
            assert f"{one.spec.label} seq{one.spec.workload.seq_len}" in text


def test_a_fit_says_its_error_and_what_would_sharpen_it() -> None:
    fit = stored_fit(
        hold_out={"step_time_s": HoldOut(median_frac=0.031, p95_frac=0.12, num_configurations=10)},
        sharpen=("trials with pp above 1: sends",),
    )
    text = shown(*fit_view(fit), width=80)
    assert "12 trials of 10 configurations" in text and "3.1%" in text and "12.0%" in text
    assert "would sharpen it: trials with pp above 1" in text
