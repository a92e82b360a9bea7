"""The order in which trials run."""

import itertools
import statistics
from dataclasses import replace

import pytest
from specs import trial_spec

from wattune.orchestrate.scheduling.run_order import BLOCK, run_order, workers_of
from wattune.trial import TrialSpec
from wattune.workload import Workload


def spec(size: int, *, device: str = "cpu", engine: str = "torch") -> TrialSpec:
    return trial_spec(on=f"1x1 {device}", engine=engine, seq_len=8, batch=8, micro_batch_size=size)


def test_the_order_is_the_seeds_and_nothing_elses() -> None:
    specs = [spec(size) for size in range(1, 31)]
    first = run_order(specs, seed=0, order="shuffled")
    assert run_order(specs[::-1], seed=0, order="shuffled") == first
    assert sorted(one.plan.micro_batch_size for one in first) == list(range(1, 31))
    assert first != specs and run_order(specs, seed=1, order="shuffled") != first
    assert run_order(specs, seed=0, order="listed") == specs


def test_more_trials_leave_the_order_of_the_others_as_it_was() -> None:
    specs = [spec(size) for size in range(1, 31)]
    whole = run_order(specs, seed=0, order="shuffled")
    assert [one for one in whole if one in specs[:12]] == run_order(specs[:12], seed=0, order="shuffled")


def test_trials_for_the_same_workers_run_in_blocks_and_the_blocks_mix() -> None:
    specs = [spec(size, engine=engine) for engine in ("torch", "other") for size in range(1, 26)]
    ordered = [workers_of(one)[1] for one in run_order(specs, seed=0, order="shuffled")]
    changes = sum(a != b for a, b in itertools.pairwise(ordered))
    assert 2 <= changes <= 5
    assert "other" in ordered[:25] and "torch" in ordered[:25]
    assert max(len(block) for block in "".join("t" if one == "torch" else " " for one in ordered).split()) <= 3 * BLOCK


def grouped(sizes: list[int], *, seed: int = 0, chunk: int = 5) -> list[int]:
    """The group of each trial in order; the groups have so many trials."""
    specs = [
        replace(spec(index + 1), workload=Workload(seq_len=8 + group, global_batch_size=8))
        for group, size in enumerate(sizes)
        for index in range(size)
    ]
    ordered = run_order(specs, seed=seed, order="shuffled", graphs_of=lambda one: one.workload.seq_len, chunk=chunk)
    assert sorted(map(specs.index, ordered)) == list(range(len(specs)))
    return [one.workload.seq_len - 8 for one in ordered]


def test_trials_with_the_same_graphs_run_side_by_side_in_short_chunks() -> None:
    order = grouped([20] * 6)
    lengths = [len(list(run)) for _, run in itertools.groupby(order)]
    assert len(lengths) <= 24 and max(lengths) <= 10, "two chunks may meet by chance"
    shuffled = grouped([20] * 6, chunk=1)
    assert len(list(itertools.groupby(shuffled))) > 90


@pytest.mark.parametrize("sizes", [[30, 30, 30], [40, 5, 1, 5, 1, 12]])
def test_no_group_comes_early_or_late_whatever_its_size(sizes: list[int]) -> None:
    """A steady drift adds to the mean of a group what its mean place is. Over seeds that is the middle for all."""
    means = []
    for seed in range(60):
        order = grouped(sizes, seed=seed)
        places = [
            [place / (len(order) - 1) for place, group in enumerate(order) if group == one] for one in range(len(sizes))
        ]
        means.append([statistics.fmean(one) for one in places])
    for group in zip(*means, strict=True):
        assert abs(statistics.fmean(group) - 0.5) < 4 * statistics.stdev(group) / len(group) ** 0.5


def test_trials_that_compile_nothing_are_shuffled_one_by_one() -> None:
    specs = [spec(size) for size in range(1, 31)]
    assert run_order(specs, seed=0, order="shuffled") == run_order(specs, seed=0, order="shuffled", chunk=1)
