"""Steps of any program that trains with torch: the time from one round of its optimizers to the next."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from .events import guarded, tell_problem
from .writer import StepWriter

if TYPE_CHECKING:
    from types import ModuleType

WHAT = "the hook on torch's optimizers"

_now_ns = time.monotonic_ns


class Rounds:
    """Counts one step for each round of the optimizers.

    A round begins where an optimizer steps that has stepped in the round already. So programs with several optimizers,
    each called once a step, count one step. DeepSpeed's ZeRO calls one optimizer for each group of parameters in turn:
    the first parameter tells these calls apart.
    """

    __slots__ = ("_optimizer", "_parameter", "_seen", "_start_ns", "_writer")

    def __init__(self, writer: StepWriter) -> None:
        """Starts before the first round, whose start is not known: it is not told."""
        self._writer = writer
        self._start_ns = 0
        self._seen: set[tuple[int, int]] = set()
        # The only call that was seen in this round, if there is but one.
        self._optimizer = self._parameter = 0

    def stepped(self, optimizer: Any, args: Any = None, kwargs: Any = None) -> None:  # noqa: ARG002 - torch gives them
        """Takes the end of an optimizer's step: this is the hook itself, so that a step costs one call."""
        try:
            now_ns = _now_ns()
            try:
                parameter = id(optimizer.param_groups[0]["params"][0])
            except LookupError:
                parameter = next((id(one) for group in optimizer.param_groups for one in group["params"]), 0)
            if parameter == self._parameter and id(optimizer) == self._optimizer:
                self._writer.step(self._start_ns, now_ns)
                self._start_ns = now_ns
            else:
                self._took((id(optimizer), parameter), now_ns)
        except Exception as error:
            tell_problem(WHAT, error)

    def _took(self, key: tuple[int, int], now_ns: int) -> None:
        if self._seen and key not in self._seen:
            self._seen.add(key)
            self._optimizer = self._parameter = 0
            return
        if self._seen:
            self._writer.step(self._start_ns, now_ns)
        self._start_ns = now_ns
        self._seen = {key}
        self._optimizer, self._parameter = key


@guarded(WHAT)
def attach(module: ModuleType) -> None:
    """Registers the hook in `torch.optim.optimizer`, once that is loaded. It waits for no device."""
    module.register_optimizer_step_post_hook(Rounds(StepWriter("optimizer")).stepped)
