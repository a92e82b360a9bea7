"""Tokens by step and sample, drawn from a seed or read from a file, so that every plan has the same global batch."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from wattune.errors import EngineError
from wattune.plans.parallel import coordinates
from wattune.trial import TrialSpec
from wattune.workers.engine import Ranks
from wattune.workload import TOKEN_DTYPES


def stable_seed(*parts: object) -> int:
    """A 63-bit seed that depends on the parts alone, the same in every process and version of Python."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class FileSamples:
    """Sequences of a token file in its order, each beginning with the last token of the one before.

    Sample s of the whole run is at token s * seq_len; after the last whole sequence it starts from the first again.
    """

    def __init__(self, spec: TrialSpec) -> None:
        """Maps the file of a specification into memory.

        Raises `EngineError`: the file is not there, not of its data type, or shorter than one sequence.
        """
        file, workload = spec.workload.tokens, spec.workload
        assert file is not None
        self._path, self._seq_len, self._vocab_size = (
            Path(file.path).absolute(),
            workload.seq_len,
            spec.model.vocab_size,
        )
        self._samples_per_step = workload.global_batch_size
        if file.dtype not in TOKEN_DTYPES:
            raise EngineError(f"workload.tokens.dtype: got {file.dtype}; use one of: {', '.join(TOKEN_DTYPES)}")
        try:
            problem = file.problem(workload.seq_len)
            if problem is not None:
                raise EngineError(f"workload.tokens: {problem}")
            self._tokens = np.memmap(self._path, dtype=file.dtype, mode="r")
        except OSError as error:
            raise EngineError(
                f"workload.tokens.path: {self._path} cannot be read ({error.strerror}); "
                "give a file that is on every node"
            ) from error
        self._num_samples = (len(self._tokens) - 1) // self._seq_len

    def at(self, step: int, sample: int) -> Tensor:
        """One sequence and the token after it, int64 [seq_len + 1].

        Steps count from 0, samples through the global batch. Raises `EngineError` where it holds a token the model has
        no embedding of.
        """
        number = (step * self._samples_per_step + sample) % self._num_samples
        start = number * self._seq_len
        tokens = self._tokens[start : start + self._seq_len + 1].astype(np.int64)
        for value in (int(tokens.max()), int(tokens.min())):
            if not 0 <= value < self._vocab_size:
                raise EngineError(
                    f"{self._path} has token {value} in sequence {number}; the model's vocab_size is "
                    f"{self._vocab_size}; use tokens below it, or check the data type"
                )
        return torch.from_numpy(tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """The samples of one data-parallel replica."""

    seed: int
    vocab_size: int
    seq_len: int
    replica_batch_size: int
    """Sequences this replica trains on per step: micro-batch size times micro-batches."""
    replica: int
    """Data-parallel coordinate."""
    device: torch.device
    samples: FileSamples | None = None
    """A file's sequences; None draws them."""

    @classmethod
    def of(cls, spec: TrialSpec, ranks: Ranks, *, seed: int, device: torch.device) -> "Batches":
        """The samples of one rank's replica.

        Raises `EngineError` where tokens are taken from a file that cannot be used; see `FileSamples`.
        """
        plan, workload = spec.plan, spec.workload
        return cls(
            seed=seed,
            vocab_size=spec.model.vocab_size,
            seq_len=workload.seq_len,
            replica_batch_size=workload.global_batch_size // plan.dp(ranks.world_size),
            replica=coordinates(ranks.rank, plan, ranks.world_size).dp,
            device=device,
            samples=None if workload.tokens is None else FileSamples(spec),
        )

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """The inputs and the targets, each shifted by one token from the other.

        Both are int64 [replica_batch_size, seq_len] on the device. Steps count from 0, samples through the global
        batch: replica `d` holds `d * replica_batch_size` and those that follow.
        """
        first = self.replica * self.replica_batch_size
        sample = self._drawn if self.samples is None else self.samples.at
        samples = [sample(step, first + index) for index in range(self.replica_batch_size)]
        tokens = torch.stack(samples)
        if self.device.type == "cuda":  # pinned, so that the copy does not hold up the host
            tokens = tokens.pin_memory().to(self.device, non_blocking=True)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def _drawn(self, step: int, sample: int) -> Tensor:
        generator = torch.Generator().manual_seed(stable_seed("tokens", self.seed, step, sample))
        return torch.randint(self.vocab_size, (self.seq_len + 1,), generator=generator)
