"""Runs parts of a model eagerly, or as graphs compiled once per process and shared by layers and trials.

A graph is kept by torch with the function it came from, and reused wherever shapes, data types and settings are the
same: by every layer of a model, and by every later trial of a process whose layers look alike. Inductor keeps what it
generated on disk too, so that a new process compiles a known layer in seconds.
"""

import copyreg
import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch

MOST_VARIANTS: Final = 24
"""Different configurations a process keeps graphs of; at the next one it forgets all. Every call checks the guards of
the graphs before its own, and torch gives up on a function after `recompile_limit` of them."""

GRAPHS_PER_VARIANT: Final = 8
"""Graphs one function may need in one configuration: with and without gradients, of the first layer and of others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """A backend of `torch.compile`, or none."""

    backend: str | Callable[..., Any] | None

    def run(self, function: Callable[..., Tensor], *args: Any) -> Tensor:
        """Calls a module's method, given as a function of its class, on the module and its inputs."""
        return function(*args) if self.backend is None else _compiled(function, self.backend)(*args)

    def __str__(self) -> str:
        return "eager" if self.backend is None else str(self.backend)


EAGER: Final = Compiler(backend=None)

_UNTIMED: Final[dict[str, Any]] = {"triton.autotune_pointwise": False}
"""Kernels that compute place by place are taken in their first form: to time several took 1.3 to 1.6 s of a first step,
and steps of dense plans are as long without it. Mixtures were not compared (study_economics.md)."""


def compile_only(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """A backend that compiles a graph as inductor does, backward too, and runs its operations: tensors need no data."""
    from torch._inductor.compile_fx import compile_fx

    for place, value in zip(graph.graph.find_nodes(op="placeholder"), inputs, strict=True):
        place.type = nn.Parameter if isinstance(value, nn.Parameter) else Tensor  # a part of the code's key
    graph.recompile()
    compile_fx(graph, inputs, config_patches=_UNTIMED)
    return graph.forward


def _keep_code() -> None:
    """Has torch keep whole graphs on disk under one key, whoever compiles them.

    Backward graphs are compiled with the forward ones, also where nothing is run. Collectives of tensor parallel are
    functions with a backward of their own, and torch keeps no graph of these unless told to: all they do is in it.
    """
    functorch.force_non_lazy_backward_lowering = True
    functorch.autograd_cache_allow_custom_autograd_functions = True
    # Else the key has the name of whichever module first imported torch: one of Ray's in a worker, one of torch's in a
    # process beside it, which then compiled in vain (two H200, torch 2.11).
    copyreg.pickle(torch.memory_format, lambda one: (_memory_format, (str(one),)))


def _memory_format(name: str) -> Any:
    return getattr(torch, name.removeprefix("torch."))


def compiler_for(device: torch.device) -> Compiler:
    """Inductor on GPUs. On CPUs it needs a C++ compiler and half a minute a trial, more than it can save there."""
    return Compiler(backend="inductor") if device.type == "cuda" else EAGER


@cache
def _compiled(function: Callable[..., Tensor], backend: str | Callable[..., Any]) -> Callable[..., Tensor]:
    _keep_code()
    # One wrapper for all layers and trials. Whole graphs only: what cannot be compiled is an error, not a slow trial.
    options = _UNTIMED if backend == "inductor" else None
    made = torch.compile(function, backend=backend, fullgraph=True, dynamic=False, options=options)
    compiled: Callable[..., Tensor] = made
    return compiled


def start_compilers() -> None:
    """Starts the processes that compile kernels of GPUs: they load torch while this one loads what else it needs.

    torch starts them at the first graph. Until they have loaded it, it compiles kernels one by one itself.
    """
    if torch.cuda.is_available():  # the import takes seconds
        from torch._inductor import async_compile

        getattr(async_compile, "maybe_warm_pool", lambda: None)()


_variants: set[object] = set()


def begin_variant(key: object) -> bool:
    """Says which configuration is compiled for next; returns whether this process may already hold its graphs.

    Keys are equal for two configurations exactly where their graphs can be shared.
    """
    torch._dynamo.config.recompile_limit = MOST_VARIANTS * GRAPHS_PER_VARIANT
    torch._dynamo.config.accumulated_recompile_limit = 4 * MOST_VARIANTS * GRAPHS_PER_VARIANT
    known = key in _variants
    if not known and len(_variants) >= MOST_VARIANTS:
        torch._dynamo.reset()
        _variants.clear()
        gc.unfreeze()  # workers freeze what they hold between trials
    _variants.add(key)
    return known
