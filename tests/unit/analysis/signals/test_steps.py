"""Measured steps of all ranks."""

import pyarrow.compute as pc

from wattune.analysis.signals.align import align
from wattune.analysis.signals.steps import find_steps

GPU = ("n0", "gpu0")


OTHER = ("n1", "gpu0")


def rows(device, rank, *steps):
    return [(device, rank, number, "step", start_s, end_s) for number, start_s, end_s in steps]


def test_times_of_all_ranks_are_on_one_clock_whatever_order_the_rows_have(make_bench):
    bench = make_bench(mono_0_s={"n0": 100, "n1": 9_000})
    wanted = rows(OTHER, 1, (1, 1.0, 1.75), (0, 0.0, 0.5)) + rows(GPU, 0, (0, 0.25, 1.0), (1, 1.0, 2.0))
    spans = bench.spans(wanted)
    anchors_ns = {node: int(bench.wall_ns(node, 0.0) - bench.mono_ns(node, 0.0)) for node in ("n0", "n1")}
    found = find_steps(spans, anchors_ns, None)
    zero_ns = int(bench.wall_ns("n0", 0.0))
    assert (found.number.tolist(), found.rank.tolist(), found.device) == ([0, 1], [0, 1], (GPU, OTHER))
    assert ((found.start_ns - zero_ns) / 1e9).tolist() == [[0.25, 0.0], [1.0, 1.0]]
    assert found.duration_s().tolist() == [[0.75, 0.5], [1.0, 0.75]]
    assert found.anchor_ns.tolist() == [anchors_ns["n0"], anchors_ns["n1"]]


def test_spans_of_some_ranks_alone_need_no_clock_of_the_others(bench):
    spans = bench.spans(rows(GPU, 0, (0, 0.0, 1.0)) + rows(OTHER, 1, (0, 0.0, 2.0)))
    alone = align({}, spans.filter(pc.equal(spans["rank"], 0)), {})
    assert alone.devices == (GPU,) and alone.duration_s == 1.0


def test_only_the_steps_asked_for_count_and_warm_up_never_does(bench):
    spans = bench.spans(rows(GPU, 0, (-1, -1.0, 0.0), (0, 0.0, 1.0), (1, 1.0, 2.0), (2, 2.0, 3.0)))
    assert find_steps(spans, {"n0": 0}, None).number.tolist() == [0, 1, 2]
    assert find_steps(spans, {"n0": 0}, [1, 2, 7]).number.tolist() == [1, 2]
    assert find_steps(spans, {"n0": 0}, [7]) is None


def test_a_step_that_ends_before_it_starts_is_not_a_step(bench):
    spans = bench.spans(rows(GPU, 0, (0, 1.0, 0.5)))
    assert find_steps(spans, {"n0": 0}, None) is None
