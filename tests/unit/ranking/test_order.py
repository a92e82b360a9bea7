import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_trials import CAPPED, FASTEST, LEAST_ENERGY, POWER, Pair, asked, numbers, on_n0, reference_runs, speed, trial
from pace import least_cpu_s

from wattune.catalog.models import model
from wattune.errors import SpaceError
from wattune.fidelity import FIRST_BURST_REPEAT
from wattune.objective import Question, parse_constraint, parse_objective
from wattune.ranking.assessment import Verdict
from wattune.ranking.bounds import Holds
from wattune.ranking.order import Ranking, pareto_front, rank
from wattune.run import Run, RunStatus
from wattune.view.files import ranking_csv, ranking_table


def test_every_trial_is_in_the_list_its_measurement_puts_it_in():
    ranking = rank(
        [
            speed(1, 100.0),
            speed(2, 200.0, power_w=3188.0),
            speed(3, 150.0, power_w=2350.0),
            trial(4, {"tokens_per_s": 400.0}),
            trial(5, status=RunStatus.OUT_OF_MEMORY, reason="rank 3 at 140.2 GiB"),
        ],
        asked(FASTEST, POWER),
    )
    assert numbers(ranking.feasible) == [3, 1]
    assert numbers(ranking.infeasible) == [2]
    assert ranking.infeasible[0].reason == "node_device_power_peak_1s_w <= 2750 fails at 3188"
    assert numbers(ranking.unknown) == [4]
    assert ranking.unknown[0].reason == "not measured: node_device_power_peak_1s_w"
    assert ranking.unknown[0].missing == ("node_device_power_peak_1s_w",)
    assert numbers(ranking.failed) == [5]
    assert ranking.failed[0].reason == "out_of_memory: rank 3 at 140.2 GiB"
    assert [row.verdict for row in ranking.trials] == [*["feasible"] * 2, "infeasible", "unknown", "failed"]


def test_trials_that_are_not_told_apart_share_a_rank():
    # Single runs scatter by about 1 %: 3 % between two of them may be luck, 30 % may not.
    reference = reference_runs([99.0, 101.0, 99.0 + 2 * 0.134, 101.0 - 2 * 0.134])
    singles = [on_n0(speed(n, value)) for n, value in ((1, 200.0), (2, 203.0), (3, 206.0), (4, 300.0))]
    ranking = rank([*reference, *singles], asked(FASTEST))
    assert [(row.rank, number) for row, number in zip(ranking.feasible, numbers(ranking.feasible), strict=True)] == [
        (1, 4), (2, 3), (2, 2), (2, 1), (5, 90),
    ]  # fmt: skip
    assert {row.objective.method for row in ranking.feasible} == {"pooled", "repeats"}
    assert [row.best_probability for row in ranking.feasible] == [1.0, 0.0, 0.0, 0.0, 0.0]
    leaders = rank([*reference, *singles[:3]], asked(FASTEST)).feasible[:3]
    first, second, third = (row.best_probability for row in leaders)
    assert 0.95 > first > second > third > 0.0
    assert first + second + third == pytest.approx(1.0)
    assert 201.0 < rank([*reference, *singles[:3]], asked(FASTEST)).expected < 206.0


def test_infeasible_trials_stand_by_objective_so_that_the_first_is_the_price_of_the_bounds():
    """However much is known of each: a repeat makes an interval narrow, and moves no row by that."""
    over = 3300.0
    pairs = [
        speed(1, 100.0),
        speed(2, 180.0, power_w=over),
        *(speed(3, 170.0 + 0.01 * repeat, power_w=over, repeat=repeat) for repeat in range(4)),
        speed(4, 175.0, power_w=over),
        speed(4, 187.0, power_w=over, repeat=1),
        trial(5, {"node_device_power_peak_1s_w": over}),
    ]
    ranking = rank(pairs, asked(FASTEST, POWER))
    assert numbers(ranking.infeasible) == [4, 2, 3, 5], "a figure that was not measured is last"
    assert ranking.price is ranking.infeasible[0]
    assert ranking.to_json()["price"] == ranking.infeasible[0].trial_id
    assert rank([speed(1, 200.0), *pairs[1:]], asked(FASTEST, POWER)).price is None, "a bound that costs nothing"
    slow = replace(pairs[1][0], model=replace(pairs[1][0].model, num_layers=8))
    other = (slow, replace(pairs[1][1], trial_id=slow.trial_id))
    assert rank([pairs[0], other], asked(FASTEST, POWER)).price is None, "less work for a token is no price"


@pytest.mark.parametrize("metric", ["tokens_per_s", "throttle_frac", "device_temp_max_c", "excursion_count"])
@pytest.mark.parametrize("value", [0.0, 1e-6, 0.5])
def test_no_figure_is_ever_certain(metric, value):
    rows = rank([trial(1, {metric: value}), trial(2, {metric: value})], Question.of(f"minimize {metric}")).trials
    assert all(row.objective.low < row.objective.value < row.objective.high for row in rows)
    assert [row.rank for row in rows] == [1, 1] and 0.3 < rows[0].best_probability < 0.7


def test_drift_is_taken_out_of_the_objective_and_said():
    # 10 % slower over the study; the two trials are equal but for when they ran.
    reference = reference_runs([110.0, 107.5, 105.0, 102.5, 100.0] * 1)
    early, late = on_n0(speed(1, 220.0), at_s=0.0), on_n0(speed(2, 200.0), at_s=2400.0)
    ranking = rank([*reference, early, late], asked(FASTEST, POWER))
    values = {row.spec.plan.micro_batch_size: row.objective.value for row in ranking.feasible}
    assert values[1] == pytest.approx(values[2], rel=0.03)
    assert {row.rank for row in ranking.feasible if row.objective.value > 150} == {1}
    assert any("tokens_per_s drifted by -8" in warning for warning in ranking.warnings)


def nodes(pair: Pair, name: str, at_s: float = 0.0) -> Pair:
    spec, result = on_n0(pair, at_s)
    return spec, replace(result, tags={**result.tags, "nodes": name})


def test_a_slower_set_of_nodes_is_corrected_by_the_trials_that_ran_on_both():
    tie = [
        nodes(speed(90, 100.0 - 6.0 * (name == "n1"), repeat=n), name, 60.0 * n)
        for n in range(6)
        for name in ("n0", "n1")
    ]
    tie = [(spec, replace(result, repeat=index)) for index, (spec, result) in enumerate(tie)]
    ranking = rank([*tie, nodes(speed(1, 200.0), "n0"), nodes(speed(2, 188.0), "n1")], asked(FASTEST))
    equal = {row.rank for row in ranking.feasible[:2]}
    assert equal == {1}, "188 on nodes that are 6 % slower is 200"
    assert ranking.feasible[0].objective.value == pytest.approx(ranking.feasible[1].objective.value, rel=0.01)
    (said,) = ranking.corrections
    assert said.startswith("n1: tokens_per_s is -6.") and "of that on n0, by the trials that ran on both" in said


def test_a_set_of_nodes_without_a_tie_is_named_and_compared_with_a_wide_interval():
    tied = [nodes(speed(n, 200.0 + n), "n0", 60.0 * n) for n in range(1, 5)]
    ranking = rank([*tied, nodes(speed(9, 190.0), "n7", 90.0)], asked(FASTEST))
    apart = next(row for row in ranking.feasible if row.spec.plan.micro_batch_size == 9)
    assert apart.rank == 1, "5 % may be the nodes"
    assert apart.objective.half_width_frac > 0.1 > ranking.feasible[0].objective.half_width_frac
    assert [text.split(":")[0] for text in ranking.corrections] == ["n7"] and "not tied to n0" in ranking.corrections[0]


def study_of(seed: int, *, num_reference: int = 5) -> list[Pair]:
    """Twelve trials 2 % apart, each once, beside the reference trial; runs scatter by 0.5 %."""
    rng = np.random.default_rng(seed)
    pairs = [
        on_n0(speed(n, 200.0 * 1.02**n * math.exp(0.005 * rng.normal()), 2600.0 * 1.02**n), 100.0 * n)
        for n in range(1, 13)
    ]
    runs = [100.0 * math.exp(0.005 * each) for each in np.random.default_rng(7).normal(size=num_reference)]
    return [*pairs, *reference_runs(runs, every_s=1300.0 / num_reference)]


def verdicts(ranking: Ranking) -> dict[str, Verdict]:
    return {row.trial_id: row.verdict for row in ranking.trials}


def test_verdicts_stay_with_another_order_another_seed_and_one_more_reference_run():
    pairs = study_of(1)
    first = rank(pairs, asked(FASTEST, POWER))
    assert {row.verdict for row in first.trials} == {Verdict.FEASIBLE, Verdict.UNDECIDED, Verdict.INFEASIBLE}
    assert rank(pairs[::-1], asked(FASTEST, POWER)).to_json() == first.to_json()
    best = [rank(study_of(seed), asked(FASTEST, POWER)) for seed in (2, 3, 4)]
    assert {one.best.trial_id for one in best} == {first.best.trial_id}
    for other in (*best, rank(study_of(1, num_reference=6), asked(FASTEST, POWER))):
        assert verdicts(other) == verdicts(first)


def test_minimizing_turns_the_order():
    pairs = [trial(n, {"energy_per_token_j": value}) for n, value in ((1, 0.9), (2, 0.3), (3, 0.5))]
    ranking = rank(pairs, asked(LEAST_ENERGY))
    assert numbers(ranking.feasible) == [2, 3, 1]
    assert [row.rank for row in ranking.feasible] == [1, 2, 3]
    assert ranking.best is ranking.feasible[0]


def test_what_runs_again_is_interrupted_and_not_failed_unless_another_repeat_failed():
    stopped = [trial(number, repeat=1, status=RunStatus.INTERRUPTED, reason="stopped") for number in (1, 2, 3)]
    others = [trial(1, status=RunStatus.INVALID, quality="invalid"), trial(2, status=RunStatus.CRASHED, reason="died")]
    ranking = rank([*stopped, *others], asked(FASTEST, POWER))
    assert (numbers(ranking.interrupted), numbers(ranking.failed)) == ([3, 1], [2])
    assert ranking.interrupted[0].reason == "interrupted: stopped"
    assert [row.verdict for row in ranking.trials] == ["interrupted", "interrupted", "failed"]


def test_where_leaves_trials_out_and_counts_them():
    where = [parse_constraint("tokens_per_s > 100")]
    pairs = [
        speed(1, 100.0),
        speed(2, 101.0),
        speed(3, 300.0),
        speed(3, 99.0, repeat=1),
        trial(4, status=RunStatus.CRASHED),
    ]
    ranking = rank(pairs, asked(FASTEST, POWER), where=where)
    assert numbers(ranking.trials) == [2]
    assert ranking.num_filtered == 3
    assert "3 left out by tokens_per_s > 100" in ranking.note


def test_the_note_never_lets_qualities_or_simulation_pass_in_silence():
    pairs = [
        trial(1, {"tokens_per_s": 1.0}, quality="indicative", tags={"simulated": "true"}),
        trial(2, {"tokens_per_s": 2.0}, tags={"simulated": "false"}),
        trial(3, status=RunStatus.CRASHED),
    ]
    ranking = rank(pairs, asked(FASTEST))
    assert ranking.qualities == {"publishable": 1, "indicative": 1}
    assert ranking.note == "quality: 1 publishable, 1 indicative; SIMULATED telemetry in 1 of 2 measured trials"
    assert ranking.simulated
    assert [row.simulated for row in ranking.feasible] == [False, True]
    assert not rank(pairs[1:], asked(FASTEST)).simulated


def test_nothing_at_all_is_a_ranking():
    ranking = rank([], asked(FASTEST, POWER))
    assert (ranking.best, ranking.trials, ranking.note) == (None, (), "nothing was measured")
    assert ranking_table(ranking).num_rows == 0
    assert len(ranking_csv(ranking).splitlines()) == 1


def test_several_studies_stand_in_one_ranking_and_are_never_merged():
    up, out = speed(1, 100.0), speed(1, 120.0)
    ranking = rank({"scale_up": [up, *reference_runs([100.0, 101.0])], "scale_out": [out]}, asked(FASTEST, POWER))
    assert [(row.study, row.objective.value) for row in ranking.feasible][:1] == [("scale_out", 120.0)]
    assert len(ranking.trials) == 3
    assert ranking.studies == ("scale_up", "scale_out")
    assert rank({"alone": [up]}, asked(FASTEST)).trials[0].study == ""


def test_models_of_unlike_size_never_share_a_table_in_silence():
    spec, result = speed(1, 900.0)
    small = replace(spec, model=model("llama3_8b"))
    large = replace(spec, model=model("mixtral_8x7b"))
    pairs = [(small, result), (large, replace(result, trial_id=large.trial_id, metrics={**result.metrics}))]
    ranking = rank(pairs, asked(FASTEST))
    (warning,) = [text for text in ranking.warnings if "of different work" in text]
    assert "llama3_8b (32 layers, 8.03 G parameters)" in warning
    assert "mixtral_8x7b (32 layers, 12.88 G of 46.7 G parameters)" in warning
    assert {row.spec.model.name for row in ranking.best_of_each} == {"llama3_8b", "mixtral_8x7b"}
    assert rank(pairs[:1], asked(FASTEST)).best_of_each == ()
    power = parse_objective("minimize node_device_power_peak_1s_w")
    assert not [text for text in rank(pairs, asked(power)).warnings if "of different work" in text]


def test_sensors_of_two_devices_simulated_on_one_machine_are_told_apart_and_said():
    spec, result = speed(1, 900.0)
    clusters = [replace(spec.cluster, device="cpu", simulate_sensors_of=name) for name in ("h100_sxm", "h200_sxm")]
    specs = [replace(spec, cluster=cluster) for cluster in clusters]
    ranking = rank([(one, replace(result, trial_id=one.trial_id)) for one in specs], asked(FASTEST))
    assert any("sensors of h100_sxm and h200_sxm are simulated" in text for text in ranking.warnings)
    assert "cluster" in ranking.varying
    assert len({row.setting["cluster"] for row in ranking.trials}) == 2
    alone = rank([(specs[0], replace(result, trial_id=specs[0].trial_id))], asked(FASTEST))
    assert not any("are simulated" in text for text in alone.warnings)


def test_qualities_can_be_ranked_apart():
    pairs = [trial(1, {"tokens_per_s": 9.0}, quality="indicative"), trial(2, {"tokens_per_s": 2.0})]
    mixed = rank(pairs, asked(FASTEST))
    assert any("different qualities" in warning for warning in mixed.warnings)
    best = rank(pairs, asked(FASTEST), least_quality="publishable")
    assert numbers(best.trials) == [2]
    assert best.note == "quality: 1 publishable; 1 left out by quality below publishable"
    with pytest.raises(SpaceError, match='did you mean "publishable"'):
        rank(pairs, asked(FASTEST), least_quality="publishible")


def dominates(a: Sequence[float], b: Sequence[float]) -> bool:
    return all(x >= y for x, y in zip(a, b, strict=True)) and tuple(a) != tuple(b)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=30))
def test_the_front_is_the_rows_nobody_dominates(points):
    pairs = [
        trial(number, {"tokens_per_s": float(a), "energy_per_token_j": float(b)})
        for number, (a, b) in enumerate(points, start=1)
    ]
    rows = rank(pairs, asked(FASTEST)).feasible
    front = pareto_front(rows, "tokens_per_s", "energy_per_token_j")
    turned = [(a, -b) for a, b in points]
    expected = {n for n, p in enumerate(turned, start=1) if not any(dominates(q, p) for q in turned)}
    assert set(numbers(front)) == expected
    assert len(front) == len(expected)


def test_the_front_takes_the_middle_of_repeats_and_leaves_out_what_was_not_measured():
    energy = "energy_per_token_j"
    pairs = [
        trial(1, {"tokens_per_s": 8.0, energy: 1.0}), trial(1, {"tokens_per_s": 1.0, energy: 9.0}, repeat=1),
        trial(2, {"tokens_per_s": 5.0, energy: 2.0}),
        trial(3, {"tokens_per_s": 99.0}),
    ]  # fmt: skip
    assert numbers(pareto_front(rank(pairs, asked(FASTEST)).feasible, "tokens_per_s", energy)) == [2]


@pytest.mark.parametrize(
    ("metric", "says"), [("tensor_active_frac", "neither more nor less"), ("tokens_per_sec", 'did you mean "tokens')]
)
def test_a_front_needs_metrics_with_a_direction(metric, says):
    with pytest.raises(SpaceError, match=says):
        pareto_front([], "tokens_per_s", metric)


measurements = st.builds(
    lambda number, repeat, tokens, power, status: trial(
        number,
        {"tokens_per_s": tokens} | ({} if power is None else {"node_device_power_peak_1s_w": power}),
        repeat=repeat,
        status=status,
    ),
    st.integers(1, 8),
    st.integers(0, 2),
    st.integers(1, 20).map(float),
    st.none() | st.sampled_from([2000.0, 2750.0, 2751.0]),
    st.sampled_from([RunStatus.COMPLETED] * 5 + [RunStatus.CRASHED, RunStatus.INTERRUPTED]),
)
studies = st.lists(measurements, max_size=20, unique_by=lambda pair: (pair[1].trial_id, pair[1].repeat))


def outcome(ranking: Ranking) -> list[tuple[str, int | None, Verdict]]:
    return [(row.trial_id, row.rank, row.verdict) for row in ranking.trials]


@settings(deadline=None)
@given(studies, st.randoms(use_true_random=False))
def test_the_order_of_results_does_not_matter(pairs, shuffler):
    shuffled = list(pairs)
    shuffler.shuffle(shuffled)
    assert rank(pairs, asked(FASTEST, POWER)).to_json() == rank(shuffled, asked(FASTEST, POWER)).to_json()


@settings(deadline=None)
@given(studies, st.integers(1, 20), st.sampled_from([None, 9000.0]))
def test_a_trial_that_is_not_feasible_changes_no_rank(pairs, tokens, power_w):
    metrics = {"tokens_per_s": float(tokens)} | ({} if power_w is None else {"node_device_power_peak_1s_w": power_w})
    ranks = {row.trial_id: row.rank for row in rank(pairs, asked(FASTEST, POWER)).feasible}
    more = rank([*pairs, trial(99, metrics)], asked(FASTEST, POWER))
    assert {row.trial_id: row.rank for row in more.feasible} == ranks


@settings(deadline=None)
@given(studies)
def test_ranks_and_probabilities_are_what_their_definition_says(pairs):
    ranking = rank(pairs, asked(FASTEST, POWER))
    values = [row.objective.value for row in ranking.feasible]
    assert values == sorted(values, reverse=True)
    for number, row in enumerate(ranking.feasible):
        assert 1 <= row.rank <= 1 + number
        assert all(margin.verdict is Holds.HOLDS for margin in row.margins)
    able = (*ranking.feasible, *ranking.undecided, *ranking.behind)
    if ranking.feasible and ranking.undecided and ranking.behind:
        assert max(row.objective.value for row in ranking.behind) < max(values[0], ranking.undecided[0].objective.value)
    assert all(row.behind and row.behind in row.reason for row in ranking.behind)
    assert sum(row.best_probability for row in able) <= 1.0 + 1e-9
    assert all(row.rank is None for row in ranking.trials if row.verdict != "feasible")
    assert all(row.best_probability is None for row in ranking.trials if row not in able)
    assert len(ranking.trials) == len({result.trial_id for _, result in pairs})


@settings(deadline=None)
@given(studies)
def test_a_tighter_bound_never_makes_a_trial_feasible(pairs):
    loose = {row.trial_id for row in rank(pairs, asked(FASTEST, POWER)).feasible}
    tight = {row.trial_id for row in rank(pairs, asked(FASTEST, parse_constraint(f"{POWER.metric} <= 2500"))).feasible}
    assert tight <= loose


@pytest.mark.slow
def test_ten_thousand_trials_are_ranked_in_two_seconds():
    dice = random.Random(0)
    (spec, _), constraints = speed(1, 1.0), [POWER, CAPPED]
    names = ("tokens_per_s", "node_device_power_peak_1s_w", "device_power_peak_1s_w", "device_power_limit_w")
    pairs = [
        (
            spec,
            Run(
                trial_id=f"{number:012x}",
                repeat=repeat,
                status=RunStatus.COMPLETED,
                metrics={name: dice.uniform(1000, 3000) for name in names} | {f"m{i}": 1.0 for i in range(50)},
                quality="indicative",
            ),
        )
        for number, repeat in product(range(10_000), range(2))
    ]

    def whole() -> None:
        ranking = rank(pairs, asked(FASTEST, *constraints))
        assert len(ranking.trials) == 10_000
        pareto_front(ranking.trials, "tokens_per_s", "node_device_power_peak_1s_w")

    assert least_cpu_s(whole) < 2.0


def as_burst(pair: Pair) -> Pair:
    spec, result = pair
    return spec, replace(result, repeat=FIRST_BURST_REPEAT, tags={**result.tags, "fidelity": "burst"})


def test_a_burst_is_shown_apart_and_never_ranked_however_fast():
    ranking = rank([speed(1, 100.0), as_burst(speed(2, 900.0)), as_burst(speed(3, 950.0))], asked(FASTEST, POWER))
    assert numbers(ranking.feasible) == [1] and ranking.best.best_probability == 1.0
    assert numbers(ranking.burst) == [3, 2]
    assert ranking.burst[0].rank is None and ranking.burst[0].objective is None
    assert "950" in ranking.burst[0].reason and "not promoted" in ranking.burst[0].reason
    assert [row["trial_id"] for row in ranking.to_json()["burst"]] == [row.trial_id for row in ranking.burst]
    assert ranking_table(ranking)["verdict"].to_pylist() == ["feasible", "burst", "burst"]
    assert rank([as_burst(speed(2, 900.0))], asked(FASTEST), least_quality="indicative").trials == ()


def test_a_burst_changes_nothing_of_what_was_measured_in_full():
    full = [on_n0(speed(n, value), at_s=n) for n, value in ((1, 200.0), (2, 203.0), (3, 260.0))]
    alone = rank(full, asked(FASTEST, POWER))
    with_bursts = rank([*full, as_burst(speed(1, 90.0)), as_burst(speed(3, 900.0, power_w=9e3))], asked(FASTEST, POWER))
    for one, other in zip(alone.feasible, with_bursts.feasible, strict=True):
        assert (one.rank, one.best_probability, one.objective) == (other.rank, other.best_probability, other.objective)
    assert with_bursts.shared == alone.shared and with_bursts.burst == ()


def test_a_burst_that_failed_fails_its_trial():
    failed = as_burst(trial(1, status=RunStatus.OUT_OF_MEMORY, reason="rank 3 at 140.2 GiB"))
    assert numbers(rank([failed], asked(FASTEST)).failed) == [1]
