"""The live view of a study while it runs."""

import io
import re
import threading
from dataclasses import replace
from typing import Any

import pytest
from made_events import CLUSTER, QUESTION, ended, placement, preview, spec, started
from rich.console import Console
from rich.text import Text

from wattune.objective import Question
from wattune.orchestrate.events import RaceStep, RowStopped, TrialProgress
from wattune.run import Prediction, Run, RunStatus
from wattune.terminal.progress import StudyProgress


def plain(*events: Any) -> list[str]:
    out = io.StringIO()
    progress = StudyProgress(Console(file=out, width=160), QUESTION, clock_s=lambda: 0.0)
    with progress:
        for event in events:
            progress(event)
    return out.getvalue().splitlines()


def test_plain_lines_say_what_will_happen_and_what_did() -> None:
    lines = plain(
        preview(4, {RunStatus.COMPLETED: 1}, num_again=1, num_references=1),
        ended(1, 100, kind="skipped"),
        placement(wall_s=125),
        started(2),
        ended(2, 250),
        started(4),
        ended(4, status=RunStatus.CRASHED),
    )
    assert lines[0] == (
        "4 trial(s) to run, 1 reference trial(s), 1 begun before among them: at least 1 device-hours "
        "(measured steps alone; build and warm-up on top)"
    )
    assert lines[1] == "1 skipped, done before: 1 completed"
    assert lines[2].startswith("[1/5]") and "done before  tokens_per_s 100" in lines[2]
    assert lines[3] == "1 at once on n0; at least 2:05 min"
    assert lines[4].startswith("[2/5]") and "tokens_per_s 250" in lines[4] and "1 s node peak 900" in lines[4]
    assert "took 20" in lines[4]
    assert lines[5].startswith("[3/5]") and "crashed: rank 0: it broke" in lines[5]
    assert len(lines) == 6


@pytest.mark.parametrize(
    ("budget", "line"),
    [
        (
            {"num_now": 1, "load_now_s": {CLUSTER: 450.0}},
            "at most 1 of them, at least 0.25 device-hours (--max-trials or --gpu-hours)",
        ),
        ({"num_now": 0, "load_now_s": {}}, "none of them (--max-trials or --gpu-hours)"),
        ({"most_s": 7200.0}, "at most 2:00 h on the clock (--max-hours or --deadline)"),
        (
            {"num_now": 2, "load_now_s": {CLUSTER: 900.0}, "measured": True, "most_s": 90.0},
            (
                "at most 2 of them, about 0.5 device-hours (--max-trials or --gpu-hours); "
                "at most 1:30 min on the clock (--max-hours or --deadline)"
            ),
        ),
    ],
)
def test_what_this_call_does_at_most_is_said_before_it_starts(budget: dict[str, Any], line: str) -> None:
    lines = plain(preview(4, **budget))
    assert lines[0].startswith("4 trial(s) to run: ") and "1 device-hours" in lines[0]
    assert lines[1:] == [f"this call: {line}"]


def test_the_time_of_this_call_is_that_of_its_budget() -> None:
    lines = plain(preview(40, most_s=50.0), placement(wall_s=45, cut_short=True))
    assert lines[-1] == "1 at once on n0; at most 45 s and 0.0333 device-hours (--max-hours or --deadline)"


def test_what_waits_for_nodes_is_said_at_once() -> None:
    missing = ("2x1 cpu needs 2 node(s) with 1 device(s) cpu each; the cluster has n0: 2 CPU",)
    lines = plain(preview(2), placement(missing=missing))
    assert lines[-1] == f"waits for nodes: {missing[0]}"


def test_many_skipped_trials_are_counted_and_not_listed() -> None:
    lines = plain(preview(0, {RunStatus.COMPLETED: 40}), *(ended(size, 1, kind="skipped") for size in range(1, 41)))
    assert lines[-1] == "... and 35 more done before"
    assert len(lines) == 2 + 5 + 1


def test_on_a_narrow_terminal_lines_fold_between_words_and_in_a_file_not_at_all() -> None:
    for is_terminal, num_lines in ((True, 2), (False, 1)):
        console = Console(file=io.StringIO(), width=80, force_terminal=is_terminal, color_system=None)
        progress = StudyProgress(console, QUESTION)
        event = ended(1, status=RunStatus.ABORTED)
        assert event.result is not None
        reason = "stopped while running: power of node n0 was 3000 W over 1 s, the hard limit is 2900 W"
        progress(replace(event, result=replace(event.result, reason=reason)))
        lines = console.file.getvalue().splitlines()
        assert len(lines) in (num_lines, num_lines + is_terminal)
        assert "aborted: stopped" in lines[0] and " ".join(" ".join(lines).split()).endswith(reason)


def test_an_anchor_of_an_earlier_call_is_called_one() -> None:
    earlier = ended(1, 100, kind="skipped", repeat=1000)
    assert "mbs1 reference trial " in plain(preview(1), replace(earlier, role="reference"))[-1]


def rendered(progress: StudyProgress) -> str:
    console = Console(file=io.StringIO(), width=120, record=True)
    console.print(progress.view())
    return console.export_text()


def test_the_live_view_shows_what_runs_what_failed_and_what_is_best() -> None:
    now_s = [0.0]
    progress = StudyProgress(Console(file=io.StringIO()), QUESTION, clock_s=lambda: now_s[0])
    assert "starting" in rendered(progress)
    told = TrialProgress(part="measure", done=12, total=20)
    for event in (
        preview(6),
        placement(),
        started(1),
        ended(1, 100),
        started(2),
        ended(2, status=RunStatus.OUT_OF_MEMORY),
        started(4, progress=lambda: told, role="reference"),
    ):
        progress(event)
    now_s[0] = 30
    progress._progress[next(iter(progress._tally.running))] = told
    text = rendered(progress)
    assert "2/6 trials" in text and "30 s elapsed" in text
    assert "mbs4 reference trial" in text and "measure 12/20" in text and "n0" in text
    assert "1 out_of_memory" in text
    lines = [line.rstrip() for line in text.splitlines()]
    (told,) = (
        line for line in lines if line.startswith("The best plan so far that keeps every bound is dp2 mbs1: 100")
    )
    assert told.endswith("P(best) 1.00.")
    assert any(
        line.startswith("Closest bound: node_device_power_peak_1s_w <= 1000: +100 W (+10.0 %), holds") for line in lines
    )


def test_the_live_view_says_that_nothing_is_within_the_bounds() -> None:
    progress = StudyProgress(Console(file=io.StringIO()), QUESTION)
    progress(preview(6))
    progress(ended(1, status=RunStatus.OUT_OF_MEMORY))
    assert "best" not in rendered(progress), "nothing was measured"
    progress(ended(2, 100, peak_w=1100))
    assert "No plan that was measured keeps every bound." in rendered(progress)
    progress(ended(8, 70, peak_w=990))
    text = rendered(progress)
    assert "No plan is known to keep every bound. Most likely the best is dp2 mbs8: 70" in text
    assert (
        "Closest bound: node_device_power_peak_1s_w <= 1000: +10 W (+1.0 %), undecided" in text and "Next:" not in text
    )
    progress(ended(4, 50, peak_w=900))
    assert "Not decided. The best known plan so far that keeps every bound is dp2 mbs4" in rendered(progress)
    assert "Undecided, and could be better: dp2 mbs8, 40.0 % faster, P(holds) 0.7" in rendered(progress)


def test_a_log_is_told_from_time_to_time_how_far_trials_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wattune.terminal.progress.TELL_EVERY_S", 0.02)
    told = threading.Event()

    class Log(io.StringIO):
        def write(self, text: str) -> int:
            if "runs for" in text:
                told.set()
            return super().write(text)

    console = Console(file=Log(), width=100)
    with StudyProgress(console, QUESTION) as progress:
        progress(preview(2))
        progress(started(1, progress=lambda: TrialProgress(part="measure", done=7, total=20)))
        assert told.wait(60)
        progress(ended(1, 100))
    lines = console.file.getvalue().splitlines()
    running = next(line for line in lines if "runs for" in line)
    assert re.fullmatch(r"\[0/2\] .* runs for \d+ s  measure 7/20", running)


def test_workers_that_do_not_answer_hold_up_nothing() -> None:
    asked, over, waited = threading.Event(), threading.Event(), []

    def slow() -> None:
        asked.set()
        waited.append(over.wait(10))

    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with StudyProgress(console, QUESTION) as progress:
        progress(preview(1))
        progress(started(1, progress=slow))
        assert asked.wait(60), "it asks by itself"
        progress(ended(1, 100))
    assert waited == []
    over.set()
    assert "[1/1]" in console.file.getvalue()


@pytest.mark.timeout(60)
def test_a_ctrl_c_in_the_middle_of_a_line_does_not_wait_for_the_screen() -> None:
    """The handler runs on the thread that writes, while the view's own thread waits for that write to end."""

    class Screen(io.StringIO):
        def write(self, text: str) -> int:
            if "a line" in text and not refreshing.is_alive():
                refreshing.start()
                assert has_view.wait(10)
                progress.stopping("stopping: at most 15 s")  # what the signal's handler calls
                is_handled.set()
            return super().write(text)

    def refresh() -> None:
        live = progress._live
        assert live is not None
        with live._lock:  # as rich's own thread does, which then waits for the console
            has_view.set()
            live.refresh()

    has_view, is_handled = threading.Event(), threading.Event()
    refreshing = threading.Thread(target=refresh, daemon=True)
    console = Console(file=(screen := Screen()), force_terminal=True, width=80)
    with (progress := StudyProgress(console, QUESTION)):
        writing = threading.Thread(target=progress._print, args=(Text("a line"),), daemon=True)
        writing.start()
        writing.join(20)
        assert is_handled.is_set() and not writing.is_alive()
    refreshing.join(20)
    assert "a line" in screen.getvalue() and "stopping: at most 15 s" in screen.getvalue()


def test_failures_of_the_cluster_are_told_apart_and_a_row_that_stops_is_said() -> None:
    failed = Run(trial_id="a", repeat=0, status=RunStatus.INFRA_FAILED, reason="node n1 left the cluster")
    again = replace(ended(1, 100), result=failed, again=True)
    stopped = RowStopped(cluster=CLUSTER, engine="torch", result=failed, count=5, num_held=7)
    lines = plain(preview(12), again, replace(again, again=False), stopped)
    assert lines[-3].endswith("infra_failed: node n1 left the cluster; tried again")
    assert lines[-2].endswith("infra_failed: node n1 left the cluster")
    assert "5 trials of torch on" in lines[-1] and "no more of them start, 7 that waited are left" in lines[-1]


def test_trials_that_cannot_be_read_are_named_before_anything_starts() -> None:
    damaged = {"a-0": "trials/a-0: no trial of this version"}
    assert plain(preview(1, unreadable=damaged))[0] == "not read and not run: trials/a-0: no trial of this version"


def race_step(**more: Any) -> RaceStep:
    facts = {"leader": spec(2), "best_probability": 0.84, "before": 0.71, "num_repeats": 3, "most_repeats": 8}
    return RaceStep(**(facts | more))


def test_a_race_is_told_step_by_step_and_shown_while_it_runs() -> None:
    first = race_step(before=None, best_probability=0.71, num_repeats=2)
    last = race_step(best_probability=0.96, before=0.84, num_repeats=4, ending="the best is told apart")
    lines = plain(preview(8, num_race=3), first, race_step(), last)
    assert "3 repeat(s) of the race" in lines[0]
    assert plain(preview(8, num_race=3), ended(1, 100))[-1].startswith("[1/up to 8]"), "some may never run"
    assert plain(preview(8, num_race=3), last, ended(1, 100))[-1].startswith("[1/8]")
    assert lines[1:] == [
        "racing: P(best) 0.71 for llama3_8b dp2 mbs2, 2 of at most 8 repeats",
        "racing: P(best) 0.71 -> 0.84 for llama3_8b dp2 mbs2, 3 of at most 8 repeats",
        "racing: P(best) 0.84 -> 0.96 for llama3_8b dp2 mbs2, 4 of at most 8 repeats; the best is told apart",
    ]
    progress = StudyProgress(Console(file=io.StringIO(), width=120), Question(objective=QUESTION.objective))
    for event in (preview(8), race_step(), started(2, role="race")):
        progress(event)
    shown = rendered(progress)
    assert "P(best) 0.71 -> 0.84" in shown and "race #0" in shown


def test_what_was_predicted_stands_beside_what_was_measured() -> None:
    made = Prediction(metric="tokens_per_s", value=12300.0, low=11000.0, high=13700.0, feasible_probability=0.9)
    out = io.StringIO()
    progress = StudyProgress(Console(file=out, width=160), QUESTION, clock_s=lambda: 0.0)
    progress(replace(started(1), predicted=made))
    running = io.StringIO()
    Console(file=running, width=160).print(progress.view())
    assert "predicted 12.3 k/s (11 k/s to 13.7 k/s)" in running.getvalue()
    progress(replace(ended(1, 12900.0), predicted=made))
    progress(ended(2, 100.0))
    first, second = out.getvalue().splitlines()
    assert "tokens_per_s 12.9 k/s  predicted 12.3 k/s (11 k/s to 13.7 k/s)" in first
    assert "predicted" not in second


def test_trials_of_a_study_of_several_sizes_are_named_with_theirs() -> None:
    workloads = (spec(2).workload, replace(spec(2).workload, seq_len=16))
    step = race_step(leader_name="dp2 mbs2 seq8")
    lines = plain(preview(4, workloads=workloads), ended(2, 250), step)
    assert "llama3_8b dp2 mbs2 seq8 " in lines[-2] and "for llama3_8b dp2 mbs2 seq8, 3 of" in lines[-1]
    progress = StudyProgress(Console(file=io.StringIO(), width=160), Question(objective=QUESTION.objective))
    for event in (preview(8, workloads=workloads), ended(2, 250), started(4)):
        progress(event)
    shown = rendered(progress)
    assert "best plan so far is dp2 mbs2: 250" in shown and "llama3_8b dp2 mbs4 seq8 " in shown
