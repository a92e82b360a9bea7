"""The table of engine cases: what it names is valid and complete, and its dry run gives figures."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from wattune.plan.axes import Plan
from wattune.plan.engines import built_engines, effective
from wattune.plan.rules import violations

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "engine_cases.py"

OF_ALL = {"tp", "pp", "ep", "micro_batch_size", "sharding", "recompute", "overlap", "layout"}
AXES_OF = {"torch": OF_ALL | {"vpp", "dtype"}, "megatron": OF_ALL | {"vpp", "etp"}, "deepspeed": OF_ALL}
"""What can vary on four GPUs without TransformerEngine; bf16 is what engines are compared in."""


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("engine_cases", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["engine_cases"] = module
    spec.loader.exec_module(module)
    return module


def test_every_case_is_one_that_runs_and_does_what_it_says(script: Any) -> None:
    names = [case.name for case in script.CASES]
    assert 40 <= len(names) <= 60 and len(set(names)) == len(names)
    ids = set()
    for case in script.CASES:
        spec = script.Where().spec(case)
        assert [violation.reason for violation in violations(spec)] == [], case.name
        assert effective(spec) == (spec.plan, ()), case.name
        ids.add(spec.trial_id)
    assert len(ids) == len(names)


def test_every_engine_meets_every_axis_it_has(script: Any) -> None:
    assert {case.engine for case in script.CASES} == set(built_engines())
    for engine, axes in AXES_OF.items():
        varied = set()
        for case in (case for case in script.CASES if case.engine == engine):
            plan = script.Where().spec(case).plan
            neutral = Plan(etp=plan.tp)
            varied |= {axis for axis in AXES_OF["torch"] | {"etp"} if getattr(plan, axis) != getattr(neutral, axis)}
        assert axes <= varied


def test_references_run_before_what_is_compared_with_them(script: Any) -> None:
    order = {case.name: index for index, case in enumerate(script.CASES)}
    for case in script.CASES:
        assert case.reference is None or order[case.reference] <= order[case.name]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_dry_run_compares_engines_and_survives_what_cannot_run(script: Any, tmp_path: Path) -> None:
    wanted = [
        "torch/llama/dp4",
        "torch/llama/tp4",
        "torch/llama/tp2-dp2",
        "deepspeed/llama/dp4-zero1",
        "megatron/llama/dp4",
    ]
    command = [sys.executable, str(SCRIPT), "--quick", "--ranks", "2", "--json", "--out", str(tmp_path / "rows.json")]
    for name in wanted:
        command += ["--only", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {row["case"]: row for row in json.loads(done.stdout)["cases"]}
    assert rows.keys() == set(wanted)
    assert rows["torch/llama/tp4"]["status"] == rows["megatron/llama/dp4"]["status"] == "refused"
    for name in ("torch/llama/dp4", "torch/llama/tp2-dp2", "deepspeed/llama/dp4-zero1"):
        row = rows[name]
        assert row["status"] == "ran" and row["ranks_agree"]
        assert row["step_ms"] > 0 and row["num_steps"] == 2 and row["memory_gib"] > 0
        assert row["loss_deviation"] is None if name == "torch/llama/dp4" else row["loss_deviation"] < 1e-5
    assert json.loads((tmp_path / "rows.json").read_text())["cases"] == json.loads(done.stdout)["cases"]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_case_that_fails_costs_no_other_its_figures(script: Any, tmp_path: Path) -> None:
    """A rank that is killed in the middle: the case says so, and the next one runs on new ranks."""
    case = next(case for case in script.CASES if case.name == "torch/llama/dp4")
    where = script.Where(ranks=2, quick=True)
    spec = where.spec(case)
    first = script.Ranks("torch", where, tmp_path / "1")
    first._workers[1].kill()
    with pytest.raises((RuntimeError, BrokenPipeError)):
        first.run(spec, (1, 1), 60)
    first.stop()
    second = script.Ranks("torch", where, tmp_path / "2")
    try:
        assert len(second.run(spec, (1, 1), 100)) == 2
    finally:
        second.stop()
