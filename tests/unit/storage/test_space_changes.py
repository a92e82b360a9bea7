"""Spaces that a study may go on with, and those it may not: one line with key, stored value, given value and remedy."""

from typing import Any

import pytest

from wattune.search.space import parse_space
from wattune.storage.space_changes import changes, completed_space, contradictions

MODEL = {"name": "llama3_8b", "num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2}
SPACE: dict[str, Any] = {
    "study": "x",
    "model": [MODEL],
    "cluster": [{"device": "h200_sxm", "devices_per_node": 4}],
    "engine": ["torch"],
    "workload": {"seq_len": 128, "global_batch_size": 16},
    "space": {"tp": [1, 2]},
    "objective": "maximize tokens_per_s",
    "constraints": ["node_device_power_peak_1s_w <= 2600"],
}


def document(**changed: Any) -> dict[str, Any]:
    return dict(parse_space({**SPACE, **changed}).document)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"objective": "minimize step_time_s"}, "objective: maximize tokens_per_s -> minimize step_time_s"),
        ({"constraints": []}, "constraints: drops node_device_power_peak_1s_w <= 2600"),
        ({"limits": {"node_device_power_w": 2800}}, "limits.node_device_power_w: nothing -> 2800.0"),
        ({"search": {"seed": 7}}, "search.seed: 0 -> 7"),
        ({"measure": {"repeats": 3}}, "measure.repeats: 1 -> 3"),
        ({"measure": {"min_seconds": 60}}, "measure.min_seconds: 15.0 -> 60.0"),
        ({"isolation": "fresh"}, "isolation: warm -> fresh"),
        ({"space": {"tp": [2, 4]}}, "space.tp: adds 4 and drops 1"),
        ({"space": {"tp": [2, 1]}}, "space.tp: in another order"),
        ({"space": {"tp": [1, 2], "pp": [1, 2]}}, "space.pp: adds 2"),
        ({"engine": ["torch", "megatron"]}, "engine: adds megatron"),
        ({"model": [MODEL, {"name": "gpt3_175b"}]}, "model: adds gpt3_175b"),
        ({"model": [MODEL, {**MODEL, "num_layers": 4}]}, "model: adds llama3_8b"),
        (
            {"cluster": [*SPACE["cluster"], {"device": "h200_sxm", "devices_per_node": 8}]},
            "cluster: adds device=h200_sxm, num_nodes=1, devices_per_node=8, transformer_engine=False, host_speed=1.0",
        ),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_what_leaves_results_true_may_change_and_is_told(changed: dict[str, Any], line: str) -> None:
    stored, given = document(), document(**changed)
    assert contradictions(stored, given) == []
    assert changes(stored, given) == [line]
    assert contradictions(given, stored) == [], "and back"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"workload": {"seq_len": 256, "global_batch_size": 16}},
            "workload.seq_len: stored 128, given 256; results of",
        ),
        (
            {"cluster": [{"device": "h200_sxm", "devices_per_node": 8}]},
            "cluster.devices_per_node: stored 4, given 8; keep a stored cluster and add this one as another entry, or",
        ),
        (
            {"model": [{**MODEL, "num_layers": 4}]},
            "model llama3_8b.num_layers: stored 2, given 4; a name keeps its meaning: keep the stored model and add",
        ),
    ],
    ids=("workload", "cluster", "model"),
)
def test_what_contradicts_results_is_named_with_both_values_and_the_remedy(changed: dict[str, Any], said: str) -> None:
    (found,) = contradictions(document(), document(**changed))
    assert str(found).startswith(said)
    assert str(found).endswith("give the study another name")


def test_a_list_of_sizes_may_gain_values_while_one_stays() -> None:
    grown = {**document(), "workload": {**document()["workload"], "seq_len": [128, 256]}}
    other = {**document(), "workload": {**document()["workload"], "seq_len": [256, 512]}}
    assert contradictions(document(), grown) == []
    assert [one.partition(":")[0] for one in contradictions(document(), other)] == ["workload.seq_len"]


def test_a_study_of_an_own_device_goes_on_where_its_peak_in_fp8_became_known() -> None:
    cluster = {"device": {"name": "h200_500w", "like": "h200_sxm", "power_limit_w": 500}, "devices_per_node": 4}
    now = document(cluster=cluster)
    (stored,) = now["cluster"]
    before = now | {"cluster": [stored | {"device": dict(stored["device"])}]}
    assert before["cluster"][0]["device"].pop("peak_fp8_flop_per_s") > 0
    assert contradictions(before, now) == changes(before, now) == []
    other = document(cluster=cluster | {"device": cluster["device"] | {"power_limit_w": 400}})  # type: ignore[operator]
    assert [one.partition(":")[0] for one in contradictions(before, other)] == ["cluster.device.power_limit_w"]


def test_a_key_that_nobody_knows_is_refused_until_it_has_a_value_for_old_studies() -> None:
    (found,) = contradictions(document(), {**document(), "cooling": "air"})
    assert str(found) == "cooling: stored nothing, given air; restore it, or give the study another name"


def test_later_settings_and_axes_have_their_defaults_as_a_file_writes_them() -> None:
    found = completed_space({"measure": {"repeats": 3}, "workload": {"mode": "prefill"}, "space": {"tp": [1, 2]}})
    assert found["measure"].items() >= {"repeats": 3, "reference_every": 10, "stall_s": 60.0}.items()
    assert found["measure"]["profile_steps"] is None
    assert found["workload"].items() >= {"mode": "prefill", "tokens": None, "lora": None}.items()
    axes = {"tp": [1, 2], "pp": [1], "sharding": ["none"], "layout": ["even"], "rank_order": ["topology"]}
    assert found["space"].items() >= axes.items()
    assert found["space"].keys().isdisjoint({"etp", "dtype"})  # they follow from the rest


def test_every_model_and_cluster_of_a_list_is_completed() -> None:
    space = {"model": [{"name": "a", "bias": True}, {"name": "b"}], "cluster": [{"device": "cpu", "num_nodes": 2}, {}]}
    completed = completed_space(space)
    assert [(each["name"], each["bias"], each["norm"]) for each in completed["model"]] == [
        ("a", True, "rmsnorm"),
        ("b", False, "rmsnorm"),
    ]
    assert [each["num_nodes"] for each in completed["cluster"]] == [2, 1]
    assert not any("source" in each for each in completed["model"])  # the origin of numbers is not a setting


def test_sections_of_another_kind_are_left_for_a_later_check() -> None:
    space = {"measure": None, "workload": "pretrain", "model": ["llama", 3], "space": [1], "search": "grid"}
    assert completed_space(space) == space
