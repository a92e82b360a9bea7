"""Intervals know what was measured: wider with nodes and never narrower, and surer of a network that was seen."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specs import trial_spec

from wattune.catalog.hardware import DEVICES, parse_cluster_label
from wattune.catalog.networks import NETWORKS
from wattune.cost.coefficients import MeasuredCollective
from wattune.cost.defaults import default_coefficients
from wattune.cost.estimate import estimate
from wattune.cost.tables import FULL_MEMORY_FRAC
from wattune.plans.axes import Plan

NODES = (1, 2, 4, 8, 16, 32, 128)


def half_widths(plan, *, device="h200_sxm", engine="megatron", name="llama3_70b", weak=True, changes=None, found=None):
    """Returns how far both ends are from the step time, relative, by number of nodes.

    Where devices are nearly full the upper end is NaN: over more nodes each may hold less, and wait less for memory.
    """
    coefficients = found or default_coefficients(DEVICES[device])
    specs = [
        trial_spec(name, on=f"{nodes}x8 {device}", engine=engine, batch=32 * nodes if weak else 4096, plan=plan)
        for nodes in NODES
    ]
    specs = [replace(spec, cluster=replace(spec.cluster, **(changes or {}))) for spec in specs]
    columns = estimate(specs, lambda _: coefficients).columns
    step, roomy = columns["step_time_s"], columns["memory_headroom_frac"].value > 1 - FULL_MEMORY_FRAC
    return np.stack([1 - step.low / step.value, np.where(roomy, step.high / step.value - 1, np.nan)])


@settings(max_examples=60)
@given(
    plan=st.builds(
        lambda tp, cp, mbs, sharding, overlap: Plan(
            tp=tp, etp=tp, cp=cp, micro_batch_size=mbs, sharding=sharding, overlap=overlap
        ),
        tp=st.sampled_from([1, 2, 4, 8]),
        cp=st.sampled_from([1, 2]),
        mbs=st.sampled_from([1, 2]),
        sharding=st.sampled_from(["none", "zero1", "zero2", "zero3"]),
        overlap=st.sampled_from(["none", "grad", "grad_param"]),
    ),
    device=st.sampled_from(["h200_sxm", "h100_sxm", "b200_sxm", "mi300x"]),
    engine=st.sampled_from(["torch", "megatron", "deepspeed"]),
    name=st.sampled_from(["llama3_8b", "llama3_70b", "mixtral_8x7b"]),
    network=st.sampled_from([None, "hdr", "efa_p4d"]),
    weak=st.booleans(),
)
def test_more_nodes_are_never_surer(plan, device, engine, name, network, weak):
    if plan.tp * plan.cp > 8:
        plan = replace(plan, cp=1)
    changes = {"network": NETWORKS[network]} if network else {}
    widths = half_widths(plan, device=device, engine=engine, name=name, weak=weak, changes=changes)
    assert (np.diff(widths[0]) > 0).all(), widths
    assert (np.diff(widths[1][~np.isnan(widths[1])]) >= -1e-6).all(), widths


def test_a_pipeline_over_nodes_is_never_surer():
    widths = half_widths(Plan(tp=4, etp=4, pp=2, sharding="zero1"))
    assert all((np.diff(each[~np.isnan(each)]) >= -1e-6).all() for each in widths), widths


@pytest.mark.parametrize("trials", ["one node", "eight nodes", "eight nodes of roce"])
def test_a_fit_is_believed_on_the_nodes_and_the_network_that_it_saw(trials):
    """At 128 nodes a fit of one node is as unsure as published kernels; one of eight is surer, over its own network."""
    prior = default_coefficients(DEVICES["h200_sxm"])
    seen = {
        "one node": {},
        "eight nodes": {"seen_domains": (1, 8), "seen_networks": ("",)},
        "eight nodes of roce": {"seen_domains": (1, 8), "seen_networks": ("roce_400",)},
    }[trials]
    step = replace(prior.step_time, error_frac=0.1, elsewhere_error_frac=0.1, **seen)
    fit = replace(prior, step_time=step, fit="2026-11-26, 46 trials")
    of = {nodes: parse_cluster_label(f"{nodes}x8 h200_sxm") for nodes in NODES}
    errors = {nodes: fit.on(cluster).step_time.error_frac for nodes, cluster in of.items()}
    assert errors[1] == 0.1
    if trials == "eight nodes":
        assert errors[8] == 0.1 < errors[16] < errors[128] < 0.16
        assert fit.on(of[8]).step_time.origin == "measured here"
    else:
        assert errors[2] > 0.3 and errors[128] > errors[8] + 0.02
        assert fit.on(of[8]).step_time.origin == "published kernels"
    over_roce = fit.on(replace(of[8], network=NETWORKS["roce_400"])).step_time
    assert (over_roce.error_frac == 0.1) == (trials == "eight nodes of roce")


def test_a_fabric_that_joins_nodes_needs_no_network():
    found = default_coefficients(DEVICES["h200_sxm"])
    rack = replace(parse_cluster_label("9x8 h200_sxm"), nvlink_domain_size=72)
    assert found.on(rack).step_time == found.step_time


def test_a_sweep_over_nodes_says_where_its_links_come_from():
    found = default_coefficients(DEVICES["h200_sxm"])
    swept = MeasuredCollective(
        kind="all_reduce", group_size=16, num_nodes=2, sizes_bytes=(1e6,), time_ratio=(1.1,), latency_s=1e-5
    )  # fmt: skip
    step = replace(found.step_time, link=replace(found.step_time.link, measured=(swept,)))
    two = parse_cluster_label("2x8 h200_sxm")
    assert replace(found, step_time=step).on(two).step_time.link.origin == "measured here"
    assert replace(found, step_time=step).on(two).step_time.error_frac > 0.3, "no step was"
