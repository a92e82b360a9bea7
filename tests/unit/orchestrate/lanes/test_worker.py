"""A lane's worker without Ray: the name of its device, the outcome of an error."""

import time

import pytest
from specs import trial_spec
from tiny_models import LLAMA

from wattune.errors import EngineError, NodeError
from wattune.orchestrate.lanes.worker import failed, sensed_name
from wattune.run import RunStatus
from wattune.trial import TrialSpec
from wattune.workers.device import device_uuid

FIRST, SECOND = "GPU-163b45e6-75c7-fc2e-765c-f19788620a68", "GPU-00000000-0000-0000-0000-000000000001"
NAMES = {FIRST: "gpu0", SECOND: "gpu1"}


def on(device: str) -> TrialSpec:
    return trial_spec(LLAMA, on=f"1x2 {device}", seq_len=8, batch=2)


def test_a_reordered_device_keeps_its_own_name() -> None:
    """With CUDA_VISIBLE_DEVICES=1,0 the device `cuda:0` is NVML's second."""
    assert sensed_name(on("h200_sxm"), 0, SECOND, NAMES) == "gpu1"
    assert sensed_name(on("h200_sxm"), 1, FIRST, NAMES) == "gpu0"


@pytest.mark.parametrize("uuid", [None, "GPU-ffffffff-0000-0000-0000-000000000000"])
def test_a_device_that_is_not_sampled_is_an_error(uuid: str | None) -> None:
    with pytest.raises(EngineError, match=f"device {uuid}.*gpu0 {FIRST}, gpu1 {SECOND}"):
        sensed_name(on("h200_sxm"), 0, uuid, NAMES)


def test_a_processor_goes_by_its_number() -> None:
    assert device_uuid("cpu") is None
    assert sensed_name(on("cpu"), 1, None, {}) == "cpu1"


def test_failures_are_classified_and_stamped() -> None:
    before_ns = time.monotonic_ns()
    memory = failed(3, RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried\nmore"))
    assert memory.status is RunStatus.OUT_OF_MEMORY and memory.end_mono_ns >= before_ns
    assert failed(3, ValueError("x")).reason == "rank 3: ValueError: x"
    assert failed(3, FileNotFoundError(2, "no tokens there")).status is RunStatus.CRASHED, "the space named it"


@pytest.mark.parametrize(
    "error",
    [
        NodeError('engine "deepspeed" needs deepspeed, which is not installed'),
        ImportError("libcudnn.so.9: cannot open shared object file"),
        OSError(28, "No space left on device"),
    ],
)
def test_what_one_node_lacks_is_not_the_plans_failure(error: Exception) -> None:
    assert failed(3, error).status is RunStatus.INFRA_FAILED
    wrapped = RuntimeError("compiling failed")
    wrapped.__cause__ = error
    assert failed(3, wrapped).status is RunStatus.INFRA_FAILED
