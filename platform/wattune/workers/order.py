"""An order to the processes of a trial that is over for them."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Order:
    """An order to the ranks of a trial, or to the nodes of a command."""

    kind: Literal["free", "dump", "finish"]
    """`free`: leave the trial. `dump`: only report the stacks of all threads; the process is ended then. `finish`: the
    leading node of a command has measured enough."""
    reason: str
