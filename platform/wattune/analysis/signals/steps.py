"""Measured steps of all ranks, from their spans."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from wattune.analysis.signals.readings import integers
from wattune.arrays import Floats, Ints
from wattune.schema import DeviceKey
from wattune.storage.parquet import codes
from wattune.units import NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The measured steps that every rank has finished, in common time."""

    number: Ints
    """Step numbers, shape (steps,)."""
    rank: Ints
    """Global ranks, shape (ranks,)."""
    device: tuple[DeviceKey, ...]
    """The device of each rank, in the order of `rank`."""
    start_ns: Ints
    """Shape (steps, ranks)."""
    end_ns: Ints
    """Shape (steps, ranks)."""
    anchor_ns: Ints
    """Shift from each rank's monotonic times to common time, shape (ranks,)."""

    def only(self, device: DeviceKey) -> "Steps | None":
        """Returns those of the ranks on one device; None where there are none."""
        own = [index for index, each in enumerate(self.device) if each == device]
        if not own:
            return None
        return Steps(
            number=self.number,
            rank=self.rank[own],
            device=(device,) * len(own),
            start_ns=self.start_ns[:, own],
            end_ns=self.end_ns[:, own],
            anchor_ns=self.anchor_ns[own],
        )

    def duration_s(self) -> Floats:
        """Returns the time of each rank in each step, shape (steps, ranks)."""
        return (self.end_ns - self.start_ns) / NS_PER_S


def find_steps(spans: pa.Table, anchors_ns: Mapping[str, int], measured: Sequence[int] | None) -> Steps | None:
    """Finds the measured steps that every rank has recorded; None if there is none.

    Where a rank lacks a step between others, the longest run without such steps counts: the window runs from the first
    step to the last, so a step inside it that did not count would make all rates too low.

    `measured` are the steps to count, None for all from 0 on.
    """
    phase, phase_names = codes(spans, "phase")
    step = integers(spans, "step")
    wanted = step >= 0 if measured is None else np.isin(step, np.array(measured, np.int64))
    rows = spans.filter(pa.array(wanted & np.array([name == "step" for name in phase_names], bool)[phase]))
    if not rows.num_rows:
        return None
    rank, rank_index = np.unique(integers(rows, "rank"), return_inverse=True)
    number, step_index = np.unique(integers(rows, "step"), return_inverse=True)
    node, node_names = codes(rows, "node")
    device, device_names = codes(rows, "device")
    # A table that was filtered still names nodes that have no row in it.
    anchor_ns = np.array([anchors_ns.get(name, 0) for name in node_names], np.int64)[node]
    start_ns, end_ns = (np.full((len(number), len(rank)), -1, np.int64) for _ in range(2))
    start_ns[step_index, rank_index] = integers(rows, "start_mono_ns") + anchor_ns
    end_ns[step_index, rank_index] = integers(rows, "end_mono_ns") + anchor_ns
    whole = np.all((start_ns >= 0) & (end_ns > start_ns), axis=1)
    if not whole.any():
        return None
    whole = _longest_run(whole)
    first = np.unique(rank_index, return_index=True)[1]
    return Steps(
        number=number[whole],
        rank=rank,
        device=tuple((node_names[node[row]], device_names[device[row]]) for row in first),
        start_ns=start_ns[whole],
        end_ns=end_ns[whole],
        anchor_ns=anchor_ns[first],
    )


def _longest_run(whole: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Returns true for the longest run of true values, the first of equally long ones."""
    edges = np.diff(whole.astype(np.int8), prepend=0, append=0)
    begins, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    longest = int(np.argmax(ends - begins))
    run = np.zeros(len(whole), bool)
    run[begins[longest] : ends[longest]] = True
    return run
