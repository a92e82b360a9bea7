"""Runs wattune as a user does: as a command, in a folder of its own, with its own storage."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

COMMAND = [sys.executable, "-m", "wattune"]

TINY_MODEL = {
    "name": "llama3_8b",
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 256,
}


@pytest.fixture
def environment(storage: Path) -> dict[str, str]:
    """The user's environment, without what a developer's shell may add to it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "MLFLOW_", "WATTUNE_"))}
    return kept | {"WATTUNE_STORAGE": str(storage), "PYTHONUNBUFFERED": "1"}


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
            "constraints": ["node_device_power_peak_1s_w <= 3000"],
            "search": {"strategy": "grid", "num_trials": 10},
        } | changes
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(document))
        return path

    return write


@pytest.fixture
def write_two_trials(write_space: Callable[..., Path]) -> Callable[..., Path]:
    """Writes a space of two trials that measure for so long, with what else the test changes of `measure`."""

    def write(name: str, *, min_seconds: float, **measure: Any) -> Path:
        measured = {"warmup_steps": 2, "min_steps": 4, "min_seconds": min_seconds}
        return write_space(name, space={"micro_batch_size": [1, 2]}, measure=measured | measure)

    return write


@pytest.fixture
def wattune(tmp_path: Path, environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a command to its end."""

    def run(*arguments: object, timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *map(str, arguments)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    return run


@pytest.fixture
def start_wattune(tmp_path: Path, environment: dict[str, str]):
    """Starts a command, and ends it with the test whatever happens."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait(30)


@pytest.fixture
def results() -> Callable[[Path], dict[str, dict[str, Any]]]:
    """Reads every result of a study folder, by trial folder."""

    def read(study: Path) -> dict[str, dict[str, Any]]:
        return {path.parent.name: json.loads(path.read_text()) for path in study.glob("trials/*/result.json")}

    return read
