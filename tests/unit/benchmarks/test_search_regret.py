"""The replay of measured tables: its figures are those of a table that is known, and the shipped tables can be read."""

import csv
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
DATA = ROOT / "benchmarks" / "data"
CASES = DATA / "search_cases.yaml"


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
    row = row_of(case, run, len(SPECS))
    good = [case.value(trial) >= 0.98 * metrics(BEST)["tokens_per_s"] for trial in case.trials]
    assert row["num_trials_median"] == good.index(True) + 1
    assert row["gpu_time_median_s"] == 100 * (good.index(True) + 1)
    assert row["found_frac"] == 1.0 and row["end_regret_median_frac"] == 0.0
    assert row["feasible_frac"] == pytest.approx(np.mean([case.value(t) > -np.inf for t in case.trials]), abs=1e-3)


def test_regret_never_rises_and_a_stopped_run_stays_where_it_was(case):
    run = script.replay(script.STRATEGIES["model_guided"], case, 0, 40)
    regrets = script.curve(case, run, metrics(BEST)["tokens_per_s"], 60)
    assert len(regrets) == 60 and (np.diff([r for r in regrets if np.isfinite(r)]) <= 0).all()
    assert regrets[-1] == regrets[len(run.trials) - 1]


def test_a_right_estimate_orders_every_pair_and_a_wrong_one_none(case):
    assert script.pairwise_accuracy(case) == 1.0
    backwards = [
        replace(trial, estimate={name: -value for name, value in trial.estimate.items()}) for trial in case.trials
    ]
    assert script.pairwise_accuracy(replace(case, trials=tuple(backwards))) == 0.0


def row_of(case, run, most):
    return dict(zip(script.COLUMNS, script.figures(case, "known", [run], most), strict=True))


def case_of(**changes):
    """A case of seven plans; a held-out fit takes seconds, and `test_held_out_estimates_...` makes one."""
    (one,) = [one for one in yaml.safe_load(CASES.read_text()) if one["name"] == "dense_gpt_h200x4_2700w"]
    return one | {"table": str(DATA / one["table"]), "held_out": False} | changes


TABLES = [path for path in sorted(DATA.glob("*.parquet")) if path.stem != "published_steps"]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_every_shipped_table_can_be_replayed(path):
    trials = script.read_table(path)
    assert trials and all(trial.cost_s > 0 for trial in trials)
    assert len({trial.spec for trial in trials}) == len(trials)
    assert any(trial.results[0].status is RunStatus.COMPLETED for trial in trials)


def test_bounds_that_nothing_holds_are_refused(tmp_path, capsys):
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump([case_of(where=["node_device_power_peak_1s_w <= 1"])]))
    with pytest.raises(SystemExit, match="2"):
        script.main(["--cases", str(tmp_path / "cases.yaml")])
    assert "no trial holds every bound" in capsys.readouterr().err


def test_a_surrogate_s_intervals_are_judged_on_what_it_had_not_seen(case):
    run = script.replay(lambda problem: script.ModelGuided(problem, stops=False), case, 0, 30)
    assert len(run.inside) >= 20 and np.mean(run.inside) > 0.7
    assert row_of(case, run, 30)["inside_frac"] == pytest.approx(np.mean(run.inside), abs=1e-3)
    plain = script.replay(script.STRATEGIES["random"], case, 0, 30)
    assert plain.inside == () and row_of(case, plain, 30)["inside_frac"] == ""


def test_one_command_writes_the_rows_of_strategies_and_of_priors(tmp_path):
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump([case_of()]))
    command = ["--cases", str(tmp_path / "cases.yaml"), "--seeds", "2", "--csv", str(tmp_path / "rows.csv")]
    for more, names in (
        (["--only", "random", "--only", "model_guided"], ["random", "model_guided"]),
        (["--priors", "--most", "4"], ["none"]),
    ):
        with pytest.raises(SystemExit, match="0"):
            script.main([*command, *more])
        with (tmp_path / "rows.csv").open(newline="") as lines:
            rows = list(csv.DictReader(lines))
        assert [row["strategy"] for row in rows] == names
        assert {row["num_candidates"] for row in rows} == {"7"}
        assert {row["num_trials_most"] for row in rows} == ({"4"} if "--most" in more else {"7"})


def test_wrong_priors_are_the_estimates_mirrored_and_turned():
    assert script.mirrored(np.array([1.0, 4.0, np.nan])).tolist()[:2] == pytest.approx([4.0, 1.0])
    assert script.mirrored(np.array([-1.0, 3.0])).tolist() == [3.0, -1.0]
    assert script.reversed_ranks(np.array([1.0, 5.0, 3.0])).tolist() == [5.0, 1.0, 3.0]


def test_every_case_names_a_table_and_a_bound_that_excludes_the_fastest_plan():
    """Without a bound that matters nothing is learned of constraints."""
    tables = {path.name: script.read_table(path) for path in TABLES}
    for one in yaml.safe_load(CASES.read_text()):
        question = Question.of(one["objective"], *one["where"])
        case = script.Case(name=one["name"], trials=tables[one["table"]], question=question)
        fastest = max((t for t in case.trials if t.metrics), key=lambda t: t.metrics[question.objective.metric])
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
