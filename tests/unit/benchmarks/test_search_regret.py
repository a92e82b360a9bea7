"""The replay of measured tables: its figures are those of a table that is known, and the shipped tables can be read."""

import csv
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import search_regret as script
import yaml
from known_space import BEST, OBJECTIVE, POWER, SPECS, metrics, result

from wattune.objective import Question
from wattune.run import RunStatus

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "search_regret.py"
DATA = ROOT / "benchmarks" / "data"
CASES = DATA / "search_cases.yaml"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs the benchmark's command in this process; gives its exit code, and what it printed as an error."""

    def run(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
        try:
            script.main()
        except SystemExit as leaving:
            return (leaving.code, capsys.readouterr().err) if isinstance(leaving.code, int) else (1, str(leaving.code))
        return 0, capsys.readouterr().err

    return run


@pytest.fixture(scope="module")
def case():
    trials = tuple(
        script.Trial(
            spec=spec,
            results=(result(spec),),
            metrics=dict(result(spec).metrics),
            estimate={"estimated_tokens_per_s": metrics(spec)["tokens_per_s"]} if row % 2 else {},
            cost_s=100.0,
        )
        for row, spec in enumerate(SPECS)
    )
    return script.Case(name="known", trials=trials, question=Question(objective=OBJECTIVE, constraints=(POWER,)))


def test_a_replay_of_the_grid_finds_the_best_where_it_stands(case):
    run = script.replay(lambda problem: script.STRATEGIES["grid"](replace(problem, specs=SPECS)), case, 0, len(SPECS))
    row = script.figures(case, "grid", [run], len(SPECS), "node_device_power_peak_1s_w")
    good = [case.value(trial) >= 0.98 * metrics(BEST)["tokens_per_s"] for trial in case.trials]
    assert row["num_trials_median"] == good.index(True) + 1
    assert row["gpu_time_median_s"] == 100 * (good.index(True) + 1)
    assert row["found_frac"] == 1.0 and row["end_regret_median_frac"] == 0.0
    assert row["hypervolume_frac"] == 1.0
    assert row["feasible_frac"] == pytest.approx(np.mean([case.value(t) > -np.inf for t in case.trials]), abs=1e-3)


def test_regret_never_rises_and_a_stopped_run_stays_where_it_was(case):
    run = script.replay(script.STRATEGIES["model_guided"], case, 0, 40)
    regrets = script.curve(case, run, metrics(BEST)["tokens_per_s"], 60)
    assert len(regrets) == 60 and (np.diff([r for r in regrets if np.isfinite(r)]) <= 0).all()
    assert regrets[-1] == regrets[len(run.trials) - 1]


def test_the_hypervolume_is_the_area_above_the_worst_point():
    assert script.hypervolume([(2.0, 5.0)], (1.0, 10.0)) == 5.0
    assert script.hypervolume([(2.0, 5.0), (3.0, 8.0), (1.5, 6.0)], (1.0, 10.0)) == 5.0 + 2.0


def test_a_right_estimate_orders_every_pair_and_a_wrong_one_none(case):
    assert script.pairwise_accuracy(case) == 1.0
    backwards = [
        replace(trial, estimate={name: -value for name, value in trial.estimate.items()}) for trial in case.trials
    ]
    assert script.pairwise_accuracy(replace(case, trials=tuple(backwards))) == 0.0


TABLES = [path for path in sorted(DATA.glob("*.parquet")) if path.stem != "published_steps"]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_every_shipped_table_can_be_replayed(path):
    trials = script.read_table(path)
    assert trials and all(trial.cost_s > 0 for trial in trials)
    assert len({trial.spec for trial in trials}) == len(trials)
    assert any(trial.results[0].status is RunStatus.COMPLETED for trial in trials)


def test_bounds_that_nothing_holds_are_refused(benchmark):
    where = ["--objective", "maximize tokens_per_s", "--where", "node_device_power_peak_1s_w <= 1"]
    code, said = benchmark("--table", DATA / "moe_ep_h200x4.parquet", *where)
    assert code == 2 and "no trial holds every bound" in said


def test_a_surrogate_s_order_and_intervals_are_judged_on_what_it_had_not_seen(case):
    run = script.replay(lambda problem: script.ModelGuided(problem, stops=False), case, 0, 30)
    assert run.pairs_frac is not None and run.pairs_frac > 0.7
    assert len(run.inside) >= 20 and np.mean(run.inside) > 0.7
    row = script.figures(case, "model_guided", [run], 30, "node_device_power_peak_1s_w")
    assert row["inside_frac"] == pytest.approx(np.mean(run.inside), abs=1e-3)
    plain = script.replay(script.STRATEGIES["random"], case, 0, 30)
    assert plain.pairs_frac is None and plain.inside == ()
    assert script.figures(case, "random", [plain], 30, "node_device_power_peak_1s_w")["pairwise_frac"] == ""


def test_rows_of_a_table_that_is_replayed_again_are_replaced_and_others_stay(tmp_path):
    path = tmp_path / "rows.csv"
    script.merge_rows(
        path, [{"table": "a", "strategy": "grid", "x_frac": 1}, {"table": "b", "strategy": "grid", "x_frac": 2}]
    )
    script.merge_rows(path, [{"table": "a", "strategy": "grid", "x_frac": 3, "y_frac": 4}])
    with path.open(newline="") as lines:
        rows = [(row["table"], row["x_frac"], row["y_frac"]) for row in csv.DictReader(lines)]
    assert rows == [("a", "3", "4"), ("b", "2", "")]


def test_one_command_writes_rows_page_and_drawing(tmp_path):
    import search_regret_page

    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\nbefore\n\n{search_regret_page.BEGIN}\nold\n{search_regret_page.END}\n\nafter\n")
    cases = tmp_path / "cases.yaml"
    (one,) = [one for one in yaml.safe_load(CASES.read_text()) if one["name"] == "dense_gpt_h200x4_2700w"]
    # A held-out fit takes seconds; `test_held_out_estimates_are_fitted_to_other_tables` makes one.
    cases.write_text(yaml.safe_dump([one | {"table": str(DATA / one["table"]), "held_out": False}]))
    command = [sys.executable, SCRIPT, "--cases", cases, "--case", "dense_gpt_h200x4_2700w", "--seeds", "2"]
    command += ["--only", "random", "--only", "model_guided", "--csv", tmp_path / "rows.csv"]
    command += ["--markdown", page, "--svg", tmp_path / "page"]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    text = page.read_text()
    assert text.startswith("# Page\n\nbefore") and text.endswith("after\n") and "old" not in text
    assert "**dense_gpt_h200x4_2700w**, 7 candidates, 2 seeds ([drawing](page/dense_gpt_h200x4_2700w.svg)):" in text
    assert "| random | " in text and "| model_guided | " in text
    assert (tmp_path / "page" / "dense_gpt_h200x4_2700w.svg").read_text().count("<polyline") == 2


def test_every_case_names_a_table_and_a_bound_that_excludes_the_fastest_plan():
    """Without a bound that matters nothing is learned of constraints."""
    tables = {path.name: script.read_table(path) for path in TABLES}
    for one in yaml.safe_load(CASES.read_text()):
        objective = script.parse_objective(one["objective"])
        bounds = tuple(map(script.parse_constraint, one["where"]))
        case = script.Case(
            name=one["name"], trials=tables[one["table"]], question=Question(objective=objective, constraints=bounds)
        )
        fastest = max((t for t in case.trials if t.metrics), key=lambda t: t.metrics[objective.metric])
        assert case.value(fastest) == -np.inf, case.name
        assert max(map(case.value, case.trials)) > -np.inf, case.name


@pytest.mark.slow
def test_held_out_estimates_are_fitted_to_other_tables():
    """They order a table's plans better than chance, and the table itself is not needed for them."""
    path = DATA / "moe_ep_h200x4.parquet"
    case = script.Case(
        name="moe",
        trials=script.read_table(path, held_out=True),
        question=Question(objective=OBJECTIVE, constraints=(POWER,)),
    )
    assert 0.5 < script.pairwise_accuracy(case) < 1.0
    assert all(0.0 < trial.estimate["estimated_tokens_per_s_log_std"] < 0.5 for trial in case.trials)
