"""A space planned from Python: from a file, a mapping, or what was planned before."""

from pathlib import Path

import pytest
import yaml

import wattune
from wattune.api import catalog

SPACES = Path(__file__).parents[3] / "search_spaces"


def test_a_file_its_content_and_a_plan_are_one_thing() -> None:
    path = SPACES / "cpu_smoke.yaml"
    planned = wattune.plan(path)
    assert wattune.plan(str(path)) == wattune.plan(yaml.safe_load(path.read_text())) == planned
    assert wattune.plan(planned) is planned
    assert planned.name == "cpu_smoke"
    assert (len(planned.kept), planned.num_trials) == (10, 10)
    assert planned.rejected and all(one.rule and one.reason for one in planned.rejected)
    assert {one.into for one in planned.equivalent} <= {one.trial_id for one in planned.kept}


def test_a_budget_of_trials_and_the_reference_are_in_the_plan() -> None:
    document = yaml.safe_load((SPACES / "cpu_smoke.yaml").read_text())
    ids = [kept.trial_id for kept in wattune.plan(document).kept]
    search = {**document.get("search", {}), "num_trials": 3, "reference": ids[1]}
    planned = wattune.plan({**document, "search": search})
    assert planned.num_trials == 3
    assert planned.reference is not None and planned.reference.trial_id == ids[1]
    assert wattune.plan(document).reference is None
    assert [spec.trial_id for spec in planned.strategy().ask(100)] != []
    lost = wattune.plan({**document, "search": {**search, "reference": "0" * 12}})
    with pytest.raises(wattune.WattuneError, match=r"search\.reference: 000000000000 is none of the 10 trials"):
        _ = lost.reference


@pytest.mark.parametrize(
    ("seconds", "bounds", "said"),
    [
        (1.5, ["node_device_power_peak_1s_w <= 900", "device_power_peak_20ms_w <= 500"], "node_device_power_peak_1s_w"),
        (0.1, ["device_power_peak_100ms_w <= 500", "mfu_frac > 0.1"], "device_power_peak_100ms_w"),
        (2.0, ["node_device_power_peak_1s_w <= 900"], None),
        (0.1, ["device_power_mean_w <= 500"], None),
        (0.1, [], None),
    ],
)
def test_a_window_that_warm_up_may_leave_too_short_for_a_peak_is_said(
    seconds: float, bounds: list[str], said: str | None
) -> None:
    document = yaml.safe_load((SPACES / "cpu_smoke.yaml").read_text())
    document = {**document, "measure": {**document["measure"], "min_seconds": seconds}, "constraints": bounds}
    warnings = wattune.plan(document).warnings
    assert len(warnings) == (said is not None)
    if said is not None:
        assert warnings[0].startswith(f"measure.min_seconds: got {seconds:g}; ") and said in warnings[0]
        assert warnings[0].endswith(f"give {2.0 if '1s' in said else 0.2:g} or more")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"search": {"strategy": "model_guided"}}, ["search.strategy: a command has no analytic estimate"]),
        ({"search": {"strategy": "tpe"}}, []),
        (
            {"objective": "maximize tokens_per_s"},
            ["objective: tokens_per_s is known where the program tells its tokens"],
        ),
        ({"objective": "maximize tokens_per_s", "steps": "transformers"}, []),
        ({"constraints": ["energy_per_token_j <= 1"]}, ["constraints[0]: energy_per_token_j is known where"]),
        ({"objective": "maximize tokens_per_s", "workload": {"seq_len": 8, "global_batch_size": 2}}, []),
    ],
)
def test_what_nobody_knows_of_a_command_is_said(changes: dict[str, object], said: list[str]) -> None:
    document = {
        "study": "own",
        "cluster": {"device": "cpu", "devices_per_node": 2, "simulate_sensors_of": "h200_sxm"},
        "engine": "command",
        "command": "train.py --lr {lr}",
        "flags": {"lr": [1, 2]},
        "objective": "minimize step_time_s",
    }
    warnings = wattune.plan({**document, **changes}).warnings
    assert len(warnings) == len(said) and all(map(str.startswith, warnings, said))


def test_the_catalog_counts_parameters() -> None:
    listed = catalog()
    assert {device["name"] for device in listed["devices"]} >= {"cpu", "h200_sxm"}
    assert all(0 < model["num_active_parameters"] <= model["num_parameters"] for model in listed["models"])
