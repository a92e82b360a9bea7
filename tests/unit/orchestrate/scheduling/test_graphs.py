"""Trials that share compiled graphs, and the graphs that warm workers hold."""

from dataclasses import replace

import pytest
from specs import trial_spec

from wattune.catalog.models import model
from wattune.orchestrate.scheduling.graphs import PLANS_KEPT, WarmGraphs, graphs_of, one_of_each, waited_for_workers
from wattune.run import Numbers, Run, RunStatus
from wattune.trial import TrialSpec
from wattune.workload import Workload


def spec(engine: str = "torch", *, device: str = "h200_sxm", name: str = "llama3_8b", **axes) -> TrialSpec:
    return trial_spec(name, on=f"1x4 {device}", engine=engine, batch=8, **axes)


SHARED = [
    ("torch", {}, {"sharding": "zero3"}),
    ("torch", {}, {"recompute": "full"}),
    ("torch", {}, {"pp": 2}),
    ("torch", {"tp": 2, "sharding": "zero1"}, {"tp": 2, "sharding": "zero3"}),
    ("deepspeed", {"tp": 2}, {"tp": 2, "micro_batch_size": 4}),
    ("megatron", {"tp": 2}, {"tp": 2, "ep": 2, "overlap": "grad"}),
]
APART = [
    ("torch", {}, {"micro_batch_size": 2}),
    ("torch", {}, {"tp": 2}),
    ("torch", {}, {"recompute": "selective"}),
    ("torch", {"tp": 2}, {"tp": 2, "sharding": "zero1"}),
    ("torch", {"tp": 2}, {"tp": 2, "pp": 2}),
    ("deepspeed", {}, {"sharding": "zero3"}),
    ("megatron", {}, {"recompute": "full"}),
    ("mine:Engine", {}, {"cp": 2}),
]


@pytest.mark.parametrize(("engine", "one", "other"), SHARED)
def test_replicas_stages_and_eager_layers_do_not_decide(engine, one, other) -> None:
    assert graphs_of(spec(engine, **one)) == graphs_of(spec(engine, **other))


@pytest.mark.parametrize(("engine", "one", "other"), APART)
def test_shapes_groups_and_recomputing_decide(engine, one, other) -> None:
    assert graphs_of(spec(engine, **one)) != graphs_of(spec(engine, **other))


def test_layers_of_two_models_differ_and_their_number_does_not_count() -> None:
    short = replace(spec(), model=replace(model("llama3_8b"), num_layers=2))
    assert graphs_of(spec()) == graphs_of(short) != graphs_of(spec(name="llama3_70b"))
    longer = replace(spec(), workload=Workload(seq_len=8192, global_batch_size=8))
    assert graphs_of(longer) != graphs_of(spec())


def test_workers_are_new_then_compile_and_then_are_warm() -> None:
    warm = WarmGraphs()
    assert warm.start_of(spec(), "n0") == "new_workers"
    assert warm.ran(spec(), "n0", new_workers=True) == "new_workers"
    assert warm.start_of(spec(micro_batch_size=2), "n0") == "new_graphs"
    assert warm.start_of(spec(sharding="zero1"), "n0") == "warm"
    assert warm.start_of(spec("megatron"), "n0") == "new_workers"
    assert warm.start_of(spec(), "n1") == "new_workers" and warm.start_of(spec()) == "warm"
    assert warm.ran(spec(), "n0", new_workers=True) == "new_workers", "its workers were lost"
    warm.forget()
    assert warm.start_of(spec()) == "new_workers"


def test_one_plan_for_each_set_of_graphs_that_is_known_before_it_runs() -> None:
    known = [spec(pp=2), spec(), spec(micro_batch_size=2), spec(tp=2), spec(micro_batch_size=2, sharding="zero1")]
    late = [spec("megatron"), spec(dtype="fp8"), spec(device="mi300x"), spec(device="cpu")]
    assert one_of_each([*late, *known], by_share=False) == (known[1], known[2], known[3]), "each rank has every part"
    assert one_of_each([*known[2:], *known], by_share=True) == (known[2], known[3], known[1])
    assert len(one_of_each([spec(micro_batch_size=n) for n in range(1, 60)], by_share=False)) == PLANS_KEPT


def test_after_so_many_plans_all_graphs_are_forgotten() -> None:
    warm = WarmGraphs()
    for size in range(1, PLANS_KEPT + 1):
        warm.ran(spec(micro_batch_size=size), "n0", new_workers=size == 1)
    assert warm.start_of(spec(micro_batch_size=1), "n0") == "warm"
    warm.ran(spec(micro_batch_size=PLANS_KEPT + 1), "n0", new_workers=False)
    assert warm.start_of(spec(micro_batch_size=1), "n0") == "new_graphs"


@pytest.mark.parametrize(("start_s", "waited"), [(23.29, True), (0.0, False), (None, False), (10.0, True)])
def test_the_result_says_whether_workers_were_made(start_s, waited) -> None:
    result = Run(trial_id="0" * 12, repeat=0, status=RunStatus.COMPLETED, numbers=Numbers(group_start_s=start_s))
    assert waited_for_workers(result) is waited
