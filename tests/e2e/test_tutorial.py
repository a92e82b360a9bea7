"""docs/tutorial.md typed line by line, from `make demo` on: real workers, a real MLflow server and a real browser.

`tests/contracts/test_tutorial.py` holds what the page says of their output on a stored run.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from headless import chromium
from mlflow_server import free_port
from tutorial import ROOT, Command, commands, edit_as_told

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_every_command_of_the_page_runs_from_the_first_to_the_last(tmp_path: Path) -> None:
    for name in ("search_spaces", "Makefile", "pyproject.toml", "constraints"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for program in ("python", "wattune", "mlflow"):
        module = "" if program == "python" else f" -m {program}"
        (programs / program).write_text(f'#!/bin/sh\nexec {sys.executable}{module} "$@"\n')
        (programs / program).chmod(0o755)
    (tmp_path / ".venv" / ".installed").touch()  # newer than what it was made from: nothing is installed

    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WATTUNE_", "MLFLOW_"))}
    environment = kept | {"MLFLOW_DISABLE_TELEMETRY": "true", "PYTHONUNBUFFERED": "1"}

    def types(command: Command) -> tuple[int, str]:
        program, *arguments = command.words
        done = subprocess.run(
            [command.folder + program, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=1200,
        )
        return done.returncode, done.stdout + done.stderr

    typed = 0
    for command in commands():
        if command.text.startswith("export "):
            shell = f"{command.text}; env -0"
            shown = subprocess.run(
                ["/bin/sh", "-c", shell], cwd=tmp_path, env=environment, capture_output=True, text=True
            )
            environment = dict(line.split("=", 1) for line in shown.stdout.split("\0") if "=" in line)
            assert environment["WATTUNE_STORAGE"] == "wattune-studies"
            shutil.copytree(tmp_path / "wattune-studies" / "cpu_smoke", tmp_path / "wattune-studies" / "again")
            continue
        if command.text.startswith("mlflow "):
            _serves(command, tmp_path, environment)
            continue
        if "--figures" in command.text and chromium() is None:
            continue
        if "--dry-run" in command.text:
            edit_as_told(tmp_path / "search_spaces" / "cpu_smoke.yaml")
        code, said = types(command)
        none = "nothing is feasible" in said or "nothing is surely feasible" in said
        assert code == (3 if none else 0), f"{command.text}: {said[-3000:]}"
        assert "Traceback" not in said and "\nerror:" not in said, said
        typed += 1
        if command.text == "make demo":
            assert (tmp_path / "wattune-studies" / "cpu_smoke" / "report.html").exists(), said[-3000:]
    assert typed >= 18


def _serves(command: Command, home: Path, environment: dict[str, str]) -> None:
    """Runs the page's `mlflow ui`, on a port of the test's own, until it answers."""
    port = free_port()
    with (home / "mlflow.log").open("w") as log:
        server = subprocess.Popen(
            [*command.words, "--port", str(port), "--workers", "1"],
            cwd=home,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            end_s = time.monotonic() + 180
            while True:
                assert server.poll() is None and time.monotonic() < end_s, (home / "mlflow.log").read_text()[-3000:]
                with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
                    assert answer.status == 200
                    return
                time.sleep(0.3)
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(server.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    server.wait(20)
