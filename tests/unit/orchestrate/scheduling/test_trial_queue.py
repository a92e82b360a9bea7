"""The queue of a study: order, repeats, finalists, reference trials, learning strategies, and the trials left."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from wattune.catalog.hardware import DEVICES, ClusterSpec
from wattune.fidelity import BURST, FIDELITY, FIRST_BURST_REPEAT, FIRST_REFERENCE_REPEAT, FIRST_SOAK_REPEAT, UNPROFILED
from wattune.objective import Question
from wattune.orchestrate.events import Preview, RaceStep, TrialEvent
from wattune.orchestrate.scheduling.budget import Budget
from wattune.orchestrate.scheduling.durations import BESIDE_STEPS_S, NEW_WORKERS_S
from wattune.run import Numbers, Prediction, RunStatus
from wattune.search.search_entry import Burst, Finalists, LadderSettings
from wattune.search.strategy import Problem, make_strategy
from wattune.trial import Measure, TrialSpec

COMPLETED, OUT_OF_MEMORY = RunStatus.COMPLETED, RunStatus.OUT_OF_MEMORY


def runs(trials) -> list[tuple[int, int, float]]:
    """Micro-batch size, repeat and least seconds of each trial."""
    return [(one.spec.plan.micro_batch_size, one.repeat, one.measure.min_seconds) for one in trials]


def references(trials) -> list[int]:
    return [index for index, one in enumerate(trials) if one.role == "reference"]


def test_shuffled_repeats_come_in_rounds_far_apart(world, make_specs) -> None:
    specs = make_specs(6)
    ran = runs(world.drain(world.controller(specs, measure=Measure(repeats=2, reference_every=0), order="shuffled")))
    assert [repeat for _, repeat, _ in ran] == [0] * 6 + [1] * 6
    sizes = [size for size, _, _ in ran]
    assert sorted(sizes[:6]) == [1, 2, 3, 4, 5, 6] == sorted(sizes[6:])
    assert sizes[:6] != [1, 2, 3, 4, 5, 6]


def test_a_trial_that_is_likely_to_run_out_of_memory_runs_after_the_others(world, specs) -> None:
    def risk(spec: TrialSpec) -> float:
        return 0.6 if spec.plan.micro_batch_size == 1 else 0.4

    measure = Measure(repeats=2, min_seconds=5, reference_every=0)
    ran = world.drain(world.controller(specs, measure=measure, out_of_memory=risk))
    assert [size for size, _, _ in runs(ran)] == [2, 2, 4, 4, 1, 1]
    assert all(one.alone for one in ran), "and nothing is compiled beside any of them"
    assert not any(one.alone for one in world.drain(world.controller(specs, out_of_memory=lambda _spec: 0.05)))


def test_finalists_run_once_more_and_longer_when_all_else_is_done(world, specs) -> None:
    measure = Measure(min_seconds=5, soak_finalists=1, soak_seconds=60)
    ran = world.drain(world.controller(specs, measure=measure, finalists=[specs[1], specs[0]]))
    assert runs(ran) == [(1, 0, 5), (2, 0, 5), (4, 0, 5), (2, FIRST_SOAK_REPEAT, 60)]
    assert ran[-1].tags["soak"] == "true" and "soak" not in ran[0].tags


def grown(world, specs, **more) -> list[tuple[int, int]]:
    """Returns the runs of a second call: size of the micro-batch and repeat."""
    ran = world.drain(world.controller(specs, **more))
    return [(one.spec.plan.micro_batch_size, one.repeat) for one in ran]


def test_a_study_that_grew_runs_only_what_is_new(world, make_specs) -> None:
    specs = make_specs(4)
    world.drain(world.controller(specs[:3], measure=Measure(reference_every=0)))
    more = Measure(reference_every=0, repeats=3)
    assert sorted(grown(world, [specs[0], specs[1], specs[3]], measure=more)) == [
        *((size, repeat) for size in (1, 2) for repeat in (1, 2)),
        *((4, repeat) for repeat in (0, 1, 2)),
    ], "the third trial is no longer listed: it is not repeated"
    assert world.result(specs[2]).status is RunStatus.COMPLETED
    assert grown(world, specs, measure=Measure(reference_every=0)) == [], "fewer repeats: nothing is left"


def test_a_trial_that_the_space_has_lost_is_not_promoted(world, make_specs) -> None:
    specs, measure = make_specs(8), Measure(reference_every=0)
    world.measured = lambda spec, _repeat: {"tokens_per_s": float(spec.plan.micro_batch_size)}
    for spec in specs:
        world.write(spec, FIRST_BURST_REPEAT, tags={FIDELITY: BURST})
    world.write(specs[7])
    left = specs[:4]  # the best bursts, and the one that was promoted, are none of the space's any more
    more = {"ladder": LADDER, "candidates": left, "measure": measure}
    ran = world.drain(world.controller(left, **more))
    assert [(one.trial_id, one.repeat) for one in ran] == [(left[3].trial_id, 0)]


def test_a_preview_counts_neither_runs_nor_interruptions_of_trials_that_the_space_has_lost(
    world, make_specs, learner
) -> None:
    specs, measure = make_specs(5), Measure(reference_every=0)
    world.write(specs[0])
    world.write(specs[1], status=RunStatus.INTERRUPTED)
    left = specs[2:]
    world.controller(left, strategy=learner(left), candidates=left, measure=measure)
    world.controller(left, candidates=left, measure=measure)
    for preview in (event for event in world.heard if isinstance(event, Preview)):
        assert (preview.num_left, preview.num_again) == (3, 0)


def test_the_wait_for_cool_devices_is_a_part_of_the_time_a_trial_is_expected_to_take(world, make_specs) -> None:
    specs, measure = make_specs(3), Measure(reference_every=0, cooldown_temp_c=40)
    for spec in specs[:2]:
        world.write(spec, took_s=60, numbers=Numbers(cooldown_s=240.0))
    assert world.controller(specs, measure=measure, budget=Budget(max_hours=250 / 3600)).next("t0") is None
    assert world.controller(specs, measure=measure, budget=Budget(max_hours=310 / 3600)).next("t0") is not None


@pytest.mark.parametrize("strategy", ["grid", "random"])
def test_what_was_measured_counts_where_only_some_are_tried(world, make_specs, strategy) -> None:
    specs = make_specs(8)
    drawn = world.drain(
        world.controller(specs[4:], num_trials=3, strategy=make_strategy(strategy, Problem(specs=specs[4:], seed=1)))
    )
    assert len(drawn) == 3
    wider = {"num_trials": 5, "candidates": specs, "measure": Measure(reference_every=0)}
    again = world.drain(
        world.controller(specs, strategy=make_strategy(strategy, Problem(specs=specs, seed=2)), **wider)
    )
    assert len(again) == 2 and not {one.trial_id for one in again} & {one.trial_id for one in drawn}


def test_a_strategy_that_learns_counts_the_trials_of_its_space_alone(world, make_specs, learner) -> None:
    specs = make_specs(5)
    world.drain(world.controller(specs[:2], strategy=learner(specs[:2])))
    left = specs[1:]
    again = world.drain(world.controller(left, num_trials=3, strategy=learner(left), candidates=left))
    assert len(again) == 2


def test_a_trial_that_a_limit_stopped_runs_again_under_a_looser_one(world, make_specs) -> None:
    specs = make_specs(2)
    world.write(specs[0], status=RunStatus.ABORTED)
    world.write(specs[1])
    assert grown(world, specs, measure=Measure(reference_every=0)) == []
    loosened = {"outdated": lambda result: result.status is RunStatus.ABORTED}
    assert grown(world, specs, measure=Measure(reference_every=0), **loosened) == [(1, 0)]


def test_a_preview_takes_times_from_estimates_and_names_the_first_trials(world, make_specs) -> None:
    specs = make_specs(3)
    took = dict(zip(specs, (100.0, 200.0, 4000.0), strict=True))
    told = {"duration_s": lambda spec, _measure: took[spec], "candidates": specs}
    measure = Measure(reference_every=0, timeout_s=1000)
    world.controller(specs, measure=measure, **told)
    preview = next(event for event in world.heard if isinstance(event, Preview))
    assert preview.estimated and not preview.measured
    beside_s = NEW_WORKERS_S + 2 * BESIDE_STEPS_S["warm"]
    assert preview.device_s == (100 + 200 + 1000 + beside_s) * specs[0].cluster.world_size
    assert (preview.num_timeouts, preview.longest_s) == (1, 4000.0)
    new_s, warm_s = NEW_WORKERS_S, BESIDE_STEPS_S["warm"]
    first = [(one.spec, one.expected_s) for one in preview.first]
    assert first == [(specs[0], 100 + new_s), (specs[1], 200 + warm_s), (specs[2], 1000 + warm_s)]


@pytest.mark.parametrize(("status", "repeats"), [(OUT_OF_MEMORY, False), (RunStatus.INVALID, True)])
def test_repeats_of_a_trial_run_unless_it_failed(world, specs, status: RunStatus, repeats: bool) -> None:
    controller = world.controller(specs[:1], measure=Measure(repeats=2))
    world.run(controller, controller.next("t0"), "t0", status)
    assert (controller.next("t1") is not None) is repeats and (controller.ending == "finished") is not repeats


def test_the_reference_trial_is_measured_again_every_so_many_trials(world, make_specs) -> None:
    specs = make_specs(12)
    ran = world.drain(world.controller(specs, measure=Measure(reference_every=5)))
    assert references(ran) == [5, 11]
    assert {one.spec for one in ran if one.role == "reference"} == {specs[0]}
    assert [ran[index].repeat for index in references(ran)] == [FIRST_REFERENCE_REPEAT, FIRST_REFERENCE_REPEAT + 1]
    assert ran[5].tags["reference"] == "true" and "reference" not in ran[4].tags
    world.controller(specs, measure=Measure(reference_every=5))
    skipped = [event.role for event in world.heard if getattr(event, "kind", "") == "skipped"]
    assert sorted(skipped) == ["reference"] * 2 + ["trial"] * 12, "what an earlier call ran has its role too"
    preview = next(event for event in world.heard if isinstance(event, Preview))
    assert (preview.num_references, preview.num_left) == (2, 14)


def test_a_small_study_has_no_reference_trial_and_a_large_one_spends_a_tenth_on_it(world, make_specs) -> None:
    assert references(world.drain(world.controller(make_specs(10)))) == []
    assert len(references(world.drain(world.controller(make_specs(60))))) <= 6


def test_a_strategy_that_learns_is_told_before_it_is_asked(world, make_specs, learner) -> None:
    specs = make_specs(5)
    world.write(specs[0])
    taught = learner(specs)
    ran = world.drain(world.controller(specs, strategy=taught, num_trials=4, measure=Measure(repeats=2)))
    assert taught.knew[:3] == [1, 2, 3]
    firsts = [one.spec for one in ran if one.repeat == 0]
    assert firsts == specs[1:4]
    assert sorted(one.spec.plan.micro_batch_size for one in ran if one.repeat == 1) == [1, 2, 3, 4]


def test_what_a_device_measured_before_its_fp8_peak_was_known_is_learned_from(world, make_specs) -> None:
    """The peak counts in no id, so its trials are the same; a strategy looks for the candidate itself."""
    own = replace(DEVICES["h200_sxm"], name="mine", peak_fp8_flop_per_s=None)
    before = make_specs(4, ClusterSpec(device="mine", devices_per_node=1, own_device=own))
    known = replace(own, peak_fp8_flop_per_s=1979e12)
    specs = make_specs(4, ClusterSpec(device="mine", devices_per_node=1, own_device=known))
    assert [one.trial_id for one in specs] == [one.trial_id for one in before] and specs != before
    world.write(before[0])
    taught = make_strategy("model_guided", Problem(specs=specs, seed=1, question=Question.of("maximize tokens_per_s")))
    world.controller(specs, strategy=taught, candidates=specs)
    assert sorted(one.trial_id for one in taught.ask(4)) == sorted(one.trial_id for one in specs[1:])


def test_a_prediction_is_kept_with_the_first_run_of_the_trial_that_it_proposed(world, make_specs, learner) -> None:
    class Predicting(learner):
        def prediction(self, spec):
            size = float(spec.plan.micro_batch_size)
            return Prediction(metric="tokens_per_s", value=size, low=0.0, high=9.0, feasible_probability=0.5)

    specs = make_specs(3)
    controller = world.controller(specs, strategy=Predicting(specs), num_trials=3, measure=Measure(repeats=2))
    ran = world.drain(controller)
    values = {one.name: one.predicted for one in ran}
    for one in ran:
        found = values[one.name]
        assert (found is None) == (one.repeat > 0)
        assert found is None or found.value == one.spec.plan.micro_batch_size
    plain = world.drain(world.controller(make_specs(2), strategy=learner(make_specs(2))))
    assert all(one.predicted is None for one in plain)


def test_the_full_measurement_after_a_burst_keeps_what_was_predicted_before_it(world, make_specs, learner) -> None:
    class Predicting(learner):
        def prediction(self, spec):
            known = float(len(self.knew))  # what it knows later is no prediction
            return Prediction(metric="tokens_per_s", value=known, low=0.0, high=9.0, feasible_probability=0.5)

    specs = make_specs(4)
    rule = LADDER.model_copy(update={"promote": 0.5})
    world.measured = faster
    ran = world.drain(world.controller(specs, strategy=Predicting(specs), num_trials=4, ladder=rule))
    values: dict[str, list[float]] = {}
    for one in ran:
        values.setdefault(one.trial_id, []).append(one.predicted.value)
    assert len(values) == 4 and 2 in map(len, values.values())
    assert all(len(set(one)) == 1 for one in values.values())


def first_sizes(ran) -> list[int]:
    return [one.spec.plan.micro_batch_size for one in ran if one.repeat in (0, FIRST_BURST_REPEAT)]


@pytest.mark.parametrize("strategy", ["tpe", "model_guided"])
def test_a_trial_that_was_stopped_runs_again_whatever_the_strategy_would_propose(world, make_specs, strategy) -> None:
    world.measured = faster
    specs = make_specs(12)
    settings = {"num_trials": 5, "candidates": specs, "measure": Measure(reference_every=0)}
    world.write(specs[0])
    world.write(specs[6], status=RunStatus.INTERRUPTED)
    learning = make_strategy(strategy, Problem(specs=specs, seed=0, question=Question.of("maximize tokens_per_s")))
    controller = world.controller(specs, strategy=learning, **settings)
    assert controller.num_left == 4
    sizes = first_sizes(world.drain(controller))
    assert sizes[0] == 7 and len(set(sizes)) == 4, "once, first, and as one of the five"
    assert world.result(specs[6]).status is COMPLETED


def test_a_trial_that_may_have_ended_its_call_runs_again_after_new_proposals(world, make_specs, learner) -> None:
    specs = make_specs(6)
    for spec in specs[4:]:
        world.study.trial(spec.trial_id, 0).write_spec(spec)  # they ran when the study's process was killed
    world.write(specs[3], status=RunStatus.INTERRUPTED)
    strategy = learner(specs)
    ran = world.drain(world.controller(specs, strategy=strategy, num_trials=5, measure=Measure(reference_every=0)))
    assert first_sizes(ran) == [4, 1, 2, 5, 6]
    assert (specs[5], RunStatus.INTERRUPTED) in strategy.told, "so that it is not proposed as well"


def test_a_trial_that_crashed_teaches_nothing_where_it_is_to_run_again(world, make_specs, learner) -> None:
    specs = make_specs(3)
    world.write(specs[2], status=RunStatus.CRASHED)
    strategy = learner(specs)
    retry = {"retry": frozenset({RunStatus.CRASHED}), "measure": Measure(reference_every=0)}
    assert first_sizes(world.drain(world.controller(specs, strategy=strategy, num_trials=2, **retry))) == [3, 1]
    assert strategy.told[0] == (specs[2], RunStatus.INTERRUPTED)


def test_a_burst_that_was_stopped_runs_again(world, make_specs, learner) -> None:
    world.measured = faster
    specs = make_specs(4)
    world.write(specs[3], FIRST_BURST_REPEAT, RunStatus.INTERRUPTED, tags={FIDELITY: BURST})
    ran = world.drain(world.controller(specs, strategy=learner(specs), num_trials=2, ladder=LADDER))
    assert first_sizes(ran)[0] == 4 and ran[0].repeat == FIRST_BURST_REPEAT


def left_after_each(world: Any, specs: list[TrialSpec], *statuses: RunStatus, **options: Any) -> list[int]:
    """Runs all trials, the first of them to the given statuses; returns `num_left` after each."""
    controller, ends, number = world.controller(specs, **options), iter(statuses), 0
    while (running := controller.next(f"t{number}")) is not None:
        world.run(controller, running, f"t{number}", next(ends, COMPLETED))
        number += 1
    return [event.num_left for event in world.heard if isinstance(event, TrialEvent) and event.kind == "finished"]


def test_repeats_of_failed_trials_are_not_expected(world: Any, specs: list[TrialSpec]) -> None:
    measure = Measure(repeats=3, reference_every=0)
    # Of nine, two are not run.
    assert left_after_each(world, specs, OUT_OF_MEMORY, measure=measure) == [6, 5, 4, 3, 2, 1, 0]
    assert left_after_each(world, specs, measure=measure)[-1] == 0, "nor when the study is opened again"


@pytest.mark.parametrize("count", [1, 200])
def test_as_many_trials_run_as_are_announced(
    world: Any, make_specs: Callable[[int], list[TrialSpec]], count: int
) -> None:
    left = left_after_each(world, make_specs(count), measure=Measure(reference_every=0, repeats=2))
    assert left == list(range(2 * count - 1, -1, -1))


def finalists(max_share: float = 1.0) -> Finalists:
    return Finalists(until=0.95, max_share=max_share)


def alike(spec: TrialSpec, repeat: int) -> dict[str, float]:
    """The second and third of five trials scatter alike, so that their order is open; the second has a slight lead."""
    size, scattered = spec.plan.micro_batch_size, {1: 950.0, 2: 1050.0}.get(repeat, 1000.0)
    return {"tokens_per_s": scattered + (repeat == 1 and size == 2) if size in (2, 3) else 500.0}


def told(world: Any) -> list[RaceStep]:
    return [event for event in world.heard if isinstance(event, RaceStep)]


def test_after_the_search_the_leaders_are_repeated_until_the_share_is_used(world, make_specs) -> None:
    world.measured = alike
    measure = Measure(soak_finalists=1, soak_seconds=60)
    specs = make_specs(5)
    ran = world.drain(world.controller(specs, measure=measure, finalists=[specs[1]], race=finalists(0.8)))
    assert [one.role for one in ran] == ["trial"] * 5 + ["race"] * 4 + ["finalist"]
    repeats = [(one.spec.plan.micro_batch_size, one.repeat) for one in ran[5:9]]
    assert sorted(repeats) == [(2, 1), (2, 2), (3, 1), (3, 2)], "long runs have numbers of their own"
    assert [one.numbers.race_until_probability for one in ran] == [None] * 5 + [0.95] * 4 + [None]
    steps = told(world)
    assert [step.num_repeats for step in steps] == [0, 1, 2, 3, 4] and steps[-1].ending
    assert all(later.before == earlier.best_probability for earlier, later in pairwise(steps))


def test_a_race_that_ended_starts_nothing_when_the_study_is_run_again(world, make_specs) -> None:
    world.measured = alike
    world.drain(world.controller(make_specs(5), race=finalists(0.4)))
    world.heard.clear()
    again = world.controller(make_specs(5), race=finalists(0.4))
    preview = next(event for event in world.heard if isinstance(event, Preview))
    assert (preview.num_left, preview.num_race, preview.load_s) == (0, 0, {})
    assert world.drain(again) == [] and again.ending == "finished"


def test_a_race_that_was_stopped_goes_on_where_it_was(world, make_specs) -> None:
    world.measured = alike
    whole = finalists(0.8)
    first = world.controller(make_specs(5), race=whole, budget=Budget(max_trials=7))
    assert [one.role for one in world.drain(first)].count("race") == 2 and first.ending == "budget"
    world.heard.clear()
    second = world.controller(make_specs(5), race=whole)
    preview = next(event for event in world.heard if isinstance(event, Preview))
    assert (preview.num_left, preview.num_race) == (2, 2)
    running = second.next("t0")
    assert running.role == "race"
    second.interrupt()
    third = world.drain(world.controller(make_specs(5), race=whole))
    assert [one.role for one in third] == ["race"] * 2 and third[0].name == running.name


def test_free_nodes_race_side_by_side(world, make_specs, new_node) -> None:
    world.measured = alike
    world.nodes.append(new_node("n1"))
    controller = world.controller(make_specs(5), race=finalists(0.4))
    for _ in range(3):
        pair = {tune_id: controller.next(tune_id) for tune_id in ("a", "b")}
        assert all(one is None or one.role == "trial" for one in pair.values())
        for tune_id, running in pair.items():
            if running is not None:
                world.run(controller, running, tune_id)
    raced = [controller.next("a"), controller.next("b")]
    assert {(one.role, one.spec.plan.micro_batch_size) for one in raced} == {("race", 2), ("race", 3)}


def test_the_reference_trial_is_an_ordinary_one_and_is_measured_twice_at_the_start(world, make_specs) -> None:
    specs = make_specs(12)
    ran = world.drain(world.controller(specs, measure=Measure(reference_every=5), candidates=specs))
    assert references(ran) == [0, 1, 7, 13]
    (reference,) = {one.spec for one in ran if one.role == "reference"}
    assert reference in specs[5:7]
    preview = next(event for event in world.heard if isinstance(event, Preview))
    assert (preview.num_references, preview.num_left) == (4, 16)


def test_an_ordinary_reference_trial_that_cannot_run_gives_way(world, make_specs) -> None:
    specs = make_specs(12)
    controller = world.controller(specs, measure=Measure(reference_every=5), candidates=specs)
    first = controller.next("t0")
    assert first.role == "reference"
    world.run(controller, first, "t0", OUT_OF_MEMORY)
    assert {one.spec for one in world.drain(controller) if one.role == "reference"} == {specs[0]}


def test_a_reference_trial_that_is_no_trial_of_the_search_is_known_when_the_study_goes_on(
    world, make_specs, learner
) -> None:
    space, asked = make_specs(21), make_specs(8)
    measure = Measure(reference_every=5, repeats=1)
    world.drain(world.controller(asked, measure=measure, candidates=space, budget=Budget(max_trials=4)))
    world.heard.clear()
    for strategy in (None, learner(space)):
        world.controller(asked, measure=measure, candidates=space, strategy=strategy)
        skipped = [event for event in world.heard if isinstance(event, TrialEvent) and event.kind == "skipped"]
        assert sorted(event.repeat for event in skipped) == [0, 0, FIRST_REFERENCE_REPEAT, FIRST_REFERENCE_REPEAT + 1]
        previewed = next(event for event in world.heard if isinstance(event, Preview))
        assert previewed.num_left - previewed.num_references == 6
        world.heard.clear()


def test_few_proposals_wait_while_a_strategy_proposes_what_does_not_fit(world, make_specs, new_node, learner) -> None:
    world.nodes += [new_node("n1"), new_node("n2")]
    large = make_specs(20, ClusterSpec(device="cpu", num_nodes=2, devices_per_node=1))
    taught = learner([*large, *make_specs(1)])
    controller = world.controller([*large, *make_specs(1)], strategy=taught)
    controller.next("t0")
    assert controller.next("t1") is None and len(taught.knew) == 5, "one runs, four wait"


H200 = ClusterSpec(device="h200_sxm", devices_per_node=8)


def on_gpus(world, new_node) -> None:
    world.nodes[:] = [new_node("g0", **{"wattune.io/device": "h200_sxm"})]


def ran_earlier(world, specs: list[TrialSpec], times_s: list[float]) -> None:
    """Trials of an earlier call: its first waited for workers."""
    for number, (spec, took_s) in enumerate(zip(specs, times_s, strict=True)):
        start_s = Numbers(group_start_s=0.0 if number else 23.29)
        world.write(spec, tags={"nodes": "g0"}, numbers=start_s, took_s=took_s)


def sharded(spec: TrialSpec) -> list[TrialSpec]:
    """Trials that share their graphs."""
    return [replace(spec, plan=replace(spec.plan, sharding=kind)) for kind in ("none", "zero1", "zero2", "zero3")]


def test_trials_that_share_graphs_run_side_by_side_on_gpus(world, make_specs, new_node) -> None:
    on_gpus(world, new_node)
    specs = [one for spec in make_specs(6, H200) for one in sharded(spec)]
    measure = Measure(reference_every=0, repeats=2)
    sizes = [size for size, _, _ in runs(world.drain(world.controller(specs, measure=measure, order="shuffled")))]
    assert sum(one != other for one, other in pairwise(sizes)) == 2 * 6 - 1, "six chunks of four in each round"
    assert sizes[:24] == sizes[24:], "repeats are a whole round apart"


def test_a_strategy_that_can_tell_is_asked_for_gain_per_second(world, make_specs, new_node, learner) -> None:
    on_gpus(world, new_node)
    first, second, third = map(sharded, make_specs(3, H200))
    asked_s: list[list[float]] = []

    class Timed(learner):
        stopped_because = None

        def ask(self, n, expected_s=None):
            if expected_s is not None:
                asked_s.append([expected_s(one) for one in (first[0], second[0], third[0])])
            return super().ask(n)

    ran_earlier(world, [*first[:2], *second[:2]], [60, 15, 22, 17])
    specs = [*first, *second, *third]
    controller = world.controller(specs, strategy=Timed(specs), measure=Measure(min_seconds=1, reference_every=0))
    world.run(controller, controller.next("t0"), "t0")
    controller.next("t1")
    assert asked_s == [[60, 60, 60], [16, 22, 22]], "first all workers are new, then some trials are warm"


LADDER = LadderSettings(burst=Burst(min_steps=3, min_seconds=1.0), promote=0.25)


def faster(spec: TrialSpec, _repeat: int = 0) -> dict[str, float]:
    return {"tokens_per_s": 100.0 + spec.plan.micro_batch_size, "node_device_power_peak_1s_w": 1.0}


def test_on_a_ladder_every_trial_is_a_burst_and_the_best_are_measured_with_their_repeats(world, make_specs) -> None:
    world.measured = faster
    measure = Measure(min_seconds=5, repeats=2)
    ran = world.drain(world.controller(make_specs(8), measure=measure, ladder=LADDER))
    assert runs(ran[:8]) == [(size, FIRST_BURST_REPEAT, 1) for size in range(1, 9)]
    assert runs(ran[8:]) == [(8, 0, 5), (7, 0, 5), (7, 1, 5), (8, 1, 5)]
    assert {one.tags.get("fidelity") for one in ran[:8]} == {"burst"} and "fidelity" not in ran[8].tags
    assert {one.role for one in ran[:8]} == {"burst"}
    preview = next(event for event in world.heard if isinstance(event, Preview))
    assert preview.num_left == len(ran)
    assert [event.num_left for event in world.heard if isinstance(event, TrialEvent)][-1] == 0


def test_a_strategy_that_learns_is_promoted_for_as_soon_as_a_burst_is_worth_it(world, make_specs, learner) -> None:
    world.measured = faster
    specs = make_specs(8)
    strategy = learner(specs)
    ran = world.drain(world.controller(specs, strategy=strategy, ladder=LADDER))
    order = [(one.spec.plan.micro_batch_size, one.repeat == 0) for one in ran]
    assert order[:6] == [(1, False), (2, False), (3, False), (4, False), (4, True), (5, False)]
    assert sum(full for _, full in order) == len({size for size, full in order if full}) >= 2
    assert (8, True) in order
    assert len(strategy.told) == len(ran)


def test_a_continued_ladder_repeats_neither_bursts_nor_promotions(world, make_specs) -> None:
    world.measured = faster
    specs = make_specs(8)
    first = world.drain(world.controller(specs, ladder=LADDER, budget=Budget(max_trials=9)))
    assert [one.repeat for one in first] == [FIRST_BURST_REPEAT] * 8 + [0]
    second = world.drain(world.controller(specs, ladder=LADDER))
    assert runs(second) == [(7, 0, Measure().min_seconds)]
    assert world.drain(world.controller(specs, ladder=LADDER)) == []


def test_bursts_bring_no_reference_trial_and_never_count_as_one(world, make_specs) -> None:
    world.measured = faster
    specs = make_specs(24)
    ran = world.drain(world.controller(specs, measure=Measure(reference_every=3), ladder=LADDER, candidates=specs))
    assert references(ran)[0] >= 24
    assert all(one.repeat < FIRST_BURST_REPEAT for one in ran if one.role == "reference")


def test_only_trials_of_the_search_may_stop_early(world, make_specs) -> None:
    world.measured = faster
    specs = make_specs(12)
    rule = Question.of("maximize tokens_per_s")
    measure = Measure(reference_every=5, soak_finalists=1)
    ran = world.drain(world.controller(specs, measure=measure, early_stop=True, question=rule, finalists=specs[-1:]))
    assert ran[0].stop_above_s is None, "nothing is known yet"
    roles = {one.role for one in ran if one.stop_above_s is not None}
    assert roles == {"trial"} and {one.role for one in ran} == {"trial", "reference", "finalist"}
    bars_s = [one.stop_above_s for one in ran if one.stop_above_s is not None]
    assert len(bars_s) >= 10 and bars_s[-1] < bars_s[0], "the best so far sets it"


@pytest.mark.parametrize(
    ("host_bound_frac", "objective", "profile_steps", "profiled"),
    [
        (0.0, "maximize tokens_per_s", None, [True, True, False, False]),
        (0.3, "maximize tokens_per_s", None, [True, True, True, True]),
        (0.0, "minimize host_bound_frac", None, [True, True, True, True]),
        (0.0, "minimize exposed_comm_frac", None, [True, True, True, True]),
        (0.0, "maximize tokens_per_s", 2, [True, True, True, True]),
        (None, "maximize tokens_per_s", None, [True, True, True, True]),
    ],
)
def test_a_repeat_is_profiled_only_where_something_reads_it(
    world, make_specs, host_bound_frac: float | None, objective: str, profile_steps: int | None, profiled: list[bool]
) -> None:
    world.measured = lambda _spec, _repeat: {} if host_bound_frac is None else {"host_bound_frac": host_bound_frac}
    measure = Measure(repeats=2, reference_every=0, profile_steps=profile_steps)
    ran = world.drain(
        world.controller(make_specs(2), measure=measure, order="shuffled", question=Question.of(objective))
    )
    assert [one.measure.profile_steps == profile_steps for one in ran] == profiled
    assert [one.tags.get("profile") != UNPROFILED for one in ran] == profiled


def test_the_long_run_of_a_finalist_is_profiled(world, specs) -> None:
    world.measured = lambda _spec, _repeat: {"host_bound_frac": 0.0}
    measure = Measure(soak_finalists=1, soak_seconds=60, reference_every=0)
    ran = world.drain(world.controller(specs, measure=measure, finalists=[specs[1]]))
    assert [one.measure.profile_steps for one in ran] == [None] * 4
