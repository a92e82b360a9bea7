"""Outcomes of a command's nodes, as the spans, window and telemetry of a trial."""

from dataclasses import replace

from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import OWN_MODEL
from wattune.orchestrate.command_result import command_spans, command_told, num_answers, run_spans
from wattune.orchestrate.lanes.messages import Place
from wattune.plans.axes import Plan
from wattune.plans.program import Program
from wattune.run import NO_NUMBERS, Numbers, RunStatus
from wattune.steps.files import Step
from wattune.trial import TrialSpec
from wattune.workers.command.program_run import ProgramOutcome
from wattune.workers.outcome import RankOutcome
from wattune.workload import UNKNOWN_WORKLOAD

SPEC = TrialSpec(
    model=OWN_MODEL,
    cluster=ClusterSpec(device="cpu", num_nodes=2, devices_per_node=2),
    engine="command",
    workload=UNKNOWN_WORKLOAD,
    plan=Plan(),
    program=Program(command=("run",)),
)
PLACES = [
    Place(rank=rank, node=f"n{rank // 2}", slot=rank % 2, device=f"cpu{rank % 2}", device_uuid=None, pid=100 + rank)
    for rank in range(4)
]
WALL_MINUS_MONO_NS = (5_000_000_000, 9_000_000_000)


def steps(count, start_ns=1_000_000_000):
    return [Step(n, start_ns + n * 10**7, start_ns + (n + 1) * 10**7, 8) for n in range(count)]


def outcome(node, told, *, count=20, first=5, end=15):
    command = ProgramOutcome(
        first_index=first,
        end_index=end,
        start_mono_ns=10**9,
        end_mono_ns=3 * 10**9,
        over_mono_ns=35 * 10**8,
        wall_minus_mono_ns=WALL_MINUS_MONO_NS[node],
        steps={rank: steps(count) for rank in told},
    )
    return RankOutcome(rank=node, status=RunStatus.COMPLETED, command=command)


def test_a_commands_answers_are_those_of_its_nodes():
    assert num_answers(SPEC) == 2
    assert num_answers(replace(SPEC, engine="torch")) == 4


def test_warm_up_is_negative_and_steps_after_the_end_do_not_count():
    spans = command_spans([outcome(0, (0, 1)), outcome(1, (2, 3), first=0, end=None)], PLACES, {})
    assert set(spans["rank"].to_pylist()) == {0, 1, 2, 3}
    for rank in range(4):
        numbers = [row["step"] for row in spans.to_pylist() if row["rank"] == rank]
        assert numbers == list(range(-5, 10))


def test_a_node_that_told_nothing_has_the_first_ranks_steps_on_its_own_clock():
    spans = command_spans([outcome(0, (0,)), outcome(1, ())], PLACES, {})
    rows = {(row["rank"], row["step"]): row for row in spans.to_pylist()}
    assert {rank for rank, _ in rows} == {0, 1, 2, 3}
    mine, theirs = rows[0, 0], rows[3, 0]
    assert theirs["start_wall_ns"] == mine["start_wall_ns"]
    assert theirs["start_mono_ns"] == mine["start_wall_ns"] - WALL_MINUS_MONO_NS[1]
    assert (theirs["node"], theirs["device"]) == ("n1", "cpu1")


def test_copied_steps_are_at_the_same_moment_where_the_clocks_of_nodes_differ():
    """Node 1's wall clock is 3 s ahead of the driver's, and the leading node's a second behind it."""
    offsets_ns = {"n0": -1_000_000_000, "n1": 3_000_000_000}
    spans = command_spans([outcome(0, (0,)), outcome(1, ())], PLACES, offsets_ns)
    common_ns = {
        row["rank"]: row["start_mono_ns"] + WALL_MINUS_MONO_NS[int(row["node"][1])] - offsets_ns[row["node"]]
        for row in spans.to_pylist()
        if row["step"] == 0
    }
    assert common_ns.keys() == {0, 1, 2, 3} and len(set(common_ns.values())) == 1
    for row in spans.to_pylist():
        assert row["start_wall_ns"] - row["start_mono_ns"] == WALL_MINUS_MONO_NS[int(row["node"][1])]
        assert row["end_mono_ns"] - row["start_mono_ns"] == 10**7


def test_without_measured_steps_there_are_no_spans_and_the_run_is_the_window():
    outcomes = [outcome(0, (), first=0, end=None), outcome(1, (), first=0, end=None)]
    assert command_spans(outcomes, PLACES, {}) is None
    window = Numbers(window_start_mono_ns=1000000000, window_end_mono_ns=3000000000, command_run_s=2.5)
    assert command_told(outcomes, PLACES, NO_NUMBERS, has_steps=False) == ({"window_node": "n0"}, window)
    run = run_spans(outcomes, PLACES)
    assert [row["rank"] for row in run.to_pylist()] == [0, 1, 2, 3]
    assert {row["end_mono_ns"] - row["start_mono_ns"] for row in run.to_pylist()} == {2 * 10**9}
    assert command_spans([], PLACES, {}) is None and run_spans([], PLACES) is None


def test_tokens_of_all_nodes_are_added_up():
    outcomes = [outcome(0, (0, 1)), outcome(1, (2, 3))]
    assert command_told(outcomes, PLACES, NO_NUMBERS, has_steps=True) == (
        {},
        Numbers(told_tokens_per_step=32.0, command_run_s=2.5),
    )
