"""One rank of a sweep: which ranks communicate, how a case is timed, and what a row says."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from wattune.cost.sweep import TABLE, Case
from wattune.workers import link_load
from wattune.workers.link_load import Rank, main, row_of, tiled, timed

ALONE = Rank(0, 1, 0, 1, torch.device("cpu"))


def test_groups_cover_all_ranks_and_leave_over_what_does_not_fill_one() -> None:
    assert tiled(4, 2, 1) == [[0, 1], [2, 3]]
    assert tiled(4, 2, 2) == [[0, 2], [1, 3]]
    assert tiled(6, 4, 1) == [[0, 1, 2, 3]]
    assert tiled(8, 8, 1) == [[*range(8)]]


def test_rows_over_nodes_keep_the_name_of_their_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(rank: Rank, case: Case) -> list[dict[str, object]]:
        return [{"rank": 0, "kind": case.kind, "num_nodes": case.group_size}] if case.is_collective else [{"rank": 0}]

    monkeypatch.setattr(link_load, "measure", measured)
    wanted = [Case(kind="all_reduce", group_size=1), Case(kind="all_reduce", group_size=2), Case(kind="copy")]
    link_load.sweep(ALONE, tmp_path, wanted, 60, "hdr")
    assert pq.read_table(tmp_path / TABLE).column("network").to_pylist() == [None, "hdr", None]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    now = [0]
    monkeypatch.setattr(link_load.time, "monotonic_ns", lambda: now[0])
    yield now


def test_a_slow_first_call_does_not_count(clock: list[int]) -> None:
    calls = [0]

    def call() -> None:
        calls[0] += 1
        clock[0] += 3_000_000_000 if calls[0] == 1 else 100_000

    each_s, num_calls = timed(ALONE, call)
    assert each_s == pytest.approx([100e-6] * len(each_s))
    assert num_calls == 20  # 2 ms a repeat
    assert len(each_s) == link_load.MOST


def test_a_call_of_seconds_is_measured_twice(clock: list[int]) -> None:
    def call() -> None:
        clock[0] += 2_000_000_000

    assert timed(ALONE, call)[0] == [2.0, 2.0]


def test_a_row_has_the_median_its_quartiles_and_both_bandwidths() -> None:
    rank = Rank(0, 16, 0, 8, torch.device("cpu"))
    case = Case(kind="all_reduce", size_bytes=8000, group_size=16, stride=1)
    row = row_of(rank, case, ([1.0, 2.0, 3.0, 4.0, 100.0], 7), 1)
    assert (row["time_low_s"], row["time_s"], row["time_high_s"]) == (2.0, 3.0, 4.0)
    assert row["algorithm_bytes_per_s"] == pytest.approx(8000 / 3)
    assert row["bus_bytes_per_s"] == pytest.approx(8000 / 3 * 2 * 15 / 16)
    assert (row["num_nodes"], row["num_groups"]) == (2, 1)
    across = row_of(rank, Case(kind="all_reduce", size_bytes=8000, group_size=2, stride=8), ([1.0], 1), 8)
    assert (across["num_nodes"], across["num_groups"]) == (2, 8)


def test_a_rank_alone_measures_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(link_load.signal, "signal", lambda *_: None)
    sizes = ["--sizes", "4096", "65536"]
    assert main([str(tmp_path), "--device", "cpu", "--minutes", "1", *sizes, "--kinds", "copy", "add", "norm"]) == 0
    table = pq.read_table(tmp_path / TABLE)
    assert table["kind"].to_pylist() == ["copy", "add", "norm"]
    assert set(table["device"].to_pylist()) == {"cpu"}
    row = table.to_pylist()[1]
    assert row["algorithm_bytes_per_s"] == pytest.approx(3 * row["size_bytes"] / row["time_s"])
