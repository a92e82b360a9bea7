"""Runs wattune as a user does: as a command, in a folder of its own, with its own storage."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from raylet_cluster import Raylets, raylet_cluster
from warm_commands import Command, WarmCommands, warm_commands

COMMAND = [sys.executable, "-m", "wattune"]

TELL_EVERY_S = 0.5

TELLS_OFTEN = f"""
from wattune.__main__ import main
from wattune.terminal import progress
progress.TELL_EVERY_S = {TELL_EVERY_S}
main()
"""
"""The command as it is, but for how often a log is told how far a trial is: every minute, of trials of seconds."""

UNBUFFERED = {"PYTHONUNBUFFERED": "1"}

TINY_MODEL = {
    "name": "llama3_8b",
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 256,
}


def _address(cluster: Raylets) -> dict[str, str]:
    return {"RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": cluster.address}


def _users(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(("RAY_", "MLFLOW_", "WATTUNE_"))}


@pytest.fixture(scope="session")
def users_environment() -> dict[str, str]:
    """The user's environment, without what a developer's shell may add to it."""
    return _users(os.environ)


@pytest.fixture
def environment(storage: Path, users_environment: dict[str, str]) -> dict[str, str]:
    """The same with a storage of the test's own."""
    return users_environment | UNBUFFERED | {"WATTUNE_STORAGE": str(storage)}


@pytest.fixture(scope="session")
def standing_cluster(tmp_path_factory: pytest.TempPathFactory, users_environment: dict[str, str]) -> Iterator[Raylets]:
    """One cluster for all tests that are not about how a cluster starts or ends; its head is a node for trials."""
    with raylet_cluster(tmp_path_factory.mktemp("cluster"), users_environment, head_cpus=2) as found:
        yield found


@pytest.fixture
def on_standing_cluster(
    environment: dict[str, str], standing_cluster: Raylets, storage: Path, empty_store: Path
) -> None:
    """The commands of a test run on the standing cluster, as a user's with `RAY_ADDRESS` do.

    Their storage has a store without a study: making its tables takes a processor most of a second.
    """
    storage.mkdir()
    shutil.copyfile(empty_store, storage / empty_store.name)
    environment |= _address(standing_cluster)


@pytest.fixture
def go_on_standing_cluster(environment: dict[str, str], request: pytest.FixtureRequest) -> Callable[[], None]:
    """From its call on, when clusters of the test's own have ended, its commands run on the standing one."""

    def go_on() -> None:
        environment.update(_address(request.getfixturevalue("standing_cluster")))

    return go_on


@pytest.fixture(scope="session")
def commands_on_standing_cluster(
    tmp_path_factory: pytest.TempPathFactory, users_environment: dict[str, str], standing_cluster: Raylets
) -> Iterator[WarmCommands]:
    """Starts commands that need not load their libraries."""
    environment = users_environment | UNBUFFERED | _address(standing_cluster)
    with warm_commands(tmp_path_factory.mktemp("commands"), environment) as found:
        yield found


@pytest.fixture
def warm(environment: dict[str, str], request: pytest.FixtureRequest) -> Callable[[], WarmCommands | None]:
    """Returns what starts the test's commands where they are on the standing cluster now, else None."""
    return lambda: request.getfixturevalue("commands_on_standing_cluster") if "RAY_ADDRESS" in environment else None


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    return tmp_path / "storage"


@pytest.fixture
def tiny_model() -> dict[str, Any]:
    return TINY_MODEL


@pytest.fixture
def write_space(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tiny two-rank space, with what the test changes in it."""

    def write(name: str, **changes: Any) -> Path:
        document = {
            "study": name,
            "model": TINY_MODEL,
            "cluster": {"device": "cpu", "num_nodes": 1, "devices_per_node": 2, "simulate_sensors_of": "h200_sxm"},
            "engine": "torch",
            "workload": {"mode": "pretrain", "seq_len": 32, "global_batch_size": 4},
            "space": {"tp": [1]},
            "measure": {"warmup_steps": 2, "min_steps": 4, "min_seconds": 1},
            "objective": "maximize tokens_per_s",
            # Not over 1 s: of so short a window a busy machine may leave less, and the bound would be undecided.
            "constraints": ["node_device_power_peak_100ms_w <= 3000"],
            "search": {"strategy": "grid", "num_trials": 10},
        } | changes
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(document))
        return path

    return write


@pytest.fixture
def write_two_trials(write_space: Callable[..., Path]) -> Callable[..., Path]:
    """Writes a space of two trials that measure for so long, with what else the test changes of `measure`.

    A rank keeps a processor busy while it measures, so that a test which is not about several has one.
    """

    def write(name: str, *, min_seconds: float, num_ranks: int = 2, **measure: Any) -> Path:
        measured = {"warmup_steps": 2, "min_steps": 4, "min_seconds": min_seconds} | measure
        cluster = {"device": "cpu", "devices_per_node": num_ranks, "simulate_sensors_of": "h200_sxm"}
        return write_space(name, cluster=cluster, space={"micro_batch_size": [1, 2]}, measure=measured)

    return write


@pytest.fixture
def wattune(
    tmp_path: Path, environment: dict[str, str], warm: Callable[[], WarmCommands | None]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a command to its end."""

    def run(*arguments: object, timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
        texts = [*map(str, arguments)]
        if (commands := warm()) is not None:
            return commands.run(texts, timeout_s=timeout_s, cwd=tmp_path, env=environment)
        return subprocess.run(
            [*COMMAND, *texts], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=timeout_s
        )

    return run


@pytest.fixture
def wattune_here(
    tmp_path: Path, environment: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a command that only reads, in this process: one of its own takes a second or two to load what it needs."""

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        from wattune.cli import main

        command, code = ["wattune", *map(str, arguments)], 0
        capsys.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path)
            for name in os.environ.keys() - environment.keys():
                patch.delenv(name)
            for name, value in environment.items():
                patch.setenv(name, value)
            patch.setattr(sys, "argv", command)
            try:
                main()
            except SystemExit as leaving:
                code = int(leaving.code or 0)
        return subprocess.CompletedProcess(command, code, *capsys.readouterr())

    return run


class Running:
    """A command that runs, and the lines it has said so far."""

    def __init__(self, process: "subprocess.Popen[str] | Command") -> None:
        self.process = process
        self._lines: list[str] = []
        self._said = threading.Condition()
        self._over = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._said:
                self._lines.append(line)
                self._said.notify_all()
        with self._said:
            self._over = True
            self._said.notify_all()

    @property
    def text(self) -> str:
        """All it has said."""
        return "".join(self._lines)

    def says(self, pattern: str, within_s: float = 480) -> None:
        """Waits for a line, of those before too."""
        looked_at = 0

        def come() -> bool:
            nonlocal looked_at
            new, looked_at = self._lines[looked_at:], len(self._lines)
            return any(re.search(pattern, line) for line in new)

        with self._said:
            found = self._said.wait_for(lambda: come() or self._over, within_s)
        assert found, f"within {within_s:g} s no line was {pattern!r}:\n{self.text}"
        assert re.search(pattern, self.text, re.MULTILINE), f"it ended, and no line was {pattern!r}:\n{self.text}"

    def ends(self, within_s: float) -> int:
        """Waits for its end; returns its exit code."""
        code = self.process.wait(within_s)
        self._reader.join(30)
        return code


@pytest.fixture
def follow() -> Iterator[Callable[["subprocess.Popen[str] | Command"], Running]]:
    """Hears what a process says, and ends it with the test whatever happens."""
    followed: list[Running] = []

    def follow_one(process: "subprocess.Popen[str] | Command") -> Running:
        followed.append(Running(process))
        return followed[-1]

    yield follow_one
    for running in followed:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait(30)


@pytest.fixture
def start(tmp_path: Path, environment: dict[str, str], follow: Callable[..., Running]) -> Callable[..., Running]:
    """Starts a program that says on one stream what it does, and ends it with the test whatever happens."""

    def start_one(command: Sequence[str], **more: Any) -> Running:
        settings: dict[str, Any] = {"cwd": tmp_path, "env": environment, "stdout": subprocess.PIPE} | more
        return follow(subprocess.Popen(command, stderr=subprocess.STDOUT, text=True, **settings))

    return start_one


@pytest.fixture
def start_wattune(
    tmp_path: Path,
    environment: dict[str, str],
    start: Callable[..., Running],
    follow: Callable[..., Running],
    warm: Callable[[], WarmCommands | None],
) -> Callable[..., Running]:
    """Starts a command, in a place of `before` where that is given."""

    def start_command(*arguments: object, before: Sequence[str] = ()) -> Running:
        texts = [*map(str, arguments)]
        if (commands := warm()) is not None:
            assert not before
            return follow(commands.open(texts, cwd=tmp_path, env=environment, tell_every_s=TELL_EVERY_S))
        return start([*before, sys.executable, "-c", TELLS_OFTEN, *texts])

    return start_command


@pytest.fixture
def results() -> Callable[[Path], dict[str, dict[str, Any]]]:
    """Reads every result of a study folder, by trial folder."""

    def read(study: Path) -> dict[str, dict[str, Any]]:
        return {path.parent.name: json.loads(path.read_text()) for path in study.glob("trials/*/run.json")}

    return read
