"""The benchmark's dry run: every case has figures, and compiling changes no loss."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "engine_mfu.py"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_dry_run_has_a_figure_for_every_case(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--json", "--budget", "300", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    cases = result["cases"]
    assert cases.keys() == {"limit", "bare_bf16", "bare_fp32", "engine", "engine_eager", "engine_again"}
    assert cases["engine"]["warm"]["spec_to_first_step_s"] < cases["engine"]["cold"]["spec_to_first_step_s"]
    assert cases["engine"]["warm_repeats_losses"] is True
    assert sum(cases["engine"]["profile"]["parts"].values()) == pytest.approx(1.0, abs=1e-3)
    assert result["ratios"]["largest_loss_deviation_compiled_from_eager"] < 1e-5
    assert (tmp_path / cases["engine"]["profile"]["trace"]).exists()
