"""The `sitecustomize` on the path: an existing one still runs, and nothing of ours stops a program."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from wattune.steps.launch import INJECTED, environment


def run(code: str, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def existing(tmp_path: Path) -> str:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("import builtins\nbuiltins.greeting = __file__\n")
    return str(tmp_path / "own")


def test_one_that_the_program_has_already_still_runs(tmp_path: Path, existing: str) -> None:
    code = "import sitecustomize, sys; print(greeting, sitecustomize.__file__, '_wattune_steps' in sys.modules)"
    own = f"{existing}/sitecustomize.py"
    assert run(code, environment(tmp_path, {"PYTHONPATH": existing})).stdout == f"{own} {own} True\n"


def test_an_error_in_that_one_is_shown_as_python_does(tmp_path: Path, existing: str) -> None:
    (Path(existing) / "sitecustomize.py").write_text("1 / 0")
    alone = run("print(5)", {"PYTHONPATH": existing})
    beside = run("print(5)", environment(tmp_path, {"PYTHONPATH": existing}))
    assert beside.stdout == alone.stdout == "5\n"
    assert "ZeroDivisionError" in alone.stderr and "ZeroDivisionError" in beside.stderr


def test_without_the_variable_nothing_is_installed() -> None:
    assert run("import sys; print('_wattune_steps' in sys.modules)", {"PYTHONPATH": str(INJECTED)}).stdout == "False\n"


def test_hooks_that_cannot_load_are_said_and_the_program_runs(tmp_path: Path, existing: str) -> None:
    copied = tmp_path / "inject"
    shutil.copytree(INJECTED, copied)  # without its hooks beside it
    path = os.pathsep.join([str(copied), existing])
    done = run("print(greeting)", {"PYTHONPATH": path, "WATTUNE_STEPS": str(tmp_path)})
    assert done.stdout == f"{existing}/sitecustomize.py\n" and done.returncode == 0
    assert done.stderr.startswith("wattune: its steps are not found by hooks: ModuleNotFoundError")
