"""Programs: templates are filled argument by argument, and say what they lack."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import MODELS, OWN_MODEL
from wattune.errors import SpaceError
from wattune.plans.axes import AXES, Plan
from wattune.plans.program import (
    Program,
    filled,
    filled_arguments,
    is_command,
    names_in,
    shown_axes,
    split_command,
    template_problem,
    values_of,
)
from wattune.plans.rules import violations
from wattune.trial import TrialSpec
from wattune.workload import UNKNOWN_WORKLOAD, Workload

SPEC = TrialSpec(
    model=OWN_MODEL,
    cluster=ClusterSpec(device="h200_sxm", num_nodes=2, devices_per_node=4),
    engine="command",
    workload=UNKNOWN_WORKLOAD,
    plan=Plan(tp=2, etp=2),
    program=Program(command=("train", "{tp}"), flags=(("lr", 0.01), ("flash", True))),
)


def test_no_shell_sees_a_value():
    values = {"a": "x; rm -rf / $(id)", "b": "two words", "on": True, "off": False}
    templates = ["run", "{a}", "--b={b}", "{on?--on}", "{off?--off}", "{{a}}", ""]
    got = filled_arguments(templates, values)
    assert got == ["run", "x; rm -rf / $(id)", "--b=two words", "--on", "{a}", ""]


@given(st.text(), st.text(max_size=20))
def test_a_value_is_taken_as_it_is(value, around):
    around = around.replace("{", "").replace("}", "")
    assert filled(f"{around}{{name}}", {"name": value}) == f"{around}{value}"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{tensor}", '"{tensor}" names nothing'),
        ("{tpp}", 'did you mean "tp"'),
        ('{"a": 1}', "brace without its partner"),
        ("{tp", "brace without its partner"),
        ("{tp=2}", 'write "{tp=2?--option}"'),
        ("{tp.real}", "brace without its partner"),
        ("{tp!r}", "brace without its partner"),
    ],
)
def test_a_template_that_cannot_be_filled_says_why(template, words):
    assert words in str(template_problem(template, AXES))


def test_choices_follow_values():
    assert filled("{recompute=full?--recompute}", {"recompute": "full"}) == "--recompute"
    assert filled("{recompute=full?--recompute}", {"recompute": "none"}) == ""
    assert names_in("{recompute=full?--a} {tp} {{pp}}") == {"recompute", "tp"}


def test_a_command_is_split_once():
    assert split_command("torchrun 'my file.py' --x {tp}") == ("torchrun", "my file.py", "--x", "{tp}")
    assert split_command(["a b", "c"]) == ("a b", "c")
    for wrong in ("'open", "", []):
        with pytest.raises(SpaceError):
            split_command(wrong)


def test_values_come_from_plan_cluster_and_flags():
    values = values_of(SPEC, SPEC.flags)
    assert (values["tp"], values["dp"], values["num_nodes"], values["world_size"]) == (2, 4, 2, 8)
    assert (values["lr"], values["flash"]) == (0.01, True)
    assert not {"seq_len", "model", "num_micro_batches"} & values.keys()  # nobody said them
    known = replace(SPEC, model=MODELS["llama3_8b"], workload=Workload(seq_len=8, global_batch_size=32))
    more = values_of(known, ())
    assert (more["model"], more["seq_len"], more["num_micro_batches"]) == ("llama3_8b", 8, 8)


def test_axes_behind_derived_values_count_as_shown():
    assert shown_axes({"dp", "lr"}) == {"tp", "pp", "cp"}
    assert shown_axes({"num_micro_batches"}) == {"tp", "pp", "cp", "micro_batch_size"}


def test_rules_of_a_model_wait_for_one():
    assert is_command(SPEC) and not list(violations(SPEC))
    uneven = replace(SPEC, plan=Plan(tp=3))
    assert [one.rule for one in violations(uneven)] == ["world_size"]
    known = replace(SPEC, model=replace(MODELS["llama3_8b"], num_heads=7, hidden_size=4095))
    assert "heads" in {one.rule for one in violations(known)}


def test_a_program_counts_in_the_id_and_nothing_else_changes_it():
    without = replace(SPEC, program=None)
    others = [
        replace(SPEC, program=replace(SPEC.program, **change))
        for change in (
            {"flags": (("lr", 0.02), ("flash", True))},
            {"environment": (("A", "1"),)},
            {"command": ("train",)},
            {"steps": "none"},
        )
    ]
    assert len({one.trial_id for one in (SPEC, without, *others)}) == 6
    assert "program" not in without.to_json()
    for one in (SPEC, *others):
        assert TrialSpec.from_json(json.loads(json.dumps(one.to_json()))) == one
    assert SPEC.label == "dp4 tp2 lr=0.01 flash=true"


@pytest.mark.parametrize(
    "wrong", [{"command": [1]}, {"flags": [["a", [1]]]}, {"environment": [["A", 3]]}, {"speed": 1}, {"steps": 2}]
)
def test_a_damaged_program_is_refused(wrong):
    with pytest.raises((TypeError, ValueError)):
        Program.from_json({"command": ["a"], **wrong})
