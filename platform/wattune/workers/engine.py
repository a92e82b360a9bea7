"""The protocol of an engine. An engine trains; it does not warm up, measure or judge."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from wattune.trial import TrialSpec
from wattune.workers.phases import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Position of one worker. The default process group exists already when an engine is built."""

    rank: int
    world_size: int
    local_rank: int
    """Rank among the workers of the same node."""
    device: str
    """The torch device this rank drives, such as `cuda:0` or `cpu`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpans:
    """Result of one optimizer step on one rank."""

    spans: tuple[Span, ...]
    """`step` once, and the phases inside it."""
    loss: float
    """Mean loss over the global batch; the same number on every rank."""
    grad_norm: float
    """2-norm of the gradient over all parameters, before the optimizer; the same number on every rank."""


ExpertTokens = tuple[tuple[int, ...], ...]
"""Tokens by layer of the model and by expert; zeros where a rank does not hold a layer."""


class Engine(Protocol):
    """One specification made ready to train on this rank. All ranks call the same methods in the same order."""

    def build(self, spec: TrialSpec, ranks: Ranks, *, seed: int) -> None:
        """Builds model, optimizer and data from one seed.

        Raises `EngineError`: this engine cannot build the specification; the message names the setting.
        """
        ...

    def step(self) -> StepSpans:
        """Runs one optimizer step over one global batch."""
        ...

    def memory_peak_bytes(self) -> int:
        """Highest memory this rank's device held since `build`: allocated by torch on GPUs, resident set on CPUs."""
        ...

    def facts(self) -> Mapping[str, str]:
        """Returns choices of the engine that no axis holds, such as the compiler of its layers: tags of the result."""
        ...

    def expert_tokens(self) -> ExpertTokens:
        """Tokens this rank sent to each expert of each layer since the last call, or since `build`.

        Empty for models without experts. Waits for the device.
        """
        ...

    def close(self) -> None:
        """Gives back memory and own process groups; may be called twice, and after a failed `build`."""
        ...
