"""A node's part of a trial with small programs in place of training: every ending, and what is measured."""

import os
import sys
import tempfile
import time
from pathlib import Path

import pytest

from wattune.run import RunStatus
from wattune.steps.source import parse_source
from wattune.trial import Measure
from wattune.workers.command import measured_run
from wattune.workers.command.measured_run import MeasuredRun
from wattune.workers.watchdog import Order

pytestmark = pytest.mark.timeout(120)
MEASURE = Measure(warmup_steps=4, min_steps=10, min_seconds=0.2, timeout_s=30.0, stall_s=1.0)
LOOP = "from wattune import spans\nimport time\nfor n in range({}):\n with spans.step(tokens=7):\n  time.sleep(0.01)\n"


@pytest.fixture
def run(tmp_path: Path):
    def run(
        code,
        *,
        leads=True,
        steps="auto",
        order=None,
        order_after_s=0.0,
        when=None,
        program=None,
        measure=MEASURE,
        **callbacks,
    ):
        begun_s = time.monotonic()

        def orders(timeout_s):
            time.sleep(min(timeout_s, 0.05))
            due = time.monotonic() - begun_s >= order_after_s if when is None else when()
            return order if due else None

        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        return MeasuredRun(
            program or [sys.executable, "-c", code],
            os.environ,
            steps_folder=folder,
            source=parse_source(steps),
            measure=measure,
            leads=leads,
            grace_s=1.0,
            orders=orders,
            **callbacks,
        ).until_over()

    return run


def test_an_endless_program_is_measured_and_stopped(run, tmp_path: Path):
    told, finishing, heard = [], [], tmp_path / "heard"

    def progress(*of) -> None:
        told.append(of)
        heard.touch()

    found = run(
        f"import os, time\nwhile not os.path.exists({str(heard)!r}):\n time.sleep(0.01)\n" + LOOP.format(10**9),
        progress=progress,
        finishing=lambda: finishing.append(time.monotonic_ns()),
    )
    assert (found.status, found.reason) == (RunStatus.COMPLETED, "")
    assert found.num_measured >= 10 and found.first_index >= 4
    assert found.source.startswith("spans") and found.tokens_per_step == pytest.approx(7)
    assert found.startup_s > 0 and 0 < found.measured_s < found.run_s
    assert told[0][0] == "build"
    assert finishing and finishing[0] <= found.end_mono_ns  # the other nodes hear of it before anything is stopped


def test_a_program_that_ends_with_enough_steps_is_fine_and_with_few_is_not(run):
    enough = run(LOOP.format(16))
    assert enough.status is RunStatus.COMPLETED and enough.exit_code == 0 and enough.num_measured >= 2
    few = run(LOOP.format(3) + "print('bye')")
    assert few.status is RunStatus.CRASHED and few.reason.startswith("ended after 3 steps, needs 14 or more")
    assert few.output.endswith("bye\n")


def test_it_is_measured_until_all_of_its_ranks_have_told_enough(run):
    """Ranks of a pipeline end their steps apart, and each writes them when it likes."""
    rank = "import sys\n" + LOOP.format(10**9).replace("0.01", "0.05 if sys.argv[1] == '1' else 0.01")
    both = (
        "import os, subprocess, sys\n"
        f"command = [sys.executable, '-c', {rank!r}]\n"
        "ranks = [subprocess.Popen([*command, r], env={**os.environ, 'RANK': r}) for r in '01']\n"
        "for one in ranks: one.wait()"
    )
    found = run(both)
    assert found.status is RunStatus.COMPLETED and found.num_measured >= 10 and found.steps.keys() == {0, 1}
    for told in found.steps.values():
        assert {step.index for step in told} >= set(range(found.end_index))


@pytest.mark.parametrize(("growth", "steady"), [("0", True), ("0.05 * n", False)])
def test_a_node_that_does_not_lead_says_whether_its_own_steps_were_steady(run, tmp_path: Path, growth, steady):
    """Its steps are told and not slept, so that a busy machine does not change them."""
    ready = tmp_path / "ready"
    code = (
        "import os, pathlib, time\nfrom wattune.steps.process.writer import StepWriter\n"
        "writer, at = StepWriter('spans'), time.monotonic_ns()  # long ago would be a stall\n"
        f"for n in range(40):\n end = at + round((0.1 + {growth}) * 1e9); writer.step(at, end); at = end\n"
        f"writer.flush(); pathlib.Path({str(ready)!r}).touch()\ntime.sleep(100)"
    )
    found = run(code, leads=False, order=Order("finish", ""), when=ready.exists)
    assert found.steady is steady and len(found.steps[0]) == 40
    assert (found.first_index, found.end_index, found.stopped_early) == (0, None, "")


def test_what_a_command_told_until_nothing_of_it_is_left_is_read(run, tmp_path: Path):
    """Its node is told that another one has measured enough, and its last steps are written only then."""
    ready = tmp_path / "ready"
    code = (
        "import pathlib, signal, sys, time\nfrom wattune import spans\n"
        "def end(*_):\n for n in range(5):\n  with spans.step(): time.sleep(0.01)\n sys.exit()\n"
        "signal.signal(signal.SIGTERM, end)\nwith spans.step(): pass\n"
        f"pathlib.Path({str(ready)!r}).touch()\ntime.sleep(100)"
    )
    found = run(code, leads=False, order=Order("finish", ""), when=ready.exists)
    assert [len(each) for each in found.steps.values()] == [6]


def test_steps_in_the_output_are_found_by_a_pattern(run):
    code = "import time\nfor n in range(10**9):\n time.sleep(0.02)\n print(f'step time: {20 + n % 2} ms')"
    found = run(code, steps={"pattern": r"step time: ([0-9.]+) ms", "unit": "ms"})
    assert found.status is RunStatus.COMPLETED and found.source.startswith("pattern")
    measured = [step for step in found.steps[0] if step.index >= found.first_index]
    assert measured[2].duration_ns == pytest.approx(20e6, rel=0.6)


def test_without_any_step_the_run_is_the_window(run):
    found = run("import time; time.sleep(0.4)", steps="none")
    assert found.status is RunStatus.COMPLETED and not found.steps and found.startup_s is None
    assert 0.3e9 < found.end_mono_ns - found.start_mono_ns < 20e9


def test_a_hang_is_told_by_steps_and_a_silent_program_by_the_time_out(run):
    hangs = LOOP.format(12) + "print('waiting', flush=True)\ntime.sleep(100)"
    long = Measure(warmup_steps=4, min_steps=10**6, timeout_s=60.0, stall_s=0.5)
    found = run(hangs, measure=long)
    assert found.status is RunStatus.TIMED_OUT
    assert "no step finished for" in found.reason and "its last line: waiting" in found.reason
    found = run("import time; time.sleep(100)", measure=Measure(timeout_s=0.7, stall_s=0.1))
    assert found.status is RunStatus.TIMED_OUT and found.reason.startswith("longer than measure.timeout_s = 0.7")


def test_a_hang_before_the_first_step_is_seen_within_its_own_time_out(run, monkeypatch):
    monkeypatch.setattr(measured_run, "PIDS_EVERY_S", 0.1)
    hangs, measure = "print('meeting', flush=True)\nimport time; time.sleep(100)", Measure(start_stall_s=1.0)
    found = run(hangs, measure=measure)
    assert found.status is RunStatus.TIMED_OUT and found.reason.startswith("no sign of life for 1 s before its first")
    assert "measure.start_stall_s = 1" in found.reason and found.reason.endswith("its last line: meeting")
    for without in ({"leads": False}, {"steps": "none"}):  # the other nodes wait for the first; nobody asked for steps
        ends = run(hangs.replace("100", "2"), measure=measure, **without)
        assert ends.status is RunStatus.COMPLETED


def test_a_launcher_that_lingers_after_a_ranks_error_is_no_hang(run):
    rank = LOOP.format(12) + "raise ValueError('of a rank')"
    lingers = f"import subprocess, sys, time\nsubprocess.run([sys.executable, '-c', {rank!r}])\ntime.sleep(100)"
    long = Measure(warmup_steps=4, min_steps=10**6, timeout_s=60.0, stall_s=0.5)
    found = run(lingers, measure=long)
    assert found.status is RunStatus.CRASHED and "rank 0: ValueError: of a rank" in found.reason


def test_an_order_stops_it_and_the_end_of_the_trial_completes_it(run):
    stopped = run(LOOP.format(10**9), order=Order("free", "too much power"), order_after_s=0.3)
    assert (stopped.status, stopped.reason) == (RunStatus.ABORTED, "it was stopped: too much power")
    beside = run(LOOP.format(10**9), leads=False, order=Order("finish", ""), order_after_s=0.3)
    assert beside.status is RunStatus.COMPLETED


def test_a_node_whose_peers_were_stopped_waits_for_word_of_it(run):
    late = Order("finish", "")
    found = run("import sys; sys.exit(1)", leads=False, order=late, order_after_s=0.0)
    assert found.status is RunStatus.COMPLETED
    alone = run("import sys; sys.exit(1)", leads=False)
    assert alone.status is RunStatus.CRASHED
