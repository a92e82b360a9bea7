"""Answers of an engine, from the specification that it has built."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from wattune.engines.model.routing import Routes
from wattune.workers.engine import ExpertTokens, StepSpans
from wattune.workers.recorder import Recorder


class Running(ABC):
    """One specification built, on this rank."""

    recorder: Recorder
    facts: Mapping[str, str]
    """See `Engine.facts`."""
    routes: Routes | None = None
    """Routing of tokens to experts; None without experts."""

    @abstractmethod
    def step(self) -> StepSpans:
        """See `Engine.step`."""


class Answering:
    """Answers an engine's calls from the `_running` that its `build` has made."""

    _running: Running | None = None

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
