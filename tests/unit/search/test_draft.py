"""First spaces: each plans as it stands, names its schema, and says what was cut."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from wattune.catalog.huggingface import read_config
from wattune.catalog.models import MODELS, model
from wattune.errors import PlanError, SpaceError
from wattune.plans.engines import CAPABILITIES
from wattune.search.draft import MOST_TRIALS, check_bound, draft, planned
from wattune.search.reference import json_schema
from wattune.search.space import parse_space

CLUSTERS = ("1x2 cpu", "1x4 h200_sxm", "1x8 h100_sxm", "2x8 mi300x", "4x8 b200_sxm", "1x1 h200_sxm", "18x4 gb200")


def written(**wishes: object) -> str:
    made: dict[str, Any] = {"study": "first", "model": "llama3_8b", "cluster": "1x4 h200_sxm", **wishes}
    return draft(model(made["model"]), **made, schema="space.schema.json")


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


@pytest.mark.parametrize("name", ["on", "null", "1e3", "1E3", "007", "0x1F", "0o17", "1.5", "2024-01-01", "y", "x"])
def test_a_name_is_read_back_as_it_is(name: str) -> None:
    """Also by the YAML 1.2 of editors, to whom 1e3 and 0o17 are numbers."""
    text = written(study=name)
    assert parse_space(yaml.safe_load(text)).name == name
    line = next(one for one in text.splitlines() if one.startswith("study: "))
    assert (line[7] in "\"'") == (name != "x")


@pytest.mark.parametrize("max_positions", [32, 1024])
def test_learned_positions_are_those_of_the_model_on_processors_too(tmp_path: Path, max_positions: int) -> None:
    config = {"model_type": "gpt2", "n_positions": max_positions}
    (tmp_path / "config.json").write_text(json.dumps(config))
    full = read_config(tmp_path / "config.json", "1e3")
    told = {"study": "first", "model": "1e3", "cluster": "1x2 cpu", "from_config": "config.json"}
    text = draft(full, **told, schema="space.schema.json")
    assert "name: '1e3'" in text or 'name: "1e3"' in text
    assert planned(text, tmp_path).kept
    study = parse_space(yaml.safe_load(text), folder=tmp_path)
    (trained,), (workload,) = study.models, study.workloads
    assert (trained.positions, trained.max_positions) == ("learned", max_positions)
    assert workload.seq_len == min(128, max_positions)
