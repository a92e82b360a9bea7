"""Uses of Megatron-Core that it does not promise. Each is a row of docs/dependencies.md."""

import pytest
from installed import get, load, parameters, source


@pytest.mark.private_api("megatron.core.ModelParallelConfig.timers")
def test_timers() -> None:
    text = source("megatron.core.pipeline_parallel.schedules")
    for name in ("forward-compute", "backward-compute"):
        assert f"config.timers('{name}', log_level=2).start()" in text and f"config.timers('{name}').stop()" in text
    assert get("megatron.core.ModelParallelConfig")().timers is None


@pytest.mark.private_api("megatron.core.pipeline_parallel.schedules.get_schedule_table")
def test_get_schedule_table() -> None:
    table = get("megatron.core.pipeline_parallel.schedules.get_schedule_table")
    assert table(4, 2, 2) == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]


@pytest.mark.private_api("megatron.core.models.gpt.gpt_layer_specs.get_gpt_layer_local_spec")
def test_get_gpt_layer_local_spec() -> None:
    import functools

    specs = load("megatron.core.models.gpt.gpt_layer_specs")
    assert isinstance(specs.HAVE_TE, bool) and (not specs.HAVE_TE or specs.TENorm)
    layer = specs.get_gpt_layer_local_spec(num_experts=2, moe_grouped_gemm=False, normalization="RMSNorm")
    parts = layer.submodules
    assert {"input_layernorm", "pre_mlp_layernorm", "self_attention", "mlp"} <= vars(parts).keys()
    assert {"core_attention", "q_layernorm", "k_layernorm"} <= vars(parts.self_attention.submodules).keys()
    mlp = parts.mlp
    inside = mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules
    assert {"experts", "shared_experts"} <= vars(inside).keys()
    block = load("megatron.core.transformer.transformer_block")
    assert {"layer_specs", "layer_norm"} <= set(parameters(block.TransformerBlockSubmodules))


@pytest.mark.private_api("megatron.core.transformer.moe.moe_utils._MOE_LAYER_WISE_LOGGING_TRACKER")
def test_auxiliary_losses_are_logged_where_they_can_be_emptied() -> None:
    utils = load("megatron.core.transformer.moe.moe_utils")
    if hasattr(utils, "_MOE_LAYER_WISE_LOGGING_TRACKER"):
        assert isinstance(utils._MOE_LAYER_WISE_LOGGING_TRACKER, dict)
    else:  # from 0.19 on
        assert callable(get("megatron.core.transformer.moe.moe_logging.destroy_moe_metrics_tracker"))


@pytest.mark.private_api("megatron.core.parallel_state.destroy_global_memory_buffer")
def test_destroy_global_memory_buffer() -> None:
    from wattune.engines.megatron import config
    from wattune.plans.axes import Plan

    state = load("megatron.core.parallel_state")
    assert parameters(state.destroy_global_memory_buffer) == []
    for end in (state.is_pipeline_first_stage, state.is_pipeline_last_stage):
        assert parameters(end) == ["ignore_virtual", "vp_stage"]
    asked = {*config._degrees(Plan()), "create_gloo_process_groups"}
    assert asked <= set(parameters(state.initialize_model_parallel))


@pytest.mark.private_api("megatron.core.models.common.embeddings.rotary_pos_embedding.RotaryEmbedding.forward")
def test_rotations_are_kept_where_they_can_be_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    embedding = get("megatron.core.models.common.embeddings.rotary_pos_embedding.RotaryEmbedding")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    made = embedding(kv_channels=16, rotary_percent=1.0, use_cpu_initialization=True)
    made.cp_group = None
    assert made(8).shape == (8, 1, 1, 16) and embedding.forward.cache_info().currsize > 0  # it and the model's tensor
    embedding.forward.cache_clear()
    assert embedding.forward.cache_info().currsize == 0


@pytest.mark.private_api("transformer_engine CUDNN_HOME")
def test_cudnn_home_is_looked_at_first() -> None:
    from wattune.engines.megatron.cudnn import HOMES

    text = source("transformer_engine.common")
    assert 'os.environ.get(f"{lib_name.upper()}_HOME")' in text and HOMES == ("CUDNN_HOME", "CUDNN_PATH")
