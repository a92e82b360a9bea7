"""Plans in mind: a list of them in a space, alone or crossed with it."""

import json
import re

import pytest
import yaml

import wattune
from wattune.errors import SpaceError
from wattune.search.names import namer
from wattune.search.prune import prune
from wattune.search.space import parse_space
from wattune.storage.space_changes import changes, contradictions
from wattune.tracking.view import dimensions

BUILT_IN = {
    "study": "two_plans",
    "model": "llama3_8b",
    "cluster": "1x8 h200_sxm",
    "engine": "megatron",
    "workload": {"seq_len": 4096, "global_batch_size": 32},
    "objective": "maximize tokens_per_s",
}
COMMAND = {
    "study": "two_plans",
    "cluster": "1x8 h200_sxm",
    "engine": "command",
    "command": "torchrun train.py --tp {tp} --pp {pp} --algo {algo}",
    "objective": "minimize step_time_s",
}
TWO = [{"tp": 8, "pp": 1}, {"tp": 4, "pp": 2}]


def kept(document):
    study = parse_space(document)
    assert parse_space(json.loads(json.dumps(study.document))).document == study.document
    found = prune(study)
    total = len(found.kept) + len(found.rejected) + len(found.equivalent)
    assert total == study.num_combinations
    return [one.spec for one in found.kept]


def problems(document):
    with pytest.raises(SpaceError) as caught:
        parse_space(document)
    return list(caught.value.problems)


def test_plans_are_crossed_with_the_space_and_speak_before_it():
    axes = {"recompute": ["none", "full"], "micro_batch_size": [1, 2]}
    plans = [{"tp": 8}, {"tp": 4, "pp": 2, "micro_batch_size": 4}]
    specs = kept(BUILT_IN | {"plans": plans, "space": axes, "requires": ["tp == 4 -> recompute == full"]})
    found = {(one.plan.tp, one.plan.pp, one.plan.micro_batch_size, one.plan.recompute) for one in specs}
    assert found == {(8, 1, size, kind) for size in (1, 2) for kind in ("none", "full")} | {(4, 2, 4, "full")}


def test_flags_of_a_plan_stand_in_the_place_of_the_listed_ones():
    plans = [{"tp": 8}, {"tp": 4, "pp": 2, "flags": {"algo": "Tree"}}]
    specs = kept(COMMAND | {"plans": plans, "flags": {"algo": ["Ring", "NVLS"]}})
    found = [(one.plan.tp, one.plan.pp, dict(one.flags)["algo"]) for one in specs]
    assert found == [(8, 1, "Ring"), (8, 1, "NVLS"), (4, 2, "Tree")]
    document = COMMAND | {
        "command": "train.py {how}",
        "plans": [{"flags": {"how": ["--tp", 8]}}, {"flags": {"how": []}}],
    }
    assert [dict(one.flags)["how"] for one in kept(document)] == [("--tp", "8"), ()]


def test_all_mistakes_are_told_in_one_round():
    plans = [{"tp": 8, "tpp": 2}, {"tp": 0}, 3, {"tp": 8, "flags": 1}, {"recompute": "most", "flags": {"tp": 1}}, {}]
    found = problems(BUILT_IN | {"plans": plans, "requires": ["tp <"]})
    for text in (
        'plans[0].tpp: unknown axis; did you mean "tp"?',
        "plans[1].tp: got 0",
        "plans[2]: got 3, allowed: a mapping of axes",
        "plans[3].flags: got 1, allowed: a mapping of flags",
        "plans[4].recompute: unknown value",
        "plans[4].flags.tp: means something already",
        "plans[5]: got a mapping, allowed: a mapping of axes",
        "requires[0]:",
    ):
        assert any(one.startswith(text) for one in found), (text, found)
    assert problems(BUILT_IN | {"plans": [TWO[0], TWO[1], TWO[0]]}) == ["plans[2]: the same as entry 0; remove one"]
    assert problems(BUILT_IN | {"plans": []})[0].startswith("space: missing, with flags={} and plans=[]; add axes")
    assert problems(BUILT_IN | {"plans": [{"tp": 0}]}) == [
        "plans[0].tp: got 0, allowed: an integer from 1 to 1,000,000"
    ]


def test_a_plan_is_of_what_it_names_and_its_dp_is_checked():
    document = BUILT_IN | {"model": ["llama3_8b", "llama3_70b"], "engine": ["megatron", "torch"]}
    sizes = {"workload": {"seq_len": [2048, 4096], "global_batch_size": 32}}
    plans = [
        {"tp": 8, "model": "llama3_70b", "seq_len": 2048},
        {"tp": 4, "dp": 2, "engine": "torch", "model": "llama3_8b"},
        {"tp": 2, "dp": 2, "engine": "torch", "model": "llama3_8b", "seq_len": 4096},
    ]
    found = {
        (one.model.name, one.engine, one.workload.seq_len, one.plan.tp)
        for one in kept(document | sizes | {"plans": plans})
    }
    assert found == {("llama3_70b", engine, 2048, 8) for engine in ("megatron", "torch")} | {
        ("llama3_8b", "torch", size, 4) for size in (2048, 4096)
    }
    (other,) = prune(parse_space(document | sizes | {"plans": plans})).rejected
    assert other.rule == "world_size" and other.config["dp"] == 2
    assert "tp*pp*cp*dp=4 with dp=2 is not world_size=8 of 1x8 h200_sxm; use dp=4, or a cluster of 4" in other.reason
    wrong = [{"tp": 8, "model": "llama3"}, {"tp": 4, "seq_len": 8192}, {"tp": 2, "dp": 0}, {"tp": 1, "cluster": 3}]
    texts = problems(document | sizes | {"plans": wrong[2:]})
    assert texts[0].startswith("plans[0].dp: got 0") and texts[1].startswith(
        "plans[1].cluster: got 3, allowed: the name"
    )
    texts = problems(document | sizes | {"plans": wrong[:2]})
    assert texts == [
        "plans[0].model: got llama3, none of the file's own: llama3_8b, llama3_70b",
        "plans[1].seq_len: got 8192, none of the file's own: 2048, 4096",
    ]


def test_what_plans_leave_open_or_idle_is_said():
    found = problems(COMMAND | {"plans": [{"tp": 8, "flags": {"algo": "Ring"}}, {"tp": 4}], "space": {"tp": [1, 2]}})
    assert "plans[1].flags: has no algo, as other plans have; add it, or its value to flags" in found
    assert "space.tp: does nothing, as each entry of plans has its own; leave it out" in found
    found = problems(
        COMMAND | {"plans": [{"tp": 8, "flags": {"algo": "Ring"}}, {"tp": 4, "cp": 2, "flags": {"algo": "Ring"}}]}
    )
    assert found == ["space.cp: has 2 values and the command uses none; write {cp} in it, or keep one value"]
    found = problems(COMMAND | {"plans": [{"tp": 8, "flags": {"algo": "Ring", "lr": 1}}]})
    assert found == ["flags.lr: nothing uses it; write {lr} in command or env, or leave it out"]


def test_a_study_goes_on_with_more_plans_and_is_shown_by_what_they_vary():
    before, after = (parse_space(BUILT_IN | {"plans": plans}).document for plans in (TWO, [*TWO, {"tp": 2, "pp": 4}]))
    assert contradictions(before, after) == []
    assert any(line.startswith("plans: adds") for line in changes(before, after))
    assert {"tp", "pp"} <= set(dimensions(after)) and "cp" not in dimensions(after)
    assert yaml.safe_load(yaml.safe_dump(dict(after)))["plans"][2] == {"tp": 2, "pp": 4}


def test_kinds_of_work_are_a_dimension_and_a_plan_may_name_its_own():
    """Each is the trial that a study of it alone has, adapters are of `lora` alone, and names tell them apart."""
    document = {
        "study": "kinds",
        "model": "llama3_8b",
        "cluster": "1x8 h200_sxm",
        "engine": "torch",
        "workload": {
            "mode": ["pretrain", "lora"],
            "seq_len": 4096,
            "global_batch_size": 16,
            "lora": {"rank": 8, "targets": ["q"]},
        },
        "plans": [{"tp": 8, "mode": "lora"}, {"tp": 4, "dp": 2}],
        "objective": "maximize tokens_per_s",
    }
    planned = wattune.plan(document)
    found = {(one.spec.plan.tp, one.spec.workload.mode): one for one in planned.kept}
    assert found.keys() == {(8, "lora"), (4, "lora"), (4, "pretrain")} and planned.spec.num_combinations == 3
    assert {one.spec.workload.lora is None for (_, mode), one in found.items() if mode == "pretrain"} == {True}
    alone = {key: value for key, value in document["workload"].items() if key != "lora"} | {"mode": "pretrain"}
    (same,) = wattune.plan(document | {"workload": alone, "plans": [{"tp": 4}]}).kept
    assert same.trial_id == found[4, "pretrain"].trial_id
    names = namer(one.spec.workload for one in planned.kept)
    assert {names(one.spec) for one in planned.kept} == {"tp8 mbs1 lora", "dp2 tp4 mbs1 lora", "dp2 tp4 mbs1 pretrain"}
    for wrong, said in (
        ({"mode": "lora", "lora": None}, "mode: lora needs it"),
        ({"mode": ["pretrain", "prefill"]}, "does nothing with mode: pretrain, prefill"),
        ({"mode": ["lora", "lora"]}, "workload.mode"),
        ({"mode": []}, "workload.mode"),
    ):
        with pytest.raises(SpaceError, match=re.escape(said)):
            wattune.plan(document | {"workload": document["workload"] | wrong, "plans": [{"tp": 8}]})
    with pytest.raises(SpaceError, match="none of the file's own: pretrain, lora"):
        wattune.plan(document | {"plans": [{"tp": 8, "mode": "prefill"}]})
