"""The verbs that turn results into a decision: rank, compare, report."""

import csv
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from small_study import GOLDEN, make_study, ranking_of

from wattune.cli.shell import complete_stored, out
from wattune.recording.recording import run_of
from wattune.storage.study import StudyFolder

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("storage")
    make_study(path)
    make_study(path, "strict", bound_w=2000.0)
    return path


@pytest.fixture(autouse=True)
def stored(monkeypatch: pytest.MonkeyPatch, storage: Path, tmp_path: Path) -> None:
    monkeypatch.setenv("WATTUNE_STORAGE", str(storage))
    monkeypatch.chdir(tmp_path)


def test_rank_prints_the_decision_with_its_distance_to_the_bound(wattune: Run) -> None:
    code, out, _ = wattune("rank", "dense_h200x4")
    assert code == 0
    for shown in ("tp2 pp2 mbs1", "within", "past", "node_device_power_peak_1s_w <= 3000", "rank 3 at 140.2"):
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


def test_a_question_about_configurations_bounds_and_the_space_is_one_call(wattune: Run) -> None:
    def asked(*options: str) -> dict[str, Any]:
        code, out, _ = wattune("rank", "dense_h200x4", *options, "--json")
        return json.loads(out) | {"code": code}

    counts = {"num_candidates": 3, "num_measured": 2, "num_failed": 1, "num_burst": 0}
    (space,) = asked()["space"]
    assert space == {"study": "dense_h200x4", **counts}
    assert asked()["price"] == asked()["infeasible"][0]["trial_id"]
    pipelines = asked("--where", "pp >= 2", "--where", "engine == megatron")
    assert [row["label"] for row in pipelines["feasible"]] == ["tp2 pp2 mbs1"] and not pipelines["failed"]
    assert pipelines["num_filtered"] == 2
    free = asked("--no-constraints", "--pareto", "tokens_per_s,node_device_power_mean_w")
    assert [row["label"] for row in free["feasible"]] == ["dp4 mbs1 overlap=grad_param", "tp2 pp2 mbs1"]
    assert len(free["pareto"]) == 2
    every = asked("--pareto", "tokens_per_s,node_device_power_mean_w", "--pareto-of", "all")
    assert {row["verdict"] for row in every["pareto"]} == {"feasible", "infeasible"}
    likely = asked("--constraint", "node_device_power_peak_1s_w <= 2720", "--risk", "0.001")
    assert likely["risk"] == pytest.approx(0.001) and likely["code"] == 3
    assert [row["label"] for row in likely["undecided"]] == ["dp4 mbs1 overlap=grad_param", "tp2 pp2 mbs1"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--risk", "0.6"], "below 0.5"),
        (["--no-constraints", "--constraint", "mfu_frac > 0.1"], "give one of the two"),
        (["--where", "tensor == 2"], "neither a metric nor a field"),
        (["--where", "tp == two"], "whole number"),
        (["--where", "engine < torch"], "use == or !="),
    ],
)
def test_a_question_that_is_none_is_an_error_object_and_exit_2(wattune: Run, options: list[str], said: str) -> None:
    code, out, err = wattune("rank", "dense_h200x4", *options, "--json")
    found = json.loads(out)
    assert code == 2 == found["error"]["exit_code"] and set(found) == {"error"}
    assert said in found["error"]["what"] and "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rank", "dense_h200x4", "--top", "1", "--json"], "--top shortens the table"),
        (["rank", "dense_h200x4", "--top", "1", "--csv", "-"], "--top shortens the table"),
        (["rank", "dense_h200x4", "--pareto-of", "all"], "give --pareto a,b too"),
        (["rank", "dense_h200x4", "--pareto", "tokens_per_s,mfu_frac", "--csv", "-"], "and no front"),
        (["compare", "dense_h200x4:a", "--estimate", "--html", "page.html"], "--html is of two trials"),
        (["calibrate", "--minutes", "2"], "give --links too"),
        (["calibrate", "--out", "here"], "give --links too"),
        (["init", "--example", "moe_ep_cpu", "--objective", "minimize step_time_s"], "leave --objective out"),
        (["init", "--example", "moe_ep_cpu", "--leave-out", "moe"], "leave --leave-out out"),
        (["record", "--seconds", "1", "--window", "1s:2s"], "--window: a recording of the machine alone"),
        (["record", "--seconds", "1", "--steps", "tqdm", "--tokens-per-step", "8"], "--steps, --tokens-per-step: a"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(
    wattune: Run, tmp_path: Path, arguments: list[str], said: str
) -> None:
    code, out, err = wattune(*arguments)
    assert (code, said in " ".join(re.sub(r"[│╭╮╰╯─]", " ", out + err).split())) == (2, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "verb",
    [
        ["rank", "nothing"], ["compare", "a:b", "c:d"], ["fit", "nothing"], ["report", "nothing"],
        ["analyze", "nothing"], ["sync", "nothing"], ["plan", "nothing.yaml"], ["run", "nothing.yaml"],
        ["record", "--backend", "nothing", "--seconds", "1"], ["calibrate", "--backend", "nothing"],
        ["catalog", "--nothing"], ["doctor", "--nothing"],
    ],
    ids=lambda verb: verb[0],
)  # fmt: skip
def test_every_verb_answers_a_failure_with_one_object(wattune: Run, verb: list[str]) -> None:
    plain, _, said = wattune(*verb)
    options = [verb[0], "--json", *verb[1:]]
    code, out, err = wattune(*options)
    found = json.loads(out)["error"]
    assert code == plain == found["exit_code"] != 0
    assert found["what"] and found["kind"] and "Traceback" not in said + err


def test_a_trial_is_analysed_by_its_study_and_id(wattune: Run, storage: Path) -> None:
    best = json.loads(wattune("rank", "dense_h200x4", "--json")[1])["feasible"][0]["trial_id"]
    folder = storage / "dense_h200x4" / "trials" / f"{best}-0"
    by_path = wattune("analyze", folder, "--json")
    assert by_path[0] == 0
    assert wattune("analyze", f"dense_h200x4:{best[:4]}", "--json") == by_path
    assert wattune("analyze", f"dense_h200x4:{best}-0", "--json") == by_path
    code, _, err = wattune("analyze", f"dense_h200x4:{best}-7")
    assert code == 2 and "has no repeat 7; it has 0" in err


def test_an_estimate_stands_beside_what_is_recomputed(
    wattune: Run, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = json.loads(wattune("rank", "dense_h200x4", "--json")[1])["feasible"][0]["trial_id"]
    code, out, _ = wattune("analyze", f"dense_h200x4:{best}", "--estimate", "--json")
    found = json.loads(out)
    assert code == 0 and found["beside"]["trial"] == f"dense_h200x4:{best}-0"
    step = next(one for one in found["beside"]["metrics"] if one["name"] == "step_time_s")
    assert step["measured"] == found["metrics"]["step_time_s"]
    assert step["low"] < step["measured"] < step["high"]
    parts = {one["name"]: one["estimated"] for one in found["beside"]["parts"] if one["estimated"]}
    assert sum(parts.values()) == pytest.approx(step["estimated"], rel=1e-6)
    assert parts["compute"] > 0.5 * step["estimated"]
    code, out, _ = wattune("analyze", f"dense_h200x4:{best}", "--estimate")
    assert code == 0 and out.index("quality:") < out.index("estimated and measured") < out.index("Parts of a step")
    monkeypatch.chdir(storage / "dense_h200x4" / "trials")
    again = wattune("analyze", f"{best}-0", "--estimate", "--json")
    assert json.loads(again[1])["beside"]["parts"] == found["beside"]["parts"]
    assert "beside" not in json.loads(wattune("analyze", f"{best}-0", "--json")[1])
    code, _, err = wattune("analyze", "s3://bucket/trial", "--estimate")
    assert code == 2 and "name STUDY:TRIAL_ID" in " ".join(err.split())


@pytest.fixture(scope="module")
def recordings(storage: Path) -> Path:
    """The golden recordings without spans, as recordings of two commands."""
    for name in ("dp4", "tp2pp2"):
        folder = storage / "recordings" / name
        shutil.copytree(GOLDEN / name, folder, ignore=shutil.ignore_patterns("spans.parquet"))
        facts = json.loads((folder / "manifest.json").read_text())
        spans = pq.read_table(GOLDEN / name / "spans.parquet")
        window = {
            end: function(spans[end]).as_py() for end, function in (("start_mono_ns", pc.min), ("end_mono_ns", pc.max))
        }
        facts |= {"command": ["torchrun", f"{name}.py"], "node": "node0", "window": window, "exit_code": 0}
        (folder / "manifest.json").write_text(json.dumps(facts))
    return storage


def test_recordings_are_ranked_and_their_different_work_is_said(wattune: Run, recordings: Path) -> None:
    code, out, _ = wattune("rank", "dp4", "tp2pp2", "--json")
    found = json.loads(out)
    rows = found["feasible"]
    energy_j = {row["trial_id"]: row["repeats"][0]["metrics"]["total_energy_j"] for row in rows}
    assert code == 0 and [row["trial_id"] for row in rows] == sorted(energy_j, key=energy_j.__getitem__)
    for name, total_j in energy_j.items():
        assert total_j == pytest.approx(run_of(recordings / "recordings" / name).metrics["total_energy_j"])
    assert rows[0]["recording"]["machine"]["devices"] == "4 x NVIDIA H200"
    assert any("2 different commands: wattune does not know what they do" in one for one in found["warnings"])
    bound = ["--constraint", "node_device_power_peak_1s_w <= 3000", "--objective", "minimize device_temp_max_c"]
    code, text, _ = wattune("rank", "dp4", "tp2pp2", *bound)
    assert code == 0 and "within" in text and "torchrun dp4.py" in text and "different work" in text
    code, _, err = wattune("rank", "dp4", "dense_h200x4")
    assert code == 2 and "rank recordings alone" in " ".join(err.replace("│", " ").split())
    assert wattune("rank", "dp4", "dp4")[0] == 2
    code, _, err = wattune("rank", "dp4", "tp2pp2", "--where", "tp <= 2")
    assert code == 2 and "a recording has no configuration" in err


def test_a_command_that_failed_does_not_win_by_having_done_less(wattune: Run, recordings: Path) -> None:
    manifest = recordings / "recordings" / "tp2pp2" / "manifest.json"
    facts = json.loads(manifest.read_text())
    try:
        manifest.write_text(json.dumps(facts | {"exit_code": 5}))
        found = json.loads(wattune("rank", "dp4", "tp2pp2", "--json")[1])
        rows = [(row["trial_id"], row["verdict"]) for row in (*found["feasible"], *found["failed"])]
        assert rows == [("dp4", "feasible"), ("tp2pp2", "failed")]
        assert "exit code 5: it may not have done its work" in found["failed"][0]["reason"]
        peak = ["--objective", "minimize node_device_power_peak_1s_w"]  # a peak was measured all the same
        found = json.loads(wattune("rank", "dp4", "tp2pp2", *peak, "--json")[1])
        assert [row["verdict"] for row in found["feasible"]] == ["feasible", "feasible"]
        assert "tp2pp2: its command ended with exit code 5" in found["warnings"]
    finally:
        manifest.write_text(json.dumps(facts))


def test_recordings_are_compared_with_each_other_and_with_a_trial(wattune: Run, recordings: Path) -> None:
    code, out, _ = wattune("compare", "dp4", recordings / "recordings" / "tp2pp2", "--json")
    found = json.loads(out)
    assert code == 0 and (found["asked"], found["a"]["kind"], found["time"]) == ("total_energy_j", "recording", None)
    assert found["differences"]["work"] == {"a": "command: torchrun dp4.py", "b": "command: torchrun tp2pp2.py"}
    assert any("commands differ" in warning for warning in found["warnings"])
    tested = {one["metric"]: one for one in found["tested"]}
    assert tested["device_temp_max_c"]["unit"] == "K" and tested["device_temp_max_c"]["change_frac"] is None
    trial = f"{recordings}/dense_h200x4/trials/{_trial_ids(wattune)['tp2 pp2 mbs1']}-0"
    found = json.loads(wattune("compare", trial, "tp2pp2", "--json")[1])
    assert (found["a"]["kind"], found["b"]["kind"]) == ("trial", "recording")
    assert any("does not know what the command does" in warning for warning in found["warnings"])
    assert not {"tokens_per_s", "energy_per_token_j", "total_energy_j"} & {one["metric"] for one in found["tested"]}
    # The recording is of the trial's own readings: same power.
    power = next(one for one in found["tested"] if one["metric"] == "node_device_power_peak_1s_w")
    assert power["change_frac"] == pytest.approx(0.0, abs=0.02) and not power["told_apart"]


def _trial_ids(wattune: Run) -> dict[str, str]:
    found = json.loads(wattune("rank", "dense_h200x4", "--no-constraints", "--json")[1])
    return {row["label"]: row["trial_id"] for row in found["feasible"]}


def test_a_shell_completes_studies_and_recordings(recordings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATTUNE_STORAGE", str(recordings))
    assert complete_stored("d") == ["dense_h200x4", "dp4"] and complete_stored("zzz") == []


def test_no_color_is_taken_anywhere_but_from_a_recorded_command(wattune: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(out, "no_color", False)
    assert wattune("rank", "dense_h200x4", "--top", 1, "--no-color")[0] == 0
    assert out.no_color and os.environ.pop("NO_COLOR") == "1"
    code, _, _ = wattune("record", "--seconds", "0.01", "--no-color", "echo")  # not looked for there
    assert code == 2 and "NO_COLOR" not in os.environ


def test_report_says_where_it_is(wattune: Run, storage: Path) -> None:
    code, out, _ = wattune("report", "dense_h200x4", "--json")
    assert code == 0
    assert json.loads(out) == {"report": str(storage / "dense_h200x4" / "report.html"), "figures": []}
