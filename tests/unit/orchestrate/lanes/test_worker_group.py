"""State of a group and its trial: ranks on workers, the cause of a failure, the moments when a group is ready."""

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from specs import trial_spec

from wattune.catalog.hardware import ClusterSpec
from wattune.orchestrate.attempt import Attempt
from wattune.orchestrate.cluster import Node
from wattune.orchestrate.lanes.messages import Assignment, GroupKey, WorkerPlace
from wattune.orchestrate.lanes.worker_group import Group, LaneError, TrialOfGroup, _groups, assign_ranks
from wattune.plans.axes import Plan
from wattune.run import RunStatus
from wattune.trial import Measure, TrialSpec
from wattune.workers.outcome import RankOutcome

SPEC = trial_spec(on="1x2 cpu", seq_len=8, batch=8)


def node(number: int) -> Node:
    return Node(node_id=f"id{number}", name=f"n{number}", num_cpus=2, num_gpus=0)


def asked(spec: TrialSpec, *nodes: Node) -> Assignment:
    attempt = Attempt(spec=spec, repeat=0, measure=Measure(), nodes=nodes)
    return Assignment(attempt=attempt, key=GroupKey.of(spec, {"CPU": 1.0}), sensed={})


ASSIGNMENT = asked(SPEC, node(0))


def worker_place(number: int, node_id: str = "id0", device_index: int | None = None) -> WorkerPlace:
    index = number if device_index is None else device_index
    return WorkerPlace(number=number, node_id=node_id, device_index=index, device_uuid=None, pid=number, actor=None)  # type: ignore[arg-type]


def outcome(rank: int, status: RunStatus = RunStatus.COMPLETED, reason: str = "") -> RankOutcome:
    return RankOutcome(rank=rank, status=status, reason=reason)


@pytest.fixture
def group() -> Group:
    return Group(number=1, key=ASSIGNMENT.key, workers={0: worker_place(0), 1: worker_place(1)})


@pytest.fixture
def trial(group: Group) -> TrialOfGroup:
    return group.begin(ASSIGNMENT)


@pytest.mark.parametrize(("order", "workers_of_ranks"), [("topology", [0, 1]), ((1, 0), [1, 0])])
def test_the_plans_order_gives_each_rank_its_worker(order: Any, workers_of_ranks: list[int]) -> None:
    ordered = asked(replace(SPEC, plan=Plan(rank_order=order)), node(0))
    ranks = assign_ranks(ordered, {0: worker_place(0), 1: worker_place(1)})
    assert ranks == {number: (rank, rank, 0, number) for rank, number in enumerate(workers_of_ranks)}
    assert list(ranks) == workers_of_ranks


def test_ranks_are_counted_by_node() -> None:
    spec = replace(SPEC, cluster=ClusterSpec(device="cpu", num_nodes=2, devices_per_node=2))
    two = asked(spec, node(1), node(0))
    where = [("id0", 5), ("id1", 0), ("id0", 3), ("id1", 1)]
    workers = {number: worker_place(number, node_id, index) for number, (node_id, index) in enumerate(where)}
    assert assign_ranks(two, workers) == {1: (0, 0, 0, 0), 3: (1, 1, 0, 1), 2: (2, 0, 1, 0), 0: (3, 1, 1, 1)}


def test_workers_on_other_nodes_are_refused(group: Group) -> None:
    group.workers[1] = worker_place(1, "id9")
    with pytest.raises(LaneError, match=r"wants 2 worker\(s\) on each of 1 node\(s\), but they run on n0: 1"):
        assign_ranks(ASSIGNMENT, group.workers)
    with pytest.raises(LaneError):
        group.begin(ASSIGNMENT)
    assert group.trial is None


def test_each_trial_of_a_group_has_a_number_and_one_that_did_not_end_well_a_meeting_of_its_own(group: Group) -> None:
    first, second = group.begin(ASSIGNMENT), group.begin(ASSIGNMENT)
    assert (first.number, second.number) == (1, 2) and group.trial is second
    assert (first.part.meeting, second.part.meeting) == ("trial-1", "trial-2")
    assert second.name == f"{SPEC.trial_id}-0" and second.part.number == 2


def test_ranks_stay_together_where_the_last_trial_ended_well_and_the_next_needs_the_same_groups(group: Group) -> None:
    def meeting(spec: TrialSpec, *ends: RunStatus) -> str:
        trial = group.begin(replace(ASSIGNMENT, attempt=replace(ASSIGNMENT.attempt, spec=spec)))
        for rank, status in enumerate(ends):
            trial.deliver(outcome(rank, status), None)
        return trial.part.meeting

    well = (RunStatus.COMPLETED, RunStatus.COMPLETED)
    other = replace(SPEC, plan=replace(SPEC.plan, micro_batch_size=2))
    names = [meeting(SPEC, *well), meeting(other, *well), meeting(replace(SPEC, engine="other"), *well)]
    assert names == ["trial-1", "trial-1", "trial-3"]
    names = [meeting(SPEC, RunStatus.COMPLETED, RunStatus.OUT_OF_MEMORY), meeting(SPEC, *well), meeting(SPEC, well[0])]
    assert names == ["trial-4", "trial-5", "trial-5"]
    assert meeting(SPEC, *well) == "trial-7", "a rank of the last one has not answered"
    group.begin(ASSIGNMENT, only_meet=True)
    assert meeting(SPEC, *well) == "trial-9", "those that only met have left"
    assert meeting(replace(SPEC, plan=Plan(rank_order=(1, 0))), *well) == "trial-10", "other processes"
    # Of more ranks each shape needs groups of its own, which would hold memory.
    four = replace(SPEC, cluster=replace(SPEC.cluster, devices_per_node=4), plan=replace(SPEC.plan, tp=2))
    wide = replace(four, plan=replace(four.plan, tp=4))
    assert _groups(four) == _groups(replace(four, plan=replace(four.plan, recompute="full"))) != _groups(wide)


def test_ranks_that_only_meet_get_nothing_to_train(group: Group) -> None:
    probe = group.begin(ASSIGNMENT, only_meet=True)
    assert probe.name is None and probe.number == 1, "it counts, so that its meeting has a name of its own"
    assert (probe.part.number, probe.part.assignment, probe.part.meeting) == (1, None, "trial-1")
    assert sorted(rank for rank, *_ in probe.ranks.values()) == [0, 1]


def test_the_first_failure_stays_the_cause_and_what_follows_from_it_stays_too(trial: TrialOfGroup) -> None:
    first = outcome(1, RunStatus.OUT_OF_MEMORY, "rank 1: out of memory")
    trial.fail(first, keeps_group=True, notified=True)
    trial.fail(outcome(0, RunStatus.TIMED_OUT, "rank 0: no step"), keeps_group=False)
    assert (trial.cause, trial.keeps_group, trial.notified) == (first, True, True)
    trial.deliver(outcome(0, RunStatus.CRASHED, "rank 0: closed by peer"), None)
    assert trial.cause == first


def test_a_rank_may_describe_its_failure_in_more_words_and_still_its_first_outcome_counts(trial: TrialOfGroup) -> None:
    trial.fail(outcome(1, RunStatus.CRASHED, "rank 1: short"), keeps_group=False)
    longer = replace(outcome(1, RunStatus.CRASHED, "rank 1: with spans"), spans=pa.table({"step": [1]}))
    trial.deliver(longer, None)
    assert trial.cause is longer and trial.outcomes[1] is longer and not trial.keeps_group
    trial.deliver(outcome(1), None)
    assert trial.outcomes[1] is longer
