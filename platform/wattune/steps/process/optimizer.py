"""Steps of any program that trains with torch: the time from one round of its optimizers to the next."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from .events import guarded
from .writer import StepWriter

if TYPE_CHECKING:
    from types import ModuleType

WHAT = "the hook on torch's optimizers"


class Rounds:
    """Counts one step for each round of the optimizers.

    A round begins where an optimizer steps that has stepped in the round already. So programs with several optimizers,
    each called once a step, count one step. DeepSpeed's ZeRO calls one optimizer for each group of parameters in turn:
    the first parameter tells these calls apart.
    """

    def __init__(self, writer: StepWriter) -> None:
        """Starts before the first round, whose start is not known: it is not told."""
        self._writer = writer
        self._seen: set[tuple[int, int]] = set()
        self._start_ns = 0

    def stepped(self, optimizer: Any) -> None:
        """Takes the end of an optimizer's step."""
        key = (id(optimizer), _first_parameter(optimizer))
        if not self._seen:
            self._start_ns = time.monotonic_ns()
        elif key in self._seen:
            now_ns = time.monotonic_ns()
            self._writer.step(self._start_ns, now_ns)
            self._start_ns = now_ns
            self._seen.clear()
        self._seen.add(key)


def _first_parameter(optimizer: Any) -> int:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            return id(parameter)
    return 0


@guarded(WHAT)
def attach(module: ModuleType) -> None:
    """Registers the hook in `torch.optim.optimizer`, once that is loaded. It waits for no device."""
    rounds = Rounds(StepWriter("optimizer"))
    stepped = guarded(WHAT)(rounds.stepped)

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG001 - torch gives them
        stepped(optimizer)

    module.register_optimizer_step_post_hook(hook)
