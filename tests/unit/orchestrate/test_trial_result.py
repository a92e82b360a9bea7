"""The result of a trial from its ranks' outcomes: status, reason, tags. No Ray is started."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from specs import trial_spec

from wattune.analysis.summary import Summary
from wattune.orchestrate.attempt import Attempt
from wattune.orchestrate.cluster import Node
from wattune.orchestrate.failures import CAUSE_TAG, NODES_TAG, Cause
from wattune.orchestrate.lanes.messages import Answer, Death, Place
from wattune.orchestrate.trial_result import against_limits, rank_numbers, rank_tags, told_by_ranks, trial_result
from wattune.run import NO_NUMBERS, Numbers, Run, RunStatus
from wattune.trial import Measure
from wattune.workers.outcome import OutOfMemory, RankOutcome

SPEC = trial_spec(on="1x2 cpu", seq_len=8, batch=8)


def outcome(rank: int, status: RunStatus = RunStatus.COMPLETED, **fields: Any) -> RankOutcome:
    return RankOutcome(rank=rank, status=status, **fields)


def result_of(tmp_path: Path, answer: Answer) -> Run:
    folder = tmp_path / "study" / "trials" / f"{SPEC.trial_id}-0"
    node = Node(node_id="id0", name="n0", num_cpus=2, num_gpus=0)
    ended = Attempt(spec=SPEC, repeat=3, measure=Measure(), tags={"a": "b"}, nodes=(node,), folder=folder)
    result = trial_result(ended, answer, None, start_wall_ns=7)
    assert (result.trial_id, result.repeat, result.tags["a"], result.start_wall_ns) == (SPEC.trial_id, 3, "b", 7)
    return result


def assessed(
    tmp_path: Path, *outcomes: RankOutcome, cause: RankOutcome | None = None, failure: str = ""
) -> tuple[RunStatus, str]:
    result = result_of(tmp_path, Answer(outcomes=outcomes, cause=cause, failure=failure))
    return result.status, result.reason


def test_the_first_failure_names_the_status(tmp_path: Path) -> None:
    other = outcome(0, RunStatus.CRASHED, reason="rank 0: closed by peer")
    first = outcome(1, RunStatus.OUT_OF_MEMORY, reason="rank 1: can't allocate")
    found = assessed(tmp_path, other, first, cause=first, failure="group failed")
    assert found == (RunStatus.OUT_OF_MEMORY, "rank 1: can't allocate")


def test_ranks_that_are_ended_with_another_one_are_not_blamed(tmp_path: Path) -> None:
    hung = outcome(0, RunStatus.TIMED_OUT, reason="rank 0: no step")
    assert assessed(tmp_path, hung, cause=hung, failure="ended") == (RunStatus.TIMED_OUT, "rank 0: no step")


def test_a_rank_that_reported_nothing_is_named(tmp_path: Path) -> None:
    other = outcome(1, RunStatus.CRASHED, reason="rank 1: closed by peer")
    status, reason = assessed(tmp_path, other, cause=other, failure="group failed")
    assert (status, reason) == (RunStatus.CRASHED, "rank 0 ended without reporting; rank 1: closed by peer")


def test_a_profile_that_failed_is_a_tag_of_a_trial_that_was_measured(tmp_path: Path) -> None:
    first = outcome(1, facts={"profile": "missing, since rank 1"}, end_mono_ns=5)
    freed = outcome(0, facts={"profile": "missing, since rank 0 was freed", "compiler": "eager"}, end_mono_ns=9)
    elsewhere = replace(first, end_mono_ns=10**15)  # of a node that has been up for longer
    for answer in (Answer(outcomes=(freed, elsewhere), cause=elsewhere), Answer(outcomes=(freed, first))):
        found = result_of(tmp_path, answer)
        assert found.status is RunStatus.INVALID and "no_window" in found.reason  # there are no spans here
        assert found.tags["profile"] == "missing, since rank 1" and found.tags["compiler"] == "eager"
    assert assessed(tmp_path, first, cause=first) == (RunStatus.INFRA_FAILED, "rank 0 ended without reporting")


def test_retries_of_memory_are_a_step_of_the_worst_rank_and_not_told_of_processors() -> None:
    first, second = (
        outcome(rank, losses=(1.0,) * 4, allocator_retries=6 * rank, memory_reserved_peak_bytes=9) for rank in range(2)
    )
    assert told_by_ranks([first, second], ep=1) == {"memory_retries_per_step_count": 1.5}
    assert told_by_ranks([outcome(0), outcome(1)], ep=1) == {}


def test_a_group_that_never_ran_says_why(tmp_path: Path) -> None:
    assert assessed(tmp_path, failure="no resources") == (RunStatus.INFRA_FAILED, "no resources")


def died(rank: int = 1, **facts: Any) -> Death:
    return Death(rank=rank, node_id="id0", pid=7, why="The actor died unexpectedly", **facts)


@pytest.mark.parametrize("status", [RunStatus.CRASHED, RunStatus.TIMED_OUT])
def test_a_worker_killed_from_outside_is_no_crash_whatever_the_others_say(tmp_path: Path, status: RunStatus) -> None:
    other = outcome(0, status, reason="rank 0: closed by peer")
    found = result_of(tmp_path, Answer(outcomes=(other,), cause=other, deaths=(died(),)))
    assert found.status is RunStatus.INFRA_FAILED and "rank 1 ended without reporting" in found.reason
    assert (found.tags[CAUSE_TAG], found.tags[NODES_TAG]) == (Cause.WORKER_KILLED, "n0")


def test_what_a_worker_did_to_itself_is_its_own(tmp_path: Path) -> None:
    other = outcome(0, RunStatus.CRASHED, reason="rank 0: closed by peer")
    fatal = died(words="Fatal Python error: Segmentation fault\n\nThread 0x7f")
    found = result_of(tmp_path, Answer(outcomes=(other,), cause=other, deaths=(died(0), fatal)))
    assert (found.status, found.reason) == (RunStatus.CRASHED, "rank 1: Fatal Python error: Segmentation fault")
    starved = result_of(tmp_path, Answer(outcomes=(other,), cause=other, deaths=(died(out_of_memory=True),)))
    assert starved.status is RunStatus.OUT_OF_MEMORY and "memory of node n0 ran out" in starved.reason
    large = outcome(0, RunStatus.OUT_OF_MEMORY, reason="rank 0: out of memory")
    found = result_of(tmp_path, Answer(outcomes=(large,), cause=large, deaths=(died(),)))
    assert (found.status, found.reason) == (RunStatus.OUT_OF_MEMORY, large.reason), "it came first"


def test_a_node_that_lacks_a_library_is_named(tmp_path: Path) -> None:
    lacking = outcome(1, RunStatus.INFRA_FAILED, reason="rank 1: NodeError: not installed")
    places = tuple(
        Place(rank=rank, node=f"n{rank}", slot=0, device="cpu0", device_uuid=None, pid=1) for rank in range(2)
    )
    found = result_of(tmp_path, Answer(outcomes=(outcome(0), lacking), cause=lacking, places=places))
    assert found.status is RunStatus.INFRA_FAILED
    assert (found.tags[CAUSE_TAG], found.tags[NODES_TAG]) == (Cause.NODE_UNFIT, "n1")


def test_a_trial_of_a_study_that_is_stopped_is_run_again(tmp_path: Path) -> None:
    answer = Answer(outcomes=(outcome(0),), failure="the study was stopped", interrupted=True)
    found = result_of(tmp_path, answer)
    assert (found.status, found.reason) == (RunStatus.INTERRUPTED, "the study was stopped")


def test_telemetry_that_was_lost_is_no_completed_trial(tmp_path: Path) -> None:
    status, reason = assessed(tmp_path, outcome(0), outcome(1), failure="telemetry of node n0 did not answer")
    assert status is RunStatus.INFRA_FAILED and "n0" in reason


def test_completed_without_any_measurement_is_invalid(tmp_path: Path) -> None:
    status, reason = assessed(tmp_path, outcome(0), outcome(1))
    assert status is RunStatus.INVALID and "no_window" in reason


def test_a_hard_limit_aborts() -> None:
    over = Summary(metrics={"node_device_power_peak_1s_w": 2950.0}, quality="publishable")
    status, reason = against_limits(over, {"node_device_power_w": 2900.0})
    assert status is RunStatus.ABORTED and "2950 W" in reason and "2900 W" in reason
    assert against_limits(over, {})[0] is RunStatus.COMPLETED


def test_a_measurement_of_no_use_is_invalid_and_says_why_unless_the_limit_comes_first() -> None:
    useless = Summary(
        metrics={"node_device_power_peak_1s_w": 2950.0}, quality="invalid", quality_reasons=("no_power", "few_steps")
    )
    assert against_limits(useless, {}) == (RunStatus.INVALID, "measurement quality: no_power, few_steps")
    assert against_limits(useless, {"node_device_power_w": 2900.0})[0] is RunStatus.ABORTED
    assert against_limits(useless, {"node_device_power_w": 2950.0})[0] is RunStatus.INVALID, "at the limit is allowed"


def test_tags_and_numbers_of_ranks_are_those_of_the_slowest_and_fullest() -> None:
    first = outcome(0, build_time_s=2.0, num_warmup_steps=6, steady=True, memory_peak_bytes=10)
    second = outcome(1, build_time_s=3.5, num_warmup_steps=6, steady=False, memory_peak_bytes=30)
    stopped = outcome(2, memory_reserved_peak_bytes=50)
    assert rank_tags([first, second, stopped], None) == {"steady": "false"}
    assert rank_numbers([first, second, stopped]) == Numbers(
        warmup_steps=6, build_time_s=3.5, memory_peak_rank=1, memory_reserved_peak_bytes=50
    )
    assert rank_tags([outcome(0)], None) == {} == rank_tags([], None)
    assert rank_numbers([outcome(0)]) == NO_NUMBERS == rank_numbers([])


def test_fragmentation_is_told_apart_from_a_device_that_is_full() -> None:
    def failed(allocated_bytes: int) -> RankOutcome:
        memory = {
            "allocated_bytes": allocated_bytes,
            "reserved_bytes": 75,
            "reserved_peak_bytes": 75,
            "total_bytes": 80,
        }
        where = OutOfMemory(rank=0, phase="forward", message="no", requested_bytes=3, **memory)
        return outcome(0, status=RunStatus.OUT_OF_MEMORY, reason=str(where), out_of_memory=where)

    assert rank_tags([failed(60)], failed(60)) == {"out_of_memory": "fragmentation"}
    assert rank_tags([failed(74)], failed(74)) == {}


def test_tags_say_what_the_ranks_found_and_where_they_differ() -> None:
    one, other = {"version.torch": "2.13.0", "env.NCCL_ALGO": "Ring"}, {"version.torch": "2.12.1"}
    outcomes = [outcome(0, provenance=one), outcome(1, provenance=one), outcome(3, provenance=other), outcome(2)]
    assert rank_tags(outcomes, None) == {
        "version.torch": "rank0-1: 2.13.0; rank3: 2.12.1",
        "env.NCCL_ALGO": "rank0-1: Ring; rank3: absent",
    }
    assert rank_tags(outcomes[:2], None) == one


def test_every_result_has_its_engine_and_device_also_one_that_never_ran(tmp_path: Path) -> None:
    tags = result_of(tmp_path, Answer(failure="no resources")).tags
    assert {name: tags[name] for name in ("engine", "device", "simulated")} == {
        "engine": "torch",
        "device": "cpu",
        "simulated": "false",
    }
