"""Conditions on configurations: fields, names and counts; and what is refused in words."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_trials import FASTEST, asked, numbers, speed, trial

from wattune.catalog.models import model
from wattune.errors import SpaceError
from wattune.plans.axes import AXES, SETTINGS, Plan
from wattune.ranking.conditions import FIELDS, keeps, parse_where, unmet, value_of
from wattune.ranking.order import rank
from wattune.run import RunStatus

SPEC = replace(
    trial(2)[0], plan=Plan(tp=2, etp=2, micro_batch_size=2, sharding="zero3", layout=(21, 19), rank_order=(1, 0, 2, 3))
)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("tp <= 2", True), ("tp < 2", False), ("tp == 2", True), ("tp != 2", False), ("dp >= 2", True),
        ("engine == torch", True), ("engine != torch", False), ("sharding != none", True), ("model == llama3_8b", True),
        ("layout == 21-19", True), ("layout == even", False), ("rank_order == 1-0-2-3", True), ("seq_len > 4095", True),
        ("device == h200_sxm", True), ("mode == lora", False), ("devices_per_node == 4", True),
    ],
)  # fmt: skip
def test_a_condition_says_of_a_configuration_what_it_says(text: str, holds: bool) -> None:
    condition = parse_where(text)
    assert condition.holds(value_of(SPEC, condition.field)) is holds
    assert parse_where(str(condition)) == condition


def test_every_axis_and_the_parallel_degree_that_follows_are_fields() -> None:
    assert {*AXES, "dp", "engine", "model"} <= FIELDS.keys()
    for name, field in FIELDS.items():
        value = value_of(SPEC, name)
        assert value is None if name in SETTINGS else isinstance(value, field.kind), "a device as found has no number"
    limited = replace(SPEC, plan=replace(SPEC.plan, power_limit_w=500))
    assert [keeps(parse_where("power_limit_w <= 500"), one) for one in (SPEC, limited)] == [False, True]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tpp <= 2", 'did you mean "tp'),
        ("tp <= two", "whole number"),
        ("tp <= 2.5", "whole number"),
        ("sharding > zero1", "no order"),
        ("sharding == zero9", 'did you mean "zero'),
        ("tokens_per_s == 5", "use one of <= < >= >"),
        ("tp", "is not a condition"),
        ("mfu_frac > 30", "a fraction"),
    ],
)
def test_what_is_no_condition_is_refused_with_what_to_write(text: str, said: str) -> None:
    with pytest.raises(SpaceError, match=said):
        parse_where(text)


@given(st.text(max_size=60) | st.sampled_from(["tp", "engine", "<=", "==", "2", "torch", " ", "*"]).map(str))
def test_any_text_is_read_or_refused_in_words(text: str) -> None:
    try:
        assert parse_where(str(parse_where(text))) == parse_where(text)
    except SpaceError as error:
        assert len(str(error)) < 600


def test_a_configuration_is_chosen_whether_it_completed_or_not() -> None:
    pairs = [speed(1, 100.0), speed(2, 200.0), speed(4, 150.0), trial(8, status=RunStatus.OUT_OF_MEMORY, reason="x")]
    ranking = rank(pairs, asked(FASTEST), where=[parse_where("micro_batch_size != 2"), parse_where("engine == torch")])
    assert numbers(ranking.feasible) == [4, 1] and numbers(ranking.failed) == [8] and ranking.num_filtered == 1
    assert not ranking.unmet
    both = rank(pairs, asked(FASTEST), where=[parse_where("micro_batch_size >= 4"), parse_where("tokens_per_s > 120")])
    assert numbers(both.trials) == [4] and both.num_filtered == 3


def test_a_name_that_no_trial_has_is_said() -> None:
    ranking = rank([speed(1, 100.0)], asked(FASTEST), where=[parse_where("model == lama3_8b")])
    assert not ranking.trials
    assert ranking.warnings[0] == 'no trial has model "lama3_8b": there is llama3_8b'
    assert not unmet([parse_where(f"model == {model('llama3_8b').name}")], [SPEC])
