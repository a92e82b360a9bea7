"""Answers of an engine, from the specification that it has built."""

import gc
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from wattune.engines.model.compiler import Compiler
from wattune.engines.model.routing import Routes, routing_facts
from wattune.engines.model.tokens import Batches
from wattune.plans.parallel import num_micro_batches
from wattune.trial import TrialSpec
from wattune.workers.engine import ExpertTokens, Ranks, StepSpans
from wattune.workers.phases import Span
from wattune.workers.recorder import recorder_for, with_idle


class Running(ABC):
    """One specification built and ready to step on this rank."""

    routes: Routes | None = None
    """Routing of tokens to experts; None without experts."""

    def __init__(self, spec: TrialSpec, ranks: Ranks, device: torch.device, compiler: Compiler) -> None:
        """Begins to record; the model is an engine's own, and `_begin` follows it."""
        self._spec, self._world_size = spec, ranks.world_size
        self._trains = spec.workload.mode != "prefill"
        self._num_micro_batches = num_micro_batches(spec.plan, ranks.world_size, spec.workload.global_batch_size)
        self.recorder = recorder_for(device)
        self.facts: Mapping[str, str] = {"compiler": str(compiler), **routing_facts(spec)}
        """See `Engine.facts`."""

    def _begin(self, ranks: Ranks, device: torch.device, seed: int) -> None:
        """Makes the data, and the first global batch."""
        self._batches = Batches.of(self._spec, ranks, seed=seed, device=device)
        self._step = 0
        self._next = self._batches.at(0)

    def _go_on(self) -> tuple[Span, ...]:
        """Makes the next global batch, while a GPU still works on this step, and returns this step's spans."""
        self._step += 1
        self._next = self._batches.at(self._step)
        spans = self.recorder.take()
        return with_idle(spans) if self._spec.plan.pp > 1 else spans

    def _after_micro_batches(self) -> AbstractContextManager[None]:
        """Returns the phase in which ranks wait for each other's gradients."""
        if self._world_size > 1:
            return self.recorder.phase("wait")
        return self.recorder.phase("optimizer") if self._trains else nullcontext()

    @abstractmethod
    def step(self) -> StepSpans:
        """See `Engine.step`."""

    def close(self) -> None:  # noqa: B027 - most have nothing of the kind
        """Lets go of what Python's collector does not find."""


class _Session(Protocol):
    def close(self) -> None:
        """Destroys the process groups made since it began, and forgets what its library remembers of them."""


class Answering:
    """Answers an engine's calls from the `_running` that its `build` has made."""

    _running: Running | None = None
    _session: _Session | None = None
    """A library between `build` and `close`. Without one, process groups stay for the next trial of the meeting."""

    def __init__(self, compiler: Compiler | None = None) -> None:
        """Holds nothing yet; without a compiler of layers, plan and device choose."""
        self._compiler = compiler

    def close(self) -> None:
        """Gives back memory, and what a session has made."""
        running, self._running = self._running, None
        session, self._session = self._session, None
        if running is not None:
            running.close()
        del running
        if session is not None:
            session.close()
        gc.collect()  # modules and their hooks refer to each other
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            # The pages that offloaded activations were pinned in; not every version of torch can give them back.
            getattr(torch.accelerator, "empty_host_cache", lambda: None)()

    def step(self) -> StepSpans:
        """Runs one optimizer step over one global batch; waits for the device once, at its end."""
        assert self._running is not None, "build comes first"
        return self._running.step()

    def memory_peak_bytes(self) -> int:
        """Highest memory held since `build`: allocated by torch on GPUs; resident at the end of a phase on CPUs."""
        assert self._running is not None, "build comes first"
        return self._running.recorder.memory_peak_bytes()

    def facts(self) -> Mapping[str, str]:
        """Returns choices of this engine that no axis holds; empty before `build`."""
        return {} if self._running is None else self._running.facts

    def expert_tokens(self) -> ExpertTokens:
        """Tokens this rank sent to each expert of each layer since the last call; waits for the device."""
        assert self._running is not None, "build comes first"
        return () if self._running.routes is None else self._running.routes.take_counts()
