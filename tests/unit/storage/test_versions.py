"""Reading what earlier versions wrote: versions, renamed keys, and keys that came later."""

import re
from typing import Any

import pytest

from wattune.errors import PlanError
from wattune.storage import versions
from wattune.storage.versions import VERSION, check_version, completed_space, upgraded_candidate, upgraded_space


@pytest.mark.parametrize("version", [None, 0, VERSION])
def test_folders_of_this_and_earlier_versions_are_read(version: int | None) -> None:
    check_version(version, "study.yaml")


@pytest.mark.parametrize("version", [VERSION + 1, -1, 1.0, True, False, "1", [1]])
def test_another_version_is_refused_with_its_place_and_the_remedy(version: object) -> None:
    with pytest.raises(PlanError) as caught:
        check_version(version, "mine/study.yaml")
    assert str(caught.value) == (
        f"mine/study.yaml: got version {version}, allowed: up to {VERSION}; read it with the wattune that wrote it, "
        "or install a newer one"
    )
    assert caught.value.exit_code == 2


def test_a_refused_version_is_shown_in_a_line_of_bounded_length() -> None:
    with pytest.raises(PlanError) as caught:
        check_version("9" * 10_000, "study.yaml")
    assert f"got version {'9' * 40}, allowed" in str(caught.value)


def test_renamed_keys_stay_in_their_place() -> None:
    old = {
        "search": {"strategy": "grid", "anchor": "abc", "seed": 0},
        "study": "mine",
        "measure": {"repeats": 1, "anchor_every": 2, "stall_s": 60.0},
    }
    new = upgraded_space(old)
    assert list(new) == ["search", "study", "measure"]
    assert list(new["search"].items()) == [("strategy", "grid"), ("reference", "abc"), ("seed", 0)]
    assert list(new["measure"].items()) == [("repeats", 1), ("reference_every", 2), ("stall_s", 60.0)]
    assert "anchor" in old["search"] and "anchor_every" in old["measure"]  # what was given is left as it was


@pytest.mark.parametrize(
    "space",
    [
        {},
        {"search": None, "measure": []},
        {"search": {"reference": "abc"}, "measure": {"reference_every": 2}},
        {"space": {"anchor": [1]}, "model": {"anchor_every": 2}},
    ],
)
def test_a_space_without_old_keys_is_returned_as_it_is(space: dict[str, Any]) -> None:
    assert upgraded_space(space) == space


def test_a_later_setting_of_measuring_has_its_default() -> None:
    completed = completed_space({"measure": {"repeats": 3}})["measure"]
    assert completed["repeats"] == 3
    assert (completed["reference_every"], completed["stall_s"], completed["profile_steps"]) == (10, 60.0, None)


def test_a_later_field_of_the_workload_has_its_default() -> None:
    given = {"mode": "prefill", "seq_len": 8, "global_batch_size": 2}
    completed = completed_space({"workload": given})["workload"]
    assert completed["mode"] == "prefill"
    assert completed["tokens"] is None and completed["lora"] is None


def test_fields_without_a_default_are_not_made_up() -> None:
    completed = completed_space({"workload": {}, "model": [{}], "cluster": [{}]})
    assert completed["workload"].keys().isdisjoint({"seq_len", "global_batch_size"})
    assert completed["model"][0].keys().isdisjoint({"name", "num_layers"})
    assert completed["cluster"][0].keys().isdisjoint({"device", "devices_per_node"})


def test_every_model_and_cluster_of_a_list_is_completed() -> None:
    space = {"model": [{"name": "a", "bias": True}, {"name": "b"}], "cluster": [{"device": "cpu", "num_nodes": 2}, {}]}
    completed = completed_space(space)
    assert [(each["name"], each["bias"], each["norm"]) for each in completed["model"]] == [
        ("a", True, "rmsnorm"),
        ("b", False, "rmsnorm"),
    ]
    assert [each["num_nodes"] for each in completed["cluster"]] == [2, 1]
    assert not any("source" in each for each in completed["model"])  # the origin of numbers is not a setting


def test_a_later_axis_has_its_neutral_value_as_a_file_writes_it() -> None:
    axes = completed_space({"space": {"tp": [1, 2]}})["space"]
    assert axes["tp"] == [1, 2]
    assert (axes["pp"], axes["sharding"], axes["layout"], axes["rank_order"]) == ([1], ["none"], ["even"], ["topology"])
    assert axes.keys().isdisjoint({"etp", "dtype"})  # they follow from the rest


def test_keys_that_are_there_keep_their_order_and_later_ones_follow() -> None:
    completed = completed_space({"space": {"pp": [1], "tp": [2]}, "measure": {"stall_s": 9.0, "repeats": 3}})
    assert list(completed) == ["space", "measure"]
    assert list(completed["space"])[:2] == ["pp", "tp"]
    assert list(completed["measure"])[:2] == ["stall_s", "repeats"]


def test_sections_of_another_kind_are_left_for_a_later_check() -> None:
    space = {"measure": None, "workload": "pretrain", "model": ["llama", 3], "space": [1], "search": "grid"}
    assert completed_space(space) == space


def test_a_completed_space_stays_as_it_is() -> None:
    once = completed_space({"measure": {}, "workload": {}, "model": [{}], "cluster": [{}], "space": {}})
    assert completed_space(once) == once


def test_later_keys_outside_of_classes_come_from_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    added = {"search.patience": 3, "limits.rack_power_w": None, "placement": "packed", "workload.lora.alpha": 1.0}
    monkeypatch.setattr(versions, "ADDED", {**added, "model.window": 0})
    space = {"search": {"seed": 7}, "limits": {}, "workload": {"lora": {"rank": 4}}, "model": [{"window": 9}, {}]}
    completed = completed_space(space)
    assert completed["search"] == {"seed": 7, "patience": 3}
    assert completed["limits"] == {"rack_power_w": None}
    assert completed["placement"] == "packed"
    assert completed["workload"]["lora"] == {"rank": 4, "alpha": 1.0}
    assert [each["window"] for each in completed["model"]] == [9, 0]
    assert space["search"] == {"seed": 7} and space["workload"] == {"lora": {"rank": 4}}


@pytest.mark.parametrize("space", [{}, {"search": None}, {"search": "grid"}, {"search": ["grid"]}])
def test_the_table_makes_no_section(space: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "ADDED", {"search.patience": 3})
    assert completed_space(space) == space


def test_every_line_of_the_table_is_a_path() -> None:
    assert [path for path in versions.ADDED if not re.fullmatch(r"[a-z_]+(\.[a-z_]+)*", path)] == []


@pytest.mark.parametrize(
    ("status", "today"), [("folded", "equivalent"), ("kept", "kept"), ("equivalent", "equivalent"), (None, None)]
)
def test_a_candidate_is_read_in_todays_words(status: str | None, today: str | None) -> None:
    row = {"trial_id": "abc", "status": status, "reason": "folded"}
    assert upgraded_candidate(row) == {"trial_id": "abc", "status": today, "reason": "folded"}
    assert row["status"] == status


def test_a_candidate_without_a_status_stays_without() -> None:
    assert upgraded_candidate({"trial_id": "abc"}) == {"trial_id": "abc"}
