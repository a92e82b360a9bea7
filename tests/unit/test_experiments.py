"""Experiments are programs of their own: they say what is wrong in a line and end with the right code."""

import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Wattune = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parents[2]
EXPERIMENTS = sorted((ROOT / "experiments").glob("*.py"))
OF_A_SPACE = [one for one in EXPERIMENTS if "shared.one_study import main" in one.read_text()]
"""Those that take a space; the others have two arms and claims of their own."""
OF_ARMS = sorted({*EXPERIMENTS} - {*OF_A_SPACE})
ASKS = """
if __name__ == "__main__":
    from shared.one_study import ask

    raise SystemExit(ask(__file__))
"""


def run(experiment: Path, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    # Without an installed wattune on the path: a job's nodes have the dependencies and the folder, nothing else.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, experiment, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Wattune:
    """Runs an experiment in this process; gives its exit code, and what it printed on both streams."""
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))

    def run(experiment: Path, *arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [str(experiment), *map(str, arguments)])
        with pytest.raises(SystemExit) as leaving:
            runpy.run_path(str(experiment), run_name="__main__")
        return int(leaving.value.code or 0), *capsys.readouterr()

    return run


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda path: path.stem)
def test_an_experiment_is_executable_and_those_with_arms_end_alike(experiment: Path) -> None:
    text = experiment.read_text()
    assert os.access(experiment, os.X_OK) and text.startswith("#!/usr/bin/env python\n")
    assert "sys.argv" not in text and (experiment in OF_A_SPACE or text.endswith(ASKS))


@pytest.mark.parametrize("experiment", OF_A_SPACE, ids=lambda path: path.stem)
def test_an_experiment_of_a_space_ends_with_the_right_code(experiment: Path, tmp_path: Path, run_here: Wattune) -> None:
    code, out, _ = run_here(experiment, "-h")
    assert code == 0 and "--storage" in out and "Hypothesis" in out
    (tmp_path / "occupied").write_text("")
    code, _, err = run_here(experiment, "--storage", tmp_path / "occupied")
    assert code == 2 and "cannot be written" in err and "Traceback" not in err
    if experiment != OF_A_SPACE[0]:  # they share all that follows
        return
    storage = tmp_path / "storage"
    assert run_here(experiment, "--storag")[0] == 2
    absent = run(experiment, "absent.yaml", "--storage", storage, cwd=tmp_path)
    assert (absent.returncode, absent.stdout) == (2, "")
    said = "cannot be read (No such file or directory); give the path of a search space"
    assert absent.stderr == f"error: {ROOT / 'absent.yaml'}: {said}\n"
    assert not storage.exists()


def test_an_experiment_with_arms_ends_with_the_right_code(tmp_path: Path, wattune: Wattune, run_here: Wattune) -> None:
    experiment, storage = OF_ARMS[0], tmp_path / "storage"
    code, out, _ = run_here(experiment, "-h")
    assert code == 0 and "--storage" in out and "Hypothesis" in out
    absent = run(experiment, "absent.yaml", "--storage", storage, cwd=tmp_path)
    assert (absent.returncode, absent.stdout) == (2, "") and "Traceback" not in absent.stderr
    assert "absent.yaml" in absent.stderr
    # What it runs is the verb: the rest is asked of that.
    verb = ("experiments", "run", experiment.stem, "--folder", experiment.parent)
    code, _, err = wattune(*verb, "--short", "--storage", storage)
    assert code == 2 and "give --results" in err
    assert wattune(*verb, "--storag")[0] == 2
    assert not storage.exists()
