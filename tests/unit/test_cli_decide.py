"""The verbs `frontier` and `suggest`: what a person reads, what a program reads, and how they refuse."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from decided_study import POWER, write_study
from specs import made_run, store_run, trial_spec

from wattune import api
from wattune.cost.defaults import default_coefficients
from wattune.cost.estimate import estimate
from wattune.ranking.limits import FIGURES
from wattune.storage.study import StudyFolder

Verb = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("storage")
    write_study(path, lambda spec: spec.plan.micro_batch_size in (1, 8), constraints=[f"{POWER} <= 1200"])
    write_study(path, lambda _: True, name="whole")
    write_study(path, lambda _: False, name="empty")
    return path


@pytest.fixture(autouse=True)
def stored(monkeypatch: pytest.MonkeyPatch, storage: Path) -> None:
    monkeypatch.setenv("WATTUNE_STORAGE", str(storage))


def test_frontier_keeps_what_is_measured_and_what_is_predicted_in_two_tables(wattune: Verb) -> None:
    code, out, _ = wattune("frontier", "decided", "--vary", f"{POWER} <= 900..1300 step 100")
    measured, _, predicted = out.partition("predicted: best of")
    assert code == 0 and "measured: maximize tokens_per_s" in measured and "SIMULATED" in measured
    assert "predicted" not in measured.replace("P(holds)", "")
    assert "never measured" in predicted and "mbs4" in predicted and "mbs8" in measured


def test_frontier_s_json_has_one_point_for_each_value(wattune: Verb) -> None:
    code, out, _ = wattune("frontier", "decided", "--vary", f"{POWER} <= 900..1300 step 100", "--json")
    found = json.loads(out)
    assert code == 0 and [point["value"] for point in found["points"]] == [900, 1000, 1100, 1200, 1300]
    best = found["points"][-1]["best"]
    assert best["holds_probability"] > 0.95 and best["best_probability"] is not None
    assert set(found["points"][-1]["predicted"]["predicted"]) == {"value", "low", "high"}


def test_suggest_lists_plans_with_what_they_may_change(wattune: Verb) -> None:
    code, out, _ = wattune("suggest", "decided", "--budget", "1m")
    assert code == 0 and "the best plan, now" in out and "P(feasible)" in out and "20 s" in out
    code, out, _ = wattune("suggest", "decided", "--budget", "1m", "--json")
    found = json.loads(out)
    assert code == 0 and found["suggestions"] and found["expected_s"] <= 60


def test_suggest_says_plainly_that_nothing_is_worth_measuring(wattune: Verb) -> None:
    code, out, _ = wattune("suggest", "whole", "--json")
    found = json.loads(out)
    assert code == 0
    if not found["suggestions"]:
        assert found["nothing"].startswith("nothing is worth measuring: every plan of the space was tried")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("frontier", "empty"), "has no finished trial"),
        (("frontier", "nobody"), 'no study "nobody"'),
        (("frontier", "decided", "--vary", "watts <= 1..2 step 1"), 'unknown metric "watts"'),
        (("frontier", "decided", "--vary", f"{POWER} <= 5"), "LOW..HIGH step STEP"),
        (("frontier", "decided", "--vary", "device_temp_max_c <= 50..60 step 5"), "measured device_temp_max_c"),
        (("suggest", "empty"), "has no finished trial"),
        (("suggest", "decided", "--budget", "soon"), "allowed: a time such as 90s"),
    ],
)
def test_what_cannot_be_answered_is_one_line_and_exit_code_2(wattune: Verb, arguments, said) -> None:
    code, out, err = wattune(*arguments)
    assert (code, out) == (2, "") and said in err and "Traceback" not in err
    assert len(err.strip().splitlines()) == 1


@pytest.fixture(scope="module")
def pipeline(storage: Path) -> str:
    """A measured trial of a pipeline and one without, by the study's name."""
    study = StudyFolder.create(storage, "pipeline", {"study": "pipeline"})
    for pp in (4, 1):
        spec = trial_spec("llama3_70b", on="1x8 h200_sxm", engine="megatron", batch=16, pp=pp, tp=8 // pp)
        metrics = {"step_time_s": 3.0, "energy_per_step_j": 12_000.0}
        store_run(study, spec, made_run(spec, quality="indicative", metrics=metrics))
        if pp > 1:
            found = f"pipeline:{spec.trial_id}"
        else:
            (storage / "one_stage").write_text(f"pipeline:{spec.trial_id}")
    return found


def test_clocks_of_a_pipeline_are_files_that_zeus_reads(wattune: Verb, pipeline: str, tmp_path: Path) -> None:
    code, out, err = wattune("frontier", pipeline, "--clocks", str(tmp_path / "clocks.py"), "--json")
    assert code == 0, err
    now, *points = json.loads(out)
    assert (now["step_time_s"], now["predicted"]) == (3.0, False)
    assert now["energy_per_step_j"] == pytest.approx(12_000.0)
    assert len(list(tmp_path.iterdir())) == len(points) > 3 and all(one["predicted"] for one in points)
    for place, one in enumerate(points):
        text = (tmp_path / f"clocks{f'_{place}' if place else ''}.py").read_text()
        stages = eval(text)  # as `PointSolution` does
        assert [[list(pair) for pair in stage] for stage in stages] == one["clocks_mhz"]
        assert [name for name, _ in stages[-1]] == ["forward", "backward"] * 16
        assert "a step predicted by wattune, never run" in text
    assert points[0]["step_time_s"] == pytest.approx(3.0) and points[0]["energy_per_step_j"] < 12_000
    code, out, _ = wattune("frontier", pipeline, "--clocks", str(tmp_path / "clocks.py"))
    assert code == 0 and "predicted, never run" in out and "as they are" in out


def test_clocks_that_cannot_be_are_refused_in_a_line(
    wattune: Verb, pipeline: str, storage: Path, tmp_path: Path
) -> None:
    one_stage, file = (storage / "one_stage").read_text(), str(tmp_path / "c.py")
    for words, error in (
        ([one_stage, "--clocks", file], "pp=1 has one stage"),
        ([pipeline, "--clocks", str(tmp_path / "c.csv")], "ends in .py"),
        (["decided", "--clocks", file], "names neither a trial nor a recording"),
        (["pipeline:ffffffffffff", "--clocks", file], "no trial"),
        ([pipeline, "--clocks", file, "--vary", f"{POWER} <= 900..1300 step 100"], "give one of them"),
    ):
        code, _, err = wattune("frontier", *words)
        assert code == 2 and error in err and len(err.strip().splitlines()) == 1, err
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def limited(storage: Path) -> str:
    """A study of two models at 400 and 700 W, whose runs are 1.1 times their estimates; at 500 W nothing ran."""
    space = {
        "study": "limited",
        "model": ["llama3_8b", "mixtral_8x7b"],
        "cluster": "1x8 h200_sxm",
        "engine": "torch",
        "workload": {"seq_len": 4096, "global_batch_size": 16},
        "space": {"recompute": ["full"], "sharding": ["zero3"], "power_limit_w": [400, 500, 700]},
        "objective": "maximize tokens_per_s",
    }
    study = StudyFolder.create(storage, "limited", space)
    specs = api.plan(space).candidates.specs
    columns = estimate(specs, default_coefficients).columns
    for place, spec in enumerate(specs):
        metrics = {name: 1.1 * float(columns[name].value[place]) for name in FIGURES}
        metrics["device_power_limit_w"] = float(spec.plan.power_limit_w or 0)
        if spec.plan.power_limit_w != 500:
            ended = {"start_wall_ns": 10**18, "end_wall_ns": 10**18 + 10**10}
            store_run(study, spec, made_run(spec, quality="publishable", metrics=metrics, **ended))
    return "limited"


def test_the_limit_of_power_is_varied_plan_by_plan_and_over_a_rack(wattune: Verb, limited: str) -> None:
    code, out, err = wattune("frontier", limited, "--vary", "power_limit_w", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert [point["value"] for point in found["points"]] == [400, 450, 500, 550, 600, 650, 700]
    best = [point["best"] for point in found["points"]]
    assert all(one["holds_probability"] == 1.0 for one in best)  # what is enforced does not scatter
    assert best[0]["bounded"] == best[-2]["bounded"] == 400 and best[-1]["bounded"] == 700
    assert [row["measured"] for row in found["plans"][0]] == [True] + 5 * [False] + [True]
    assert (
        {row[0]["job"] for row in found["plans"]} == {"llama3_8b", "mixtral_8x7b"} == set(found["rack"][0]["limits_w"])
    )
    assert found["rack"][0]["budget_w"] == 6400 and found["rack"][-1]["rate_frac"] == pytest.approx(1.0)
    code, out, _ = wattune("frontier", limited, "--vary", "power_limit_w")
    assert code == 0 and "the fastest plans by limit of power" in out and "a rack's watts" in out
    code, out, err = wattune("report", limited)
    assert code == 0 and "Price of the bound" in (Path(found_report(out))).read_text(), err


def found_report(out: str) -> str:
    """The page that `report` says it wrote."""
    return next(word for word in out.split() if word.endswith(".html"))
