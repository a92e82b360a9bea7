"""An engine that does what a real one must not, named in a specification as an own engine is: `faulty_engine:Faulty`.

It trains as the torch engine does until its third step; the trial's seed says what is wrong then. One engine for all
faults, so that all trials are of the same lane.
"""

import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from wattune.engines.torch.engine import TorchEngine
from wattune.trial import TrialSpec
from wattune.workers.engine import Ranks, StepSpans

GOOD, HANGS, RAISES, OUT_OF_MEMORY, LEAKS, PROFILE_OUT_OF_MEMORY = range(6)
FAULTY_STEP = 3

_held: list[Any] = []


class Faulty(TorchEngine):
    """Trains, counts its steps, and fails on rank 1."""

    def build(self, spec: TrialSpec, ranks: Ranks, *, seed: int) -> None:
        """As the torch engine, whose rules know it by its own name only."""
        super().build(replace(spec, engine="torch"), ranks, seed=seed)
        self._here, self._fault, self._number = ranks, seed, 0

    def step(self) -> StepSpans:
        """Takes a step; the faulty one fails on rank 1."""
        self._number += 1
        if self._number == FAULTY_STEP and self._here.rank == 1:
            self._fail()
        if self._fault == PROFILE_OUT_OF_MEMORY and self._here.rank == 1 and torch.autograd._profiler_enabled():
            torch.zeros(1 << 50, device=self._here.device)
        return super().step()

    def _fail(self) -> None:
        if self._fault == HANGS:
            dist.barrier()  # the other rank calls something else
            time.sleep(600)
        elif self._fault == RAISES:
            raise ValueError("a broken engine")
        elif self._fault == OUT_OF_MEMORY:
            torch.zeros(1 << 50, device=self._here.device)
        elif self._fault == LEAKS:
            _held.append(torch.ones(50 * 2**20))
