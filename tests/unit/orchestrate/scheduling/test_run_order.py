"""The order in which trials run."""

import itertools

from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import model
from wattune.orchestrate.scheduling.run_order import BLOCK, run_order, workers_of
from wattune.plan.axes import Plan
from wattune.trial import TrialSpec, Workload


def spec(size: int, *, device: str = "cpu", engine: str = "torch") -> TrialSpec:
    return TrialSpec(
        model=model("llama3_8b"),
        cluster=ClusterSpec(device=device, devices_per_node=1),
        engine=engine,
        workload=Workload(seq_len=8, global_batch_size=8),
        plan=Plan(micro_batch_size=size),
    )


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
