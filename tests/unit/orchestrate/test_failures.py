"""Failures of the cluster: their results, the likeness of reasons, and errors of a machine."""

from dataclasses import replace

import pytest

from wattune.errors import EngineError, NodeError
from wattune.orchestrate.failures import (
    CAUSE_TAG,
    MOST_ALIKE,
    Cause,
    Failure,
    FailuresInARow,
    failed_nodes,
    is_of_the_machine,
    is_tried_again,
    likeness,
)
from wattune.run import Run, RunStatus


def ended(status: RunStatus, reason: str = "", **facts: object) -> Run:
    return Run(trial_id="a" * 12, repeat=0, status=status, reason=reason, **facts)  # type: ignore[arg-type]


def test_a_failure_of_the_cluster_takes_what_was_measured_from_a_result() -> None:
    measured = ended(RunStatus.COMPLETED, metrics={"mfu_frac": 0.5}, quality="publishable", tags={"nodes": "n0,n1"})
    lost = Failure(Cause.NODE_LOST, "node n1 left", ("n1",)).of(measured)
    assert (lost.status, lost.reason, lost.metrics, lost.quality) == (RunStatus.INFRA_FAILED, "node n1 left", {}, "")
    assert not lost.status.is_final and failed_nodes(lost) == {"n1"}
    assert failed_nodes(Failure(Cause.PLACEMENT, "late").of(measured)) == {"n0", "n1"}, "any of them may be at fault"
    assert failed_nodes(measured) == frozenset()


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("rank 3: OSError: /data/a.so: version 12.8", "rank 0: OSError: /data/b.so: version 13.0", True),
        ('engine "megatron" needs apex', 'engine "deepspeed" needs apex', True),
        ("no step finished for 61 s", "no step finished for 300 s", True),
        ("rank 0: ValueError: wrong shape", "rank 0: KeyError: wrong shape", False),
    ],
)
def test_what_differs_from_trial_to_trial_is_no_other_reason(one: str, other: str, alike: bool) -> None:
    first, second = (likeness(ended(RunStatus.CRASHED, text)) for text in (one, other))
    assert (first == second) is alike
    assert likeness(ended(RunStatus.TIMED_OUT, one)) != first
    broken = [Failure(Cause.DEVICE, text).of(ended(RunStatus.CRASHED)) for text in (one, other)]
    assert (likeness(broken[0]) == likeness(broken[1])) is alike, "two faults of a device are two reasons"


def test_findings_about_plans_are_in_no_row() -> None:
    findings = (RunStatus.OUT_OF_MEMORY, RunStatus.ABORTED, RunStatus.REJECTED, RunStatus.INTERRUPTED)
    assert [likeness(ended(status, "x")) for status in findings] == [None] * 4
    row = FailuresInARow().then(ended(RunStatus.CRASHED, "x")).then(ended(RunStatus.OUT_OF_MEMORY, "y"))
    assert row.then(ended(RunStatus.CRASHED, "x")).count == 2
    assert row.then(ended(RunStatus.COMPLETED)) == FailuresInARow(any_ran=True)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(28, "No space left on device"), True),
        (OSError(5, "Input/output error"), True),
        (MemoryError(), True),
        (ModuleNotFoundError("No module named 'deepspeed'"), True),
        (NodeError("x"), True),
        (FileNotFoundError(2, "no tokens"), False),
        (EngineError("x"), False),
        (RuntimeError("No space left on device"), False),
    ],
)
def test_errors_of_the_machine(error: Exception, expected: bool) -> None:
    assert is_of_the_machine(error) is expected


def test_what_surrounds_every_plan_ends_a_study_at_the_second_plan_and_is_not_tried_again():
    full = "any plan would meet this: exit code 1: OSError: [Errno 28] No space left on device: '/a{}'"

    def lacking(trial_id, name):
        result = replace(ended(RunStatus.INFRA_FAILED, full.format(name)), trial_id=trial_id)
        return replace(result, tags={CAUSE_TAG: str(Cause.SURROUNDINGS)})

    first, same, other = lacking("a" * 12, 1), lacking("b" * 12, 2), lacking("c" * 12, "b")
    assert not is_tried_again(first, [])
    row = FailuresInARow().then(first)
    assert not row.ends_study(first) and row.then(first) == row, "a repeat says nothing of other plans"
    assert row.then(same).ends_study(same) and not row.then(other).ends_study(other)
    ran = FailuresInARow().then(ended(RunStatus.COMPLETED))  # then only some plans lack it
    for number in range(MOST_ALIKE):
        assert not ran.ends_study(same)
        ran = ran.then(lacking(str(number) * 12, 1))
    assert ran.ends_study(same)
