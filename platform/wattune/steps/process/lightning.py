"""Steps of Lightning's Trainer, by a callback that its entry points name."""

from __future__ import annotations

from typing import Any, Final

from .events import guarded, tell_problem
from .huggingface import TrainerSteps, tokens_of
from .writer import StepWriter

WHAT = "the callback of Lightning's Trainer"

ENTRY_POINTS = """\
[lightning.pytorch.callbacks_factory]
wattune = _wattune_steps.lightning:of_lightning
[pytorch_lightning.callbacks_factory]
wattune = _wattune_steps.lightning:of_pytorch_lightning
"""
"""Both names of the package ask for callbacks at these groups (`lightning.pytorch`, External Callbacks)."""

_STEPS: Final = TrainerSteps(StepWriter("lightning"))
"""Shared by all Trainers of the process."""


def of_lightning() -> list[Any]:
    """Returns the callbacks for `lightning.pytorch`."""
    return _callbacks("lightning.pytorch")


def of_pytorch_lightning() -> list[Any]:
    """Returns the callbacks for `pytorch_lightning`."""
    return _callbacks("pytorch_lightning")


def _callbacks(package: str) -> list[Any]:
    try:
        import importlib

        return [telling(importlib.import_module(package).Callback, _STEPS)()]
    except Exception as error:
        tell_problem(WHAT, error)
        return []


def telling(base: Any, steps: TrainerSteps) -> Any:
    """Returns a class of callbacks, of Lightning's own base class, that tells the steps and tokens of any Trainer."""
    steps_done, under_way = [0], [False]

    def begin(trainer: Any, batch: Any) -> None:
        # Not with every batch: a step whose batches have a validation between them has no time of its own.
        if not under_way[0]:
            under_way[0] = True
            steps.begin()
        if not steps.num_ranks_of_batch:
            steps.num_ranks_of_batch = _ranks_of_batch(trainer)
        steps.add_tokens(tokens_of(batch, "input_ids", "tokens") // steps.num_ranks_of_batch)

    def end(trainer: Any, batch: Any) -> None:  # noqa: ARG001 - the form of all three
        # With gradients accumulated over several batches only some of them end a step.
        if trainer.global_step != steps_done[0]:
            steps_done[0], under_way[0] = trainer.global_step, False
            steps.end()

    def interrupt(trainer: Any, batch: Any) -> None:  # noqa: ARG001
        steps.interrupt()

    begin, end, interrupt = (guarded(WHAT)(each) for each in (begin, end, interrupt))

    class WattuneSteps(base):  # type: ignore[misc]
        """Tells wattune the steps."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002 - Lightning's form
            steps_done[0], under_way[0] = getattr(trainer, "global_step", 0), False
            interrupt(trainer, None)

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
            begin(trainer, batch)

        def on_train_batch_end(
            self,
            trainer: Any,
            pl_module: Any,  # noqa: ARG002
            outputs: Any,  # noqa: ARG002
            batch: Any,
            batch_idx: int,  # noqa: ARG002
        ) -> None:
            end(trainer, batch)

        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
            interrupt(trainer, None)

        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:  # noqa: ARG002
            interrupt(trainer, None)

    return WattuneSteps


def _ranks_of_batch(trainer: Any) -> int:
    """Returns how many ranks are given the same batch: those that the strategy's samplers do not tell apart.

    `ModelParallelStrategy` has a sampler for each rank of its data parallel mesh, and one batch for its tensor parallel
    ranks. A strategy of a single device names no samplers.
    """
    sampler = getattr(getattr(trainer, "strategy", None), "distributed_sampler_kwargs", None) or {}
    replicas = int(sampler.get("num_replicas") or 0)
    return max(int(trainer.world_size) // replicas, 1) if replicas else 1
