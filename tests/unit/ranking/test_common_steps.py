"""Comparison over the steps that all trials measured, where windows matter."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from made_trials import FASTEST, Pair, asked, trial
from small_study import make_study, ranking_of

from wattune.analysis.figures import figures_over
from wattune.analysis.run_data import RunData
from wattune.catalog.models import model
from wattune.objective import parse_constraint
from wattune.ranking.common_steps import COMPARED, STEPS_DIFFER, Range, of_folder, over_common_steps, window_matters
from wattune.ranking.order import rank
from wattune.ranking.sources import Source
from wattune.run import NO_NUMBERS, Numbers, Run, RunStatus
from wattune.storage.study import StudyFolder
from wattune.trial import TrialSpec
from wattune.workload import UNKNOWN_WORKLOAD, Routing

METRICS = {"tokens_per_s": 100.0, "energy_per_token_j": 0.5, "node_device_power_peak_1s_w": 900.0}


def mixture(pair: Pair, by: str | None) -> Pair:
    spec, result = pair
    routing = None if by is None else Routing(by=by)
    spec = replace(spec, model=model("mixtral_8x7b"), workload=replace(spec.workload, routing=routing))
    return spec, replace(result, trial_id=spec.trial_id)


def of_steps(steps: str) -> Numbers:
    first, _, last = steps.partition("-")
    return Numbers(first_step=int(first), last_step=int(last)) if steps else NO_NUMBERS


def measured(number: int, steps: str, reasons: tuple[str, ...] = (), by: str | None = "learned") -> Pair:
    spec, result = mixture(trial(number, METRICS), by)
    return spec, replace(result, quality_reasons=reasons, numbers=of_steps(steps))


def again(_spec: TrialSpec, _result: Run, steps: Range) -> Mapping[str, float]:
    """A trial that is faster the more of the late steps it has."""
    return {"tokens_per_s": 100.0 + steps[1], "energy_per_token_j": 0.4}


def of(pairs: list[Pair]) -> list[Run]:
    return [result for _, result in over_common_steps(pairs, again)]


@pytest.mark.parametrize(
    ("by", "reasons", "matters"),
    [
        ("learned", (), True),
        (None, (), True),
        ("balanced", (), False),
        ("skew", (), False),
        ("balanced", ("unsteady_steps",), True),
        ("balanced", ("no_steady_state", "gap"), True),
        ("balanced", ("few_steps",), False),
    ],
)
def test_a_window_matters_where_the_router_chooses_or_steps_have_a_trend(
    by: str | None, reasons: tuple[str, ...], matters: bool
) -> None:
    assert window_matters(*measured(1, "5-40", reasons, by)) == matters


def test_a_dense_model_without_a_trend_has_comparable_windows_of_any_length() -> None:
    pairs = [
        (spec, replace(result, numbers=of_steps(steps)))
        for steps, (spec, result) in (("5-40", trial(1, METRICS)), ("20-400", trial(2, METRICS)))
    ]
    assert over_common_steps(pairs, again) is pairs


def test_speed_and_energy_are_of_the_steps_that_all_measured_and_bounds_of_the_whole_window() -> None:
    found = of([measured(1, "5-40"), measured(2, "12-90"), measured(4, "12-40")])
    assert [one.tags.get(COMPARED) for one in found] == ["12-40", "12-40", None], "the last measured just these"
    assert [one.metrics["tokens_per_s"] for one in found] == [140.0, 140.0, 100.0]
    assert found[0].metrics == {**METRICS, "tokens_per_s": 140.0, "energy_per_token_j": 0.4}
    assert found[0].numbers.steps == (5, 40) and found[0].quality_reasons == ()


def test_of_balanced_trials_only_the_one_with_a_trend_changes() -> None:
    found = of([measured(1, "5-40", ("unsteady_steps",), "balanced"), measured(2, "12-90", by="balanced")])
    assert [one.metrics["tokens_per_s"] for one in found] == [140.0, 100.0]


def test_a_trial_that_shares_too_few_steps_is_marked_and_does_not_spoil_the_others() -> None:
    found = of([measured(1, "5-40"), measured(2, "12-45"), measured(4, "38-90")])
    assert [one.tags.get(COMPARED) for one in found] == ["12-40", "12-40", None]
    assert found[2].quality_reasons == (STEPS_DIFFER,) and found[2].quality == "indicative"
    alone = of([measured(1, "5-20"), measured(2, "18-90")])
    assert [one.quality_reasons for one in alone] == [(STEPS_DIFFER,)] * 2


def test_without_files_trials_are_marked_and_the_ranking_says_so() -> None:
    pairs = [measured(1, "5-40"), measured(2, "12-90"), measured(4, "")]
    marked = over_common_steps(pairs)
    assert [result.quality_reasons for _, result in marked] == [(STEPS_DIFFER,), (STEPS_DIFFER,), ()]
    ranking = rank(marked, asked(FASTEST, parse_constraint("node_device_power_peak_1s_w <= 2000")))
    assert any("2 runs are not compared over the same steps" in text for text in ranking.warnings)
    ranking = rank(over_common_steps(pairs, again), asked(FASTEST))
    assert any("speed and energy of 2 runs are over steps 12-40 of the data" in text for text in ranking.warnings)
    failed = [(spec, replace(result, status=RunStatus.CRASHED)) for spec, result in pairs[:1]]
    assert over_common_steps([*failed, pairs[1]]) == [*failed, pairs[1]]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> StudyFolder:
    return make_study(tmp_path_factory.mktemp("storage"))


def test_a_recorded_trial_with_a_trend_is_computed_again_from_its_folder(study: StudyFolder) -> None:
    """The shorter trial bounds the steps; the longer one has a trend."""
    ranking = ranking_of(study)
    rows = [ranking.feasible[0], ranking.infeasible[0]]
    ranges = {row.trial_id: row.counted[0].numbers.steps for row in rows}
    first, ends = max(one[0] for one in ranges.values()), {trial_id: one[1] for trial_id, one in ranges.items()}
    longer = max(ends, key=lambda trial_id: ends[trial_id])
    last = min(ends.values()) - 5
    pairs = []
    for spec, result in study.results():
        numbers, reasons = result.numbers, result.quality_reasons
        if result.trial_id == longer:
            reasons = (*reasons, "unsteady_steps")
        elif numbers.steps is not None:
            numbers = replace(numbers, first_step=first, last_step=last)
        pairs.append((spec, replace(result, numbers=numbers, quality_reasons=reasons)))
    before = {result.trial_id: result for _, result in pairs}
    after = {result.trial_id: result for _, result in of_folder(study, pairs)}
    assert after[longer].tags[COMPARED] == f"{first}-{last}"
    whole = figures_over(RunData.of(study.trial(longer, 0).path), *ranges[longer])
    for name, value in whole.items():
        assert value == pytest.approx(before[longer].metrics[name], rel=1e-9), "over all its steps it is as before"
    changed = {name for name in whole if after[longer].metrics[name] != before[longer].metrics[name]}
    assert {"tokens_per_s", "step_time_s", "energy_per_token_j", "step_time_uncertainty_frac"} <= changed
    assert after[longer].metrics["tokens_per_s"] == pytest.approx(before[longer].metrics["tokens_per_s"], rel=0.03)
    peak = "node_device_power_peak_1s_w"
    assert after[longer].metrics[peak] == before[longer].metrics[peak]
    assert all(after[one] is before[one] for one in after if one != longer)


def test_tokens_that_a_program_told_count_over_common_steps_too(study: StudyFolder) -> None:
    """Nobody described the data of a command: its program told the tokens of a step."""
    pairs = {result.trial_id: (spec, result) for spec, result in study.results() if result.numbers.steps is not None}
    (_, fixed), (spec, trending) = pairs.values()
    first, last = fixed.numbers.steps[0], fixed.numbers.steps[1] - 5
    tokens = spec.tokens_per_step
    spec = replace(spec, workload=UNKNOWN_WORKLOAD)
    assert tokens is not None and spec.tokens_per_step is None
    fixed = replace(fixed, numbers=replace(fixed.numbers, first_step=first, last_step=last))
    trending = replace(
        trending,
        numbers=replace(trending.numbers, told_tokens_per_step=float(tokens)),
        quality_reasons=(*trending.quality_reasons, "unsteady_steps"),
    )
    found = dict(zip(pairs, (result for _, result in of_folder(study, [(spec, fixed), (spec, trending)])), strict=True))
    again = found[trending.trial_id]
    assert COMPARED in again.tags and again.metrics.keys() >= {"tokens_per_s", "tokens_per_s_per_device"}
    for name in ("tokens_per_s", "energy_per_token_j", "tokens_per_j"):
        assert again.metrics[name] == pytest.approx(trending.metrics[name], rel=0.05)


def test_a_study_is_read_with_common_steps(study: StudyFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("wattune.ranking.sources.of_folder", lambda own, results: seen.append(own.name) or results)
    assert len(Source.of_folder(study).results) == 3 and seen == [study.name]
