"""First spaces: each plans as it stands, names its schema, and says what was cut."""

from pathlib import Path

import jsonschema
import pytest
import yaml

from wattune.catalog.models import MODELS, model
from wattune.errors import PlanError, SpaceError
from wattune.plan.engines import CAPABILITIES
from wattune.search.draft import MOST_TRIALS, Wishes, check_bound, draft, planned
from wattune.search.reference import json_schema
from wattune.search.space import parse_space

CLUSTERS = ("1x2 cpu", "1x4 h200_sxm", "1x8 h100_sxm", "2x8 mi300x", "4x8 b200_sxm", "1x1 h200_sxm", "18x4 gb200")


def written(**wishes: object) -> str:
    made = Wishes(**{"study": "first", "model": "llama3_8b", "cluster": "1x4 h200_sxm", **wishes})  # type: ignore[arg-type]
    return draft(made, model(made.model), schema="space.schema.json")


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_a_space_that_plans(name: str, cluster: str) -> None:
    try:
        text = written(model=name, cluster=cluster)
    except PlanError as error:
        assert "not one layer" in str(error) and cluster == "1x1 h200_sxm"
        return
    study = parse_space(yaml.safe_load(text))
    assert planned(text, Path()).kept and study.num_combinations < 2000
    assert study.search.num_trials == MOST_TRIALS


@pytest.mark.parametrize("cluster", ["1x3 cpu", "1x5 h200_sxm", "1x6 h200_sxm", "3x1 mi300x", "1x7 cpu"])
def test_a_number_of_devices_that_is_no_power_of_two_has_a_space_that_plans(cluster: str) -> None:
    text = written(cluster=cluster)
    assert planned(text, Path()).kept
    assert parse_space(yaml.safe_load(text)).document["workload"]["global_batch_size"] >= 16


@pytest.mark.parametrize("engine", CAPABILITIES)
def test_every_engine_has_a_space_without_settings_that_it_lacks(engine: str) -> None:
    candidates = planned(written(engine=engine), Path())
    assert candidates.kept
    assert "engine_sharding" not in candidates.rejected_by_rule() and candidates.rejected_by_rule()["engine"] == 0


def test_a_draft_says_what_was_cut_and_names_its_schema() -> None:
    text = written(model="llama3_70b")
    assert text.startswith("# yaml-language-server: $schema=space.schema.json\n")
    assert "16 of its 80 layers fit" in text and "2,800 W together" in text
    jsonschema.validate(yaml.safe_load(text), json_schema())


def test_bounds_and_objective_are_those_that_were_asked_for() -> None:
    text = written(bounds=("node_device_power_peak_1s_w <= 2600",), objective="minimize energy_per_token_j")
    study = parse_space(yaml.safe_load(text))
    assert [str(one) for one in study.constraints] == ["node_device_power_peak_1s_w <= 2600"]
    assert str(study.objective) == "minimize energy_per_token_j"


@pytest.mark.parametrize("cluster", ["1x4 h200_sxm", "1x4 cpu"])
def test_a_bound_is_checked_against_the_cluster(cluster: str) -> None:
    assert check_bound("node_device_power_peak_1s_w<=2600", cluster) == "node_device_power_peak_1s_w <= 2600"
    with pytest.raises(PlanError, match=r"for 2\.6 kW write 2600"):
        check_bound("node_device_power_peak_1s_w <= 2.6", cluster)
    with pytest.raises(SpaceError, match="drop the unit"):
        check_bound("node_device_power_peak_1s_w <= 2600 W", cluster)
