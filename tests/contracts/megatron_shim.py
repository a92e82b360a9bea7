"""Lets Megatron-Core's own code run over gloo: what it does on CUDA devices is done on the processor.

For tests alone: what runs here is Megatron's models, schedules, data parallelism and optimizers unchanged; streams,
events and random states of devices are things that do nothing. Where it asks for a CUDA tensor it gets one of the
processor's, and is told that it is one.
"""

import contextlib
import os
from typing import Any

os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # compiling takes longer than all cases

import numpy as np
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

# Torch may have read the variable before, in the process that this one is a fork of.
torch._dynamo.config.disable = os.environ["TORCH_COMPILE_DISABLE"] == "1"

CPU = torch.device("cpu")


class _Nothing:
    """A stream or an event of a device that has finished when a call returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record_event(self, *_: Any) -> "_Nothing":
        return _Nothing()

    def _ignore(self, *_: Any) -> None:
        pass

    wait_stream = wait_event = record = wait = synchronize = _ignore

    def elapsed_time(self, _end: Any) -> float:
        return 0.0


class OnProcessor(TorchFunctionMode):
    """Turns every device that is asked for into the processor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {key: _here(value) if key == "device" else value for key, value in (kwargs or {}).items()}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = tuple(_here(value) if isinstance(value, torch.device | str) else value for value in args)
        out = func(*args, **named)
        if func is torch.Tensor.type and isinstance(out, str):
            return out.replace("torch.", "torch.cuda.")
        return out


def _here(device: Any) -> Any:
    if isinstance(device, int) or (isinstance(device, torch.device | str) and "cuda" in str(device)):
        return CPU
    return device


def install() -> None:
    """Once a process, before Megatron is imported."""
    cuda = torch.cuda
    nothing = _Nothing()
    patches = {
        "current_device": lambda: 0,
        "Stream": _Nothing,
        "Event": _Nothing,
        "stream": lambda _stream: contextlib.nullcontext(),
        "current_stream": lambda *_: nothing,
        "default_stream": lambda *_: nothing,
        "synchronize": lambda *_: None,
        "manual_seed": lambda _seed: None,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda *_, **__: None,
        "get_device_capability": lambda *_: (9, 0),
        "nvtx": _Nvtx,
    }
    for name, value in patches.items():
        setattr(cuda, name, value)
    torch.autograd.backward = _backward
    dist.all_gather, dist.reduce_scatter = _all_gather, _reduce_scatter
    from megatron.core.pipeline_parallel import p2p_communication
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    own = p2p_communication._p2p_ops
    p2p_communication._p2p_ops = lambda **named: own(**{key: _kept(key, value) for key, value in named.items()})
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda *_, **__: None
    token_dispatcher.maybe_move_tensor_to_cpu = _to_host
    OnProcessor().__enter__()


def _backward(tensors: Any, grad_tensors: Any = None) -> None:
    """As torch's, which would turn the mode off while it runs; Megatron allocates in backward passes too."""
    outputs = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
    given = grad_tensors if isinstance(grad_tensors, tuple | list) else (grad_tensors,) * len(outputs)
    grads = tuple(torch.ones_like(out) if grad is None else grad for out, grad in zip(outputs, given, strict=True))
    torch.autograd.Variable._execution_engine.run_backward(
        outputs, grads, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _all_gather(gathered: list[torch.Tensor], mine: torch.Tensor, group: dist.ProcessGroup) -> None:
    """As torch's, of pieces that differ in size: what expert tensor parallel ranks got. Gloo wants equal ones."""
    for rank, piece in enumerate(gathered):
        if rank == group.rank():
            piece.copy_(mine)
        dist.broadcast(piece, group=group, group_src=rank)


def _reduce_scatter(mine: torch.Tensor, pieces: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """As torch's, of pieces that differ in size."""
    for rank, piece in enumerate(pieces):
        whole = piece.clone()
        dist.reduce(whole, group=group, group_dst=rank)
        if rank == group.rank():
            mine.copy_(whole)


def _kept(name: str, value: Any) -> Any:
    """Copies what is sent. Megatron frees outputs under way, which streams make safe and gloo does not."""
    return value.detach().clone() if name.startswith("tensor_send") and value is not None else value


class _Nvtx:
    range_push = range_pop = staticmethod(lambda *_: None)


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return np.asarray(tensor) if as_numpy and torch.is_tensor(tensor) else tensor
