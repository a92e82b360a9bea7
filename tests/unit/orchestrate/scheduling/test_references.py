"""Reference trials: an ordinary plan near the middle, measured twice at the start, and then every so often."""

from collections.abc import Callable
from dataclasses import replace

from wattune.catalog.hardware import ClusterSpec
from wattune.fidelity import FIRST_REFERENCE_REPEAT
from wattune.orchestrate.scheduling.references import References, ordinary_plans
from wattune.orchestrate.scheduling.run_order import workers_of
from wattune.plans.axes import Plan
from wattune.run import Run, RunStatus
from wattune.trial import TrialSpec

MakeSpecs = Callable[..., list[TrialSpec]]


def ended(spec: TrialSpec, repeat: int, status: RunStatus = RunStatus.COMPLETED) -> Run:
    return Run(trial_id=spec.trial_id, repeat=repeat, status=status)


def of(specs: list[TrialSpec], *, every: int = 5, named: TrialSpec | None = None, planned: int = 20) -> References:
    references = References(every=every, plans=ordinary_plans(specs, seed=0), named=named)
    references.plan({workers_of(specs[0]): planned})
    return references


def test_the_plan_in_the_middle_of_one_axis_is_taken(make_specs: MakeSpecs) -> None:
    specs = make_specs(9)
    assert ordinary_plans(specs, seed=0) == {workers_of(specs[0]): specs[4]}
    assert ordinary_plans(specs[::-1], seed=7) == {workers_of(specs[0]): specs[4]}, "in whatever order, by any seed"


def test_values_count_by_their_rank_and_choices_in_their_order(make_specs: MakeSpecs) -> None:
    (one,) = make_specs(1)
    plans = [
        Plan(micro_batch_size=size, sharding=sharding, recompute=recompute)
        for size in (1, 2, 64)
        for sharding in ("none", "zero1", "zero3")
        for recompute in ("none", "selective", "full")
    ]
    chosen = ordinary_plans([replace(one, plan=plan) for plan in plans], seed=0)[workers_of(one)].plan
    assert (chosen.micro_batch_size, chosen.sharding, chosen.recompute) == (2, "zero1", "selective")


def test_equally_near_plans_are_drawn_by_the_seed(make_specs: MakeSpecs) -> None:
    specs = make_specs(2)
    drawn = {ordinary_plans(specs, seed=seed)[workers_of(specs[0])] for seed in range(20)}
    assert drawn == set(specs)


def test_a_plan_that_may_wait_for_its_host_is_passed_over_where_another_does_not(make_specs: MakeSpecs) -> None:
    specs = make_specs(9)
    workers = workers_of(specs[0])

    def waits(spec: TrialSpec) -> bool:
        return spec.plan.micro_batch_size <= 6

    assert ordinary_plans(specs, seed=0, waits=waits) == {workers: specs[6]}, "the nearest of the others"
    assert ordinary_plans(specs, seed=0, waits=lambda _: True) == {workers: specs[4]}, "all wait"


def test_a_plan_that_may_run_out_of_memory_is_no_reference(make_specs: MakeSpecs) -> None:
    specs = make_specs(9)
    workers = workers_of(specs[0])

    def risk(spec: TrialSpec) -> float:
        return 0.01 * spec.plan.micro_batch_size

    assert ordinary_plans(specs, seed=0, out_of_memory=risk) == {workers: specs[4]}, "0.05 will do"
    fuller = ordinary_plans(specs, seed=0, out_of_memory=lambda spec: 2 * risk(spec))
    assert fuller == {workers: specs[1]}, "the nearest to the middle of those that fit for sure"
    waits = ordinary_plans(specs, seed=0, out_of_memory=lambda spec: 2 * risk(spec), waits=lambda one: one == specs[1])
    assert waits == {workers: specs[0]}
    assert ordinary_plans(specs, seed=0, out_of_memory=lambda spec: 10 * risk(spec)) == {workers: specs[0]}, "the least"


def test_every_kind_of_workers_has_its_own(make_specs: MakeSpecs) -> None:
    wide = ClusterSpec(device="cpu", devices_per_node=2)
    chosen = ordinary_plans([*make_specs(3), *make_specs(5, wide)], seed=0)
    assert sorted(spec.plan.micro_batch_size for spec in chosen.values()) == [2, 3]
    assert ordinary_plans([], seed=0) == {}


def test_a_named_one_is_kept_even_if_it_fails(make_specs: MakeSpecs) -> None:
    specs = make_specs(9)
    references, workers = of(specs, named=specs[8]), workers_of(specs[0])
    references.note(specs[8], ended(specs[8], FIRST_REFERENCE_REPEAT, RunStatus.CRASHED), "n0")
    assert references.due(workers, "n0", opens=True) == (specs[8], FIRST_REFERENCE_REPEAT + 1)


def test_a_study_that_goes_on_keeps_the_one_it_has(make_specs: MakeSpecs) -> None:
    specs = make_specs(9)
    references, workers = of(specs), workers_of(specs[0])
    for repeat in (FIRST_REFERENCE_REPEAT, FIRST_REFERENCE_REPEAT + 1):
        references.note(specs[0], ended(specs[0], repeat), "n0")
    for spec in specs[1:6]:
        references.note(spec, ended(spec, 0), "n0")
    assert references.due(workers, "n0", opens=True) == (specs[0], FIRST_REFERENCE_REPEAT + 2)


def test_a_run_that_was_given_up_may_start_again(make_specs: MakeSpecs) -> None:
    specs = make_specs(9)
    references, workers = of(specs), workers_of(specs[0])
    found = references.due(workers, "n0", opens=True)
    assert found is not None and references.num_opening(workers) == 1
    references.give_up(found[0].trial_id, found[1])
    assert references.num_opening(workers) == 2
