"""DeepSpeed's process-wide state: what it needs before an engine is built, and what has to be undone after.

DeepSpeed keeps its backend, its process groups and its modes in modules. A worker that runs one trial after another
must find none of the last one's: `DeepSpeedSession` notes what stands before and puts it back. The engine imports this
module first, since DeepSpeed writes to standard output while it is imported.
"""

import contextlib
import importlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from wattune.workers.process_groups import live_groups


@contextlib.contextmanager
def _without_mlflow() -> Iterator[None]:
    """Hides MLflow, unless it is there already: DeepSpeed's autotuner, which nothing here uses, loads it if it can.

    Of four seconds of processor that this module took to load, with torch, one and a half were MLflow's.
    """
    if "mlflow" in sys.modules:
        yield
        return
    modules = cast(dict[str, Any], sys.modules)
    modules["mlflow"] = None
    try:
        yield
    finally:
        del modules["mlflow"]


with _without_mlflow(), contextlib.redirect_stdout(io.StringIO()):
    import deepspeed
    from deepspeed.accelerator import real_accelerator
    from deepspeed.module_inject import layers as autotp_layers
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.pipe import p2p
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
    from deepspeed.utils import groups
    from deepspeed.utils.logging import logger as deepspeed_logger

logger = logging.getLogger(__name__)

# DeepSpeed calls collectives by the names torch 2.11 has; torch 2.13 deprecates them.
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)


class DeepSpeedSession:
    """DeepSpeed between the build and the close of one engine."""

    def __init__(self, device: torch.device, local_rank: int) -> None:
        """Makes DeepSpeed ready on the default group; on GPUs it takes the device's index for `local_rank`."""
        quieten()
        _choose_accelerator(device)
        _leave_out_shared_memory()
        self._groups = set(live_groups())
        index = device.index if device.type == "cuda" and device.index is not None else local_rank
        self._environment = {
            "LOCAL_RANK": str(index),
            "RANK": str(dist.get_rank()),
            "WORLD_SIZE": str(dist.get_world_size()),
            # DeepSpeed only looks whether they are there before it takes the group that exists.
            "MASTER_ADDR": os.environ.get("MASTER_ADDR", "127.0.0.1"),
            "MASTER_PORT": os.environ.get("MASTER_PORT", "0"),
        }
        self._before = {name: os.environ.get(name) for name in self._environment}
        os.environ.update(self._environment)
        deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)

    def close(self) -> None:
        """Destroys the groups made since, and forgets what DeepSpeed remembers of them."""
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        for group in [group for group in live_groups() if group not in self._groups]:
            dist.destroy_process_group(group)
        groups._release_process_group_references()
        deepspeed.comm.comm.cdb = None
        p2p._grid = p2p._groups = None
        autotp_layers.set_autotp_mode(training=False)
        autotp_layers.TensorParallel_Layer.tp_overlap_comm = False
        deepspeed.zero.partition_parameters.shutdown_init_context()
        _forget_models()


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Keeps what DeepSpeed prints out of standard output; it goes to the log at DEBUG."""
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            yield
    finally:
        for line in filter(None, map(str.strip, text.getvalue().splitlines())):
            logger.debug("deepspeed printed: %s", line)


def initialise_engine(model: nn.Module, config: Mapping[str, Any], device: torch.device) -> Any:
    """`deepspeed.initialize` that prints nothing and leaves the random state of the process as it was.

    Its optimizers take every parameter they are given for a trained one, so they are given no frozen ones.
    """
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)  # looked up when it is cut
    with muted(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=trained, config=dict(config), dist_init_required=False
        )
    if isinstance(engine.optimizer, FP16_UnfusedOptimizer):
        _forget_first_update(engine.optimizer)
    return engine


def _forget_first_update(optimizer: FP16_UnfusedOptimizer) -> None:
    """Undoes the update with which the optimizer of bf16 without ZeRO allocates its state.

    That update has no gradient, but it is counted, so that AdamW corrects its averages for one update too many and the
    first real one is a quarter too small; and it decays the fp32 weights.
    """
    for state in optimizer.optimizer.state.values():
        state["step"].zero_()
    optimizer.refresh_fp32_params()


def quieten() -> None:
    """Sends DeepSpeed's log through `logging` as any other library's, warnings and worse."""
    for handler in list(deepspeed_logger.handlers):
        deepspeed_logger.removeHandler(handler)
    deepspeed_logger.propagate = True
    deepspeed_logger.setLevel(logging.WARNING)


def _choose_accelerator(device: torch.device) -> None:
    """DeepSpeed takes a GPU where there is one; a trial may be meant for the processor all the same."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    if deepspeed.accelerator.get_accelerator().device_name() != kind:
        module = importlib.import_module(f"deepspeed.accelerator.{kind}_accelerator")
        real_accelerator.set_accelerator(getattr(module, f"{kind.upper()}_Accelerator")())


def _leave_out_shared_memory() -> None:
    """Keeps DeepSpeed from compiling an operator that only its inference uses.

    On processors `TorchBackend` builds `deepspeed_shm_comm` (40 to 60 s, g++ and ninja) for `inference_all_reduce`.
    Training calls `all_reduce`: `module_inject/layers.py`, `RowParallel.forward`. The operator would also take every
    tensor to the whole world, whatever the group (`comm/torch.py`, `inference_all_reduce`), and keep the layout of
    the first trial. What DeepSpeed may load is a table it documents as editable (`ops/__init__.py`).
    """
    deepspeed.ops.__dict__.setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False


def _forget_models() -> None:
    """Empties a cache on a method of ZeRO-3, behind a decorator, that keeps every model it has seen."""
    for function in vars(PartitionedParameterCoordinator).values():
        for cell in getattr(function, "__closure__", None) or ():
            if hasattr(cell.cell_contents, "cache_clear"):
                cell.cell_contents.cache_clear()
