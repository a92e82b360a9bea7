"""The verbs that turn results into a decision: rank, compare, report."""

import csv
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from small_study import make_study, ranking_of

from wattune.cli import main
from wattune.storage.study import StudyFolder

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("storage")
    make_study(path)
    make_study(path, "strict", bound_w=2000.0)
    return path


@pytest.fixture
def wattune(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], storage: Path, tmp_path: Path) -> Run:
    monkeypatch.setenv("WATTUNE_STORAGE", str(storage))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["wattune", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        return code, *capsys.readouterr()

    return run


def test_rank_prints_the_decision_with_its_distance_to_the_bound(wattune: Run) -> None:
    code, out, _ = wattune("rank", "dense_h200x4")
    assert code == 0
    for shown in ("tp2 pp2 mbs1", "within", "past", "bound 1: node_device_power_peak_1s_w <= 3000", "rank 3 at 140.2"):
        assert shown in out


def test_nothing_feasible_is_exit_3(wattune: Run) -> None:
    code, out, err = wattune("rank", "strict", "--json")
    assert code == 3
    assert json.loads(out)["feasible"] == []
    assert "nothing is feasible" in err


def test_several_studies_need_one_set_of_bounds_and_stand_apart(wattune: Run) -> None:
    code, _, err = wattune("rank", "dense_h200x4", "strict")
    assert (code, "constraints differ" in err, "Traceback" in err) == (2, True, False)
    code, out, _ = wattune("rank", "dense_h200x4", "strict", "--constraint", "mfu_frac > 0.1", "--json")
    ranking = json.loads(out)
    assert code == 0
    assert ranking["studies"] == ["dense_h200x4", "strict"]
    assert sorted(row["study"] for row in ranking["feasible"]) == ["dense_h200x4"] * 2 + ["strict"] * 2


def test_csv_goes_to_a_file_or_to_standard_output(wattune: Run, tmp_path: Path) -> None:
    assert wattune("rank", "dense_h200x4", "--csv", tmp_path / "r.csv")[0] == 0
    _, out, _ = wattune("rank", "dense_h200x4", "--csv", "-")
    assert out == (tmp_path / "r.csv").read_text()
    lines = list(csv.DictReader(io.StringIO(out)))
    assert [line["verdict"] for line in lines] == ["feasible", "infeasible", "failed"]
    code, _, err = wattune("rank", "dense_h200x4", "--csv", tmp_path / "none" / "r.csv")
    assert (code, "cannot be written" in err) == (2, True)
    assert wattune("rank", "dense_h200x4", "--csv", "-", "--json")[0] == 2


def test_the_front_and_the_top_are_what_was_asked_for(wattune: Run) -> None:
    code, out, _ = wattune("rank", "dense_h200x4", "--pareto", "tokens_per_s,node_device_power_mean_w", "--json")
    assert code == 0
    assert [row["label"] for row in json.loads(out)["pareto"]] == ["tp2 pp2 mbs1"]
    assert wattune("rank", "dense_h200x4", "--pareto", "tokens_per_s")[0] == 2
    assert wattune("rank", "dense_h200x4", "--top", 1)[0] == 0


@pytest.mark.parametrize("text", ["__import__('os').system('touch hacked')", "mfu_frac >", "x <= 1", "(" * 5000])
def test_a_constraint_that_is_none_is_exit_2_and_one_message(wattune: Run, tmp_path: Path, text: str) -> None:
    for option in ("--constraint", "--where", "--objective"):
        code, out, err = wattune("rank", "dense_h200x4", option, text)
        assert (code, out, "Traceback" in err) == (2, "", False)
    assert list(tmp_path.iterdir()) == []


def test_compare_shows_the_waterfall_and_writes_a_page(wattune: Run, storage: Path, tmp_path: Path) -> None:
    ranking = ranking_of(StudyFolder.open("dense_h200x4", storage))
    a, b = (f"dense_h200x4:{row.trial_id}" for row in (ranking.feasible[0], ranking.infeasible[0]))
    code, out, _ = wattune("compare", a, b, "--html", tmp_path / "c.html")
    assert code == 0
    for shown in (
        "told apart",
        "95 % interval",
        "(Holm)",
        "more tokens a second",
        "Time of a step",
        "Energy of a step",
        "whole",
        "plan.pp",
    ):
        assert shown in out
    assert "What makes the difference" in (tmp_path / "c.html").read_text()
    found = json.loads(wattune("compare", a, b, "--json")[1])
    tested = {one["metric"]: one for one in found["tested"]}
    assert found["asked"] == "tokens_per_s" and tested["tokens_per_s"]["told_apart"] is True
    assert 0 < tested["tokens_per_s"]["low_frac"] < tested["tokens_per_s"]["change_frac"]
    heat = tested["device_temp_max_c"]
    assert heat["change_frac"] is None and heat["low"] < heat["change"] < heat["high"]
    (line,) = [line for line in out.splitlines() if "device_temp_max_c " in line]
    assert " K to " in line and "%" not in line
    assert sum(part["change"] for part in found["time"]["parts"]) == pytest.approx(
        found["time"]["b"] - found["time"]["a"], abs=1e-12
    )
    code, out, err = wattune("compare", a, "dense_h200x4:nothing")
    assert (code, out, "Traceback" in err) == (2, "", False)


def test_report_says_where_it_is(wattune: Run, storage: Path) -> None:
    code, out, _ = wattune("report", "dense_h200x4", "--json")
    assert code == 0
    assert json.loads(out) == {"report": str(storage / "dense_h200x4" / "report.html"), "figures": []}
