"""The work of a step: its kind, sequences and batch, tokens, adapters, routing."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

from wattune.field_types import Count, OneOf

LORA_TARGETS: Final = ("q", "k", "v", "o", "gate", "up", "down")
"""Linear layers that adapters may stand beside: four of attention, and those of the feed-forward block."""

TOKEN_DTYPES: Final = {"uint16": 2, "uint32": 4, "int32": 4, "int64": 8}
"""Types of tokens in a file, in the machine's byte order, and the bytes of one token."""

OF_WORK: Final = ("mode", "seq_len", "global_batch_size")
"""Fields that a study may list several values of: the kind of work, and its numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """A file of token numbers alone, memory-mapped by every rank."""

    path: str
    """Path on every node. A relative one starts in the workers' folder."""
    dtype: Annotated[str, OneOf(tuple(TOKEN_DTYPES))] = "uint16"
    """Type of a token in the file, in the machine's byte order."""

    def problem(self, seq_len: int) -> str | None:
        """Says why no sequence can be taken from it, judged by its size; None where one can.

        Raises `OSError`: it cannot be read from here.
        """
        size_bytes, item_bytes = Path(self.path).stat().st_size, TOKEN_DTYPES[self.dtype]
        if size_bytes % item_bytes:
            return (
                f"{self.path} has {size_bytes} bytes, no multiple of the {item_bytes} of {self.dtype}; "
                "name its data type"
            )
        if size_bytes // item_bytes <= seq_len:
            return (
                f"{self.path} has {size_bytes // item_bytes} tokens of {self.dtype}; a sequence of seq_len={seq_len} "
                f"needs {seq_len + 1}"
            )
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Low-rank adapters, trained beside frozen weights (Hu et al. 2021, arXiv 2106.09685)."""

    rank: Count
    """Rank of every adapter."""
    targets: tuple[Annotated[str, OneOf(LORA_TARGETS)], ...] = ("q", "v")
    """Linear layers that get one. The paper adapts queries and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Routing of tokens to experts; `wattune.engines.model.routing` says what each engine then does."""

    by: str
    """One of `wattune.plans.engines.ROUTINGS`. `balanced`: every expert gets the same number of tokens; `skew`: shares
    by Zipf's law; `learned`: the router chooses, and an auxiliary loss balances it."""
    skew: float = 0.0
    """Exponent of Zipf's law where `by` is `skew`: the expert of rank r is sent tokens in proportion to r^-skew."""

    def __str__(self) -> str:
        """The routing in short, such as `skew 1.2`."""
        return f"skew {self.skew:g}" if self.by == "skew" else self.by


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The kind of work, sequence length and batch."""

    mode: str = "pretrain"
    """`pretrain` trains all weights, `lora` trains adapters. `prefill` runs prompts forward and trains nothing."""
    seq_len: int
    global_batch_size: int
    tokens: TokenFile | None = None
    """Source of tokens; None draws them from the seed."""
    lora: Lora | None = None
    """Adapters that are trained where `mode` is `lora`."""
    routing: Routing | None = None
    """Routing of tokens to experts. None for models without experts, and where the program routes as it likes."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step over all ranks. Sequences are whole, none is padded."""
        return self.seq_len * self.global_batch_size

    @property
    def is_known(self) -> bool:
        """False where a command runs whose data nobody described (`UNKNOWN_WORKLOAD`)."""
        return self.mode != UNKNOWN_MODE

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Workload":
        """Makes a workload of plain data. Lists become tuples again."""
        tokens, lora, routing = data.get("tokens"), data.get("lora"), data.get("routing")
        return cls(
            **{
                **data,
                "tokens": tokens and TokenFile(**tokens),
                "lora": lora and Lora(rank=lora["rank"], targets=tuple(lora["targets"])),
                "routing": routing and Routing(**routing),
            }
        )


UNKNOWN_MODE: Final = "unknown"
"""Mode of `UNKNOWN_WORKLOAD`; no space can ask for it."""

UNKNOWN_WORKLOAD: Final = Workload(mode=UNKNOWN_MODE, seq_len=1, global_batch_size=1)
"""Stands for the data of a command that its space does not describe. Its sizes mean nothing."""
