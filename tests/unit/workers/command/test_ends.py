"""Ends of programs as they stand in public reports, and what becomes of each."""

import os
import sys
import time
from pathlib import Path

import pytest

from wattune.run import Cause, RunStatus
from wattune.steps.source import parse_source
from wattune.trial import Measure
from wattune.workers.command.causes import (
    DEVICE,
    DEVICE_MEMORY,
    HOST_MEMORY,
    KILLED,
    NETWORK,
    PLAN,
    SURROUNDINGS,
)
from wattune.workers.command.failure import INVALID_FLAG, failure
from wattune.workers.command.measured_run import MeasuredRun

ENDS = Path(__file__).parents[3] / "fixtures" / "ends"
KINDS = {
    "plan": PLAN,
    "flag": PLAN,
    "memory": DEVICE_MEMORY,
    "host memory": HOST_MEMORY,
    "device": DEVICE,
    "network": NETWORK,
    "killed": KILLED,
    "surroundings": SURROUNDINGS,
}


def ends(*names: str) -> list[tuple[str, str, str, str, list[str]]]:
    """Reads ends: name, exit code, kind, what is said, and the lines of output."""
    found = []
    for name in names:
        for block in (ENDS / f"{name}.txt").read_text().split("\n== ")[1:]:
            head, _, output = block.partition("\n")
            found.append((*map(str.strip, head.split(" | ")[:4]), output.splitlines()))
    return found


@pytest.mark.parametrize(
    ("name", "code", "kind", "said", "lines"), ends("seen", "held", "held_again"), ids=lambda one: str(one)[:30]
)
def test_an_end_is_judged_by_what_ended_the_program(name, code, kind, said, lines):
    found, reason = failure(int(code), lines, {})
    assert (found, said in reason) == (KINDS[kind], True), (found, reason)
    assert reason.startswith(INVALID_FLAG) == (kind == "flag")


CASE = ENDS.parent / "cases" / "failures" / "fail.py"


@pytest.mark.parametrize(
    ("case", "status", "said"),
    [
        ("advice", RunStatus.CRASHED, "rank 0: AssertionError: length 4096 is no multiple"),
        (
            "ecc",
            RunStatus.INFRA_FAILED,
            "a device failed: exit code 1: rank 0: RuntimeError: CUDA error: uncorrectable",
        ),
        ("hip", RunStatus.OUT_OF_MEMORY, "rank 0: RuntimeError: HIP error: hipErrorOutOfMemory"),
        (
            "jax9",
            RunStatus.OUT_OF_MEMORY,
            "XlaRuntimeError: RESOURCE_EXHAUSTED: Failed to allocate request for 92.50GiB",
        ),
    ],
)
def test_case_failures(tmp_path, case, status, said):
    found = run([sys.executable, str(CASE), case], tmp_path)
    assert found.status is status and said in found.reason
    assert (found.cause is Cause.DEVICE) == (case == "ecc")


def run(arguments, folder):
    (folder / "steps").mkdir(parents=True)
    return MeasuredRun(
        arguments,
        os.environ,
        steps_folder=folder / "steps",
        source=parse_source("optimizer"),
        measure=Measure(),
        leads=True,
        orders=lambda timeout_s: time.sleep(min(timeout_s, 0.01)),
    ).until_over()


HEALTHY = (ENDS / "healthy.txt").read_text().split("\n== ")[1:]


@pytest.mark.parametrize("output", HEALTHY, ids=lambda one: one.partition(" | ")[0])
def test_words_that_frighten_change_no_verdict(output):
    lines = output.splitlines()[1:]
    raised = ["Traceback (most recent call last):", '  File "train.py", line 3, in <module>', "AssertionError: loss"]
    assert failure(1, [*lines, *raised], {}) == (PLAN, "exit code 1: AssertionError: loss")
    assert failure(1, lines, {0: "AssertionError: loss"})[0] is PLAN
    assert failure(-15, lines, {}) == (KILLED, "killed from outside: ended by SIGTERM")
    assert failure(-11, [*lines, "saved", "Segmentation fault (core dumped)"], {})[0].status is PLAN.status


def test_programs_that_end_well_are_completed_whatever_they_print(tmp_path):
    assert len(HEALTHY) >= 20
    for number, output in enumerate(HEALTHY):
        text = tmp_path / f"{number}.txt"
        text.write_text(output.partition("\n")[2])
        found = run(["cat", str(text)], tmp_path / str(number))
        assert (found.status, found.reason, found.cause) == (RunStatus.COMPLETED, "", None)
        assert found.output.splitlines()[-1] == output.splitlines()[-1]
