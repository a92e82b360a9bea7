"""Commands that start in forks of processes with their imports made: as cold ones, and ended as they are."""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from wattune.run import RunStatus
from wattune.steps.source import parse_source
from wattune.trial import Measure
from wattune.workers.command.measured_run import MeasuredRun
from wattune.workers.command.warm_starts import WarmStarts
from wattune.workers.watchdog import Order

pytestmark = pytest.mark.timeout(120)
MEASURE = Measure(warmup_steps=1, min_steps=2, min_seconds=0.0, timeout_s=60.0, stall_s=20.0)

SCRIPT = """
import json, os, signal, sys, time
{before}
import decimal
import starts_thread
import own
import numpy
if __name__ == "__main__":
    print(json.dumps({
        "argv": sys.argv, "pid": os.getpid(), "given": os.environ.get("GIVEN"), "cwd": os.getcwd(), "file": __file__,
        "own": own.PID, "thread": starts_thread.PID, "decimal": decimal.BORN, "random": float(numpy.random.rand()),
        "group": os.getpgrp(), "signals": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "path": sys.path,
    }), flush=True)
{after}
"""
BORN = "import os, decimal; decimal.BORN = os.getpid()"
"""A library that a program imports: it says in which process it was."""


@pytest.fixture
def warm():
    with contextlib.closing(WarmStarts()) as starts:
        yield starts
        servers = [server.command_pid for server in starts._servers.values()]
    assert not [pid for pid in servers if pid and psutil.pid_exists(pid)] and not starts._home.exists()


@pytest.fixture
def run(tmp_path: Path, warm: WarmStarts):
    packages = tmp_path / "x-packages"
    packages.mkdir()
    (packages / "starts_thread.py").write_text(
        "import os, threading, time\nPID = os.getpid()\n"
        "threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n"
    )
    (packages / "decimal_born.py").write_text(BORN)
    # As Ubuntu has it: what it asks for is asked for before the program's own folder is on the path.
    (packages / "sitecustomize.py").write_text("try:\n    import no_such_hook\nexcept ImportError:\n    pass\n")
    (tmp_path / "own.py").write_text("import os\nimport decimal_born\nPID = os.getpid()\n")

    def run(*arguments: str, before="", after="", order=None, order_when=lambda: False, given="", start="python"):
        (tmp_path / "train.py").write_text(SCRIPT.replace("{before}", before).replace("{after}", after))
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")]),
            "GIVEN": given,
        }
        program = ["-m", "train"] if start == "-m" else [str(tmp_path / "train.py")]
        launcher = ["torchrun", "--standalone", "--nproc-per-node", "2"] if start == "torchrun" else ["python"]
        command, environment = warm.prepared([*launcher, *program, *arguments], environment)
        steps = tmp_path / f"steps{time.monotonic_ns()}"
        steps.mkdir()
        found = MeasuredRun(
            command,
            environment,
            steps_folder=steps,
            source=parse_source("none"),
            measure=MEASURE,
            leads=True,
            orders=lambda _: (time.sleep(0.02), order if order_when() else None)[1],
            grace_s=1.0,
            cwd=tmp_path,
            others=warm.pids,
        ).until_over()
        first = next((json.loads(line) for line in found.output.splitlines() if line.startswith("{")), {})
        return found, first, warm.told()

    return run


def test_a_fork_is_as_the_process_it_stands_for(run, warm: WarmStarts, tmp_path: Path):
    cold, first, told = run("--lr", "1")
    assert told == "0 of 1 processes are forks; 1 cold: the first of its kind" and cold.status is RunStatus.COMPLETED
    found, fork, told = run("--lr", "2")
    assert told == "1 of 1 processes are forks", found.output
    assert fork["argv"] == [str(tmp_path / "train.py"), "--lr", "2"] and fork["cwd"] == first["cwd"] == str(tmp_path)
    assert fork["group"] == fork["pid"] and fork["signals"] and fork["path"] == first["path"]
    # Libraries were there; what acts is its own: modules of the program, and one that starts a thread.
    (server,) = warm._servers.values()
    assert fork["own"] == fork["thread"] == fork["pid"] and fork["decimal"] == server.command_pid
    again = run("--lr", "3")[1]
    assert again["pid"] != fork["pid"] and len({first["random"], fork["random"], again["random"]}) == 3

    # An end is the program's: code, signal, last words, output without its end of line.
    code = run(after="sys.exit(7)")[0]
    assert code.exit_code == 7
    raised = run(after="raise ValueError('its own')")[0]
    assert raised.exit_code == 1 and raised.output.splitlines()[-1] == "ValueError: its own"
    killed = run(after="os.kill(os.getpid(), signal.SIGSEGV)")[0]
    assert killed.exit_code == -signal.SIGSEGV

    # A variable that imports may read makes it another process.
    other, own, told = run(given="other")
    assert told.endswith("1 cold: the first of its kind") and own["given"] == "other" and other.exit_code == 0
    assert run(given="other")[2] == run()[2] == "1 of 1 processes are forks"


def test_what_a_program_sets_before_an_import_is_there_when_it_is_imported(run):
    before = "import colorsys\nos.environ['SET'] = 'by the program'\nos.environ['SEEN'] = str('decimal' in sys.modules)"
    run(before=before)
    found, fork, told = run(before=before, after="    print(fork := os.environ['SEEN'])")
    assert told == "1 of 1 processes are forks" and fork["random"]
    assert found.output.splitlines()[-1] == "False"


def test_a_module_and_processes_that_it_spawns(run):
    after = (
        "    import multiprocessing\n    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.apply(os.path.basename, (sys.argv[0],)), pool.apply(own_name), flush=True)\n"
    )
    before = "def own_name():\n    return __name__ + str(len(sys.argv))\n"
    cold = run("a", before=before, after=after, start="-m")[0]
    found, _, told = run("a", before=before, after=after, start="-m")
    assert told == "1 of 1 processes are forks" and found.exit_code == 0, found.output
    assert found.output.splitlines()[-1] == cold.output.splitlines()[-1] == "train.py __mp_main__2"


@pytest.mark.slow
def test_torchrun_and_each_of_its_ranks_are_forks(run, warm: WarmStarts, tmp_path: Path):
    after = f"    open(f'{tmp_path}/rank' + os.environ['RANK'] + '-' + str(os.getpid()), 'w').close()\n"
    cold, _, told = run("--lr", "1", after=after, start="torchrun")
    assert cold.exit_code == 0 and told == "0 of 3 processes are forks; 3 cold: the first of its kind"
    found, first, told = run("--lr", "2", after=after, start="torchrun")
    assert found.exit_code == 0 and told == "3 of 3 processes are forks", found.output
    assert first["argv"] == [str(tmp_path / "train.py"), "--lr", "2"] and first["own"] == first["pid"]
    assert first["decimal"] in [server.command_pid for server in warm._servers.values()], "a library that was there"
    assert sorted(path.name[:6] for path in tmp_path.glob("rank*")) == ["rank0-", "rank0-", "rank1-", "rank1-"]
    # A rank that fails ends the other one, which waits, and the command with it.
    failing = "    if os.environ['RANK'] == '1': sys.exit(7)\n    time.sleep(60)\n"
    begun_s, (failed, _, told) = time.monotonic(), run(after=failing, start="torchrun")
    assert told == "3 of 3 processes are forks" and failed.exit_code == 1 and time.monotonic() - begun_s < 50
    assert not [pid for pid in warm.pids() if psutil.pid_exists(pid)]


def test_it_ends_as_it_would_and_the_end_of_its_server_is_told(run, warm: WarmStarts, tmp_path: Path):
    started = tmp_path / "started"
    after = "    if os.fork() == 0:\n        os.setsid()\n"
    after += f"    open({str(started)!r} + str(os.getpid()), 'w')\n    time.sleep(60)\n"

    def both() -> bool:
        return len([*tmp_path.glob("started*")]) == 2

    run(after="")
    for kind in ("stop", "stand-in", "server"):
        for path in tmp_path.glob("started*"):
            path.unlink()

        def when(kind: str = kind) -> bool:
            if kind == "stop" or not both():
                return kind == "stop" and both()
            (server,) = [each.command_pid for each in warm._servers.values()]
            if kind == "server":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(server, signal.SIGKILL)
            else:
                for each in psutil.process_iter(["cmdline"]):
                    if str(warm._home) in (each.info["cmdline"] or ()) and "in" in each.info["cmdline"]:
                        each.kill()
            return False

        found = run(after=after, order=Order("free", "asked"), order_when=when)[0]
        pids = [int(path.name.removeprefix("started")) for path in tmp_path.glob("started*")]
        assert len(pids) == 2 and not [pid for pid in pids if psutil.pid_exists(pid)], kind
        status = RunStatus.ABORTED if kind == "stop" else RunStatus.INFRA_FAILED
        assert found.status is status, (kind, found.reason)
    found, first, told = run(after="")
    assert found.status is RunStatus.COMPLETED and first
    assert told == "0 of 1 processes are forks; 1 cold: its process ended"
