"""Frontier and suggestions of a study's folder: what they find of a known truth, and what they refuse."""

import json
from dataclasses import replace

import pytest
from decided_study import POWER, best_below, measured, truth, write_study
from specs import store_run

from wattune import api
from wattune.api.beforehand import Beforehand
from wattune.api.decisions import measured as known_of
from wattune.api.decisions import over_all_plans, parse_budget
from wattune.api.reports import report
from wattune.api.spaces import plan_again
from wattune.errors import PlanError
from wattune.fidelity import BURST, FIDELITY, FIRST_BURST_REPEAT
from wattune.ranking.answer import answer_of
from wattune.run import RunStatus
from wattune.storage.known_results import ESTIMATES, FEATURES, FITS, PLAN
from wattune.trial import TrialSpec
from wattune.units import format_probability
from wattune.view.answer import answer_lines


def half(spec: TrialSpec) -> bool:
    return spec.plan.micro_batch_size in (1, 8) or spec.plan.recompute == "full"


def test_a_frontier_finds_the_measured_best_and_predicts_the_ones_left_out(tmp_path) -> None:
    """Left out are micro-batches of 2 and 4 without recomputation, one of which is the best at some bounds."""
    study = write_study(tmp_path, half)
    found = api.frontier(study, vary=f"{POWER} <= 900..1300 step 50")
    assert found.has_predictions and found.num_unmeasured == 4 and found.simulated
    for point in found.points:
        best = best_below(point.bound.factor, tmp_path)
        if half(best) and abs(truth(best)[POWER] / point.bound.factor - 1) > 0.03:
            assert point.best is not None and point.best.spec == best
        if point.predicted is not None:
            assert not half(point.predicted.spec)
            assert point.predicted.value == pytest.approx(truth(point.predicted.spec)["tokens_per_s"], rel=0.25)
    reached = [point.predicted.spec for point in found.points if point.predicted]
    assert best_below(1200, tmp_path) in reached, "the truly best plan at 1,200 W was not measured"


def test_a_frontier_says_which_trials_it_could_not_read(tmp_path) -> None:
    study = write_study(tmp_path, half)
    damaged = study.trials()[0].path
    (damaged / "run.json").write_text("{")
    found = api.frontier(study)
    assert [one for one in found.warnings if damaged.name in one] and found.warnings[0].startswith("left out: ")


def test_without_a_range_the_study_s_bound_on_power_is_varied(tmp_path) -> None:
    found = api.frontier(write_study(tmp_path, half))
    assert found.varied.bound.metric == POWER and 1000.0 in found.varied.values


@pytest.mark.parametrize("vary", [None, f"{POWER} <= 900..1300 step 50"])
def test_a_varied_bound_is_on_true_watts_where_the_one_it_stands_for_is(tmp_path, vary) -> None:
    study = write_study(tmp_path, half, constraints=[f"{POWER} <= 1000 sensor_gain_frac=0.05"])
    found = api.frontier(study, vary=vary)
    assert found.varied.bound.sensor_gain_frac == found.varied.at(1000.0).sensor_gain_frac == 0.05
    assert api.frontier(write_study(tmp_path / "readings", half), vary=vary).varied.bound.sensor_gain_frac == 0.0


def test_a_study_that_is_measured_whole_predicts_nothing(tmp_path) -> None:
    found = api.frontier(write_study(tmp_path, lambda _: True))
    assert found.num_unmeasured == 0 and all(point.predicted is None for point in found.points)


def test_suggestions_of_a_random_study_find_what_is_left_and_its_time(tmp_path) -> None:
    study = write_study(tmp_path, half, constraints=[f"{POWER} <= 1200"])
    found = api.suggest(study, budget="70s")
    new = [one for one in found.listed if one.kind == "new"]
    assert best_below(1200, tmp_path) in [one.spec for one in new]
    assert found.budget_s == 70 and found.expected_s <= 70 and all(one.expected_s == 20 for one in found.listed)


def test_a_study_without_a_bound_names_how_to_give_one(tmp_path) -> None:
    study = write_study(tmp_path, half, constraints=[])
    with pytest.raises(PlanError, match="has no bound; name one, such as --vary"):
        api.frontier(study)
    assert api.frontier(study, vary=f"{POWER} <= 900..1300 step 100").others == ()


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), ("1h30m", 5400), ("2 min 5 s", 125), (45.0, 45)]
)
def test_a_budget_is_a_time(text, seconds) -> None:
    assert parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "10", "-5m", "0s", "10x", "m", "9" * 50 + "s", 0, -1.0, float("nan")])
def test_a_budget_that_is_none_is_refused(text) -> None:
    with pytest.raises(PlanError, match="allowed: a time such as 90s, 10m or 1h30m"):
        parse_budget(text)


def test_trials_that_are_no_candidates_any_more_still_count(tmp_path) -> None:
    study = write_study(tmp_path, half)
    digest, written = (study.path / "study.yaml").read_text().split("\n", 1)  # a space without one is taken as it is
    assert digest.startswith("#")
    (study.path / "study.yaml").write_text(written.replace("vocab_size: 512", "vocab_size: 1024"))
    found = api.suggest(study, budget="10m")
    assert found.best is not None and found.gain_frac is not None and found.num_left == 16


def test_of_many_trials_the_surrogates_learn_from_the_best_and_from_some_of_all(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("wattune.search.strategies.protocol.MOST_TAUGHT", 6)
    told: list[TrialSpec] = []
    monkeypatch.setattr("wattune.api.decisions.ModelGuided.tell", lambda _self, spec, _result: told.append(spec))
    study = write_study(tmp_path, lambda _: True, constraints=[f"{POWER} <= 1000"])
    monkeypatch.setattr("wattune.api.decisions.suggest_for", lambda *_, **__: None)
    api.suggest(study, budget="1m")
    chosen = set(told)
    assert len(chosen) == 6 and len(told) == 12, "each with both repeats"
    assert best_below(1000, tmp_path) in chosen
    speeds = sorted(truth(spec)["tokens_per_s"] for spec in chosen)
    assert speeds[0] < 600 and speeds[-1] > 1400, "slow ones and infeasible ones too"


def test_failures_are_not_among_the_best_that_surrogates_learn_from(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("wattune.search.strategies.protocol.MOST_TAUGHT", 6)
    monkeypatch.setattr("wattune.api.decisions.suggest_for", lambda *_, **__: None)
    told: list[TrialSpec] = []
    monkeypatch.setattr("wattune.api.decisions.ModelGuided.tell", lambda _self, spec, _result: told.append(spec))
    study = write_study(tmp_path, half, constraints=[])
    for spec in api.plan(study.document()).candidates.specs:
        if not half(spec):
            store_run(study, spec, replace(measured(spec), status=RunStatus.CRASHED, metrics={}))
    api.suggest(study, budget="1m")
    measured_best = sorted(filter(half, set(told)), key=lambda spec: -truth(spec)["tokens_per_s"])[:3]
    every = filter(half, api.plan(study.document()).candidates.specs)
    best = sorted(every, key=lambda spec: -truth(spec)["tokens_per_s"])[:3]
    assert [truth(spec) for spec in measured_best] == [truth(spec) for spec in best]


def test_a_plan_of_which_only_a_burst_was_measured_is_predicted_and_suggested(tmp_path) -> None:
    """At a looser bound it may be the best one, and a burst is ranked nowhere."""
    study = write_study(tmp_path, half, constraints=[f"{POWER} <= 1200"])
    best = best_below(1200, tmp_path)
    assert not half(best)
    burst = measured(best, FIRST_BURST_REPEAT)
    store_run(study, best, replace(burst, tags={**burst.tags, FIDELITY: BURST}))
    found = api.frontier(study, vary=f"{POWER} <= 1200..1200 step 1")
    assert found.num_unmeasured == 4 and found.points[0].predicted is not None
    assert found.points[0].predicted.spec == best
    listed = api.suggest(study, budget="70s")
    (promoted,) = [one for one in listed.listed if one.spec == best]
    assert listed.num_left == 4 and promoted.kind == "new" and listed.best is not None
    ahead_frac = truth(best)["tokens_per_s"] / truth(listed.best.spec)["tokens_per_s"] - 1
    assert ahead_frac > 0.04 and promoted.gain_frac == pytest.approx(ahead_frac, rel=0.3), (
        "over the best that is ranked"
    )


def test_a_measured_trial_that_no_surrogate_learned_from_is_not_suggested_as_new(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("wattune.search.strategies.protocol.MOST_TAUGHT", 4)
    study = write_study(tmp_path, half, constraints=[f"{POWER} <= 1200"])
    new = [one.spec for one in api.suggest(study, budget="10h").listed if one.kind == "new"]
    assert new and not any(half(spec) for spec in new)


@pytest.mark.parametrize("scaled", [{}, {"scale_to": "1x8", "allow_percent": 20}])
def test_plans_and_fits_that_are_kept_change_no_answer(tmp_path, monkeypatch, scaled) -> None:
    large = {"model": {"name": "llama3_8b", **scaled}, "cluster": "8x8 h100_sxm", "constraints": []}
    workload = {"seq_len": 4096, "global_batch_size": 256}
    study = write_study(tmp_path, lambda spec: spec.plan.micro_batch_size in (1, 8), **large, workload=workload)
    kept = [study.path / name for name in (PLAN, FITS, ESTIMATES, FEATURES)]

    def answers() -> str:
        asked = api.suggest(study, budget="10h"), api.frontier(study, vary=f"{POWER} <= 900..1300 step 50")
        return json.dumps([one.to_json() for one in asked])

    without = answers()
    assert [path.exists() for path in kept] == [False, True, False, False], "few trials are not kept"
    monkeypatch.setattr("wattune.api.spaces.LEAST_KEPT", 1)
    monkeypatch.setattr("wattune.storage.known_results.LEAST_KEPT", 1)
    assert without == answers()
    times = [path.stat().st_mtime_ns for path in kept]
    assert without == answers() and times == [path.stat().st_mtime_ns for path in kept], "nothing was written again"
    for path in kept:
        path.write_bytes(path.read_bytes()[:-1])
    assert without == answers()
    with monkeypatch.context() as patched:
        for made in ("wattune.api.beforehand.estimate", "wattune.search.strategies.features.make_features"):
            patched.setattr(made, None)
        assert scaled or without == answers(), "neither is computed again"
    specs = plan_again(study.document(), study.path).candidates.specs
    assert [spec.to_json() for spec in specs] == [
        spec.to_json() for spec in api.plan(study.document()).candidates.specs
    ]


def test_one_more_result_of_many_fits_no_surrogate_again(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("wattune.search.strategies.protocol.MOST_TAUGHT", 6)
    monkeypatch.setattr("wattune.api.decisions.MOST_TAUGHT", 6)
    monkeypatch.setattr("wattune.search.strategies.surrogate._REFIT_AT", 3.0)  # as of 500 trials and 50 more
    study = write_study(tmp_path, half)
    api.suggest(study, budget="10m")
    fits = (study.path / FITS).read_bytes()
    run_one(study)
    found = api.suggest(study, budget="10m")
    assert found.num_left == 3 and (study.path / FITS).read_bytes() == fits
    monkeypatch.setattr("wattune.api.decisions.CHOSEN_EVERY", 1)
    api.suggest(study, budget="10m")
    assert (study.path / FITS).read_bytes() != fits, "chosen anew"


def test_a_suggestion_of_a_scaled_study_names_the_small_run(tmp_path) -> None:
    large = {"model": {"name": "llama3_8b", "scale_to": "1x8", "allow_percent": 20}, "cluster": "8x8 h100_sxm"}
    large |= {"workload": {"seq_len": 4096, "global_batch_size": 256}, "constraints": []}
    study = write_study(tmp_path, lambda spec: spec.plan.micro_batch_size == 1, **large)
    found = api.suggest(study, budget="10h")
    small = {one.trial_id for one in api.plan(study.document()).candidates.specs}
    assert found.listed and {one.spec.trial_id for one in found.listed} <= small


def run_one(study) -> None:
    """Runs one more plan of it."""
    spec = next(one for one in api.plan(study.document()).candidates.specs if not half(one))
    store_run(study, spec, measured(spec))


def with_space(storage, ran, **changed):
    """A study that knows how many plans its space has."""
    study = write_study(storage, ran, **changed)
    study.commit(study.document(), api.plan(study.document()).candidates.rows())
    return study


def over_all(storage, ran, **changed) -> float | None:
    """Returns how likely a plan that was not measured is better."""
    study = with_space(storage, ran, **changed)
    return over_all_plans(api.rank(study), *known_of(study)).better_probability


def test_p_best_is_of_all_plans_the_ones_that_were_not_measured_too(tmp_path) -> None:
    study = with_space(tmp_path, half)
    assert api.rank(study).better_probability is None, "no ranking was written"
    report(study)
    ranking = api.rank(study)
    found, likely = answer_of(ranking), ranking.better_probability
    assert likely is not None and likely == api.suggest(study, budget="1h").better_probability
    assert found.plan is not None and found.plan.best_probability is not None
    assert found.best_probability == pytest.approx((1 - likely) * found.plan.best_probability)
    first, left, *_ = answer_lines(ranking)
    assert f"P(best) {format_probability(found.best_probability or 0)} of all 16 plans" in first
    assert f"one of them is better with probability {format_probability(likely)}" in left
    assert api.rank(study, constraints=[f"{POWER} <= 1100"]).better_probability is None, "another question"
    assert api.rank(study, where=["micro_batch_size <= 4"]).better_probability is None
    run_one(study)
    assert api.rank(study).better_probability is None, "one more result"
    report(study)
    assert api.rank(study).better_probability is not None
    _, run = study.results()[0]
    last_ns = max(one.end_wall_ns for _, one in study.results())
    study.trial(run.trial_id, run.repeat).write_result(replace(run, end_wall_ns=last_ns + 1))
    assert api.rank(study).better_probability is None, "as many results, of which one is another"


def test_the_best_plan_left_out_is_likely_among_those_not_measured(tmp_path) -> None:
    write_study(tmp_path, half)
    best, below = best_below(1030, tmp_path), {"constraints": [f"{POWER} <= 1030"]}
    without = over_all(tmp_path / "a", lambda spec: spec != best, **below)
    with_it = over_all(tmp_path / "b", lambda spec: spec == best or half(spec), **below)
    assert without is not None and with_it is not None and without > 0.5 > with_it


def test_p_best_is_of_measured_plans_where_nothing_predicts_the_others(tmp_path) -> None:
    assert over_all(tmp_path / "b", lambda _: True) is None
    assert over_all(tmp_path / "c", half, constraints=[f"{POWER} <= 300"]) is None


def test_what_was_measured_is_ranked_though_the_other_studies_cannot_be_read(tmp_path, monkeypatch) -> None:
    study = with_space(tmp_path, half)
    ranking, known = api.rank(study), known_of(study)

    def refused(_: Beforehand) -> None:
        raise PlanError("another study is damaged")

    monkeypatch.setattr(Beforehand, "warm", refused)
    assert over_all_plans(ranking, *known) == ranking
