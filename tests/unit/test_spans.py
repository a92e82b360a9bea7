"""The three lines of API: what they tell, what they cost, and that they do nothing where nobody listens."""

import subprocess
import sys
from pathlib import Path

import pytest

from wattune import spans
from wattune.steps.reader import StepReader
from wattune.steps.source import AUTO

MOST_US = 100.0
"""Five times the claim (`benchmarks/results/step_hooks.md`): a machine of the tests may be slow."""

COST = """
import time
from wattune import spans
best = float("inf")
for _ in range(5):
    start = time.process_time_ns()
    for _ in range(2000):
        with spans.step(tokens=4096):
            pass
    best = min(best, (time.process_time_ns() - start) / 2000 / 1000)
print(best)
"""


def run(code: str, folder: Path | None) -> str:
    variables = {"PYTHONPATH": str(Path(spans.__file__).parents[1])}
    if folder is not None:
        variables["WATTUNE_STEPS"] = str(folder)
    return subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True, timeout=60
    ).stdout


def test_steps_are_told_with_their_tokens(tmp_path: Path) -> None:
    code = """
import time
from wattune import spans
for tokens in (5, 7, None):
    with spans.step(tokens=tokens):
        time.sleep(0.01)
try:
    with spans.step(tokens=9):
        raise ValueError
except ValueError:
    pass
with spans.step():
    pass
"""
    run(code, tmp_path)
    reader = StepReader(tmp_path, AUTO)
    steps = reader.poll()[0]
    assert [step.tokens for step in steps] == [5, 7, None, None]  # the one that raised is no step
    assert all(step.duration_ns >= 10_000_000 for step in steps[:3]) and reader.source.startswith("spans")


def test_a_step_costs_some_microseconds(tmp_path: Path) -> None:
    assert float(run(COST, tmp_path)) < MOST_US


def test_where_nobody_listens_nothing_is_written_and_a_step_costs_next_to_nothing(tmp_path: Path) -> None:
    assert float(run(COST, None)) < MOST_US / 10
    assert not list(tmp_path.iterdir())


def test_it_loads_the_standard_library_alone() -> None:
    code = "import sys; before = {*sys.modules}; import wattune.spans; print(*{*sys.modules} - before)"
    loaded = {name.partition(".")[0] for name in run(code, None).split()}
    assert loaded - {*sys.stdlib_module_names} == {"wattune"}


def test_without_a_listener_the_context_is_shared() -> None:
    if spans.WRITER is not None:
        pytest.skip("these tests run under `wattune record`")
    assert spans.step() is spans.step(tokens=3)
