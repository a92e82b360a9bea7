"""Candidates as columns say what their specifications say."""

import math
from dataclasses import replace

import pytest
from specs import trial_spec

from wattune.catalog.hardware import parse_cluster_label
from wattune.cost.batch import batches
from wattune.plans.axes import AXES, Plan
from wattune.plans.parallel import num_micro_batches, stage_layers
from wattune.trial import TrialSpec

CLUSTER = parse_cluster_label("2x8 h200_sxm")
PLANS = (
    Plan(tp=2, etp=2, pp=4, vpp=2, micro_batch_size=2, sharding="zero1", recompute="full", overlap="grad"),
    Plan(pp=2, layout=(33, 47), recompute="selective"),
    Plan(tp=8, etp=8, cp=2, sharding="zero3", overlap="grad_param"),
    Plan(dtype="fp32"),
)


@pytest.fixture
def specs() -> list[TrialSpec]:
    return [trial_spec("llama3_70b", on=CLUSTER, engine="megatron", batch=64, plan=plan) for plan in PLANS]


def test_settings_are_those_of_the_plan_or_of_the_device() -> None:
    plans = (Plan(), Plan(power_limit_w=500), Plan(clock_mhz=1500))
    ((_, batch),) = batches([trial_spec("llama3_70b", on=CLUSTER, batch=64, plan=plan) for plan in plans])
    assert list(batch.limit_w) == [700, 500, 700] and list(batch.clock_mhz) == [math.inf, math.inf, 1500]


def test_columns_are_those_of_the_plans(specs: list[TrialSpec]) -> None:
    (positions, batch), (alone, other) = batches(specs)
    assert list(positions) == [0, 1, 2] and list(alone) == [3]
    assert (batch.dtype, other.dtype) == ("bf16", "fp32")
    assert len(batch) == 3
    for row, plan in enumerate(PLANS[:3]):
        for name in ("tp", "pp", "cp", "ep", "etp", "vpp", "micro_batch_size"):
            assert getattr(batch, name)[row] == getattr(plan, name)
        for name in ("sharding", "recompute", "overlap"):
            assert AXES[name].choices[getattr(batch, name)[row]] == getattr(plan, name)
        assert batch.dp[row] == plan.dp(16)
        assert batch.num_micro_batches[row] == num_micro_batches(plan, 16, 64)


def test_virtual_stages_hold_the_layers_that_the_plan_gives_them(specs: list[TrialSpec]) -> None:
    (_, batch), _ = batches(specs)
    for row, plan in enumerate(PLANS[:3]):
        chunks = stage_layers(specs[0].model, plan)
        for stage, own in enumerate(chunks):
            for chunk, layers in enumerate(own):
                assert batch.layers[row, chunk * plan.pp + stage] == len(layers)
        assert batch.layers[row].sum() == 80
    assert list(batch.num_virtual) == [8, 2, 1]


def test_every_candidate_is_in_one_batch(specs: list[TrialSpec]) -> None:
    several = specs + [replace(spec, engine="torch") for spec in specs]
    grouped = batches(several)
    assert sorted(position for positions, _ in grouped for position in positions) == list(range(8))
    assert {batch.engine for _, batch in grouped} == {"torch", "megatron"}
    assert batches([]) == []


def test_a_context_parallel_rank_has_its_share_of_the_tokens(specs: list[TrialSpec]) -> None:
    (_, batch), _ = batches(specs)
    assert list(batch.local_tokens) == [2 * 4096, 4096, 2048]
