"""Names of plans tell sizes of the workload apart where they differ, and say none that all share."""

from dataclasses import replace

from known_space import BASE

from wattune.search.names import namer
from wattune.workload import UNKNOWN_WORKLOAD


def sized(seq_len: int, batch: int):
    return replace(BASE, workload=replace(BASE.workload, seq_len=seq_len, global_batch_size=batch))


def among(*specs):
    return namer(spec.workload for spec in specs)


def test_sizes_that_nobody_described_are_not_named() -> None:
    unknown = replace(BASE, workload=UNKNOWN_WORKLOAD)
    assert among(unknown, sized(4096, 64))(unknown) == "dp8 mbs1"
