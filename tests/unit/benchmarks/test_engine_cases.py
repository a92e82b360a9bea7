"""The table of engine cases: what it names is valid and complete, and its dry run gives figures."""

import json
import subprocess
import sys
from pathlib import Path

import engine_cases as script
import pytest

from wattune.plans.axes import Plan
from wattune.plans.effective import effective
from wattune.plans.engines import CAPABILITIES, COMMAND
from wattune.plans.rules import violations

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "engine_cases.py"

OF_ALL = {"tp", "pp", "ep", "micro_batch_size", "sharding", "recompute", "overlap", "layout"}
AXES_OF = {"torch": OF_ALL | {"vpp", "dtype"}, "megatron": OF_ALL | {"vpp", "etp"}, "deepspeed": OF_ALL}
"""Axes that can vary without TransformerEngine. Engines are compared in bf16."""

each_size = pytest.mark.parametrize("ranks", [2, 4])


@each_size
def test_every_case_is_one_that_runs_and_does_what_it_says(ranks: int) -> None:
    cases = script.cases(ranks)
    names = [case.name for case in cases]
    assert len(names) >= 40 and len(set(names)) == len(names)
    ids = set()
    for case in cases:
        spec = script.Where(ranks=ranks).spec(case)
        assert [violation.reason for violation in violations(spec)] == [], case.name
        assert effective(spec) == (spec.plan, ()), case.name
        ids.add(spec.trial_id)
    assert len(ids) == len(names)


@each_size
def test_every_engine_meets_every_axis_it_has(ranks: int) -> None:
    cases = script.cases(ranks)
    assert {case.engine for case in cases} == set(CAPABILITIES) - {COMMAND}
    for engine, axes in AXES_OF.items():
        varied = set()
        for case in (case for case in cases if case.engine == engine):
            plan = script.Where(ranks=ranks).spec(case).plan
            neutral = Plan(etp=plan.tp)
            varied |= {axis for axis in AXES_OF["torch"] | {"etp"} if getattr(plan, axis) != getattr(neutral, axis)}
        assert axes <= varied


@each_size
def test_references_run_before_what_is_compared_with_them(ranks: int) -> None:
    order = {case.name: index for index, case in enumerate(script.cases(ranks))}
    for case in script.cases(ranks):
        assert case.reference is None or order[case.reference] <= order[case.name]


@each_size
def test_engines_are_compared_where_they_do_the_same_work_by_the_same_plan(ranks: int) -> None:
    rows = []
    for index, case in enumerate(script.cases(ranks)):
        spec = script.Where(ranks=ranks).spec(case)
        row = {"case": case.name, "engine": case.engine, "plan": spec.label}
        work = f"{case.model} {case.mode} {case.batch}"
        rows.append(row | {"work": work, "status": "ran", "step_ms": 10.0 * (index + 1)})
    rows[0] |= {"status": "failed"}
    ran = {row["case"]: row for row in rows[1:]}
    found = script.ratios(rows)
    assert len(found) >= 10 and {ran[each["case"]]["engine"] for each in found} == {"deepspeed", "megatron"}
    for each in found:
        row, own = ran[each["case"]], ran[each["torch_case"]]
        assert own["engine"] == "torch" and (own["work"], own["plan"]) == (row["work"], row["plan"])
        assert each["step_time_over_torch"] == pytest.approx(row["step_ms"] / own["step_ms"], abs=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_dry_run_compares_engines_and_survives_what_cannot_run(tmp_path: Path) -> None:
    wanted = [
        "torch/llama/dp2",
        "torch/llama/dp2-zero1",
        "torch/llama/tp2",
        "deepspeed/llama/dp2-zero1",
        "megatron/llama/dp2",
    ]
    command = [sys.executable, str(SCRIPT), "--quick", "--ranks", "2", "--json", "--out", str(tmp_path / "rows.json")]
    for name in wanted:
        command += ["--only", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {row["case"]: row for row in json.loads(done.stdout)["cases"]}
    assert rows.keys() == set(wanted)
    assert rows["megatron/llama/dp2"]["status"] == "refused"
    for name in wanted[:-1]:
        row = rows[name]
        assert row["status"] == "ran" and row["ranks_agree"]
        assert row["step_ms"] > 0 and row["num_steps"] == 2 and row["memory_gib"] > 0
        assert row["loss_deviation"] is None if name == "torch/llama/dp2" else row["loss_deviation"] < 1e-5
    assert json.loads((tmp_path / "rows.json").read_text()) == json.loads(done.stdout)
    (ratio,) = json.loads(done.stdout)["ratios"]
    assert (ratio["case"], ratio["torch_case"]) == ("deepspeed/llama/dp2-zero1", "torch/llama/dp2-zero1")


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_case_that_fails_costs_no_other_its_figures(tmp_path: Path) -> None:
    """A rank that is killed in the middle: the case says so, and the next one runs on new ranks."""
    case = next(case for case in script.cases(2) if case.name == "torch/llama/dp2")
    where = script.Where(ranks=2, quick=True)
    spec = where.spec(case)
    first = script.Ranks("torch", where, tmp_path / "1")
    first._workers[1].kill()
    first._workers[1].wait()  # from now on nobody reads what it is told
    with pytest.raises(BrokenPipeError):
        first.run(spec, (1, 1, 0), 60)
    first.stop()
    second = script.Ranks("torch", where, tmp_path / "2")
    try:
        assert len(second.run(spec, (1, 1, 0), 100)) == 2
    finally:
        second.stop()
