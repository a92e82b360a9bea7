"""What an engine is, and which there are. An engine trains; it neither warms up, measures nor judges."""

import importlib
from dataclasses import dataclass
from typing import Final, Protocol, cast

from wattune.errors import EngineError, closest
from wattune.trial import TrialSpec
from wattune.workers.phases import Mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Where one worker stands. The default process group exists already when an engine is built."""

    rank: int
    world_size: int
    local_rank: int
    """Rank among the workers of the same node."""
    device: str
    """The torch device this rank drives, such as `cuda:0` or `cpu`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMarks:
    """What one optimizer step gave on one rank."""

    marks: tuple[Mark, ...]
    """`step` once, and the phases inside it."""
    loss: float
    """Mean loss over the global batch; the same number on every rank."""
    grad_norm: float
    """2-norm of the gradient over all parameters, before the optimizer; the same number on every rank."""


class Engine(Protocol):
    """One specification made ready to train on this rank. All ranks call the same methods in the same order.

    An engine may also have `facts() -> Mapping[str, str]`: what it decided that no axis says, for the result's tags.
    """

    def build(self, spec: TrialSpec, ranks: Ranks, *, seed: int) -> None:
        """Builds model, optimizer and data from one seed.

        Raises:
            EngineError: This engine cannot build the specification; the message names the setting.
        """
        ...

    def step(self) -> StepMarks:
        """Runs one optimizer step over one global batch."""
        ...

    def memory_peak_bytes(self) -> int:
        """Highest memory this rank's device held since `build`: allocated by torch on GPUs, resident set on CPUs."""
        ...

    def close(self) -> None:
        """Gives back memory and process groups; may be called twice, and after a failed `build`."""
        ...


ENGINES: Final[dict[str, str]] = {
    "torch": "wattune.workers.torch_engine:TorchEngine",
    "deepspeed": "wattune.workers.deepspeed_engine:DeepSpeedEngine",
    "megatron": "wattune.workers.megatron_engine:MegatronEngine",
}
"""Engine name to `module:Class`; loaded on first use, so that naming an engine imports no vendor library."""


def load_engine(name: str) -> Engine:
    """A new engine of that name.

    Args:
        name: A name of `ENGINES`, or `module:Class` of an engine of one's own.

    Raises:
        EngineError: There is none, or its library is not installed.
    """
    if name not in ENGINES and ":" not in name:
        raise EngineError(f'engine "{name}" is not built; {closest(name, ENGINES)}')
    module_name, _, class_name = ENGINES.get(name, name).partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        extra = f" (wattune[{name}])" if name in ENGINES and name != "torch" else ""
        raise EngineError(
            f'engine "{name}" needs {error.name}, which is not installed; install it{extra} on every node'
        ) from error
    return cast(Engine, getattr(module, class_name)())
