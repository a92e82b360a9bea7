"""Names of plans tell sizes of the workload apart where they differ, and say none that all share."""

from dataclasses import replace

from known_space import BASE

from wattune.search.names import namer
from wattune.workload import UNKNOWN_WORKLOAD


def sized(seq_len: int, batch: int):
    return replace(BASE, workload=replace(BASE.workload, seq_len=seq_len, global_batch_size=batch))


def among(*specs):
    return namer(spec.workload for spec in specs)


def test_only_sizes_that_differ_are_named() -> None:
    one, long, large = sized(4096, 64), sized(8192, 64), sized(4096, 128)
    assert among(one, one)(one) == one.label == "dp8 mbs1"
    assert list(map(among(one, long), (one, long))) == ["dp8 mbs1 seq4096", "dp8 mbs1 seq8192"]
    assert list(map(among(one, large), (one, large))) == ["dp8 mbs1 gbs64", "dp8 mbs1 gbs128"]
    assert among(one, long, large)(large) == "dp8 mbs1 seq4096 gbs128"


def test_sizes_that_nobody_described_are_not_named() -> None:
    unknown = replace(BASE, workload=UNKNOWN_WORKLOAD)
    assert among(unknown, sized(4096, 64))(unknown) == "dp8 mbs1"
