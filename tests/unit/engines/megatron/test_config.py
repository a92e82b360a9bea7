"""A plan in Megatron's words, checked against what its configuration classes make of it where it is installed."""

from dataclasses import fields, replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from specs import trial_spec

from wattune.catalog.models import model
from wattune.engines.megatron import config as megatron_config
from wattune.engines.model.hyperparameters import BETAS, CLIP_NORM, LEARNING_RATE, WEIGHT_DECAY
from wattune.plans.parallel import stage_layers
from wattune.trial import TrialSpec

LLAMA = replace(model("llama3_8b"), num_layers=8)
GPT = replace(model("gpt3_175b"), num_layers=8)
MIXTRAL = replace(model("mixtral_8x7b"), num_layers=8)


def spec(of=LLAMA, *, world=8, transformer_engine=False, **axes) -> TrialSpec:
    return trial_spec(
        of, on=f"1x{world} h200_sxm", transformer_engine=transformer_engine, engine="megatron", batch=64, **axes
    )


def test_degrees_and_the_axes_that_follow_from_them():
    options = megatron_config.transformer(spec(MIXTRAL, tp=2, pp=2, vpp=2, ep=2, etp=1))
    degrees = {name: options[name] for name in options if name.endswith("_parallel_size")}
    assert degrees == {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    }
    assert options["sequence_parallel"] and options["deallocate_pipeline_outputs"]
    assert (options["overlap_p2p_comm"], options["batch_p2p_comm"]) == (True, False)
    made = megatron_config.model_parallel(spec(MIXTRAL, tp=2, pp=2, vpp=2, ep=2, etp=1))
    assert made == degrees | {"create_gloo_process_groups": False, "num_distributed_optimizer_instances": 1}


def test_without_splits_nothing_is_asked_of_ranks():
    options = megatron_config.transformer(spec())
    assert not options["sequence_parallel"] and not options["deallocate_pipeline_outputs"]
    assert options["virtual_pipeline_model_parallel_size"] is None
    assert options["pipeline_model_parallel_layout"] is None
    assert "recompute_granularity" not in options and "num_moe_experts" not in options


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ({"pp": 2, "layout": (5, 3)}, "Ettttt|tttL"),
        ({"pp": 4, "layout": (3, 2, 2, 1)}, "Ettt|tt|tt|tL"),
        ({"pp": 2, "vpp": 2, "layout": (3, 2, 2, 1)}, "Ettt|tt|tt|tL"),
        ({"pp": 2}, None),
    ],
)
def test_layouts_in_megatrons_letters(plan, text):
    assert megatron_config.layout(spec(**plan)) == text


@pytest.mark.parametrize("plan", [{"pp": 2, "layout": (5, 3)}, {"pp": 2, "vpp": 2, "layout": (3, 2, 2, 1)}])
def test_megatron_reads_a_layout_as_the_plan_means_it(plan, monkeypatch):
    layouts = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    enums = pytest.importorskip("megatron.core.transformer.enums")
    state = pytest.importorskip("megatron.core.parallel_state")
    one = spec(**plan)
    monkeypatch.setattr(state, "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", plan.get("vpp"))
    read = layouts.PipelineParallelLayerLayout.from_str(megatron_config.layout(one), one.plan.pp)
    for stage in range(one.plan.pp):
        theirs = [
            read.get_layer_id_list(layer_type=enums.LayerType.decoder, vp_stage=chunk, pp_rank=stage)
            for chunk in range(one.plan.vpp)
        ]
        assert theirs == [list(chunk) for chunk in stage_layers(one.model, one.plan)[stage]]


def test_the_arithmetic_is_the_torch_engines():
    llama, gpt = megatron_config.transformer(spec()), megatron_config.transformer(spec(GPT))
    assert (llama["normalization"], llama["activation_func"], llama["gated_linear_unit"]) == ("RMSNorm", F.silu, True)
    assert (gpt["normalization"], gpt["activation_func"], gpt["gated_linear_unit"]) == ("LayerNorm", F.gelu, False)
    assert llama["bias_activation_fusion"]
    assert not gpt["bias_activation_fusion"]  # Megatron's fused GELU is the tanh approximation
    assert gpt["add_bias_linear"] and not llama["add_bias_linear"]
    for options in (llama, gpt):
        assert (options["hidden_dropout"], options["attention_dropout"]) == (0.0, 0.0)
        assert not options["perform_initialization"]


def test_in_fp32_nothing_is_rounded():
    options = megatron_config.transformer(spec(dtype="fp32"))
    assert options["params_dtype"] is options["pipeline_dtype"] is torch.float32
    assert not options["bf16"] and not options["cross_entropy_loss_fusion"]
    assert megatron_config.transformer(spec())["cross_entropy_loss_fusion"]


@pytest.mark.parametrize(
    ("recompute", "options"),
    [
        ("full", {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
        ("selective", {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}),
    ],
)
def test_recompute(recompute, options):
    assert megatron_config.transformer(spec(recompute=recompute)).items() >= options.items()


def test_experts_are_routed_as_in_mixtral():
    options = megatron_config.transformer(spec(MIXTRAL, ep=4))
    assert (options["num_moe_experts"], options["moe_router_topk"]) == (8, 2)
    assert not options["moe_router_pre_softmax"]
    assert (options["moe_router_load_balancing_type"], options["moe_aux_loss_coeff"]) == ("none", 0.0)
    assert options["moe_expert_capacity_factor"] is None
    dropping = replace(MIXTRAL, expert_capacity_factor=1.25)
    assert megatron_config.transformer(spec(dropping, ep=4))["moe_expert_capacity_factor"] == 1.25


def test_kinds_of_layers_in_megatrons_words():
    deepseek = replace(
        MIXTRAL,
        num_dense_layers=3,
        dense_ffn_hidden_size=512,
        shared_ffn_hidden_size=256,
        shared_expert_gate=True,
        router_scores="sigmoid",
        router_scale=2.5,
        biased_parts="qkv",
        qk_norm="head",
    )
    options = megatron_config.transformer(spec(deepseek))
    assert (options["ffn_hidden_size"], options["moe_ffn_hidden_size"]) == (512, MIXTRAL.ffn_hidden_size)
    assert options["moe_layer_freq"] == [0, 0, 0, 1, 1, 1, 1, 1]
    assert (options["moe_shared_expert_intermediate_size"], options["moe_shared_expert_gate"]) == (256, True)
    assert (options["moe_router_score_function"], options["moe_router_topk_scaling_factor"]) == ("sigmoid", 2.5)
    assert options["add_qkv_bias"] and options["qk_layernorm"] and not options["add_bias_linear"]
    over_all = megatron_config.transformer(spec(replace(MIXTRAL, router_scores="all")))
    assert (over_all["moe_router_pre_softmax"], over_all["moe_router_score_function"]) == (True, "softmax")


@pytest.mark.parametrize(
    ("plan", "switches"),
    [
        ({}, (False, False, False)),
        ({"overlap": "grad"}, (False, True, False)),
        ({"sharding": "zero1"}, (True, False, False)),
        ({"sharding": "zero1", "overlap": "grad"}, (True, True, False)),
        ({"sharding": "zero1", "overlap": "grad_param"}, (True, True, True)),
    ],
)
def test_sharding_and_overlap(plan, switches):
    ddp, optimizer = megatron_config.data_parallel(spec(**plan)), megatron_config.optimizer(spec(**plan))
    names = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
    assert tuple(ddp[name] for name in names) == switches
    assert ddp["grad_reduce_in_fp32"]
    assert (optimizer["use_distributed_optimizer"], optimizer["overlap_param_gather"]) == (switches[0], switches[2])


def test_the_optimizer_is_the_torch_engines():
    options = megatron_config.optimizer(spec())
    assert (options["lr"], options["min_lr"]) == (LEARNING_RATE, LEARNING_RATE)
    assert (options["adam_beta1"], options["adam_beta2"]) == BETAS
    assert (options["weight_decay"], options["clip_grad"]) == (WEIGHT_DECAY, CLIP_NORM)


def test_transformer_engine_brings_its_own_parts():
    without, engine = (megatron_config.transformer(spec(MIXTRAL, transformer_engine=has)) for has in (False, True))
    changed = {name for name in engine if engine[name] != without[name]}
    assert changed == {"apply_rope_fusion", "cross_entropy_fusion_impl", "moe_grouped_gemm", "moe_permute_fusion"}
    overlapped = megatron_config.transformer(spec(tp=2, overlap="tp", transformer_engine=True))
    assert overlapped["tp_comm_overlap"]
    split = megatron_config.transformer(spec(cp=2, transformer_engine=True))
    assert split["context_parallel_size"] == 2
    assert not megatron_config.transformer(spec(tp=2, transformer_engine=True))["tp_comm_overlap"]


def test_transformer_engines_experts_fuse_no_bias():
    biased = replace(MIXTRAL, bias=True)
    fused = {
        (of.is_moe, has): megatron_config.transformer(spec(of, transformer_engine=has))["bias_dropout_fusion"]
        for of in (biased, GPT)
        for has in (False, True)
    }
    assert fused == {(True, False): True, (True, True): False, (False, False): True, (False, True): True}


def test_fp8_is_bf16_but_for_its_recipe():
    bf16, fp8 = (megatron_config.transformer(spec(transformer_engine=True, dtype=name)) for name in ("bf16", "fp8"))
    assert {name: fp8[name] for name in fp8 if fp8[name] != bf16.get(name)} == {
        "fp8": "hybrid",
        "fp8_recipe": "tensorwise",
    }
    assert set(bf16) == set(fp8) - {"fp8", "fp8_recipe"}
    for of in (megatron_config.optimizer, megatron_config.data_parallel):
        assert of(spec(transformer_engine=True, dtype="fp8")) == of(spec(transformer_engine=True, dtype="bf16"))


@pytest.mark.parametrize("of", [LLAMA, GPT, MIXTRAL])
def test_megatron_knows_every_word(of):
    transformer = pytest.importorskip("megatron.core.transformer")
    distributed = pytest.importorskip("megatron.core.distributed")
    optimizer = pytest.importorskip("megatron.core.optimizer")
    one = spec(of, tp=2, pp=2, recompute="full", sharding="zero1")
    for options, made in (
        (megatron_config.transformer(one), transformer.TransformerConfig),
        (megatron_config.transformer(spec(transformer_engine=True, dtype="fp8")), transformer.TransformerConfig),
        (megatron_config.data_parallel(one), distributed.DistributedDataParallelConfig),
        (megatron_config.optimizer(one), optimizer.OptimizerConfig),
    ):
        assert set(options) <= {field.name for field in fields(made)}
