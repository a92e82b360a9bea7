"""Steps drawn by hand: what hides what, whose waiting it is, and that nothing is counted twice."""

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.analysis.metrics.exposed_comm import kernel_metrics, parts, running_s
from wattune.plans.axes import Plan
from wattune.schema import KERNELS

GEMM, NORM, NCCL = "nvjet_tst_128x256", "triton_red_fused_rms_norm", "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
STEP_NS = 1000


def row(name: str, start_ns: int, end_ns: int, *, rank: int = 0, step: int = 0, **texts: str) -> dict[str, Any]:
    filled = {"collective": "", "group": "", "group_ranks": "", "fabric": ""} | texts
    return {"rank": rank, "step": step, "stream": 7, "name": name, "start_ns": start_ns, "end_ns": end_ns, **filled}


def step_of(rank: int = 0, step: int = 0, length_ns: int = STEP_NS) -> dict[str, Any]:
    return row("step", 0, length_ns, rank=rank, step=step)


def reduce_of(group: str, start_ns: int, end_ns: int, *, rank: int = 0, ranks: str = "[0, 1]") -> dict[str, Any]:
    texts = {"collective": "allreduce", "group": group, "group_ranks": ranks, "fabric": "node"}
    return row(NCCL, start_ns, end_ns, rank=rank, **texts)


def table(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=KERNELS)


def metrics(*rows: dict[str, Any], micro_batches: int = 1, **axes: int) -> dict[str, float]:
    return kernel_metrics(table(*rows), Plan(**axes), num_micro_batches=micro_batches)


def test_the_rank_that_comes_last_only_transfers() -> None:
    """Both ranks leave together at 900; rank 0 came at 500, rank 1 at 800: 300 of rank 0's are waiting."""
    found = metrics(
        step_of(),
        row(GEMM, 0, 500),
        reduce_of("mesh_replicate_0", 500, 900),
        step_of(rank=1),
        row(GEMM, 0, 800, rank=1),
        reduce_of("mesh_replicate_0", 800, 900, rank=1),
    )
    assert found["straggler_frac"] == pytest.approx(300 / 2000)
    assert found["exposed_comm_frac"] == found["exposed_comm_dp_frac"] == pytest.approx(200 / 2000)
    assert found["compute_frac"] == pytest.approx(1300 / 2000)


def test_a_stage_idles_for_the_ideal_bubble_first() -> None:
    """Two stages, four micro-batches: a quarter of the compute is bubble, the rest of the wait is communication."""
    waits = {"collective": "recv", "group": "mesh_pp_0", "group_ranks": "[0, 1]", "fabric": "network"}
    rows = [
        each
        for rank in (0, 1)
        for each in (
            step_of(rank=rank),
            row(GEMM, 0, 400, rank=rank),
            row("ncclDevKernel_SendRecv", 400, 600, rank=rank, **waits),
        )
    ]
    found = metrics(*rows, pp=2, micro_batches=4)
    assert found["bubble_frac"] == pytest.approx(100 / 1000)
    assert found["exposed_comm_pp_frac"] == pytest.approx(100 / 1000)
    assert found["straggler_frac"] == 0.0
    assert parts(table(*rows), Plan(pp=2), num_micro_batches=4)["comm_pp_network"] == pytest.approx(0.1)


def test_parts_name_kinds_and_add_up() -> None:
    found = parts(table(step_of(), row(GEMM, 0, 500), row(NORM, 400, 700)), Plan(), num_micro_batches=1)
    assert found == pytest.approx(
        {"compute_gemm": 0.5, "compute_norm": 0.2, "other": 0.3, "bubble": 0.0, "straggler": 0.0}
    )


def test_nothing_profiled_is_nothing_said() -> None:
    assert metrics() == {} and parts(table(), Plan(), num_micro_batches=1) == {}
    assert metrics(step_of()) == {
        "compute_frac": 0.0,
        "exposed_comm_frac": 0.0,
        "bubble_frac": 0.0,
        "straggler_frac": 0.0,
        "other_frac": 1.0,
    }


@given(
    spans=st.lists(
        st.tuples(
            st.sampled_from([GEMM, NORM, "tp", "pp", "dp"]),
            st.integers(0, 1),
            st.integers(0, STEP_NS - 1),
            st.integers(1, STEP_NS),
        ),
        max_size=25,
    )
)
def test_shares_are_never_negative_and_sum_to_one(spans: list[tuple[str, int, int, int]]) -> None:
    rows = [step_of(rank=0), step_of(rank=1)]
    for name, rank, start_ns, length_ns in spans:
        end_ns = min(start_ns + length_ns, STEP_NS)
        if name in ("tp", "pp", "dp"):
            rows.append(reduce_of({"dp": "mesh_shard_0"}.get(name, f"mesh_{name}_0"), start_ns, end_ns, rank=rank))
        else:
            rows.append(row(name, start_ns, end_ns, rank=rank))
    shares = parts(table(*rows), Plan(pp=2), num_micro_batches=4)
    assert min(shares.values()) >= 0.0
    assert sum(shares.values()) == pytest.approx(1.0)


def test_a_device_is_busy_while_anything_runs_on_any_stream() -> None:
    """Rank 0 runs from 100 to 700, with 100 between; rank 1 from 0 to 300."""
    found = running_s(
        table(
            step_of(),
            row(GEMM, 100, 400),
            reduce_of("mesh_dp_0", 300, 500),
            row(NORM, 350, 360),
            row(NORM, 600, 700),
            step_of(rank=1),
            row(GEMM, 0, 300, rank=1),
        )
    )
    assert found is not None and found[0] == pytest.approx((500 + 300) / 2 / 1e9)


def test_a_step_whose_trace_is_lost_is_unknown_and_not_idle() -> None:
    """A clock that was set, or a profiler without room: no step runs without one kernel. One of only a send has none
    of its own."""
    lost = table(step_of(), row(GEMM, 0, 300), step_of(rank=1), step_of(step=1), row(GEMM, 0, 500, step=1))
    busy, _, _ = running_s(lost) or (0.0, 0.0, 0.0)
    assert busy == pytest.approx(400 / 1e9)
    waits = table(step_of(), row(GEMM, 0, 300), step_of(rank=1), reduce_of("mesh_pp", 0, 900, rank=1))
    _, own, _ = running_s(waits) or (0.0, 0.0, 0.0)
    assert own == pytest.approx(150 / 1e9)


def test_collectives_can_be_left_out_of_what_a_device_does() -> None:
    kernels = table(step_of(), row(GEMM, 100, 400), reduce_of("mesh_dp_0", 300, 900))
    busy, _, _ = running_s(kernels) or (0.0, 0.0, 0.0)
    assert busy == pytest.approx(800 / 1e9)
    _, own, _ = running_s(kernels) or (0.0, 0.0, 0.0)
    assert own == pytest.approx(300 / 1e9)
    waits = table(step_of(), row(NORM, 0, 1), reduce_of("mesh_pp", 300, 900))
    _, own, _ = running_s(waits) or (0.0, 0.0, 0.0)
    assert own == pytest.approx(1 / 1e9)


def test_a_processor_has_no_device_to_wait_for_it() -> None:
    assert running_s(table(step_of(), row("aten::mm", 0, 400))) is None
    assert running_s(table(step_of())) is None
    assert running_s(table()) is None


@pytest.mark.parametrize(
    ("came_ns", "peer_runs", "mine_beside", "waited_ns"),
    [
        (800, [(0, 300)], [], 300),  # the peer's device ends at 300 and gets its collective at 800: all 300 after 500
        (800, [(0, 800)], [], 0),  # it works until then
        (800, [(0, 300), (600, 700)], [], 200),  # it works for 100 of them
        (800, [(0, 300)], [(500, 650)], 150),  # beside the waiting there is work for 150
        (500, [(0, 300)], [], 0),  # both come together
    ],
)
def test_a_wait_for_a_peer_that_has_nothing_to_run_is_its_hosts(
    came_ns: int, peer_runs: list[tuple[int, int]], mine_beside: list[tuple[int, int]], waited_ns: int
) -> None:
    """Rank 0 comes to the collective at 500 and both leave at 900; of the clock of rank 1 nothing is known."""
    later_ns = 37
    kernels = table(
        step_of(),
        row(GEMM, 0, 500),
        reduce_of("mesh_tp_0", 500, 900),
        *(row(GEMM, *each) for each in mine_beside),
        step_of(rank=1, length_ns=STEP_NS + later_ns),
        *(row(GEMM, start + later_ns, end + later_ns, rank=1) for start, end in peer_runs),
        reduce_of("mesh_tp_0", came_ns + later_ns, 900 + later_ns, rank=1),
    )
    _, _, waits = running_s(kernels) or (0.0, 0.0, -1.0)
    assert waits == pytest.approx(waited_ns / 2 / 1e9)


def test_ranks_that_wait_for_each_others_host_in_turn_are_not_busy() -> None:
    """Each of ten collectives one rank comes 80 late to, with nothing on its device: in turn rank 0 and rank 1.

    Collectives take 10, products 10: of 100 each device is busy for 20 beside waiting, and one of both always waits.
    """
    rows = [step_of(), step_of(rank=1)]
    for number in range(10):
        start, late = 100 * number, number % 2
        for rank in (0, 1):
            came = start + (90 if rank == late else 10)
            rows += [row(GEMM, start, start + 10, rank=rank), reduce_of("mesh_tp_0", came, start + 100, rank=rank)]
    kernels = table(*rows)
    busy, own, waits = running_s(kernels) or (0.0, 0.0, 0.0)
    assert (busy, own) == (pytest.approx((5 * 100 + 5 * 20) / 1e9), pytest.approx(100 / 1e9))
    assert busy - waits == pytest.approx(200 / 1e9)


def test_nobody_waits_for_a_peer_that_was_not_profiled() -> None:
    assert running_s(table(step_of(), reduce_of("mesh_tp_0", 100, 900))) == (800 / 1e9, 0.0, 0.0)
