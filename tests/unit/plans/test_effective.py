"""Settings that do nothing, and the plan that really runs."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specs import trial_spec

from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import MODELS
from wattune.plans.axes import AXES, Plan
from wattune.plans.effective import effective
from wattune.plans.engines import CAPABILITIES
from wattune.plans.rules import violations

DENSE, MOE = MODELS["llama3_8b"], MODELS["mixtral_8x7b"]


def spec(model=DENSE, *, world=8, **more):
    return trial_spec(model, on=f"1x{world} h200_sxm", batch=64, **more)


@pytest.mark.parametrize(
    ("axes", "as_run", "why"),
    [
        ({"overlap": "grad"}, {"overlap": "none"}, "without ZeRO it reduces gradients after the backward pass"),
        ({"overlap": "grad_param", "sharding": "zero1"}, {"overlap": "grad"}, "gathers parameters in the update"),
        ({"overlap": "grad_param", "sharding": "zero2"}, {"overlap": "grad"}, "gathers parameters in the update"),
        ({"overlap": "grad_param", "sharding": "zero3"}, {}, ""),
        ({"overlap": "grad", "sharding": "zero3"}, {}, ""),
        ({"overlap": "grad", "sharding": "zero1", "pp": 2}, {"overlap": "none"}, "after the last micro-batch"),
        ({"pp": 2}, {"sharding": "zero1"}, "its bf16 pipeline always shards the optimizer"),
        ({"pp": 2, "dtype": "fp32"}, {}, ""),
        ({"pp": 8}, {}, ""),  # one replica: nothing to share
        ({"pp": 8, "sharding": "zero1"}, {"sharding": "none"}, "no replicas"),
    ],
)
def test_what_a_setting_really_does_in_deepspeed(axes, as_run, why):
    plan, reasons = effective(spec(engine="deepspeed", **axes))
    assert plan == Plan(**(axes | as_run))
    assert len(reasons) == bool(why) and why in "".join(reasons)


@pytest.mark.parametrize(
    ("written", "as_run", "why"),
    [
        (spec(sharding="zero3", tp=8), Plan(tp=8, etp=8), "sharding=zero3 acts as none"),
        (spec(overlap="grad", tp=8), Plan(tp=8, etp=8), "no gradients to reduce at dp=1"),
        (spec(overlap="grad_param"), Plan(overlap="grad"), "no parameters to gather at sharding=none"),
        (spec(dp_replicate=2), Plan(), "dp_replicate=2 acts as 1: nothing is shared at sharding=none"),
        (spec(overlap="tp"), Plan(), "nothing to overlap at tp=1"),
        (spec(tp=2, etp=1), Plan(tp=2, etp=2), "llama3_8b has no experts"),
        (spec(pp=2, layout=(16, 16)), Plan(pp=2), "it is the even split"),
        (spec(rank_order=tuple(range(8))), Plan(), "the order of the topology"),
    ],
)
def test_a_setting_that_does_nothing_is_neutral(written, as_run, why):
    plan, reasons = effective(written)
    assert plan == as_run
    assert len(reasons) == 1 and why in reasons[0]


@pytest.mark.parametrize(
    "written",
    [
        spec(),
        spec(sharding="zero1", overlap="grad_param"),
        spec(tp=2, overlap="tp"),
        spec(sharding="zero3", dp_replicate=2),
        spec(MOE, ep=2, sharding="zero3", dp_replicate=4),  # an expert has four ranks, other weights have eight
        spec(MOE, tp=2, etp=1),
        spec(pp=2, layout=(15, 17)),
        spec(pp=2, layout=(32,)),
        spec(rank_order=(1, 0, 2, 3, 4, 5, 6, 7)),
        spec(tp=2, cp=4, sharding="zero1"),  # context parallel ranks are replicas
        spec(MOE, tp=8, etp=1, sharding="zero1"),  # the experts have replicas although the rest has none
    ],
)
def test_a_setting_that_does_something_stays(written):
    assert effective(written) == (written.plan, ())


def test_activations_of_a_processor_are_in_host_memory():
    written = spec(offload="activations")
    assert effective(written) == (written.plan, ())
    plan, (reason,) = effective(replace(written, cluster=ClusterSpec(device="cpu", devices_per_node=8)))
    assert plan == spec().plan and "are in host memory" in reason


@pytest.mark.parametrize("axes", [{"dp_replicate": 8}, {"dp_replicate": 4, "pp": 2}, {"dp_replicate": 4, "tp": 2}])
def test_a_copy_for_every_rank_is_no_sharding(axes):
    plan, reasons = effective(spec(sharding="zero2", overlap="grad_param", **axes))
    assert (plan.sharding, plan.dp_replicate, plan.overlap) == ("none", 1, "grad")
    assert "leaves every rank a copy of its own" in reasons[0]


COUNTS = ("tp", "pp", "cp", "ep", "etp", "vpp", "micro_batch_size", "dp_replicate")
PLANS = st.builds(
    Plan,
    **{name: st.sampled_from([1, 2, 3, 8]) for name in COUNTS},
    **{name: st.sampled_from(AXES[name].choices) for name in ("sharding", "recompute", "offload", "overlap", "dtype")},
    layout=st.sampled_from([(), (16, 16), (20, 12), (32,)]),
    rank_order=st.sampled_from(["topology", tuple(range(8)), tuple(reversed(range(8)))]),
)


@given(plan=PLANS, moe=st.booleans(), engine=st.sampled_from(sorted(CAPABILITIES)))
def test_what_is_effective_stays_so_and_every_change_has_a_reason(plan, moe, engine):
    written = replace(spec(MOE if moe else DENSE, engine=engine), plan=plan)
    as_run, reasons = effective(written)
    changed = [name for name in AXES if getattr(as_run, name) != getattr(plan, name)]

    assert effective(replace(written, plan=as_run)) == (as_run, ())
    assert sorted(reason.split("=")[0] for reason in reasons) == sorted(changed)
    for violation in violations(replace(written, plan=as_run)):
        assert ";" in violation.reason


@pytest.mark.parametrize(
    ("axes", "as_run", "why"),
    [
        ({"offload": "activations"}, {}, "offload=activations acts as none: mode=prefill has no backward pass"),
        ({"recompute": "full"}, {}, "recompute=full acts as none: mode=prefill has no backward pass"),
        ({"loss_chunks": 4}, {}, "mode=prefill has the loss of each sequence's last token alone"),
        (
            {"sharding": "zero1"},
            {},
            "sharding=zero1 acts as none: mode=prefill has no gradients and no optimizer state",
        ),
        ({"sharding": "zero2", "overlap": "grad_param"}, {}, "overlap=grad_param acts as none"),
        ({"overlap": "grad"}, {}, "overlap=grad acts as none: mode=prefill reduces no gradients"),
        ({"sharding": "zero3", "overlap": "grad"}, {"sharding": "zero3"}, "overlap=grad acts as none"),
        ({"sharding": "zero3", "overlap": "grad_param"}, {"sharding": "zero3", "overlap": "grad_param"}, ""),
        ({"sharding": "zero1", "tp": 8, "etp": 8}, {"tp": 8, "etp": 8}, "no replicas to share it with"),
    ],
)
def test_what_only_training_uses_does_nothing_to_prompts(axes, as_run, why):
    written = spec(**axes)
    plan, reasons = effective(replace(written, workload=replace(written.workload, mode="prefill")))
    assert plan == Plan(**as_run)
    assert why in "; ".join(reasons)


def test_a_pipeline_that_trains_nothing_shards_no_optimizer():
    """DeepSpeed's bf16 pipeline, which otherwise always does."""
    written = spec(engine="deepspeed", pp=2)
    assert effective(written)[0].sharding == "zero1"
    assert effective(replace(written, workload=replace(written.workload, mode="prefill"))) == (written.plan, ())
