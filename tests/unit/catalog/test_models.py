"""Models: parameter counts from their fields, and slices that fit a smaller cluster."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.catalog.hardware import ClusterSpec, parse_cluster_label
from wattune.catalog.models import (
    ACTIVATIONS,
    MODELS,
    NORMS,
    POSITIONS,
    STATE_BYTES_PER_PARAMETER,
    STATE_MEMORY_FRAC,
    scale_model,
)
from wattune.errors import PlanError


@pytest.mark.parametrize("spec", MODELS.values(), ids=MODELS)
def test_every_model_has_a_source_and_fields_that_fit(spec):
    assert spec.source
    assert spec.norm in NORMS and spec.activation in ACTIVATIONS and spec.positions in POSITIONS
    assert spec.hidden_size % spec.num_heads == 0 and spec.num_heads % spec.num_kv_heads == 0
    assert 0 <= spec.num_experts_per_token <= spec.num_experts
    assert (spec.positions == "learned") == (spec.max_positions > 0)


def test_parameters_of_a_model_small_enough_to_count_by_hand():
    tiny = replace(
        MODELS["llama3_8b"], num_layers=1, hidden_size=4, ffn_hidden_size=6, num_heads=2, num_kv_heads=1, vocab_size=10
    )
    attention = 4 * 4 + 4 * 2 + 4 * 2 + 4 * 4  # query, key, value, output
    feed_forward = 3 * 4 * 6
    norms = 2 * 4
    assert tiny.layer_parameters == attention + feed_forward + norms
    assert tiny.num_parameters == tiny.layer_parameters + 10 * 4 + 4 + 10 * 4
    assert replace(tiny, tied_embeddings=True).num_parameters == tiny.num_parameters - 10 * 4
    assert tiny.num_active_parameters == tiny.num_parameters

    mixture = replace(tiny, num_experts=3, num_experts_per_token=1)
    assert mixture.layer_parameters == attention + 3 * feed_forward + 3 * 4 + norms
    assert mixture.num_active_parameters == mixture.num_parameters - 2 * feed_forward


def test_biases_and_learned_positions_are_counted():
    tiny = replace(
        MODELS["gpt3_175b"],
        num_layers=1,
        hidden_size=4,
        ffn_hidden_size=6,
        num_heads=2,
        num_kv_heads=2,
        vocab_size=10,
        max_positions=5,
    )
    attention = 4 * (4 * 4 + 4)
    feed_forward = (4 * 6 + 6) + (6 * 4 + 4)
    norms = 2 * (4 + 4)
    assert tiny.layer_parameters == attention + feed_forward + norms
    assert tiny.num_parameters == tiny.layer_parameters + (10 + 5) * 4 + (4 + 4)


@pytest.mark.parametrize("name", MODELS)
def test_active_parameters_are_all_of_a_dense_model_and_fewer_of_a_mixture(name):
    spec = MODELS[name]
    assert (spec.num_active_parameters == spec.num_parameters) == (not spec.is_moe)
    everyone = replace(spec, num_experts_per_token=spec.num_experts)
    assert everyone.num_active_parameters == spec.num_parameters


@given(
    name=st.sampled_from(sorted(MODELS)),
    device=st.sampled_from(["h100_sxm", "h200_sxm", "mi250_gcd"]),
    nodes=st.integers(1, 4),
    devices=st.sampled_from([1, 2, 4, 8]),
)
def test_a_slice_keeps_every_width_and_fits(name, device, nodes, devices):
    full, cluster = MODELS[name], ClusterSpec(device=device, num_nodes=nodes, devices_per_node=devices)
    try:
        part = scale_model(full, cluster)
    except PlanError as error:
        assert "not one layer" in str(error)
        return
    assert replace(part, num_layers=full.num_layers) == full
    assert 1 <= part.num_layers <= full.num_layers
    budget_bytes = STATE_MEMORY_FRAC * cluster.sensed_device.memory_bytes * cluster.world_size
    assert part.num_parameters * STATE_BYTES_PER_PARAMETER <= budget_bytes
    if part.num_layers >= cluster.world_size:
        assert part.num_layers % cluster.world_size == 0 or part.num_layers == full.num_layers


def test_a_slice_of_unlike_layers_fits_too():
    """Its layers are not all as large as the largest kind."""
    experts = {"num_experts": 64, "num_experts_per_token": 8, "layer_kinds": "DF", "dense_ffn_hidden_size": 4096}
    full = replace(MODELS["llama3_8b"], num_layers=60, ffn_hidden_size=8192, **experts)
    cluster = parse_cluster_label("1x4 h200_sxm")
    part, budget_bytes = scale_model(full, cluster), STATE_MEMORY_FRAC * cluster.sensed_device.memory_bytes * 4
    assert part.num_layers == 4 and part.num_parameters * STATE_BYTES_PER_PARAMETER <= budget_bytes


def test_a_slice_grows_with_the_cluster():
    layers = [scale_model(MODELS["mixtral_8x7b"], parse_cluster_label(f"1x{n} h200_sxm")).num_layers for n in (2, 4, 8)]
    assert layers == sorted(layers) and layers[0] < layers[-1]


def test_a_slice_needs_a_known_memory():
    with pytest.raises(PlanError, match='the memory of "cpu" is not in the catalog; give num_layers instead'):
        scale_model(MODELS["llama3_8b"], parse_cluster_label("1x4 cpu"))
