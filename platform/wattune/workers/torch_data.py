"""Synthetic tokens: a pure function of seed, step and sample, so that every plan trains on the same global batch."""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


def stable_seed(*parts: object) -> int:
    """A 63-bit seed that depends on the parts alone, the same in every process and version of Python."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


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

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """The inputs and the targets, each shifted by one token from the other.

        Args:
            step: Optimizer step, from 0.

        Returns:
            Two int64 tensors of shape [replica_batch_size, seq_len] on the device. Sample numbers count through the
            global batch: replica `d` holds `d * replica_batch_size` and those that follow.
        """
        first = self.replica * self.replica_batch_size
        samples = [self._sample(step, first + index) for index in range(self.replica_batch_size)]
        tokens = torch.stack(samples)
        if self.device.type == "cuda":  # pinned, so that the copy does not hold up the host
            tokens = tokens.pin_memory().to(self.device, non_blocking=True)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def _sample(self, step: int, sample: int) -> Tensor:
        generator = torch.Generator().manual_seed(stable_seed("tokens", self.seed, step, sample))
        return torch.randint(self.vocab_size, (self.seq_len + 1,), generator=generator)
