"""Charts of a study: parts of steps, waterfalls, temperatures."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_report import comparison_of, evidence_of, figure_of, ranked, trial, values, whole

from wattune.analysis.metrics.waterfall import Breakdown
from wattune.catalog.models import model
from wattune.report.charts import row_labels, slot_temperatures, step_parts, waterfall
from wattune.report.traces import power


def test_plotly_draws_text_from_users_as_text():
    ranking, _, evidence = whole(text="<b>&")
    data, _ = figure_of(slot_temperatures(ranking, evidence))
    assert data[0]["y"] == ["&lt;b&gt;&amp; slot 0", "&lt;b&gt;&amp; slot 1"]
    _, layout = figure_of(power(ranking, [*ranking.feasible], evidence, {}))
    assert "<b>" not in str(layout["annotations"])


def test_the_parts_of_a_step_add_up_and_trials_of_one_plan_stay_apart():
    ranking, _, evidence = whole()
    data, _ = figure_of(step_parts(ranking, evidence))
    sums_ms = np.sum([values(trace["x"]) for trace in data], axis=0)
    assert sums_ms == pytest.approx([500.0, 600.0])
    assert len({pattern for trace in data if (pattern := trace["marker"]["pattern"]["shape"])}) == 3
    # The same plan on another model is another bar, not one on top.
    spec, result = trial(1, 1.0)
    other = replace(spec, model=model("mixtral_8x7b"))
    both = ranked([(spec, result), (other, replace(result, trial_id=other.trial_id))], "")
    data, _ = figure_of(step_parts(both, {row.trial_id: evidence_of() for row in both.trials}))
    assert len(set(data[0]["y"])) == 2


def test_the_waterfall_starts_at_a_and_ends_at_b():
    ranking, _, evidence = whole()
    data, _ = figure_of(waterfall(comparison_of(ranking, evidence)))
    time, energy = data
    heights = values(time["y"])
    assert (heights[0], heights[-1]) == pytest.approx((500.0, 600.0))
    assert sum(heights[1:-1]) == pytest.approx(heights[-1] - heights[0])
    assert values(energy["y"])[0] == pytest.approx(1300.0)


@given(
    st.lists(
        st.tuples(st.integers(1, 2), st.sampled_from(["llama3_8b", "mixtral_8x7b"]), st.sampled_from([2048, 4096])),
        max_size=6,
        unique=True,
    )
)
def test_no_two_trials_have_one_label(kinds):
    pairs = []
    for number, name, seq_len in kinds:
        spec, result = trial(number, 1000.0)
        spec = replace(spec, model=model(name), workload=replace(spec.workload, seq_len=seq_len))
        pairs.append((spec, replace(result, trial_id=spec.trial_id)))
    labels = row_labels(ranked(pairs, "").trials)
    assert len(set(labels)) == len(kinds)
    several = len({name for _, name, _ in kinds}) > 1
    assert all(("llama3_8b" in label or "mixtral_8x7b" in label) is several for label in labels)


def test_a_place_without_a_temperature_is_an_empty_cell():
    ranking, _, evidence = whole()
    first, second = ranking.feasible[0].trial_id, ranking.infeasible[0].trial_id
    half = {**evidence, second: replace(evidence[second], slots=evidence[second].slots.slice(0, 1))}
    data, _ = figure_of(slot_temperatures(ranking, half))
    assert data[0]["z"] == [[74.5, 74.5], [69.5, None]]
    assert data[0]["text"] == [["74.5", "74.5"], ["69.5", ""]]
    none = {first: replace(evidence[first], slots=evidence[first].slots.slice(0, 0))}
    assert slot_temperatures(ranking, none) is None and slot_temperatures(ranking, {}) is None


def test_shares_of_a_change_are_said_only_where_parts_do_not_cancel():
    ranking, _, evidence = whole()
    said = waterfall(comparison_of(ranking, evidence)).caption
    assert "Of the change in time: exposed comm +100 %." in said and "they add up exactly" in said
    ids = [ranking.feasible[0].trial_id, ranking.infeasible[0].trial_id]
    parts = ({"compute": 0.20, "straggler": 0.02}, {"compute": 0.18, "straggler": 0.041})
    broken = {
        trial_id: replace(
            evidence[trial_id],
            breakdown=Breakdown(
                parts={name: (time_s, None) for name, time_s in own.items()},
                step_s=sum(own.values()),
                step_energy_j=None,
            ),
        )
        for trial_id, own in zip(ids, parts, strict=True)
    }
    chart = waterfall(comparison_of(ranking, broken))
    assert "In time the parts' changes cancel out" in chart.caption
    (time,) = figure_of(chart)[0]
    assert values(time["y"]) == pytest.approx([220.0, -20.0, 21.0, 0.0, 221.0])
    blind = {trial_id: replace(one, breakdown=None) for trial_id, one in evidence.items()}
    assert waterfall(comparison_of(ranking, blind)) is None and step_parts(ranking, blind) is None
