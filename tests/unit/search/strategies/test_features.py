"""Features: what varies becomes a column, likes are near, and other models, clusters and engines fit in."""

from dataclasses import replace

import numpy as np
import pytest
from specs import trial_spec

from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import MODELS
from wattune.plans.program import Program
from wattune.search.strategies.features import columns_of, make_features

BASE = trial_spec(on="1x8 h200_sxm", batch=64)


def with_plan(**axes):
    return replace(BASE, plan=replace(BASE.plan, **axes))


def with_flag(value):
    return replace(BASE, program=Program(environment=(("X", "{x}"),), flags=(("x", value),)))


def test_only_what_varies_is_a_column():
    assert make_features([BASE]).num_columns == 0
    assert make_features([BASE, with_plan(overlap="grad")]).num_columns == 1
    assert make_features([BASE, with_plan(micro_batch_size=2)]).num_columns == 2  # and the number of micro-batches


def test_sizes_count_in_doublings():
    features = make_features([with_plan(sharding="zero1", micro_batch_size=size) for size in (1, 2, 8)])
    squares = features.distances2(np.array([0]), np.array([0, 1, 2]))[0]
    assert squares == pytest.approx([0.0, 2.0, 18.0], abs=1e-5)  # 1 and 3 doublings of two columns


def test_two_different_choices_are_at_distance_one():
    features = make_features([with_plan(overlap=name) for name in ("none", "grad", "grad_param")])
    squares = features.distances2(np.arange(3), np.arange(3))
    assert squares == pytest.approx(1.0 - np.eye(3), abs=1e-6)


def test_models_clusters_engines_and_layouts_fit_into_one_space():
    specs = [
        BASE,
        replace(BASE, model=MODELS["mixtral_8x7b"]),
        replace(BASE, engine="megatron"),
        replace(BASE, cluster=ClusterSpec(device="h200_sxm", devices_per_node=8, num_nodes=4)),
        with_plan(pp=2, layout=(20, 12)),
    ]
    features = make_features(specs)
    squares = features.distances2(np.arange(5), np.arange(5))
    assert (squares[~np.eye(5, dtype=bool)] > 0.5).all() and np.isfinite(features.additive).all()


@pytest.mark.parametrize(
    "other",
    [{"transformer_engine": True}, {"nvlink_domain_size": 4}, {"device": "cpu", "simulate_sensors_of": "h100_sxm"}],
)
def test_the_same_plan_on_nodes_that_differ_is_not_the_same_point(other):
    """A study may list both nodes: their trials differ in speed or power, and a model must be able to say so."""
    one = replace(BASE, cluster=replace(BASE.cluster, device=other.get("device", BASE.cluster.device)))
    features = make_features([one, replace(one, cluster=replace(one.cluster, **other))])
    assert features.num_columns == 1
    assert features.distances2(np.array([0]), np.array([1]))[0, 0] == pytest.approx(1.0)


def test_earlier_observations_are_told_apart():
    together = make_features([BASE, with_plan(overlap="grad"), BASE], num_earlier=1)
    assert together.distances2(np.array([0]), np.array([2]))[0, 0] == pytest.approx(1.0)


@pytest.mark.parametrize("values", [(0, 1), (-1, 0.5), (0, 0.001, 0.01), (-4, -2, 0, 2, 4), (1, 2, 1024)])
def test_different_numbers_of_a_flag_stay_different_and_in_their_order(values):
    numbers, _ = columns_of([with_flag(value) for value in values])
    assert numbers["flags.x"] == sorted(set(numbers["flags.x"])) and len(numbers["flags.x"]) == len(values)
    assert make_features([with_flag(value) for value in values]).num_columns == 1


def test_a_positive_flag_counts_in_doublings():
    numbers, _ = columns_of([with_flag(value) for value in (0.5, 1, 8)])
    assert numbers["flags.x"] == pytest.approx([-1.0, 0.0, 3.0])
