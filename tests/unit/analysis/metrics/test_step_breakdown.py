"""The breakdown of a step's time, on schedules drawn by hand."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.analysis.metrics.step_breakdown import Division, PhaseSpans, decompose_metrics, divide, host_bound_frac
from wattune.analysis.signals.align import align
from wattune.plans.axes import Plan

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


def pipeline_rows(slots, step_s, unit_s=0.1, at_s=0.0, ranks=None):
    """Spans of a step from passes such as `F0 0-1`, in units; `F0+` is the second chunk. Between them a stage waits."""
    rows = []
    for rank, line in zip(ranks or range(len(slots)), slots, strict=True):
        rows.append((rank, 0, "step", at_s, at_s + step_s))
        now = 0.0
        for name, bounds in pairs(line):
            begin, end = (float(each) * unit_s for each in bounds.split("-"))
            if begin > now:
                rows.append((rank, 0, "wait", at_s + now, at_s + begin))
            rows.append((rank, 0, {"F": "forward", "B": "backward"}[name[0]], at_s + begin, at_s + end))
            now = end
        if now < step_s:
            rows.append((rank, 0, "wait", at_s + now, at_s + step_s))
    return rows


def pairs(line):
    words = line.split()
    return list(zip(words[::2], words[1::2], strict=True))


# A pass of stage 0 takes 1, of stage 1 it takes 2 units.
UNEQUAL = [
    "F0 0-1 F1 1-2 B0 5-6 F2 6-7 B1 9-10 F3 10-11 B2 13-14 B3 17-18",
    "F0 1-3 B0 3-5 F1 5-7 B1 7-9 F2 9-11 B2 11-13 F3 13-15 B3 15-17",
]
UNEQUAL_INTERLEAVED = [
    "F0 0-1 F1 1-2 F0+ 3-4 F1+ 5-6 B0+ 9-10 B1+ 13-14 B0 15-16 B1 17-18",
    "F0 1-3 F1 3-5 F0+ 5-7 B0+ 7-9 F1+ 9-11 B1+ 11-13 B0 13-15 B1 15-17",
]


@pytest.mark.parametrize(
    ("slots", "vpp", "num_micro_batches", "equal"),
    # Equal stages take 1.5 units a pass: 3 units for each of m micro-batches, and once more for the bubble.
    [(UNEQUAL, 1, 4, (4 + 1) * 3), (UNEQUAL_INTERLEAVED, 2, 2, (4 + 1) * 3)],
    ids=["1f1b", "interleaved"],
)
def test_unequal_stages_idle_for_the_bubble_and_for_their_inequality(bench, slots, vpp, num_micro_batches, equal):
    """Both end after 18 units. Stages compute 8 and 16 units, so they idle 12; equal stages would idle 6."""
    assert 2 * equal - 24 == 6
    plan = Plan(pp=2, vpp=vpp)
    metrics = decompose(bench, pipeline_rows(slots, 1.8), plan, num_micro_batches)
    expected = {
        "compute_frac": 24 / 36,
        "exposed_comm_frac": 0.0,
        "bubble_frac": 6 / 36,
        "straggler_frac": 6 / 36,
        "other_frac": 0.0,
    }
    assert metrics == pytest.approx(expected, abs=1e-9)
    # Whatever is waited beyond the replay is communication: half a unit by each rank at the end.
    metrics = decompose(bench, pipeline_rows(slots, 1.85), plan, num_micro_batches)
    assert metrics["exposed_comm_frac"] == pytest.approx(1 / 37)
    assert [metrics["bubble_frac"], metrics["straggler_frac"]] == pytest.approx([6 / 37, 6 / 37])


@pytest.mark.parametrize(
    "slots",
    [
        ["F0 0-1 F1 1-2 B0 6-7 F2 7-8 B1 10-11 B2 14-15", "F0 1-3 B0 3-5 F1 5.5-7.5 B1 7.5-9.5 F2 10-12 B2 12-14"],
        ["F0 0-2 F1 2-4 B0 4.5-6.5 F2 6.5-8.5 B1 9-11 B2 11.5-13.5", "F0 3-4 B0 4-5 F1 6-7 B1 7-8 F2 9-10 B2 10-11"],
    ],
    ids=["last", "first"],
)
def test_an_exchange_is_what_the_slowest_stage_waits_between_passes(bench, slots):
    spans = bench.spans([(STAGES[rank], rank, *rest) for rank, *rest in pipeline_rows(slots, 1.5)])
    assert PhaseSpans.of(spans, align({}, spans, {}).steps).exchange_s() == pytest.approx(0.05)


def test_what_lies_between_the_last_pass_and_the_optimizer_is_each_rank_s(bench):
    rows = pipeline_rows(["F0 0-1 B0 5-6", "F0 1-2 B0 2-4"], 0.8)
    rows += [(rank, 0, "optimizer", 0.65, 0.65 + 0.05 * (1 + rank)) for rank in range(2)]
    spans = bench.spans([(STAGES[rank], rank, *rest) for rank, *rest in rows])
    steps = align({}, spans, {}).steps
    assert PhaseSpans.of(spans, steps).behind_s()[0] == pytest.approx([0.05, 0.25])
    none = bench.spans([(STAGES[rank], rank, *rest) for rank, *rest in rows if rest[1] != "optimizer"])
    assert PhaseSpans.of(none, steps).behind_s()[0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("slots", "num_micro_batches"),
    [(UNEQUAL, 5), ([UNEQUAL[0].replace("B3 17-18", ""), UNEQUAL[1]], 4), ([UNEQUAL[1], UNEQUAL[0]], 4)],
    ids=["other_number", "pass_missing", "no_such_order"],
)
def test_a_pipeline_that_cannot_be_replayed_has_one_undivided_wait(bench, slots, num_micro_batches):
    rows = pipeline_rows(slots, 1.8)
    metrics = decompose(bench, rows, Plan(pp=2), num_micro_batches)
    assert metrics.keys() == {"compute_frac", "other_frac"}
    spans = bench.spans([(STAGES[rank], rank, step, *rest) for rank, step, *rest in rows])
    found = divide(spans, align({}, spans, {}).steps, Plan(pp=2), num_micro_batches=num_micro_batches)
    assert list(found.waits_s) == ["wait"] and found.waits_s["wait"].sum() == pytest.approx(3.6 - found.compute_s.sum())


def test_marked_micro_batches_say_the_order_whatever_the_schedule(bench):
    """All forwards, then all backwards (GPipe): not the order of 1F1B, so only marks of micro-batches tell it."""
    slots = ["F0 0-1 F1 1-2 B0 4-5 B1 5-6", "F0 1-2 F1 2-3 B0 3-4 B1 4-5"]
    rows = pipeline_rows(slots, 0.6)
    spans = bench.spans([(STAGES[rank], rank, step, *rest) for rank, step, *rest in rows])
    steps = align({}, spans, {}).steps
    assert decompose_metrics(divide(spans, steps, Plan(pp=2), num_micro_batches=2)).keys() == {
        "compute_frac",
        "other_frac",
    }
    numbers, seen = [], {}
    for rank, _, phase, *_ in rows:
        is_pass = phase in ("forward", "backward")
        numbers.append(seen.setdefault((rank, phase), 0) if is_pass else None)
        seen[rank, phase] = seen.get((rank, phase), 0) + 1
    index = spans.schema.get_field_index("micro_batch")
    marked = spans.set_column(index, spans.schema.field(index), pa.array(numbers, pa.int32()))
    metrics = decompose_metrics(divide(marked, steps, Plan(pp=2), num_micro_batches=2))
    assert metrics["bubble_frac"] == pytest.approx(4 / 12)
    assert metrics["exposed_comm_frac"] == pytest.approx(0.0)


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
    assert metrics.keys() in (PARTS, {"compute_frac", "other_frac"}, set())
    assert metrics.keys() != PARTS or sum(metrics.values()) == pytest.approx(1.0)
    assert all(0.0 <= value <= 1.0 + 1e-9 for value in metrics.values())


def test_what_a_device_neither_runs_nor_waits_for_is_its_hosts() -> None:
    waits = {"exposed_comm": np.full((3, 2), 0.1), "straggler": np.full((3, 2), 0.05)}
    division = Division(compute_s=np.full((3, 2), 0.85), waits_s=waits, other_s=np.zeros((3, 2)))
    assert host_bound_frac(0.4, 0.4, 1.0, None) == pytest.approx(0.6)
    assert host_bound_frac(0.4, 0.4, 1.0, division) == pytest.approx(0.45)
    assert host_bound_frac(1.02, 1.02, 1.0, None) == 0.0


def test_a_wait_that_a_collectives_kernel_does_counts_once() -> None:
    """Two replicas compute for 0.4 s and reduce for 0.3 s behind it, in kernels and in a span: 0.3 s are their host's.

    Where the reduction runs beside compute and no span waits for it, it does not either.
    """
    behind = {"exposed_comm": np.full((3, 2), 0.3)}
    division = Division(compute_s=np.full((3, 2), 0.7), waits_s=behind, other_s=np.zeros((3, 2)))
    assert host_bound_frac(0.7, 0.4, 1.0, division) == pytest.approx(0.3)
    beside = Division(compute_s=np.ones((3, 2)), waits_s={"wait": np.zeros((3, 2))}, other_s=np.zeros((3, 2)))
    assert host_bound_frac(0.7, 0.4, 1.0, beside) == pytest.approx(0.3)


@pytest.mark.parametrize("count", [10, 11])
def test_a_step_that_waits_for_long_hides_no_wait_for_the_host(count: int) -> None:
    """Of steps of 1 s that wait for 0.1 s one writes a checkpoint, and all ranks wait 20 s for it."""
    wait_s = np.full((count, 2), 0.1)
    wait_s[3] = 20.0
    division = Division(
        compute_s=np.full((count, 2), 0.9), waits_s={"exposed_comm": wait_s}, other_s=np.zeros((count, 2))
    )
    assert host_bound_frac(0.4, 0.4, 1.0, division) == pytest.approx(0.5)


def test_the_waits_are_those_of_the_step_whose_time_is_the_median() -> None:
    """Two short steps wait for nothing, and rank 0 waits in the others."""
    wait_s = np.array([[0.2, 0.0], [0.0, 0.0], [0.4, 0.0], [0.0, 0.0], [0.4, 0.0]])
    compute_s = np.array([[0.8, 1.0], [0.5, 0.5], [0.8, 1.2], [0.5, 0.5], [0.8, 1.2]])
    division = Division(compute_s=compute_s, waits_s={"straggler": wait_s}, other_s=np.zeros_like(wait_s))
    assert host_bound_frac(0.5, 0.5, 1.0, division) == pytest.approx(0.4)
    even = Division(compute_s=compute_s[:4], waits_s={"straggler": wait_s[:4]}, other_s=np.zeros((4, 2)))
    assert host_bound_frac(0.5, 0.5, 0.75, even) == pytest.approx(1 - 0.55 / 0.75), "the mean of the two in the middle"
