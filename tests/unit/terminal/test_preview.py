"""The words of a preview, before anything starts."""

import math
from collections import Counter
from dataclasses import replace
from typing import Any

from specs import trial_spec

from wattune.catalog.hardware import ClusterSpec
from wattune.orchestrate.events import Preview, TrialEvent
from wattune.run import RunStatus
from wattune.terminal.preview import preview_lines
from wattune.trial import TrialSpec
from wattune.workload import Workload

CLUSTER = ClusterSpec(device="h200_sxm", devices_per_node=4)


def spec(size: int) -> TrialSpec:
    return trial_spec(on=CLUSTER, seq_len=8, batch=64, micro_batch_size=size)


def lines(**facts: Any) -> list[str]:
    load_s = {CLUSTER: 900.0}
    base: dict[str, Any] = {"num_left": 5, "num_now": 5, "num_references": 0, "num_finalists": 0, "num_again": 0}
    base |= {"load_s": load_s, "load_now_s": load_s, "most_s": math.inf, "measured": False, "done": Counter()}
    return [str(line) for line in preview_lines(Preview(**(base | facts)))]


def test_times_say_what_they_come_from() -> None:
    assert lines() == ["5 trial(s) to run: at least 1 device-hours (measured steps alone; build and warm-up on top)"]
    assert lines(estimated=True) == [
        "5 trial(s) to run: about 1 device-hours (by estimated step times, and starts as earlier trials took)"
    ]
    assert lines(estimated=True, measured=True) == [
        "5 trial(s) to run: about 1 device-hours (by the trials that finished)"
    ]


def test_changes_come_first_and_what_is_drawn_and_done_is_said() -> None:
    changed = {"changes": ("measure.repeats: 1 -> 3",), "space_number": 2}
    said = lines(**changed, num_kept=684, num_drawn=12, done={RunStatus.COMPLETED: 3})
    assert said[:2] == ["space 2: measure.repeats: 1 -> 3", "12 of 684 kept are tried (search.num_trials)"]
    assert said[-1] == "3 skipped, done before: 3 completed"


def test_the_first_trials_are_named_with_role_and_time() -> None:
    first = tuple(
        TrialEvent(kind="started", spec=spec(size), repeat=0, role=role, expected_s=took_s)
        for size, role, took_s in ((2, "reference", 30.0), (2, "reference", 30.0), (1, "trial", 90.0))
    )
    assert lines(first=first, estimated=True)[-1] == (
        "first: reference trial dp4 mbs2 2 times (about 30 s each), then dp4 mbs1 (about 1:30 min)"
    )
    assert lines(first=first)[-1] == "first: reference trial dp4 mbs2 2 times, then dp4 mbs1"
    assert "first" not in lines(first=first, num_now=0)[-1]


def test_time_outs_are_said_before_they_happen() -> None:
    said = lines(estimated=True, num_timeouts=2, longest_s=5400.0, num_kept=8, num_drawn=8)[-1]
    assert said.startswith("2 trial(s) are expected to reach measure.timeout_s") and "up to 1:30 h" in said
    chosen = lines(estimated=True, num_timeouts=7, longest_s=5400.0, num_kept=8, num_drawn=4)[-1]
    assert chosen.startswith("7 of the 8 kept are expected to reach measure.timeout_s")


def test_first_trials_of_other_sizes_have_other_names() -> None:
    long = replace(spec(1), workload=Workload(seq_len=16, global_batch_size=64))
    first = tuple(TrialEvent(kind="started", spec=one, repeat=0, expected_s=30.0) for one in (spec(1), long))
    assert lines(first=first)[-1] == "first: dp4 mbs1 seq8, then dp4 mbs1 seq16"
    assert lines(first=first[:1], workloads=(long.workload,))[-1] == "first: dp4 mbs1 seq8"
