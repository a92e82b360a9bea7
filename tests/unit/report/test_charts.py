"""Charts of a study: parts of steps, waterfalls, temperatures."""

from dataclasses import replace

import numpy as np
import pytest
from made_report import comparison_of, evidence_of, figure_of, ranked, trial, values, whole

from wattune.catalog.models import model
from wattune.report.charts import slot_temperatures, step_parts, waterfall
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
    data, _ = figure_of(step_parts(both, {row.trial_id: evidence_of(row) for row in both.trials}))
    assert len(set(data[0]["y"])) == 2


def test_the_waterfall_starts_at_a_and_ends_at_b():
    ranking, _, evidence = whole()
    data, _ = figure_of(waterfall(comparison_of(ranking, evidence)))
    time, energy = data
    heights = values(time["y"])
    assert (heights[0], heights[-1]) == pytest.approx((500.0, 600.0))
    assert sum(heights[1:-1]) == pytest.approx(heights[-1] - heights[0])
    assert values(energy["y"])[0] == pytest.approx(1300.0)
