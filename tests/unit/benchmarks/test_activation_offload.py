"""Some cases of the benchmark alone: which ones they need beside them, and a dry run."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "activation_offload.py"
WITHOUT_A_COMPILER = ["plain", "plain_again", "eager", "eager_offload", "eager_save_on_cpu"]


@pytest.fixture(scope="module")
def offload() -> ModuleType:
    spec = importlib.util.spec_from_file_location("activation_offload", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["plain"], {}),
        (["eager"], {}),
        (WITHOUT_A_COMPILER, {}),
        (["plain_again"], {"plain_again": ["plain"]}),
        (["plain", "recompute"], {"recompute": ["plain_again"]}),
        (["eager_offload"], {"eager_offload": ["plain", "plain_again", "eager"]}),
    ],
)
def test_a_case_needs_its_base_and_the_control(
    offload: ModuleType, names: list[str], found: dict[str, list[str]]
) -> None:
    assert offload.missing(names) == found


def test_all_cases_have_what_they_need(offload: ModuleType) -> None:
    assert offload.missing(list(offload.CASES)) == {}


def test_a_case_without_its_base_is_refused_before_anything_runs(
    offload: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--quick", "--cases", "plain", "offload"])
    monkeypatch.setattr(offload.subprocess, "run", lambda *_, **__: pytest.fail("a case was run"))
    with pytest.raises(SystemExit) as ended:
        offload.main()
    assert ended.value.code == 2
    assert "offload cannot be judged without plain_again; name these too" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_dry_run_of_some_cases_runs_those_alone() -> None:
    command = [sys.executable, str(SCRIPT), "--quick", "--cases", *reversed(WITHOUT_A_COMPILER)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    _, heading, *rows, last = done.stdout.splitlines()
    assert [row.split(",")[0] for row in rows] == WITHOUT_A_COMPILER
    assert heading.endswith("largest_loss_deviation_ratio") and last == "0 bad"
    assert [float(row.split(",")[-1]) for row in rows] == [0.0] * len(rows)  # a copy changes no bit on a processor
