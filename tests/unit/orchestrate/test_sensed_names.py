"""What reads a trial's sensors, and by which name a rank's device is known there."""

import pytest

from wattune.catalog.hardware import DEVICES, ClusterSpec
from wattune.catalog.models import ModelSpec
from wattune.errors import EngineError
from wattune.orchestrate.lanes.worker import sensed_name
from wattune.orchestrate.trial_telemetry import sensor_backends
from wattune.plan.axes import Plan
from wattune.telemetry.registry import BACKENDS
from wattune.trial import TrialSpec, Workload
from wattune.workers.device import device_uuid

FIRST, SECOND = "GPU-163b45e6-75c7-fc2e-765c-f19788620a68", "GPU-00000000-0000-0000-0000-000000000001"
NAMES = {FIRST: "gpu0", SECOND: "gpu1"}


def on(device: str) -> TrialSpec:
    model = ModelSpec(
        name="tiny",
        num_layers=1,
        hidden_size=8,
        ffn_hidden_size=8,
        num_heads=1,
        num_kv_heads=1,
        vocab_size=8,
        source="made up",
    )
    return TrialSpec(
        model=model,
        cluster=ClusterSpec(device=device, devices_per_node=2),
        engine="torch",
        workload=Workload(seq_len=8, global_batch_size=2),
        plan=Plan(),
    )


@pytest.mark.parametrize("name", DEVICES)
def test_every_kind_of_device_has_backends_that_are_built(name: str) -> None:
    backends = sensor_backends(on(name))
    assert backends[0] == "host" and set(backends) <= BACKENDS.keys()
    assert ("nvml" in backends) == (DEVICES[name].vendor == "nvidia")


def test_a_reordered_device_keeps_its_own_name() -> None:
    """With CUDA_VISIBLE_DEVICES=1,0 the device `cuda:0` is NVML's second."""
    assert sensed_name(on("h200_sxm"), 0, SECOND, NAMES) == "gpu1"
    assert sensed_name(on("h200_sxm"), 1, FIRST, NAMES) == "gpu0"


@pytest.mark.parametrize("uuid", [None, "GPU-ffffffff-0000-0000-0000-000000000000"])
def test_a_device_nobody_samples_is_an_error_and_no_other_device(uuid: str | None) -> None:
    with pytest.raises(EngineError, match=f"device {uuid}.*gpu0 {FIRST}, gpu1 {SECOND}"):
        sensed_name(on("h200_sxm"), 0, uuid, NAMES)


def test_a_processor_goes_by_its_number() -> None:
    assert device_uuid("cpu") is None
    assert sensed_name(on("cpu"), 1, None, {}) == "cpu1"
