"""Cuts of trials: what they keep, how far they are, what is refused and what that says."""

import itertools
import json
import math
from dataclasses import replace

import pytest

from wattune.cost.defaults import default_coefficients
from wattune.cost.estimate import estimate
from wattune.errors import PlanError
from wattune.plans.parallel import num_micro_batches
from wattune.plans.placement import spread_of_groups
from wattune.scale_down.choice import KEEPS, LEAST_FREE_DEPTH, PAUSED_FREE_DEPTH, choose
from wattune.scale_down.cut import DEPTHS, cluster_of, depths, parse_target, runnable, whole_stages
from wattune.scale_down.invariants import LACKING, Scaled, compare, fabrics
from wattune.search.prune import prune
from wattune.search.space import parse_space
from wattune.trial import TrialSpec


def larges(model="llama3_70b", cluster="8x8 h100_sxm", engine="megatron", batch=256, **axes) -> list[TrialSpec]:
    axes = {"tp": [2, 4, 8], "pp": [1, 4, 8], "sharding": ["zero1"]} | axes
    document = {"study": "s", "model": model, "cluster": cluster, "engine": engine, "space": axes}
    document |= {"workload": {"seq_len": 4096, "global_batch_size": batch}, "objective": "maximize tokens_per_s"}
    return prune(parse_space(document)).specs


def cuts(large: TrialSpec, to: str) -> list[TrialSpec]:
    whole = whole_stages(large, cluster_of(parse_target(to), large.cluster))
    return [one for cut in whole for one in map(runnable, depths(cut)) if one is not None]


MODELS = {
    "llama3_70b": {},
    "mixtral_8x7b": {"tp": [1, 2], "ep": [1, 4, 8], "pp": [1, 4]},
    "gpt_oss_20b_like": {"tp": [1], "pp": [1, 4], "ep": [1, 8], "sharding": ["zero3"]},
}


@pytest.mark.parametrize(("model", "to"), [*itertools.product(MODELS, ["1x2", "1x8", "2x8"])])
def test_a_cut_keeps_every_shape_and_its_ratios(model, to):
    found = [one for large in larges(model, engine="torch", **MODELS[model]) for one in cuts(large, to)]
    assert found
    for one in found:
        large, small = one.stands_for, one.model
        kept = {"num_layers", "vocab_size", "num_experts", "num_dense_layers"}
        assert all(getattr(small, name) == getattr(large.model, name) for name in small.__slots__ if name not in kept)
        assert one.workload.seq_len == large.workload.seq_len
        for name in ("tp", "cp", "micro_batch_size", "recompute", "dtype", "etp"):
            assert getattr(one.plan, name) == getattr(large.plan, name)
        assert one.cluster.world_size <= parse_target(to).num_nodes * parse_target(to).devices_per_node
        depth = (small.num_layers / one.plan.pp) / (large.model.num_layers / large.plan.pp)
        assert depth == pytest.approx(1.0) or min(DEPTHS) / 2 <= depth < 1.0
        rows = 64 * one.plan.tp
        assert abs(small.vocab_size - large.model.vocab_size * depth) <= rows, "the head keeps its share"
        assert small.num_experts * large.plan.ep == large.model.num_experts * one.plan.ep, "tokens an expert"
        assert small.num_layers % (len(small.layer_kinds) or 1) == 0, "whole periods"
        assert TrialSpec.from_json(json.loads(json.dumps(one.to_json()))) == one


@pytest.mark.parametrize("pp", [4, 8])
def test_a_pipeline_keeps_its_bubble(pp):
    (large,) = larges(pp=[pp], tp=[8], batch=512)
    micro_batches = num_micro_batches(large.plan, 64, 512)
    shorter = [one for one in cuts(large, "2x8") if one.plan.pp == 2]
    bubbles = {1 / num_micro_batches(one.plan, 16, one.workload.global_batch_size) for one in shorter}
    assert min(abs(one - (pp - 1) / micro_batches) for one in bubbles) < 0.5 / micro_batches * (pp - 1) ** 2


def test_the_distance_is_that_of_the_parts_by_hand():
    smalls = [one for large in larges() for one in cuts(large, "2x8")][::7]
    for one in compare(smalls, default_coefficients):
        found = estimate([one.large, one.small], default_coefficients)
        size = [
            spec.model.num_layers
            / spec.plan.pp
            * num_micro_batches(spec.plan, spec.cluster.world_size, spec.workload.global_batch_size)
            for spec in (one.large, one.small)
        ]
        parts = {name: (float(s[0]), float(s[1]) * size[0] / size[1]) for name, s in found.step_parts_s.items()}
        parts["compute"] = tuple(a + b for a, b in zip(parts["compute"], parts.pop("straggler"), strict=True))
        step_s, used, had = float(found.columns["step_time_s"].value[0]), fabrics(one.large), fabrics(one.small)
        lost = {name for name, fabric in used.items() if fabric == "network" and had.get(name) != "network"}
        total = sum(abs(math.log(1 + (b - a) / step_s)) for name, (a, b) in parts.items() if name not in lost)
        assert one.percent == pytest.approx(100 * total, abs=1e-6)
        assert one.predicted_frac == pytest.approx(sum(parts[name][0] for name in lost) / step_s, abs=1e-6)


def test_a_trial_is_no_distance_from_itself():
    (large,) = larges(tp=[8], pp=[4])
    (same,) = compare([replace(large, stands_for=large)], default_coefficients)
    assert same.percent == 0.0 and same.predicted_frac == 0.0 and not any(row.fabric == LACKING for row in same.parts)


def test_a_group_crosses_nodes_as_its_ranks_lie():
    for large in larges(tp=[1, 2, 4, 8], pp=[1, 2, 4, 8], sharding=["none"]):
        plan, dp = large.plan, large.plan.dp(64)
        for name, size, stride in (("tp", plan.tp, 1), ("dp", dp, plan.tp)):
            if size > 1:
                nodes, _ = spread_of_groups(size, stride, domain=8, world_size=64, rank_order="topology")
                assert (fabrics(large)[f"exposed_comm_{name}"] == "network") == (nodes > 1)


def test_the_choice_is_no_further_than_any_cut_but_for_what_depth_may_cost():
    plans = larges()
    for large, one in zip(plans, choose(plans, parse_target("2x8", 50.0)), strict=True):
        if isinstance(one, Scaled):
            fitting = [other for other in compare(cuts(large, "2x8"), default_coefficients) if other.fits]
            assert one.percent <= min(other.percent for other in fitting) + 1.01
            assert one.fits


def test_a_pipeline_keeps_more_of_its_phases():
    """After a pause a device draws above its limit, so that phases of half the length draw more in the mean."""
    kept = {
        one.large.plan.pp: one.small.model.num_layers / one.large.model.num_layers
        for one in choose(larges("llama3_8b", "1x2 h200_sxm", "torch", 8, tp=[1], pp=[1, 2]), parse_target("1x2"))
        if isinstance(one, Scaled)
    }
    assert kept[1] == LEAST_FREE_DEPTH < PAUSED_FREE_DEPTH <= kept[2] < 1


def test_a_refusal_names_the_invariant_and_a_cluster_that_keeps_it():
    plans = larges("llama3_8b", tp=[1, 2, 8], pp=[4, 8])
    answers = choose(plans, parse_target("1x2"))
    assert all(isinstance(one, str) for one in answers)
    beyond = [answer for plan, answer in zip(plans, answers, strict=True) if plan.plan.tp == 8]
    assert all("needs tp*cp=8 devices or more, and 1x2 has 2" in one for one in beyond)
    for plan, answer in zip(plans, answers, strict=True):
        place = answer.partition(KEEPS)[2].strip()
        assert isinstance(choose([plan], parse_target(place))[0], Scaled), answer
    far = choose(larges("llama3_8b", tp=[2], pp=[4]), parse_target("1x2"))[0]
    assert "of a step away, allowed: 5 %; it cannot keep work of a layer and micro-batch" in far


def test_more_is_allowed_where_a_space_says_so():
    plans = larges("llama3_8b", tp=[2], pp=[8])
    (far,) = choose(plans, parse_target("1x2", 60.0))
    assert isinstance(far, Scaled) and far.percent > 5 and "of a step away" in far.label


def test_a_network_that_is_lacking_is_predicted():
    (large,) = larges(tp=[8], pp=[1], batch=64, sharding=["zero3"], engine="torch")
    (one,) = choose([large], parse_target("1x8", 50.0))
    assert isinstance(one, Scaled) and one.predicted_frac > 0.01
    assert "compute measured, network predicted" in one.label
    (lost,) = [row for row in one.parts if row.fabric == LACKING]
    assert lost.name == "dp communication to compute" and lost.percent is None


def test_a_token_file_keeps_the_vocabulary(tmp_path):
    (large,) = larges(tp=[8], pp=[1])
    read = replace(large, workload=replace(large.workload, tokens=object()))
    assert {one.model.vocab_size for one in depths(replace(large, stands_for=read, workload=read.workload))} == {
        large.model.vocab_size
    }


def test_ids_of_other_trials_are_what_they_were():
    (large,) = larges(tp=[8], pp=[1])
    assert large.trial_id != replace(large, stands_for=large).trial_id
    assert "stands_for" not in large.to_json()


@pytest.mark.parametrize(
    "text", ["", "1x2x3", "0x2 h100_sxm", "-1x2", "1x-2 h100_sxm", "1 h100_sxm", "ax2", "1x2,h100"]
)
def test_a_text_that_names_no_cluster_is_refused(text):
    with pytest.raises(PlanError, match="does not name a cluster"):
        parse_target(text)


def test_a_target_may_be_written_in_three_ways():
    assert parse_target("1x2 h100_sxm") == parse_target("1x2:h100_sxm") == parse_target(" 1x2 : h100_sxm ")
    assert parse_target("1x2").device == ""
    with pytest.raises(PlanError, match='unknown device "h101_sxm"'):
        parse_target("1x2:h101_sxm")
