"""The benchmark's dry run: every case has figures, written as soon as they are known, and compiling changes no loss."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "engine_mfu.py"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_dry_run_has_a_figure_for_every_case(tmp_path: Path) -> None:
    kept, said = tmp_path / "kept.json", tmp_path / "said.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--json", "--budget", "300", "--out", str(tmp_path)]
    written = []
    with said.open("w") as out, subprocess.Popen([*command, "--keep", str(kept)], stdout=out) as running:
        while running.poll() is None:
            time.sleep(0.1)
            written.append(list(json.loads(kept.read_text())["cases"]) if kept.exists() else [])
    assert running.returncode == 0
    result = json.loads(said.read_text())
    assert json.loads(kept.read_text()) == result
    cases = result["cases"]
    # A run may be cut at any time: the loop like the engine is known before the engine, and both before the rest.
    assert list(cases) == ["limit", "bare_fp32", "engine", "bare_bf16", "engine_again", "engine_eager"]
    assert all(list(cases)[:number] in written for number in range(len(cases)))
    assert not any("partial" in case for case in cases.values())
    assert cases["engine"]["warm"]["spec_to_first_step_s"] < cases["engine"]["cold"]["spec_to_first_step_s"]
    assert cases["engine"]["warm_repeats_losses"] is True
    assert sum(cases["engine"]["profile"]["parts"].values()) == pytest.approx(1.0, abs=1e-3)
    assert {"engine_time_over_bare_fp32", "engine_time_over_bare_bf16"} <= result["ratios"].keys()
    assert result["ratios"]["largest_loss_deviation_compiled_from_eager"] < 1e-5
    assert (tmp_path / cases["engine"]["profile"]["trace"]).exists()
