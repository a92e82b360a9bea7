"""Steps of Hugging Face's Trainer, by a callback that every Trainer has from then on."""

from __future__ import annotations

import math
import time
from functools import wraps
from typing import TYPE_CHECKING, Any

from .events import guarded, tell_problem
from .writer import StepWriter

if TYPE_CHECKING:
    from types import ModuleType

WHAT = "the callback of Hugging Face's Trainer"

_now_ns = time.monotonic_ns


class TrainerSteps:
    """Times the optimizer steps of one Trainer, all micro-batches and the loading of their data included.

    A step begins where the one before it ended. Only where something else came between, such as an evaluation, it
    begins with its first micro-batch.
    """

    __slots__ = ("_start_ns", "_tokens", "_writer", "num_ranks_of_batch")

    def __init__(self, writer: StepWriter) -> None:
        self._writer = writer
        self._start_ns = 0
        self._tokens = 0
        self.num_ranks_of_batch = 0
        """Ranks that are given the same tokens; 0 until the Trainer that trains is asked."""

    def begin(self) -> None:
        """Takes the start of a step."""
        if not self._start_ns:
            self._start_ns = _now_ns()
            self._tokens = 0

    def add_tokens(self, tokens: int) -> None:
        """Takes the tokens of one micro-batch."""
        self._tokens += tokens

    def end(self) -> None:
        """Takes the end of a step."""
        if self._start_ns:
            now_ns = _now_ns()
            self._writer.step(self._start_ns, now_ns, self._tokens or None)
            self._start_ns, self._tokens = now_ns, 0

    def interrupt(self) -> None:
        """Takes that something other than a step comes next."""
        self._start_ns = 0
        self.num_ranks_of_batch = 0  # it may be another Trainer


@guarded(WHAT)
def attach(module: ModuleType) -> None:
    """Adds the callback to those that each Trainer begins with, once `transformers.trainer` is loaded.

    transformers has no entry point for callbacks. `DEFAULT_CALLBACKS` is the list that each Trainer copies. Adding to
    it changes no code, and reaches subclasses. Only `Trainer.training_step` sees the tokens of a micro-batch.
    """
    module.DEFAULT_CALLBACKS.append(telling(module.TrainerCallback, module.Trainer, StepWriter("transformers")))


def telling(base: Any, trainer: Any, writer: StepWriter) -> Any:
    """Returns a class of callbacks, of the Trainer's own base class, that tells the steps and tokens of any Trainer."""
    steps = TrainerSteps(writer)

    class WattuneSteps(base):  # type: ignore[misc]
        """Tells wattune the steps."""

    def on(event: str, call: Any) -> None:
        def method(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG001 - its form
            try:
                call()
            except Exception as error:
                tell_problem(WHAT, error)

        setattr(WattuneSteps, event, method)

    for event, call in (("on_step_begin", steps.begin), ("on_step_end", steps.end)):
        on(event, call)
    for event in ("on_train_begin", "on_train_end", "on_evaluate", "on_predict", "on_save"):
        on(event, steps.interrupt)
    _count_tokens(trainer, steps)
    return WattuneSteps


def _count_tokens(trainer: Any, steps: TrainerSteps) -> None:
    original = trainer.training_step

    @wraps(original)
    def training_step(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if not steps.num_ranks_of_batch:
                steps.num_ranks_of_batch = _ranks_of_batch(self)
            steps.add_tokens(tokens_of(inputs, "input_ids") // steps.num_ranks_of_batch)
        except Exception as error:
            tell_problem("the tokens of Hugging Face's Trainer", error)
        return original(self, model, inputs, *args, **kwargs)

    trainer.training_step = training_step


def tokens_of(inputs: Any, *names: str) -> int:
    """Returns the tokens of a micro-batch, padding included, from shapes alone; 0 where it has none of the names."""
    there = [name for name in names if hasattr(inputs, "keys") and name in inputs]
    return int(inputs[there[0]].numel()) if there else 0


def _ranks_of_batch(trainer: Any) -> int:
    """Returns how many ranks are given the same tokens: by tensor and context parallelism.

    Context parallelism cuts the sequence inside of `training_step`. Sequence parallelism is left out: its data loader
    (DeepSpeed's `UlyssesSPDataLoaderAdapter`) has cut the sequence already, so that each rank is given its own tokens.
    """
    config = getattr(getattr(trainer, "accelerator", None), "parallelism_config", None)
    degrees = (int(getattr(config, name, 1) or 1) for name in ("tp_size", "cp_size"))
    return math.prod(max(degree, 1) for degree in degrees)
