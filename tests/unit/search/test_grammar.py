"""Entries of a space file: the keys they take, and the values they resolve to."""

from dataclasses import fields

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from wattune.catalog.hardware import DEVICES
from wattune.catalog.models import MODELS, ModelSpec
from wattune.field_types import LARGEST_COUNT, LARGEST_WORLD
from wattune.plans.axes import AXES
from wattune.search.cluster_entry import ClusterEntry
from wattune.search.fields import distinct, repetitions
from wattune.search.grammar import _axis_problem
from wattune.search.model_entry import ModelEntry
from wattune.search.problems import problems_of


def problems(entry: type[BaseModel], document: object) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        entry.model_validate(document)
    return problems_of(caught.value, document, entry)


def test_a_file_can_override_every_field_of_a_model_but_its_source() -> None:
    own = {field.name for field in fields(ModelSpec)} - {"source"}
    assert set(ModelEntry.model_fields) == own | {"scale_to", "allow_percent", "like", "from_config", "leave_out"}


@pytest.mark.parametrize("name", MODELS)
def test_a_name_alone_is_the_model_of_the_catalog(name: str) -> None:
    assert ModelEntry(name=name).resolve() == MODELS[name]


@given(nodes=st.integers(2, LARGEST_WORLD), devices=st.integers(LARGEST_WORLD // 2 + 1, LARGEST_WORLD))
def test_a_cluster_of_more_ranks_than_there_are_is_refused(nodes: int, devices: int) -> None:
    (found,) = problems(ClusterEntry, {"device": "cpu", "num_nodes": nodes, "devices_per_node": devices})
    assert found.startswith("num_nodes: ") and f"ranks, allowed: {LARGEST_WORLD:,}" in found


@given(device=st.sampled_from(list(DEVICES)), simulated=st.sampled_from([None, *DEVICES]))
def test_sensors_of_accelerators_are_simulated_on_cpus_only(device: str, simulated: str | None) -> None:
    document = {"device": device, "devices_per_node": 2, "simulate_sensors_of": simulated}
    if simulated is None or (device == "cpu" and simulated != "cpu"):
        assert ClusterEntry.model_validate(document).resolve().simulate_sensors_of == simulated
    else:
        (found,) = problems(ClusterEntry, document)
        assert found.startswith("simulate_sensors_of: got ") and found.endswith("leave it out")


VALUE = st.one_of(
    st.integers(-2, 12),
    st.integers(LARGEST_COUNT - 1, LARGEST_COUNT + 1),
    st.integers(LARGEST_WORLD - 1, LARGEST_WORLD + 1),
    st.booleans(),
    st.none(),
    st.floats(),
    st.text(max_size=4),
    st.sampled_from([choice for axis in AXES.values() for choice in axis.choices]),
    st.lists(st.one_of(st.integers(-1, 4), st.booleans(), st.text(max_size=2)), max_size=3),
)


@given(name=st.sampled_from(list(AXES)), value=VALUE)
def test_an_axis_takes_its_names_counts_and_lists_and_nothing_else(name: str, value: object) -> None:
    axis = AXES[name]
    if axis.kind == "count":
        fits = type(value) is int and 1 <= value <= (LARGEST_COUNT if name == "micro_batch_size" else LARGEST_WORLD)
    elif axis.kind == "setting":
        number = type(value) is int and 1 <= value <= 10_000 and not axis.choices
        fits = number or (isinstance(value, str) and value in (axis.neutral, *axis.choices))
    else:
        lists = axis.kind in ("layout", "order") and isinstance(value, list) and bool(value)
        least = 1 if axis.kind == "layout" else 0
        fits = (
            value in axis.choices
            if isinstance(value, str)
            else lists and all(type(item) is int and item >= least for item in value)
        )
    problem = _axis_problem(axis, value)
    assert (problem is None) == fits
    assert problem is None or "allowed: " in problem or "unknown value" in problem


@given(st.lists(st.sampled_from("abc"), max_size=6))
def test_of_equal_entries_all_but_the_first_are_named(texts: list[str]) -> None:
    repeated = repetitions(texts)
    assert len(repeated) == len(texts) - len(set(texts))
    for (index,), text in repeated:
        first = int(text.split()[4].rstrip(";"))
        assert first < index and texts.index(texts[index]) == first


@given(st.lists(st.integers(1, 4), min_size=2, max_size=3))
def test_clusters_that_mean_the_same_are_a_slip(sizes: list[int]) -> None:
    assume(len(set(sizes)) == len(sizes))
    entries = [ClusterEntry(device="cpu", devices_per_node=size) for size in sizes]
    assert distinct(entries) == entries
    said_otherwise = ClusterEntry(device="cpu", devices_per_node=sizes[0], num_nodes=1)
    with pytest.raises(Exception, match="see context"):
        distinct([*entries, said_otherwise])
