"""The verbs `frontier` and `suggest`: what a person reads, what a program reads, and how they refuse."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from decided_study import POWER, write_study

Run = Callable[..., tuple[int, str, str]]


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


def test_frontier_keeps_what_is_measured_and_what_is_predicted_in_two_tables(wattune: Run) -> None:
    code, out, _ = wattune("frontier", "decided", "--vary", f"{POWER} <= 900..1300 step 100")
    measured, _, predicted = out.partition("predicted: best of")
    assert code == 0 and "measured: maximize tokens_per_s" in measured and "SIMULATED" in measured
    assert "predicted" not in measured.replace("P(holds)", "")
    assert "never measured" in predicted and "mbs4" in predicted and "mbs8" in measured


def test_frontier_s_json_has_one_point_for_each_value(wattune: Run) -> None:
    code, out, _ = wattune("frontier", "decided", "--vary", f"{POWER} <= 900..1300 step 100", "--json")
    found = json.loads(out)
    assert code == 0 and [point["value"] for point in found["points"]] == [900, 1000, 1100, 1200, 1300]
    best = found["points"][-1]["best"]
    assert best["holds_probability"] > 0.95 and best["best_probability"] is not None
    assert set(found["points"][-1]["predicted"]["predicted"]) == {"value", "low", "high"}


def test_suggest_lists_plans_with_what_they_may_change(wattune: Run) -> None:
    code, out, _ = wattune("suggest", "decided", "--budget", "1m")
    assert code == 0 and "the best plan, now" in out and "P(feasible)" in out and "20 s" in out
    code, out, _ = wattune("suggest", "decided", "--budget", "1m", "--json")
    found = json.loads(out)
    assert code == 0 and found["suggestions"] and found["expected_s"] <= 60


def test_suggest_says_plainly_that_nothing_is_worth_measuring(wattune: Run) -> None:
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
def test_what_cannot_be_answered_is_one_line_and_exit_code_2(wattune: Run, arguments, said) -> None:
    code, out, err = wattune(*arguments)
    assert (code, out) == (2, "") and said in err and "Traceback" not in err
    assert len(err.strip().splitlines()) == 1
