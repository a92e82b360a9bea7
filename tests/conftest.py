"""The suite as a whole: the groups it is divided into, and that nothing of it is left behind.

`make test` runs it in two processes. A file's tests stay together, since they share what they measured; all that
start Ray are one group, since clusters that start side by side take each other's ports. That group comes first: it
takes longest and often waits. The other process works through everything else and steps back where Ray's has work, or
each start of a cluster would wait for it.
"""

import gc
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any

import psutil
import pytest
from _pytest.assertion import rewrite

RAY_GROUP = "ray"
STANDING_CLUSTER = ("go_on_standing_cluster", "on_standing_cluster")
"""Fixtures of the tests that share a cluster, those that begin on others first. They come last of the Ray group, so
that it stands beside no other."""

LONG_FOLDERS = (
    "tests/contracts/",
    "tests/unit/engines/",
    "tests/unit/workers/",
    "tests/unit/tracking/",
    "tests/unit/telemetry/",
    "tests/unit/calibration/",
    "tests/fuzz/",
    "tests/e2e/",
)
"""Folders that take longest beside Ray. They follow it in this order, so that only short files are left for the end."""

RUN_VARIABLE = "TEST_SUITE_RUN"
"""In the environment of every process of a run, so that what stays can be told from what others do."""

STEP_BACK = 5
"""Niceness of what starts no Ray, where several processes run tests: about a third of the weight of Ray's group."""

LONG_LOOK_S = 0.05
"""A look for garbage that takes longer goes through what libraries made, and not only through what tests did."""

GONE_WITHIN_S = 20.0
"""Longest a process may outlive the last test: a sampler that nobody renews closes its files after 10 s."""

# Images of containers often keep Python from writing bytecode. Each process that the suite starts would then compile
# the modules of wattune anew, and each process of tests those of the tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if "PYTEST_XDIST_WORKER" in os.environ:
    # Several processes of tests share the processors; threads of torch's own would only take turns.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return
    os.environ[RUN_VARIABLE] = f"{os.getpid()}-{secrets.token_hex(4)}"
    # All temporary folders but pytest's own, which it keeps for who looks into a failure. Short: sockets lie in there.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="wt-")
    if config.getoption("dist", "no") != "no":
        # No test runs in this process: a stop, as of `timeout`, ends the run as any other end does.
        signal.signal(signal.SIGTERM, stop)


def stop(*_: object) -> None:
    """Ends the run, once: `timeout` sends its signal to the whole group, and `cpu_seconds.py` passes its own on."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pytest.exit("stopped by SIGTERM", pytest.ExitCode.INTERRUPTED)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Collects without looks for garbage, and keeps what was collected out of those of the tests: all of it stays."""
    gc.disable()
    try:
        compile_share(session.config)
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        gc.callbacks.append(looks)


def compile_share(config: pytest.Config) -> None:
    """Compiles this process's share of the tests, where several run them: each collects all, and would compile all."""
    worker, count = (os.environ.get(f"PYTEST_XDIST_WORKER{end}", "") for end in ("", "_COUNT"))
    state = config.stash.get(rewrite.assertstate_key, None)
    if not worker or state is None or sys.dont_write_bytecode:
        return
    for path in sorted(Path(__file__).parent.rglob("test_*.py"))[int(worker.removeprefix("gw")) :: int(count)]:
        compiled = rewrite.get_cache_dir(path) / (path.stem + rewrite.PYC_TAIL)
        # By its time alone: to read it takes as long as the collection, which compiles what is stale after all.
        is_there = compiled.exists() and compiled.stat().st_mtime >= path.stat().st_mtime
        if not is_there and rewrite.try_makedirs(compiled.parent):
            status, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(state, code, status, compiled)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        if starts_ray(item.path):
            names = getattr(item, "fixturenames", ())
            return next((number - 2 for number, name in enumerate(STANDING_CLUSTER) if name in names), -3)
        folders = enumerate(LONG_FOLDERS)
        return next((number for number, folder in folders if item.nodeid.startswith(folder)), len(LONG_FOLDERS))

    items.sort(key=place)  # stable: a file's tests stay in order


@cache
def starts_ray(path: Path) -> bool:
    """Says whether tests of a file are marked so. The process that hands out tests knows their names alone."""
    return "pytest.mark.ray" in path.read_text()


@cache
def step_back() -> None:
    """Lowers this process's priority, once, and with it that of all that it starts from now on."""
    os.nice(STEP_BACK)


class Looks:
    """Notes whether a look through all objects for garbage took long."""

    took_long = False
    _begun_s = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] == 2:
            if phase == "start":
                self._begun_s = time.thread_time()
            else:
                self.took_long |= time.thread_time() - self._begun_s > LONG_LOOK_S


looks = Looks()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if "PYTEST_XDIST_WORKER" in os.environ and not starts_ray(item.path):
        step_back()
    result = yield
    if looks.took_long:
        # Every trial of an engine looks for garbage: what libraries made since the collection of the tests, or what the
        # engine's graphs let go, would be gone through each time.
        gc.collect()
        gc.freeze()
        looks.took_long = False
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hands tests out by group, in the order of the collection."""
    if config.getvalue("dist") != "loadgroup":
        return None
    # xdist's own groups are lost with pytest 9.2: it cannot put them into the names of tests any more.
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return RAY_GROUP if starts_ray(config.rootpath / file) else file

    config.option.loadscopereorder = False
    return ByGroup(config, log)


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a tracking store without a study, to be copied to where one is wanted."""
    from wattune.tracking.store import Store, default_uri

    storage = tmp_path_factory.mktemp("store")
    store = Store(default_uri(storage))
    assert len(store.ask("make a store", lambda client: client.search_experiments())) == 1  # MLflow's own
    return storage / "mlflow.db"


@pytest.fixture
def process_group() -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def in_foreground() -> Iterator[None]:
    """A terminal's signals act as on a job in the foreground, in this process and in those the test starts.

    A shell has a job in its background ignore them (`make test &`, `nohup make test`), and so does what that starts.
    """
    ordinary = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGQUIT: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {number: signal.signal(number, handler) for number, handler in ordinary.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Fails a run that leaves processes behind, and ends them; then its temporary folders go."""
    result = yield
    if hasattr(session.config, "workerinput"):
        return result
    _end_multiprocessing()
    until_s = time.monotonic() + GONE_WITHIN_S
    while (left := _processes_of_this_run()) and time.monotonic() < until_s:
        time.sleep(0.2)
    if left:
        report = session.config.pluginmanager.getplugin("terminalreporter")
        if report is not None:
            report.section("processes left behind", red=True, bold=True)
            for process, command in left.items():
                report.line(f"{process.pid}: {command}")
        for process in left:
            process.kill()
        psutil.wait_procs(list(left), timeout=10)
        if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
    shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)
    return result


def _end_multiprocessing() -> None:
    """Ends the processes that `multiprocessing` keeps to the end of this one, where tests ran in this one."""
    forkserver._forkserver._stop()
    util._run_finalizers()  # its folder goes before the one that it lies in
    resource_tracker._resource_tracker._stop()


def _processes_of_this_run() -> dict[psutil.Process, str]:
    """Everything that runs on this machine because of this run, with its command; not this process."""
    found = {}
    for process in psutil.process_iter():
        try:
            ours = process.environ().get(RUN_VARIABLE) == os.environ[RUN_VARIABLE]
            if ours and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found[process] = " ".join(process.cmdline()).strip()[:200] or process.name()
        except psutil.Error:  # it has ended, or is another user's
            continue
    return found
