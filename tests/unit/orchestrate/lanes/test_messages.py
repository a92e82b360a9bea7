"""Messages of lanes: which trials share workers, and the rank's place as it is stored."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from wattune.catalog.hardware import ClusterSpec
from wattune.orchestrate.lanes.messages import GroupKey, Place, device_name
from wattune.plans.axes import Plan
from wattune.plans.engines import CAPABILITIES
from wattune.trial import TrialSpec


def test_trials_that_differ_in_their_plan_share_workers_and_other_kinds_do_not(specs: list[TrialSpec]) -> None:
    spec, cpus = specs[0], {"CPU": 1.0}
    key = GroupKey.of(spec, cpus)
    assert GroupKey.of(replace(spec, plan=Plan(micro_batch_size=8)), cpus) == key
    others = [
        GroupKey.of(replace(spec, engine="deepspeed"), cpus),
        GroupKey.of(replace(spec, cluster=ClusterSpec(device="cpu", devices_per_node=2)), cpus),
        GroupKey.of(replace(spec, cluster=ClusterSpec(device="cpu", num_nodes=2, devices_per_node=1)), cpus),
        GroupKey.of(spec, {"CPU": 0.5}),
    ]
    assert key not in others and len(set(others)) == len(others)


def test_a_key_counts_its_workers_and_knows_their_kind(make_specs: Callable[..., list[TrialSpec]]) -> None:
    cluster = ClusterSpec(device="h200_sxm", num_nodes=2, devices_per_node=4)
    key = GroupKey.of(make_specs(1, cluster)[0], {"GPU": 1.0, "CPU": 1.0})
    assert (key.world_size, key.has_gpus) == (8, True)
    assert key.resources == (("CPU", 1.0), ("GPU", 1.0)), "in one order, so that equal resources are equal keys"
    assert not GroupKey.of(make_specs(1)[0], {"CPU": 1.0}).has_gpus


def test_workers_start_with_the_variables_of_their_engine(specs: list[TrialSpec]) -> None:
    for engine, known in CAPABILITIES.items():
        key = GroupKey.of(replace(specs[0], engine=engine), {})
        assert dict(key.environment) == dict(known.environment)
    assert any(known.environment for known in CAPABILITIES.values()), "or the test above shows nothing"
    assert GroupKey.of(replace(specs[0], engine="own_module:Engine"), {}).environment == ()


def test_a_place_is_stored_as_plain_data() -> None:
    facts: dict[str, Any] = {"rank": 3, "node": "n0", "slot": 1, "device": "gpu1", "device_uuid": "GPU-0", "pid": 42}
    assert Place(**facts).to_json() == facts


def test_a_device_is_named_by_its_kind_and_slot(make_specs: Callable[..., list[TrialSpec]]) -> None:
    for device, name in (("cpu", "cpu1"), ("h200_sxm", "gpu1")):
        (spec,) = make_specs(1, ClusterSpec(device=device, devices_per_node=2))
        assert device_name(spec, 1) == name
