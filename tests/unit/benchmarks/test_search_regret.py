"""The replay of measured tables: its figures are those of a table that is known, and the shipped tables can be read."""

import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from known_space import BEST, OBJECTIVE, POWER, SPECS, metrics, result

from wattune.trial import TrialStatus

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "benchmarks" / "search_regret.py"
DATA = ROOT / "benchmarks" / "data"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("search_regret", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def case(script: ModuleType):
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
    return script.Case(name="known", trials=trials, objective=OBJECTIVE, constraints=(POWER,))


def test_a_replay_of_the_grid_finds_the_best_where_it_stands(script, case):
    run = script.replay(lambda problem: script.STRATEGIES["grid"](replace(problem, specs=SPECS)), case, 0, len(SPECS))
    row = script.figures(case, "grid", [run], len(SPECS), "node_device_power_peak_1s_w")
    good = [case.value(trial) >= 0.98 * metrics(BEST)["tokens_per_s"] for trial in case.trials]
    assert row["num_trials_median"] == good.index(True) + 1
    assert row["gpu_time_median_s"] == 100 * (good.index(True) + 1)
    assert row["found_frac"] == 1.0 and row["end_regret_median_frac"] == 0.0
    assert row["hypervolume_frac"] == 1.0
    assert row["feasible_frac"] == pytest.approx(np.mean([case.value(t) > -np.inf for t in case.trials]), abs=1e-3)


def test_regret_never_rises_and_a_stopped_run_stays_where_it_was(script, case):
    run = script.replay(script.STRATEGIES["model_guided"], case, 0, 120)
    regrets = script.curve(case, run, metrics(BEST)["tokens_per_s"], 150)
    assert len(regrets) == 150 and (np.diff([r for r in regrets if np.isfinite(r)]) <= 0).all()
    assert regrets[-1] == regrets[len(run.trials) - 1]


def test_the_hypervolume_is_the_area_above_the_worst_point(script):
    assert script.hypervolume([(2.0, 5.0)], (1.0, 10.0)) == 5.0
    assert script.hypervolume([(2.0, 5.0), (3.0, 8.0), (1.5, 6.0)], (1.0, 10.0)) == 5.0 + 2.0


def test_a_right_estimate_orders_every_pair_and_a_wrong_one_none(script, case):
    assert script.pairwise_accuracy(case) == 1.0
    backwards = [
        replace(trial, estimate={name: -value for name, value in trial.estimate.items()}) for trial in case.trials
    ]
    assert script.pairwise_accuracy(replace(case, trials=tuple(backwards))) == 0.0


TABLES = [path for path in sorted(DATA.glob("*.parquet")) if path.stem != "published_steps"]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_every_shipped_table_can_be_replayed(script, path):
    trials = script.read_table(path)
    assert trials and all(trial.cost_s > 0 for trial in trials)
    assert len({trial.spec for trial in trials}) == len(trials)
    assert any(trial.results[0].status is TrialStatus.COMPLETED for trial in trials)


def test_the_synthetic_table_is_what_its_script_writes(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "search_tables.py"), "--out", str(tmp_path)]
    subprocess.run(command, check=True, timeout=100, capture_output=True)
    for path in tmp_path.glob("*.parquet"):
        import pyarrow.parquet as pq

        written, kept = pq.read_table(path), pq.read_table(DATA / path.name)
        assert written.num_rows == kept.num_rows and written["trial_id"] == kept["trial_id"]
        for name in ("tokens_per_s", "node_device_power_peak_1s_w", "estimated_tokens_per_s"):
            ours, theirs = (np.array(one[name].to_pylist(), dtype=float) for one in (written, kept))
            assert ours == pytest.approx(theirs, rel=1e-9, nan_ok=True)


def test_bounds_that_nothing_holds_are_refused():
    table = str(DATA / "moe_ep_h200x4.parquet")
    where = ["--objective", "maximize tokens_per_s", "--where", "node_device_power_peak_1s_w <= 1"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--table", table, *where], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 2 and "no trial holds every bound" in done.stderr
