"""Kinds of last words: one of each library's, and those of a program about itself."""

import pytest

from wattune.workers.command.causes import (
    DEVICE,
    DEVICE_MEMORY,
    HOST_MEMORY,
    NETWORK,
    PLAN,
    SURROUNDINGS,
    kind_of,
)

KINDS = {
    PLAN: [
        "AssertionError: sequence parallel requires tp > 1",
        "ValueError: global batch size (24) is not divisible by micro batch size (5) times data parallel size (2)",
        "ValueError: CUDA out of memory is likely with this batch",
        "RuntimeError: turn on recompute to avoid CUDA out of memory errors",
        "RuntimeError: CUDA error: device-side assert triggered",
        "RuntimeError: CUDA error: unspecified launch failure",
        "RuntimeError: CUDA error: invalid device ordinal",
        "RuntimeError: HIP error: an illegal memory access was encountered",
        "RuntimeError: NCCL error: invalid usage. Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 4000",
        "jaxlib.xla_extension.XlaRuntimeError: INTERNAL: RET_CHECK failure (xla/service/gpu.cc:12)",
        "jaxlib.xla_extension.XlaRuntimeError: INVALID_ARGUMENT: Mesh shape",
        "ValueError: Target modules {'q_proj'} not found in the base model",
        "RuntimeError: FlashAttention only supports Ampere GPUs or newer.",
        "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.",
        "grpc: RESOURCE_EXHAUSTED: Received message larger than max",
    ],
    DEVICE_MEMORY: [
        "torch.AcceleratorError: CUDA error: out of memory",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "jaxlib.xla_extension.XlaRuntimeError: INTERNAL: Failed to load CUBIN: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
    ],
    HOST_MEMORY: [
        "MemoryError",
        "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 12.0 GiB for an array",
        "OSError: [Errno 12] Cannot allocate memory",
        "RuntimeError: DataLoader worker (pid 12) is killed by signal: Killed. ",
        "torch.distributed.DistBackendError: NCCL error: ncclUnhandledCudaError: Failed to CUDA host malloc 4096 bytes",
        "RuntimeError: Out of memory",
    ],
    DEVICE: ["pynvml.NVMLError_GpuIsLost: GPU is lost", "RuntimeError: No CUDA GPUs are available"],
    NETWORK: [
        "RuntimeError: RCCL error in: ProcessGroupNCCL.cpp:100, unhandled system error",
        "TimeoutError: [Errno 110] Connection timed out",
        "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError",
        "ConnectionRefusedError: [Errno 111] Connection refused",
    ],
    SURROUNDINGS: [
        "AssertionError: Torch not compiled with CUDA enabled",
        "AssertionError: /data/openwebtext_text_document.idx does not exist",
        "PermissionError: [Errno 13] Permission denied: '/scratch'",
        "RuntimeError: operator torchvision::nms does not exist",
        "RuntimeError: unable to open shared memory object </torch_1> in read-write mode: No space left on device (28)",
        "Call to ibv_reg_mr failed with error Cannot allocate memory",
        "RuntimeError: License checkout failed: the server does not answer",
        "huggingface_hub.errors.OfflineModeIsEnabled: Cannot reach https://huggingface.co: offline mode is enabled.",
    ],
}


@pytest.mark.parametrize(("kind", "words"), [(kind, each) for kind, several in KINDS.items() for each in several])
def test_last_words_have_a_kind(kind, words):
    assert kind_of(words) == kind
