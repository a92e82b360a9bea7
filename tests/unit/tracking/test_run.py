"""A trial as an MLflow run and back."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tracked_trials import START_NS, result_of, spec_of

from wattune.errors import TrackingError
from wattune.run import RunStatus
from wattune.tracking.copies import Sent
from wattune.tracking.run import is_whole, mean_per_second, read_run, run_params, run_points, run_tags
from wattune.units import NS_PER_S

samples = st.lists(st.tuples(st.integers(0, 20 * NS_PER_S), st.floats(-1e6, 1e6)), max_size=50)


@given(samples)
def test_means_by_second_keep_order_range_and_total(pairs):
    times = np.array([t for t, _ in pairs], dtype=np.int64)
    values = np.array([v for _, v in pairs], dtype=np.float64)
    points = mean_per_second(times, values)
    seconds = [t // NS_PER_S for t, _ in points]
    assert seconds == sorted(set((times // NS_PER_S).tolist()))
    counts = [np.count_nonzero(times // NS_PER_S == second) for second in seconds]
    total = sum(mean * count for (_, mean), count in zip(points, counts, strict=True))
    assert total == pytest.approx(values.sum(), abs=1e-3)


@given(hnp.arrays(np.float32, st.integers(0, 5), elements=st.sampled_from([np.nan, np.inf, 2.0])))
def test_what_is_no_number_is_left_out_of_a_mean(values):
    points = mean_per_second(np.full(len(values), START_NS), values)
    assert points == ([(START_NS, 2.0)] if (values == 2.0).any() else [])


def run_of(spec, result, status="FINISHED", **tags):
    """A run as a client hands it out."""
    data = SimpleNamespace(tags=run_tags(spec, result) | tags)
    return SimpleNamespace(info=SimpleNamespace(run_id="r1", status=status, end_time=1), data=data)


@pytest.mark.parametrize("status", [RunStatus.COMPLETED, RunStatus.CRASHED])
def test_a_trial_comes_back_from_its_tags_as_it_was(status):
    spec, result = spec_of(), result_of(spec_of(), status, repeat=3)
    assert read_run(None, run_of(spec, result)) == (spec, result)


def test_a_trial_too_long_for_a_tag_comes_back_from_its_artifact(tmp_path):
    spec = spec_of(rank_order=tuple(range(3000)))
    result = result_of(spec)
    assert "wattune.spec" not in run_tags(spec, result) and "wattune.run" in run_tags(spec, result)
    (tmp_path / "spec.json").write_text(json.dumps(spec.to_json()))
    client = SimpleNamespace(download_artifacts=lambda run_id, name, folder: str(tmp_path / name))
    assert read_run(client, run_of(spec, result)) == (spec, result)


@pytest.mark.parametrize(
    ("tag", "value", "says"),
    [
        *(("run", text, "run r1 is damaged") for text in ("{}", "[]", '{"metrics": 1}', "no json")),
        ("format", "3", "^run r1: .*written before 0.1.0"),
        ("format", "5", "^run r1: .*written by a newer wattune"),
    ],
)
def test_a_damaged_run_and_one_of_another_format_are_a_line_that_says_which(tag, value, says):
    with pytest.raises(TrackingError, match=says):
        read_run(None, run_of(spec_of(), result_of(spec_of()), **{f"wattune.{tag}": value}))


@pytest.mark.parametrize(
    ("run_status", "status", "over"),
    [
        ("RUNNING", RunStatus.COMPLETED, False),
        ("FINISHED", RunStatus.COMPLETED, True),
        ("FAILED", RunStatus.CRASHED, True),
        ("KILLED", RunStatus.ABORTED, True),
        ("KILLED", RunStatus.INTERRUPTED, False),
    ],
)
def test_a_run_is_over_unless_it_was_cut_off_or_its_trial_runs_again(run_status, status, over):
    run = run_of(spec_of(), result_of(spec_of(), status), run_status)
    assert (is_whole(run) and Sent.of_run(run).final) is over


def test_parameters_are_flat_texts_and_tags_are_never_empty():
    spec = spec_of()
    params = run_params(spec)
    assert {"tp": "2", "layout": "3-1", "dp": "2", "world_size": "4", "seq_len": "4096"}.items() <= params.items()
    assert all(isinstance(text, str) for text in params.values())
    tags = run_tags(spec, result_of(spec))
    assert all(tags.values()) and tags["mlflow.source.git.commit"] == "0517fb8"
    assert "mlflow.source.git.commit" not in run_tags(spec, replace(result_of(spec), tags={}))


def test_curves_follow_the_metrics_with_a_step_a_second():
    result = result_of(spec_of())
    wall_ns = START_NS + np.array([0, NS_PER_S // 2, 3 * NS_PER_S])
    points = run_points(result, {"n0/w": (wall_ns, np.array([1.0, 3.0, 7.0]))})
    end_ms, start_ms = result.end_wall_ns // 10**6, START_NS // 10**6
    assert points[: len(result.metrics)] == [(name, value, end_ms, 0) for name, value in result.metrics.items()]
    assert points[len(result.metrics) :] == [("trace/n0/w", 2.0, start_ms, 0), ("trace/n0/w", 7.0, start_ms + 3000, 1)]
