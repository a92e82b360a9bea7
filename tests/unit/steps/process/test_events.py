"""The exception that ends a program is told, and hooks that fail are told and never raise."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from wattune.steps.launch import environment
from wattune.steps.process import events
from wattune.steps.process.events import guarded
from wattune.steps.reader import StepReader
from wattune.steps.source import AUTO


def run(folder: Path, code: str, **variables: str) -> StepReader:
    """Runs a program under the hooks; returns what it told."""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(folder, variables), capture_output=True, text=True, timeout=60
    )
    reader = StepReader(folder, AUTO)
    reader.poll()
    reader.returncode, reader.stderr = done.returncode, done.stderr  # type: ignore[attr-defined]
    return reader


def test_the_exception_that_ends_a_program_is_told_and_shown_as_ever(tmp_path: Path) -> None:
    told = run(tmp_path, "def f():\n    raise ValueError('seven')\nf()", RANK="2")
    assert told.errors() == {2: "ValueError: seven (in f, <string>:2)"}
    assert told.returncode == 1 and told.stderr.rstrip().endswith("ValueError: seven")  # type: ignore[attr-defined]


def test_a_hook_of_the_programs_own_does_not_hide_it(tmp_path: Path) -> None:
    told = run(tmp_path, "import sys\nsys.excepthook = lambda *_: print('mine', file=sys.stderr)\n1 / 0")
    assert told.errors()[0].startswith("ZeroDivisionError")
    assert told.stderr == "mine\n"  # type: ignore[attr-defined]


@pytest.mark.parametrize("code", ["pass", "raise SystemExit(3)", "try:\n    1 / 0\nexcept ArithmeticError: pass"])
def test_a_program_that_ends_in_order_tells_nothing(tmp_path: Path, code: str) -> None:
    assert run(tmp_path, code).errors() == {} and not list(tmp_path.iterdir())


def test_torchruns_own_exception_is_not_the_cause(tmp_path: Path) -> None:
    assert run(tmp_path, "class ChildFailedError(Exception): pass\nraise ChildFailedError").errors() == {}


def test_a_hook_that_fails_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(events, "_WRITER", SimpleNamespace(event=lambda _name, text: said.append(text)))
    monkeypatch.setattr(events, "_TOLD", set())

    @guarded("the hook")
    def fails() -> None:
        raise KeyError("x")

    fails()
    fails()
    assert said == ["the hook: KeyError: 'x'"]
