"""A replayed pipeline against closed forms, and its shortcut for many micro-batches against the whole replay."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from wattune.cost.step_time import pipeline
from wattune.cost.step_time.pipeline import bubble_ratio, pipeline_s


def equal(num_stages, num_chunks, forward_s=1.0, backward_s=2.0, rows=1):
    shape = (rows, num_chunks, num_stages)
    return np.full(shape, forward_s), np.full(shape, backward_s)


@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 12))
@settings(deadline=None)
def test_equal_stages_take_the_closed_form(num_stages, num_chunks, rounds):
    num_chunks = 1 if num_stages == 1 else num_chunks
    count = np.array([rounds * num_stages])
    busy_s = count * num_chunks * 3.0
    found = pipeline_s(*equal(num_stages, num_chunks), count, trains=True)
    assert found == pytest.approx(busy_s * (1 + bubble_ratio(num_stages, num_chunks, count)))


@given(st.integers(2, 4), st.integers(1, 2), st.integers(5, 8), st.integers(0, 2**31))
@example(4, 2, 7, 379)  # the furthest known: 1.51 %; the furthest of 1,800 others is 1.29 %
@settings(deadline=None, max_examples=30)
def test_the_steady_state_goes_on_as_it_begins(num_stages, num_chunks, rounds, seed):
    forward_s, backward_s = np.random.default_rng(seed).uniform(0.5, 1.5, (2, 3, num_chunks, num_stages))
    count = np.full(3, rounds * num_stages)
    short = pipeline_s(forward_s, backward_s, count, trains=True)
    whole = pipeline.replay_s(forward_s, backward_s, rounds * num_stages, trains=True)
    assert short == pytest.approx(whole, rel=0.016)


def test_the_slowest_stage_sets_the_pace():
    forward_s, backward_s = equal(4, 1)
    forward_s[0, 0, 2] = 3.0
    few, many = (pipeline_s(forward_s, backward_s, np.array([count]), trains=True)[0] for count in (100, 200))
    assert many - few == pytest.approx(100 * 5.0)


def test_prompts_run_forward_only():
    forward_s, backward_s = equal(4, 1)
    assert pipeline_s(forward_s, backward_s, np.array([8]), trains=False)[0] == pytest.approx(8 + 3)
