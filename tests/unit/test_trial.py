"""Trials: an id that follows from the work alone, and round trips through JSON."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.catalog.hardware import DEVICES, ClusterSpec
from wattune.catalog.models import MODELS
from wattune.catalog.networks import NETWORKS
from wattune.metrics import METRICS
from wattune.plans.axes import AXES, Plan
from wattune.run import Numbers, Prediction, Run, RunStatus
from wattune.trial import TRIAL_ID_DIGITS, TrialSpec
from wattune.workload import Lora, Routing, TokenFile, Workload

COUNT = st.integers(1, 64)
SPECS = st.builds(
    TrialSpec,
    model=st.sampled_from(sorted(MODELS.values(), key=lambda model: model.name)),
    cluster=st.builds(
        ClusterSpec,
        device=st.sampled_from(sorted(DEVICES)),
        num_nodes=COUNT,
        devices_per_node=COUNT,
        nvlink_domain_size=st.none() | COUNT,
        transformer_engine=st.booleans(),
        network=st.none() | st.sampled_from(sorted(NETWORKS.values(), key=lambda one: one.name)),
        host_speed=st.sampled_from([0.5, 1.0]),
        inlet_c=st.sampled_from([None, 27.0]),
    ),
    engine=st.sampled_from(["torch", "megatron"]),
    workload=st.builds(
        Workload,
        mode=st.sampled_from(["pretrain", "lora", "prefill"]),
        seq_len=COUNT,
        global_batch_size=COUNT,
        tokens=st.none() | st.builds(TokenFile, path=st.sampled_from(["a.bin", "b.bin"])),
        routing=st.none()
        | st.builds(Routing, by=st.sampled_from(["balanced", "learned"]))
        | st.builds(Routing, by=st.just("skew"), skew=st.sampled_from([0.5, 1.0])),
        lora=st.none() | st.builds(Lora, rank=COUNT, targets=st.sampled_from([("q",), ("q", "v"), ("v", "q")])),
    ),
    plan=st.builds(
        Plan,
        **{axis.name: COUNT for axis in AXES.values() if axis.kind == "count"},
        **{axis.name: st.sampled_from(axis.choices) for axis in AXES.values() if axis.kind == "choice"},
        layout=st.lists(COUNT, max_size=4).map(tuple),
        rank_order=st.just("topology") | st.permutations(range(4)).map(tuple),
    ),
)
RESULTS = st.builds(
    Run,
    trial_id=st.text("0123456789abcdef", min_size=TRIAL_ID_DIGITS, max_size=TRIAL_ID_DIGITS),
    repeat=st.integers(0, 9),
    status=st.sampled_from(RunStatus),
    reason=st.text(max_size=20),
    metrics=st.dictionaries(st.sampled_from(sorted(METRICS)), st.floats(-1e30, 1e30)),
    quality=st.sampled_from(["", "publishable", "indicative", "invalid"]),
    quality_reasons=st.lists(st.text(max_size=9), max_size=3).map(tuple),
    tags=st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=3),
    start_wall_ns=st.integers(0, 2**62),
    end_wall_ns=st.integers(0, 2**62),
)


@given(spec=SPECS)
def test_a_specification_survives_json_and_keeps_its_id(spec):
    data = json.loads(json.dumps(spec.to_json()))
    again = TrialSpec.from_json(data)
    assert again == spec and hash(again) == hash(spec)
    assert again.trial_id == spec.trial_id == data["trial_id"]
    assert len(spec.trial_id) == TRIAL_ID_DIGITS and set(spec.trial_id) <= set("0123456789abcdef")


@given(spec=SPECS, data=st.data())
def test_an_id_does_not_depend_on_the_order_of_keys(spec, data):
    def shuffled(value):
        if not isinstance(value, dict):
            return value
        return {key: shuffled(value[key]) for key in data.draw(st.permutations(sorted(value)))}

    assert TrialSpec.from_json(shuffled(json.loads(json.dumps(spec.to_json())))).trial_id == spec.trial_id


@given(one=SPECS, other=SPECS)
def test_ids_are_equal_where_specifications_are(one, other):
    assert (one.trial_id == other.trial_id) == (one == other)


@given(spec=SPECS)
def test_an_id_follows_from_the_work_and_not_from_where_its_numbers_were_read(spec):
    assert replace(spec, model=replace(spec.model, source="elsewhere")).trial_id == spec.trial_id
    assert replace(spec, model=replace(spec.model, num_layers=999)).trial_id != spec.trial_id
    assert replace(spec, workload=replace(spec.workload, seq_len=999)).trial_id != spec.trial_id
    assert replace(spec, plan=replace(spec.plan, micro_batch_size=999)).trial_id != spec.trial_id


def test_a_specification_keeps_the_origin_of_its_device_and_is_equal_to_one_of_another():
    """Nothing is kept for one that is another's: links by PCIe are known by the origin."""

    def stored(source: str) -> TrialSpec:
        own = replace(DEVICES["h100_pcie"], name="mine", source=source)
        cluster = ClusterSpec(device="mine", devices_per_node=1, own_device=own)
        workload = Workload(seq_len=4096, global_batch_size=16)
        spec = TrialSpec(model=MODELS["llama3_8b"], cluster=cluster, engine="torch", workload=workload, plan=Plan())
        return TrialSpec.from_json(json.loads(json.dumps(spec.to_json())))

    described, like = stored("the space"), stored("like h100_pcie")
    assert described == like and hash(described) == hash(like)
    assert not described.cluster.sensed_device.is_linked_by_pcie and like.cluster.sensed_device.is_linked_by_pcie


def test_an_id_is_the_same_in_every_version():
    """Study folders are named by ids: a change here makes every stored trial unknown."""
    spec = TrialSpec(
        model=MODELS["llama3_8b"],
        cluster=ClusterSpec(device="h200_sxm", devices_per_node=4),
        engine="torch",
        workload=Workload(seq_len=4096, global_batch_size=16),
        plan=Plan(tp=2, etp=2),
    )
    assert spec.trial_id == "ba51096b2cd5"


def test_trials_from_before_routing_was_chosen_keep_their_ids():
    """They were measured without any control of it: that is what None says, and no new space asks for it."""
    spec = TrialSpec(
        model=MODELS["mixtral_8x7b"],
        cluster=ClusterSpec(device="h200_sxm", devices_per_node=4),
        engine="torch",
        workload=Workload(seq_len=4096, global_batch_size=16),
        plan=Plan(ep=4),
    )
    assert spec.trial_id == "a8a58eff3fb7"
    stored = json.loads(json.dumps(spec.to_json()))
    del stored["workload"]["routing"]
    assert TrialSpec.from_json(stored) == spec
    chosen = [Routing(by="balanced"), Routing(by="learned"), *(Routing(by="skew", skew=s) for s in (0.5, 1.0))]
    ids = {replace(spec, workload=replace(spec.workload, routing=routing)).trial_id for routing in chosen}
    assert len(ids) == 4 and spec.trial_id not in ids


@given(result=RESULTS)
def test_a_result_survives_json(result):
    assert Run.from_json(json.loads(json.dumps(result.to_json()))) == result


def test_a_result_keeps_its_numbers_and_prediction_as_such_and_refuses_text_for_them() -> None:
    made = Prediction(metric="tokens_per_s", value=123.456, low=100.0, high=150.0, feasible_probability=0.75)
    first = Numbers(space=2, group_start_s=1.5)
    result = Run(trial_id="0" * 12, repeat=0, status=RunStatus.COMPLETED, numbers=first, prediction=made)
    stored = json.loads(json.dumps(result.to_json()))
    assert Run.from_json(stored) == result and stored["numbers"] == {"space": 2, "group_start_s": 1.5}
    assert first | Numbers(space=3, attempt=2) == Numbers(space=3, attempt=2, group_start_s=1.5)
    for wrong in (
        {"prediction": {**stored["prediction"], "low": "x"}},
        {"prediction": {**stored["prediction"], "metric": 1}},
        {"prediction": {"metric": "tokens_per_s"}},
        {"prediction": "no mapping"},
        {"numbers": {"attempt": "2"}},
    ):
        with pytest.raises((TypeError, ValueError)):
            Run.from_json({**stored, **wrong})


def test_only_trials_that_say_nothing_about_their_plan_run_again():
    assert [status for status in RunStatus if not status.is_final] == [RunStatus.INTERRUPTED, RunStatus.INFRA_FAILED]


def test_tokens_of_a_step():
    assert Workload(seq_len=4096, global_batch_size=16).tokens_per_step == 65_536


def test_a_reason_cannot_steer_a_terminal() -> None:
    result = Run(trial_id="0" * 12, repeat=0, status=RunStatus.CRASHED, reason="\x1b[2Jgone\nnext")
    assert result.reason == "\\x1b[2Jgone\nnext"
    assert Run.from_json(result.to_json()) == result
