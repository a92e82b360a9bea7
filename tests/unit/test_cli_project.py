"""The verb `project`: what a person and a program read of a study and of a table, and what it refuses."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from decided_study import write_study
from small_study import make_study

from wattune.run import Recorded, RunStatus
from wattune.run import Run as RunRecord
from wattune.storage.study import StudyFolder, TrialFolder

Run = Callable[..., tuple[int, str, str]]
ROW = "Llama3.1-405B,{},H100,8,8,2,8,1,1152,8192,FP8,{}\n"
HEAD = "model,gpus,gpu,tp,pp,cp,vpp,mbs,global_batch,seq_len,precision,step_time_s\n"


def _scaled(study: StudyFolder, path: Path) -> None:
    """The measured trial of four devices again, as the small run of a plan on four nodes of four with 32 layers."""
    document = study.document() | {"study": "scaled", "constraints": []}
    document |= {"model": [{"name": "llama3_8b", "num_layers": 32, "vocab_size": 32_000, "scale_to": "1x4"}]}
    scaled = StudyFolder.create(path, "scaled", document)
    for folder in study.trials():
        spec, run = folder.read()
        if run is not None and run.metrics:
            large = replace(spec, cluster=replace(spec.cluster, num_nodes=4), model=replace(spec.model, num_layers=32))
            small = replace(spec, stands_for=large)
            own = scaled.trial(small.trial_id, 0)
            shutil.copytree(folder.path, own.path, ignore=shutil.ignore_patterns("run.json", "spec.json"))
            own.write_spec(small)
            own.write_result(replace(run, trial_id=small.trial_id))


def _recording(study: StudyFolder, path: Path) -> None:
    """The readings of one of the trials, as of a command that nobody knows a plan of."""
    folder = next(one for one in study.trials() if (one.path / "telemetry").is_dir())
    shutil.copytree(folder.path, path, ignore=shutil.ignore_patterns("run.json", "spec.json"))
    (path / "manifest.json").write_text('{"format": 4, "closed": true, "node": "node0"}')
    facts = Recorded(command=("train",), machine={"devices": "4 x NVIDIA H200"})
    told = folder.result().metrics | {"exposed_comm_frac": 0.1}
    run = RunRecord(trial_id="mine", repeat=0, status=RunStatus.COMPLETED, metrics=told, recorded=facts)
    TrialFolder(path).write_result(run)


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("storage")
    study = make_study(path)
    _scaled(study, path)
    _recording(study, path / "recordings" / "mine")
    write_study(path, lambda _: True, name="simulated")
    (path / "small.csv").write_text(HEAD + ROW.format(512, 55.143))
    (path / "large.csv").write_text(HEAD + ROW.format(2048, 14.222))
    return path


@pytest.fixture(autouse=True)
def stored(monkeypatch: pytest.MonkeyPatch, storage: Path, tmp_path: Path) -> None:
    monkeypatch.setenv("WATTUNE_STORAGE", str(storage))
    monkeypatch.chdir(tmp_path)


def projections(wattune: Run, *arguments: object) -> list[dict[str, dict[str, dict[str, float]]]]:
    if "--mtbf" not in arguments and not str(arguments[0]).endswith(".csv"):
        arguments += ("--mtbf", 1)  # a shorter cycle of checkpoints, whose transforms take a tenth of the time
    code, out, _ = wattune("project", *arguments, "--json")
    assert code == 0
    found: list[dict[str, dict[str, dict[str, float]]]] = json.loads(out)["projections"]
    return found


def test_a_study_s_best_plan_keeps_its_residual(wattune: Run) -> None:
    (same,) = projections(wattune, "dense_h200x4", "--to", "1x4")
    step = same["figures"]["step_time_s"]
    assert step["value"] == pytest.approx(0.4928, rel=1e-3) and same["label"] == "projected"
    (there,) = projections(wattune, "dense_h200x4", "--to", "8x4", "--network", "hdr")
    (slow,) = projections(wattune, "dense_h200x4", "--to", "8x4", "--network", "roce_100")
    (capped,) = projections(wattune, "dense_h200x4", "--to", "8x4", "--network", "hdr", "--limit", 450)
    for one in (there, slow, capped):
        assert one["label"] == "transferred" and "fabric" in one["untested"]
    assert step["value"] < there["figures"]["step_time_s"]["value"] < slow["figures"]["step_time_s"]["value"]
    power = "node_device_power_mean_w"
    assert capped["figures"][power]["value"] < there["figures"][power]["value"]
    assert capped["figures"]["step_time_s"]["value"] > there["figures"]["step_time_s"]["value"]


def test_a_transferred_plan_is_judged_only_if_asked_for(wattune: Run, tmp_path: Path) -> None:
    code, out, _ = wattune("project", "dense_h200x4", "--to", "8x4", "--plot", tmp_path / "page.html")
    assert "cluster_power_mean_w against size" in (tmp_path / "page.html").read_text()
    assert (
        code == 0
        and "transferred" in out
        and "neither ordered nor checked" in out
        and "±0 %" not in out
        and "±0%" not in out
    )
    code, out, _ = wattune("project", "dense_h200x4", "--to", "8x4", "--include", "transferred")
    assert code == 0 and "transferred" in out and "neither ordered nor checked" not in out
    code, out, _ = wattune("project", "dense_h200x4", "--to", "250000x4")
    assert code == 0 and "±200" not in out and "2.0 % (0.2 % to 8.1 %)" in out and "250,000 times" in out, (
        "no share of ±200 %"
    )


def test_a_table_is_scored_and_drawn(wattune: Run, storage: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    code, out, _ = wattune("project", storage / "small.csv", "--against", storage / "large.csv", "--plot", page)
    assert code == 0 and "measured" in out and "14.2" in out
    text = page.read_text()
    assert '"circle","diamond-open","x"' in text and "90 % interval" in text
    (row,) = projections(wattune, storage / "small.csv", "--to", "256x8", "--against", storage / "large.csv")
    assert row["is_inside"] and abs(float(str(row["error_frac"]))) < 0.03


def test_a_small_run_is_projected_from_the_plan_it_stands_for(wattune: Run) -> None:
    own, far = (projections(wattune, "scaled", "--to", size, "--include", "transferred") for size in ("4x4", "32x4"))
    _, out, _ = wattune("rank", "scaled", "--json")
    ranked = {one["label"]: one["objective"] for one in json.loads(out)["feasible"]}
    for near, there in ((one, next(two for two in far if two["name"] == one["name"])) for one in own):
        speed, told = near["figures"]["tokens_per_s"], ranked[str(near["name"])]
        assert speed["value"] == pytest.approx(told["value"], rel=0.03), "two doublings of growth are added"
        assert speed["low"] < told["low"] and told["high"] < speed["high"], "both errors"
        step, wide = near["figures"]["step_time_s"], there["figures"]["step_time_s"]
        assert wide["high"] / wide["low"] > step["high"] / step["low"] > 1.2
        assert "fabric" in str(near["untested"]) and "32 times" in str(there["untested"]), "of what the small run had"
        assert "1x4 h200_sxm" in near["notes"]["scaled_down"] and not near["measured"]
        ramps = [one["figures"]["cluster_power_ramp_1s_w_per_s"]["value"] for one in (near, there)]
        # Eight times the nodes, in phase. A mean of a second passes another share of a step that is stretched.
        assert 4 < ramps[1] / ramps[0] < 9, "its own traces, stretched to the large step"
    code, out, _ = wattune("project", "scaled", "--to", "4x4")
    assert code == 0 and "transferred, scaled_down" in " ".join(out.split())


def test_a_recording_has_the_power_of_its_cluster(wattune: Run) -> None:
    (one,) = projections(wattune, "mine", "--to", "16x8", "--mtbf", 6)
    figures = one["figures"]
    node = figures["node_device_power_mean_w"]
    assert node["low"] < node["value"] < node["high"] and node["high"] == pytest.approx(8 * 691, rel=0.1)
    assert 0.9 < figures["cluster_power_mean_w"]["value"] / (16 * node["value"]) < 1.0
    assert {"cluster_swing_rms_w", "goodput_frac"} <= figures.keys() and "tokens_per_s" not in figures


def test_an_operator_bounds_the_cluster(wattune: Run, storage: Path) -> None:
    swing = "cluster_swing_rms_w"
    (free,) = projections(wattune, "dense_h200x4", "--to", "16x4")
    figure = free["figures"][swing]
    for limit_w, breaks, unsure in (
        (figure["low"] - 1, True, False),
        ((figure["value"] + figure["high"]) / 2, False, True),
        (figure["high"] + 1, False, False),
    ):
        bound = f"{swing} <= {limit_w:.0f}"
        (one,) = projections(wattune, "dense_h200x4", "--to", "16x4", "--bound", bound)
        assert (bound in one["breaks"], f"may break {bound}" in one["unsure"]) == (breaks, unsure)
    (blind,) = projections(wattune, storage / "small.csv", "--to", "256x8", "--bound", f"{swing} <= 1")
    assert blind["unsure"] == [f"does not tell {swing} <= 1"] and not blind["breaks"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["dense_h200x4"], "--to: got nothing"),
        (["dense_h200x4", "--to", "1x2"], "cannot run there"),
        (["dense_h200x4", "--to", "8x4", "--network", "token_ring"], "unknown network"),
        (["dense_h200x4", "--to", "8x4", "--limit", "-5"], "--limit"),
        (["dense_h200x4", "--to", "8x4", "--limit", "5000"], "--limit"),
        (["dense_h200x4", "--to", "8x4", "--limit", "1"], "--limit: power_limit_w=1.0 is outside"),
        (["dense_h200x4", "--to", "8x4", "--inlet", "nan"], "--inlet"),

        (["dense_h200x4", "--to", "8x4", "--mtbf", "nan"], "--mtbf"), (["small.csv", "--to=8x4", "--mtbf=6"], "--mtbf"),

        (["dense_h200x4", "--to", "8x4", "--global-batch-size", "3"], "cannot run there"),
        (["dense_h200x4", "--to", "8x4", "--include", "all"], "--include"),
        (["dense_h200x4", "--to", "8x4 mi300x"], "--to"), (["dense_h200x4", "--against", "large.csv"], "large.csv"),
        (["dense_h200x4", "--to", "8x4", "--network", ""], "unknown network"),
        (["dense_h200x4", "--to", "8x4", "--bound", "cluster_swing_w <= 5"], 'did you mean "cluster_swing_rms_w"'),
        (["mine", "--to", "1x2"], "got 4 devices"), (["mine", "--to", "8x4", "--limit", "500"], "does not tell"),
        (["simulated", "--to", "8x4"], "measured sensors"), (["nobody", "--to", "8x4"], "nobody"),
        (["small.csv", "--to", "8x4"], "small.csv"), (["nothing.csv", "--to", "8x4"], "nothing.csv"),
    ],
)  # fmt: skip
def test_what_cannot_be_projected_is_one_line_and_writes_nothing(
    wattune: Run, tmp_path: Path, arguments: list[str], said: str
) -> None:
    code, _, err = wattune("project", *arguments, "--plot", tmp_path / "page.html")
    assert code == 2 and said in err and ((err.startswith("error: ") and err.count("\n") == 1) or "Usage" in err)
    assert not list(tmp_path.iterdir())


def test_a_plan_has_the_goodput_and_the_swing_of_its_cluster(wattune: Run) -> None:
    (often,) = projections(wattune, "dense_h200x4", "--to", "16x4", "--mtbf", 2)
    (rare,) = projections(wattune, "dense_h200x4", "--to", "16x4", "--mtbf", 2000)
    often, rare = often["figures"], rare["figures"]
    (never,) = projections(wattune, "dense_h200x4", "--to", "16x4", "--mtbf", 1e-9)
    assert never["figures"]["goodput_frac"]["value"] < 1e-6
    assert often["goodput_frac"]["value"] < 0.9 < 0.98 < rare["goodput_frac"]["value"]
    (one,) = projections(wattune, "dense_h200x4", "--to", "1x4")
    swing = "cluster_swing_rms_w"
    assert rare[swing]["low"] <= rare[swing]["value"] <= rare[swing]["high"]
    assert 8 < rare[swing]["value"] / one["figures"][swing]["value"] < 17, "in step, and slower over a network"
    mean_w, node_w = rare["cluster_power_mean_w"]["value"], rare["node_device_power_mean_w"]["value"]
    assert 0.97 < mean_w / (16 * node_w) < 1.0, "less than without checkpoints and failures"
