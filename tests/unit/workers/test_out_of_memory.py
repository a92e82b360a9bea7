import pytest
import torch
import torch.distributed as dist

from wattune.errors import EngineError
from wattune.workers.out_of_memory import first_line, is_out_of_memory


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory"),
        OSError(12, "Cannot allocate memory"),
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported at some other call"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN Frontend error: [cudnn_frontend] Error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOC_FAILED"),
        RuntimeError("miopenStatusAllocFailed"),
        RuntimeError(
            "NCCL error in: NCCLUtils.cpp:93, unhandled cuda error (run with NCCL_DEBUG=INFO for details)\n"
            "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to CUDA calloc 10485760 bytes"
        ),
        RuntimeError(
            "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 'out of memory'"
        ),
        RuntimeError("Last error:\nFailed to CUDA host malloc 4096 bytes"),
        dist.DistBackendError(
            "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error (run with NCCL_DEBUG=INFO for details)\n"
            "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
        ),
    ],
)
def test_memory_that_anybody_asks_for_in_vain_counts_as_out_of_memory(error: Exception) -> None:
    assert is_out_of_memory(error)


def test_other_errors_do_not_count_as_out_of_memory() -> None:
    assert not is_out_of_memory(ValueError("memory"))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not is_out_of_memory(EngineError("a plan that would run out of memory"))


def test_the_first_line_of_an_error_is_its_message_or_its_type() -> None:
    assert first_line(RuntimeError("first\nsecond")) == "first"
    assert first_line(RuntimeError("")) == "RuntimeError"
