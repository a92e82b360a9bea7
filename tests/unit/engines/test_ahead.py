"""The process that compiles ahead: where it starts, what a plan that fails costs, and that it ends with its worker."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import tiny_models
from specs import trial_spec

from wattune.engines import ahead
from wattune.engines.ahead import EARLY, early, start, taken
from wattune.plans.placement import Slot

SPEC = trial_spec(tiny_models.LLAMA, on="1x2 h200_sxm", seq_len=8, batch=2, rank_order=(1, 0))
HERE = Slot(node=0, device=1)
OF_TORCH = """
import os, time
def compile_ahead(spec, ranks, part):
    here = os.environ["HERE"]
    open(f"{here}/{os.getpid()}", "w").close()
    try:
        open(f"{here}.first", "x").close()
    except FileExistsError:
        ...
    else:
        print("loud", ranks, part, flush=True)
        raise RuntimeError("no compiler here")
    time.sleep(float(os.environ["STAYS_S"]))
"""


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts it with something in the place of torch, which would take seconds to load."""
    here = tmp_path / "begun"
    here.mkdir()
    monkeypatch.setenv("HERE", str(here))
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, types, wattune.engines.torch\n"
        "made = types.ModuleType('wattune.engines.torch.ahead')\n"
        f"exec({OF_TORCH!r}, made.__dict__)\n"
        "wattune.engines.torch.ahead = sys.modules[made.__name__] = made\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ""), *sys.path]))
    monkeypatch.setattr(ahead, "_beside", [])

    def begun(num_plans: int, stays_s: float, processors: int = 16) -> subprocess.Popen[bytes]:
        monkeypatch.setenv("STAYS_S", str(stays_s))
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))
        start([SPEC] * num_plans, HERE)
        return ahead._beside[0][2]

    yield begun
    ahead.end()


def until(done: Callable[[], object], within_s: float = 60.0) -> None:
    end_s = time.monotonic() + within_s
    while not done():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def status(pid: int) -> str:
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "zombie"  # and taken away since


def test_a_plan_that_fails_costs_no_other(begin: Callable[..., subprocess.Popen[bytes]], tmp_path: Path, capfd) -> None:
    process = begin(3, 0.0)
    assert process.wait(60) == 0
    assert len(list((tmp_path / "begun").iterdir())) == 6, "the layers and the head of each"
    said = capfd.readouterr().err
    assert said.count("RuntimeError: no compiler here") == 1 and SPEC.trial_id in said
    assert "loud Ranks(rank=0, world_size=2, local_rank=1, device='cuda:1') " in said
    cpu_s, num_failed = taken()
    assert cpu_s > 0 and num_failed == 1 and taken() == (0, 0)


def test_it_ends_with_its_worker_and_so_do_its_children(begin, tmp_path: Path) -> None:
    process = begin(5, 60.0)
    assert ahead.pids()[0] == process.pid
    begun = tmp_path / "begun"
    assert taken() == (0, 0), "nothing has ended yet, and nobody waits for it"
    until(lambda: len(list(begun.iterdir())) == 3)  # the one that failed, and two that stay
    children = psutil.Process(process.pid).children()
    assert len(children) == 2 and all(one.nice() == 19 for one in children)
    assert {*ahead.pids()} == {process.pid, *(one.pid for one in children)}
    ahead.hold()
    until(lambda: all(one.status() == "stopped" for one in children))
    assert psutil.Process(process.pid).status() != "stopped", "it must hear when its worker ends"
    ahead.hold(signal.SIGCONT)
    until(lambda: all(one.status() == "sleeping" for one in children))
    ahead.hold()
    process.stdin.close()  # as the kernel does when a worker is killed
    assert process.wait(60) == 0 and ahead.pids() == ()
    until(lambda: all(status(one.pid) == "zombie" for one in children))
    assert len(list(begun.iterdir())) == 3


def test_nothing_is_forked_while_steps_are_measured(begin, tmp_path: Path) -> None:
    process = begin(10, 0.0)
    begun = tmp_path / "begun"
    until(lambda: list(begun.iterdir()))
    ahead.hold()  # whatever it is at: about to fork, or to wait for one that ended
    until(lambda: all(status(one) in ("stopped", "zombie") for one in ahead.pids()[1:]))
    num_begun = len(list(begun.iterdir()))
    time.sleep(0.5)  # several turns of its loop
    assert len(list(begun.iterdir())) == num_begun < 20
    ahead.hold(signal.SIGCONT)
    assert process.wait(60) == 0 and len(list(begun.iterdir())) == 20


def test_workers_take_over_what_their_study_began(begin, tmp_path: Path, monkeypatch) -> None:
    begin(1, 0.0).wait(60)  # fills the processes' environment
    ahead._beside.clear()
    monkeypatch.setenv("STAYS_S", "60")
    with early([SPEC] * 4, tmp_path, lambda spec: spec.device == "h200_sxm"):
        folder = Path(os.environ[EARLY])
        until(lambda: (folder / "1.pid").exists())
        start([SPEC], HERE)
        ((_, _, own),) = ahead._beside
        assert own is None, "nothing is begun a second time"
        until(lambda: len(ahead.pids()) == 3)
        assert str(ahead.pids()[0]) == (folder / "1.pid").read_text() and taken() == (0, 0)
        os.kill(ahead.pids()[1], signal.SIGKILL)
        until(lambda: taken()[1])
        ahead.end()
        until(lambda: len(ahead.pids()) == 1)  # nobody has asked how it ended
        first = int((folder / "0.pid").read_text())
        assert psutil.pid_exists(first), "that of another worker"
    assert not psutil.pid_exists(first) and EARLY not in os.environ
    with early([SPEC], tmp_path, lambda _: False):
        assert not list(Path(os.environ[EARLY]).iterdir())


def test_few_processors_are_left_to_the_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(7)))
    monkeypatch.setattr(ahead, "_beside", [])
    start([SPEC], HERE)
    assert not ahead._beside


def test_a_study_goes_on_where_no_process_can_be_begun(tmp_path: Path, monkeypatch, caplog) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ahead, "_begin", full)
    with early([SPEC], tmp_path, lambda _: True):
        pass
    assert "not compiled before workers start" in caplog.text and EARLY not in os.environ
