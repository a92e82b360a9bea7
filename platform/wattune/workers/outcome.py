"""Outcome of a trial on one rank. It is plain data: a process that reads it, such as a study's own, needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

from wattune.run import RunStatus
from wattune.workers.command.program_run import ProgramOutcome
from wattune.workers.engine import ExpertTokens

FRAGMENTATION: Final = "fragmentation"
"""Beginning of the reason, and value of the tag `out_of_memory`, where memory was free but in pieces too small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """Place at which memory ran out. Bytes that are not counted there are None."""

    rank: int
    phase: str
    """The innermost phase of the step; outside of steps `build` or `profile`."""
    message: str
    """The first line of the allocator's message."""
    requested_bytes: int | None = None
    """Bytes asked for, to the digits the allocator prints."""
    allocated_bytes: int | None = None
    """Bytes of the device that tensors held; this and the rest are None on processors."""
    reserved_bytes: int | None = None
    """Those that torch's allocator held, tensors included."""
    reserved_peak_bytes: int | None = None
    """The most since the last reset of torch's peaks."""
    total_bytes: int | None = None
    """The device's memory."""

    @property
    def needed_bytes(self) -> int:
        """Bytes of tensors and of what was asked for; 0 where they are not known."""
        if self.allocated_bytes is None or self.requested_bytes is None:
            return 0
        return self.allocated_bytes + self.requested_bytes

    @property
    def is_fragmentation(self) -> bool:
        """True where torch's allocator held enough free memory, in pieces that were each too small."""
        if self.allocated_bytes is None or self.reserved_bytes is None or self.requested_bytes is None:
            return False
        return self.reserved_bytes - self.allocated_bytes >= self.requested_bytes

    def __str__(self) -> str:
        """Returns the text of a result's reason."""
        parts = [FRAGMENTATION] if self.is_fragmentation else []
        parts += [f"rank {self.rank} in {self.phase}"]
        if self.requested_bytes is not None:
            parts.append(f"{self.requested_bytes:,} bytes asked for")
        if self.allocated_bytes is not None:
            held = f"{self.allocated_bytes:,} allocated, {self.reserved_bytes:,} reserved of {self.total_bytes:,}"
            parts.append(held)
        return f"{', '.join(parts)}: {self.message}"


@dataclass(frozen=True, kw_only=True)
class RankOutcome:
    """Outcome of a trial on one rank. Without slots: pickle takes a third of the time, and a driver has one a rank."""

    rank: int
    status: RunStatus
    reason: str = ""
    spans: pa.Table | None = None
    """Spans of all steps; warm-up steps are negative, measured ones count from 0."""
    losses: tuple[float, ...] = ()
    """Mean loss of each measured step."""
    num_warmup_steps: int = 0
    steady: bool = False
    """True where step time was stable when measuring began."""
    stopped_early: str = ""
    """The proof that the trial loses, after which measuring ended early; empty where it did not."""
    build_time_s: float = 0.0
    parts_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds by part: `start build compile warmup measure profile close`. A part that it did not reach is missing."""
    ahead_cpu_s: float = 0.0
    """Processor time of coming plans' graphs that were compiled since this worker's last outcome."""
    ahead_failed: int = 0
    """Plans of these that failed to compile."""
    memory_peak_bytes: int = 0
    """Highest memory the engine held: see `wattune.workers.engine.Engine.memory_peak_bytes`."""
    memory_reserved_peak_bytes: int = 0
    """Highest memory torch's allocator held of the device, what it keeps for later included; 0 on processors."""
    allocator_retries: int = 0
    """Times in the measured steps that it gave memory back and asked anew."""
    out_of_memory: OutOfMemory | None = None
    """Place at which memory ran out, with status `out_of_memory`."""
    kernels: pa.Table | None = None
    """Kernels of the profiled steps, which come after the measured ones (`wattune.schema.KERNELS`)."""
    expert_tokens: ExpertTokens = ()
    """Tokens this rank sent to each expert of each layer in the measured steps; empty without experts."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Choices of the engine that no axis holds, such as the compiler of its layers."""
    provenance: Mapping[str, str] = field(default_factory=dict)
    """Libraries, settings and kernels of the rank (`wattune.workers.provenance`); its lane's worker adds them."""
    end_mono_ns: int = 0
    """Time the rank finished or failed, on its node's clock; of several failures the first is the cause."""
    command: ProgramOutcome | None = None
    """Outcome of a command: this one is then of a node, and `rank` its number."""
