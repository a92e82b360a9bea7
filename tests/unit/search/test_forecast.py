"""Forecasts: what cannot fit is rejected with its bytes, the rest is ordered, and risks are said."""

import numpy as np
import pytest

from wattune.cost.coefficients import ORIGINS
from wattune.cost.defaults import default_coefficients
from wattune.objective import parse_constraint, parse_objective
from wattune.search.forecast import FALLBACK, MEMORY_RISK, around_s, forecast
from wattune.search.prune import prune
from wattune.search.space import parse_space
from wattune.trial import Measure


def candidates(**changes):
    return prune(
        parse_space(
            {
                "study": "x",
                "model": {"name": "llama3_70b"},
                "cluster": {"device": "h200_sxm", "num_nodes": 2, "devices_per_node": 8},
                "engine": "torch",
                "workload": {"seq_len": 4096, "global_batch_size": 64},
                "space": {"tp": [1, 2, 8], "pp": [1, 2], "sharding": ["none", "zero3"]},
                "objective": "maximize tokens_per_s",
                **changes,
            }
        )
    )


def foretell(objective="maximize tokens_per_s", bounds=(), **changes):
    return forecast(
        candidates(**changes),
        parse_objective(objective),
        [parse_constraint(one) for one in bounds],
        default_coefficients,
    )


def test_what_cannot_fit_is_rejected_with_its_bytes_by_part():
    all_kept = candidates().kept
    found = foretell()
    assert found.rejected and found.kept and len(found.kept) + len(found.rejected) == len(all_kept)
    for one in found.rejected:
        assert one.rule == "memory" and "h200_sxm leaves a program 148.8 GB" in one.reason and "weights" in one.reason
    whole = [one for one in found.rejected if one.config["tp"] == one.config["pp"] == 1]
    assert {one.config["sharding"] for one in whole} >= {"none"}, "70 billion fp32 weights fit no device"


@pytest.mark.parametrize("objective", ["maximize tokens_per_s", "minimize energy_per_token_j"])
def test_the_best_expectation_comes_first(objective):
    found = foretell(objective)
    values = found.estimates.columns[found.objective.metric].value
    broken = np.array([bool(found.breaks(place)) for place in range(len(found.kept))])
    assert (np.diff(broken.astype(int)) >= 0).all(), "those that are expected to break a bound come last"
    for part in (values[~broken], values[broken]):
        steps = np.diff(part)
        assert (steps <= 0).all() if found.objective.maximize else (steps >= 0).all()


def test_bounds_are_given_with_their_probability():
    bounds = [
        "node_device_power_peak_1s_w <= 1",
        "tokens_per_s >= 1",
        "device_power_peak_1s_w <= 2 * device_power_limit_w",
    ]
    found = foretell(bounds=bounds)
    assert list(found.risks) == [MEMORY_RISK, *(str(parse_constraint(one)) for one in bounds)]
    impossible, certain, twice = (found.risks[str(parse_constraint(one))] for one in bounds)
    assert (impossible > 0.99).all() and (certain < 0.01).all() and (twice < 0.01).all()
    assert next(iter(found.breaks(0))) == "node_device_power_peak_1s_w <= 1"


def test_what_no_estimate_speaks_of_is_said():
    found = foretell("minimize throttle_frac", bounds=["throttle_thermal_frac <= 0.01"])
    assert found.objective == FALLBACK
    assert found.unestimated == ("minimize throttle_frac", "throttle_thermal_frac <= 0.01")


def test_plain_data_keeps_estimates_apart():
    found = foretell(bounds=["device_temp_max_c <= 80"])
    data = found.to_json(top=2)
    assert data["num_kept"] == len(found.kept) and len(data["kept"]) == 2
    one = data["kept"][0]
    assert "metrics" not in one and one["estimate"]["tokens_per_s"]["low"] < one["estimate"]["tokens_per_s"]["high"]
    assert data["sources"][0]["device"] == "h200_sxm" and data["sorted_by"] == "maximize tokens_per_s"
    table = found.table()
    assert table.num_rows == len(found.kept) and table["trial_id"][0].as_py() == one["trial_id"]


def test_every_cluster_names_what_its_estimates_come_from():
    """A measurement in one node says nothing of the network between several."""
    clusters = ["1x8 h200_sxm", "1x4 h200_sxm", "2x8 h200_sxm", "1x8 h100_sxm"]
    own = {"model": {"name": "llama3_8b"}, "space": {"tp": [2, 4], "sharding": ["zero3"]}}
    found = foretell(cluster=clusters, **own)
    assert {one.spec.cluster.label for one in found.kept} == set(clusters)
    origins = {one.clusters: one.coefficients.origins["step time"] for one in found.sources}
    assert origins == {
        ("1x8 h200_sxm", "1x4 h200_sxm"): "measured here",
        ("2x8 h200_sxm",): "published kernels",
        ("1x8 h100_sxm",): "same chip",
    }
    data = found.to_json()
    assert [one["clusters"] for one in data["sources"]] == [list(one) for one in origins]
    for one, kept in zip(data["kept"], found.kept, strict=True):
        (own,) = (source for source in data["sources"] if kept.spec.cluster.label in source["clusters"])
        least = max((own[kind] for kind in ("memory", "step time", "power", "temperature")), key=ORIGINS.index)
        assert one["origin"] == least, "the named origin is that of the numbers"


def test_a_scaled_space_shows_and_orders_the_large_plans():
    model = {"name": "llama3_70b", "scale_to": "1x8", "allow_percent": 60}
    large, small = foretell(), foretell(model=model)
    names = [found.namer()(one.spec.read_as) for found in (large, small) for one in found.kept]
    own = names[len(large.kept) :]
    assert len(own) > 1 and own == [name for name in names[: len(large.kept)] if name in own], "in their order"
    by_name = dict(zip(names[: len(large.kept)], large.estimates.columns["step_time_s"].value, strict=True))
    assert [by_name[name] for name in own] == small.estimates.columns["step_time_s"].value.tolist()
    assert {one["runs_on"] for one in small.to_json()["kept"]} == {"1x8 h200_sxm"}
    assert set(small.table()["cluster"].to_pylist()) == {"2x8 h200_sxm"}


def test_steps_around_the_window_take_as_long_as_a_step_does():
    measure = Measure(warmup_steps=4, profile_steps=2)
    one, two = (around_s(step_s, measure, on_cpu=False) for step_s in (1.0, 2.0))
    assert two == pytest.approx(2 * one) and one >= 2 + 1
