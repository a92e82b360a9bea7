"""A search over a command of the user's own, with real Ray on processors."""

import json
import sys
from pathlib import Path

import psutil
import pytest
from own_study import PROGRAM, commands, own_space

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600), pytest.mark.usefixtures("on_standing_cluster")]


def test_commands_run_and_every_ending_has_its_status(
    wattune, wattune_here, results, storage: Path, tmp_path: Path
) -> None:
    modes = ["good", "out_of_memory", "crash", "short", "hang", "silent"]
    left = tmp_path / "daemon"
    command = [
        sys.executable,
        str(PROGRAM),
        "--mode={how}",
        "{how=good?--leave}",
        f"{{how=good?{left}}}",
        f"--tag={tmp_path}",
    ]
    space = own_space(tmp_path, "own", command=command, flags={"how": modes, "algorithm": ["Ring"]})

    done = wattune("run", space, "--json")
    assert done.returncode == 0, done.stderr
    assert not commands(tmp_path)
    assert not psutil.pid_exists(int(left.read_text()))  # nothing that a command leaves behind stays

    study = storage / "own"
    specs = {path.parent.name: json.loads(path.read_text()) for path in study.glob("trials/*/spec.json")}
    mode_of = {name: dict(spec["program"]["flags"])["how"] for name, spec in specs.items()}
    found = {mode_of[name]: one for name, one in results(study).items()}
    endings = {mode: (one["status"], one["reason"]) for mode, one in found.items()}
    assert endings["good"] == ("completed", "")
    assert endings["out_of_memory"][0] == "out_of_memory"
    assert endings["crash"][0] == "crashed" and "rank 0: ValueError: the loss is no number" in endings["crash"][1]
    assert endings["short"][0] == "crashed" and endings["short"][1].startswith("ended after 3 steps, needs 25 or more")
    assert endings["hang"][0] == "timed_out" and "no step finished for" in endings["hang"][1]

    good = found["good"]
    assert good["tags"]["steps_source"].startswith("spans")
    assert good["metrics"]["startup_s"] > 0 and 0 < good["metrics"]["overhead_frac"] < 1
    # One process trains 100 tokens a step of 20 ms; its step stands for both devices.
    measured = good["metrics"]
    assert measured["energy_per_step_j"] / measured["energy_per_token_j"] == pytest.approx(100, rel=1e-6)
    assert 0 < measured["tokens_per_s"] <= 100 / 0.02 and measured["step_time_s"] >= 0.02
    assert good["metrics"]["node_device_power_mean_w"] > 500  # of two simulated devices

    silent = found["silent"]
    assert silent["status"] == "completed" and "start_up_counts" in silent["quality_reasons"]
    assert silent["metrics"]["total_energy_j"] > 0 and "step_time_s" not in silent["metrics"]
    took_s = (silent["end_wall_ns"] - silent["start_wall_ns"]) / 1e9
    assert 1.9 < silent["metrics"]["window_s"] < took_s, "its sleep, and its start-up as long as the host takes"

    folders = {mode: study / "trials" / name for name, mode in mode_of.items()}
    assert "mode good, algorithm Ring" in (folders["good"] / "output" / "node0.txt").read_text()
    for mode in ("good", "silent"):
        analysed = wattune_here("analyze", folders[mode], "--json")
        assert analysed.returncode == 0, analysed.stderr
        again = json.loads(analysed.stdout)["metrics"]
        stored = found[mode]["metrics"]
        assert {name: again[name] for name in stored if name in again} == pytest.approx(
            {name: stored[name] for name in stored if name in again}
        )

    ranked = wattune_here("rank", "own", "--where", "how == good", "--json")
    assert ranked.returncode == 0, ranked.stderr
    rows = json.loads(ranked.stdout)
    assert [row["flags"]["how"] for row in rows["feasible"]] == ["good"] and not rows["failed"]
