"""The breakdown of a step's time, on schedules drawn by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.analysis.metrics.step_time import decompose_metrics, divide
from wattune.analysis.signals.align import align
from wattune.plan.axes import Plan

STAGES = [("n0", "gpu0"), ("n0", "gpu1")]
PARTS = {"compute_frac", "exposed_comm_frac", "bubble_frac", "straggler_frac", "other_frac"}


def decompose(bench, rows, plan, num_micro_batches=1):
    spans = bench.spans([(STAGES[rank], rank, step, *rest) for rank, step, *rest in rows])
    return decompose_metrics(divide(spans, align({}, spans, {}).steps, plan, num_micro_batches=num_micro_batches))


def data_parallel(step=0, at_s=0.0, slow=0.5):
    """A step of 1 s: rank 0 computes for 0.4 s, rank 1 for `slow`; both reduce until 0.8 and optimize until 0.9 s."""
    rows = []
    for rank, forward_end, backward_end in ((0, 0.2, 0.4), (1, 0.2, slow)):
        rows += [
            (rank, step, "step", at_s, at_s + 1.0),
            (rank, step, "forward", at_s, at_s + forward_end),
            (rank, step, "backward", at_s + forward_end, at_s + backward_end),
            (rank, step, "wait", at_s + backward_end, at_s + 0.8),
            (rank, step, "optimizer", at_s + 0.8, at_s + 0.9),
        ]
    return rows


def test_data_parallel_waits_for_its_slower_rank_and_then_for_the_network(bench):
    metrics = decompose(bench, data_parallel(), Plan())
    assert metrics == pytest.approx(
        {
            "compute_frac": (0.5 + 0.6) / 2,
            "straggler_frac": 0.1 / 2,
            "exposed_comm_frac": 0.3,
            "bubble_frac": 0.0,
            "other_frac": 0.1,
        }
    )


def test_warm_up_steps_do_not_count(bench):
    rows = data_parallel(0) + data_parallel(-1, -5.0, slow=0.79)
    assert decompose(bench, rows, Plan()) == pytest.approx(decompose(bench, data_parallel(0), Plan()))


def test_a_pipeline_of_two_stages_has_its_schedules_bubble(bench):
    """Two micro-batches, forward and backward of 0.1 s each: each stage works 0.4 s of a 0.6 s step."""
    slots = {
        0: [("forward", 0), ("forward", 1), ("wait", 2), ("backward", 3), ("wait", 4), ("backward", 5)],
        1: [("wait", 0), ("forward", 1), ("backward", 2), ("forward", 3), ("backward", 4), ("wait", 5)],
    }
    rows = [(rank, 0, name, slot / 10, (slot + 1) / 10) for rank, parts in slots.items() for name, slot in parts]
    rows += [(rank, 0, "step", 0.0, 0.6) for rank in (0, 1)]
    metrics = decompose(bench, rows, Plan(pp=2), num_micro_batches=2)
    assert metrics["compute_frac"] == pytest.approx(2 / 3)
    assert metrics["bubble_frac"] == pytest.approx(1 / 3)
    assert metrics["exposed_comm_frac"] + metrics["straggler_frac"] + metrics["other_frac"] == pytest.approx(0.0)


def test_uneven_stages_are_a_straggler_beside_the_bubble(bench):
    """Stage 1 takes twice as long: forward and backward of 0.2 s against 0.1 s, one micro-batch."""
    rows = [
        *[(rank, 0, "step", 0.0, 0.6) for rank in (0, 1)],
        (0, 0, "forward", 0.0, 0.1),
        (0, 0, "wait", 0.1, 0.5),
        (0, 0, "backward", 0.5, 0.6),
        (1, 0, "wait", 0.0, 0.1),
        (1, 0, "forward", 0.1, 0.3),
        (1, 0, "backward", 0.3, 0.5),
        (1, 0, "wait", 0.5, 0.6),
    ]
    metrics = decompose(bench, rows, Plan(pp=2), num_micro_batches=4)
    assert metrics["bubble_frac"] == pytest.approx((0.1 + 0.1) / 1.2)
    assert metrics["straggler_frac"] == pytest.approx(0.2 / 1.2)
    assert sum(metrics.values()) == pytest.approx(1.0)


def test_a_wait_inside_a_phase_is_wait_and_overlapping_phases_count_once(bench):
    rows = [
        (0, 0, "step", 0.0, 1.0),
        (0, 0, "forward", 0.0, 0.6),
        (0, 0, "backward", 0.4, 0.9),
        (0, 0, "wait", 0.3, 0.5),
        (0, 0, "optimizer", 0.9, 1.2),
    ]
    metrics = decompose(bench, rows, Plan())
    assert metrics["compute_frac"] == pytest.approx(0.8)
    assert metrics["exposed_comm_frac"] == pytest.approx(0.2)
    assert metrics["other_frac"] == pytest.approx(0.0)


@pytest.mark.parametrize("plan", [Plan(tp=2), Plan(cp=2), Plan(ep=2), Plan(sharding="zero3")])
def test_plans_whose_communication_hides_inside_phases_are_not_decomposed(bench, plan):
    assert decompose(bench, data_parallel(), plan) == {}


def test_spans_of_steps_alone_or_without_waits_cannot_tell(bench):
    steps_only = [row for row in data_parallel() if row[2] == "step"]
    no_waits = [row for row in data_parallel() if row[2] != "wait"]
    one_rank_silent = [row for row in data_parallel() if row[0] == 0 or row[2] in ("step", "wait")]
    for rows in (steps_only, no_waits, one_rank_silent):
        assert decompose(bench, rows, Plan()) == {}


@given(
    st.lists(
        st.tuples(st.sampled_from(["forward", "backward", "optimizer", "wait"]), st.floats(0, 1), st.floats(0, 1)),
        max_size=20,
    ),
    st.integers(1, 4),
)
def test_the_parts_sum_to_one_whatever_the_spans(make_bench, spans, pp):
    rows = [(rank, 0, "step", 0.0, 1.0) for rank in (0, 1)]
    rows += [(rank, 0, "forward", 0.0, 0.1) for rank in (0, 1)] + [(0, 0, "wait", 0.1, 0.2)]
    rows += [(index % 2, 0, name, min(a, b), max(a, b)) for index, (name, a, b) in enumerate(spans)]
    metrics = decompose(make_bench(), rows, Plan(pp=pp), num_micro_batches=2)
    assert metrics.keys() in (PARTS, set())
    if metrics:
        assert sum(metrics.values()) == pytest.approx(1.0)
        assert min(metrics.values()) >= 0.0
