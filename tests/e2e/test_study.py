"""A whole study as a user runs it: real Ray, real workers, real files."""

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]


@pytest.mark.usefixtures("on_standing_cluster")
def test_failures_are_statuses_and_the_study_goes_on(
    wattune, wattune_here, write_space, tiny_model, results, storage: Path
) -> None:
    # Real failures: weights no machine of this size can hold, and rotary frequencies that overflow.
    too_large = tiny_model | {"hidden_size": 65536, "ffn_hidden_size": 262144, "vocab_size": 1048576}
    not_finite = tiny_model | {"rope_base": 1e-300}
    space = write_space("failing", model=[too_large, not_finite, tiny_model])

    done = wattune("run", space, "--json")
    assert done.returncode == 0, done.stderr
    ranking = json.loads(done.stdout)
    assert [row["verdict"] for row in ranking["feasible"]] == ["feasible"]
    statuses = sorted((one["status"], one["reason"].split(":")[0]) for one in results(storage / "failing").values())
    assert [status for status, _ in statuses] == ["completed", "crashed", "out_of_memory"]
    assert ("crashed", "non_finite_loss") in statuses

    study = storage / "failing"
    assert (study / "report.html").stat().st_size > 10_000
    assert (study / "candidates.parquet").exists() and (study / "ranking.parquet").exists()
    assert not (study.parent / "mlruns").exists()
    good = next(study / "trials" / name for name, one in results(study).items() if one["status"] == "completed")
    node = next((good / "telemetry").iterdir())
    assert {path.stem for path in node.glob("*.parquet")} == {"host", "ring", "fast", "counter", "slow"}
    manifest = json.loads((node / "manifest.json").read_text())
    assert manifest["closed"] is True

    analysed = wattune_here("analyze", good, "--json")
    assert analysed.returncode == 0, analysed.stderr
    stored = json.loads((good / "run.json").read_text())["metrics"]
    recomputed = json.loads(analysed.stdout)["metrics"]
    assert {name: recomputed[name] for name in recomputed if name in stored} == pytest.approx(
        {name: stored[name] for name in recomputed if name in stored}
    )

    before = {path: path.stat().st_mtime_ns for path in study.glob("trials/*/run.json")}
    again = wattune("run", space, "--json")
    assert again.returncode == 0, again.stderr
    assert {path: path.stat().st_mtime_ns for path in study.glob("trials/*/run.json")} == before
    assert wattune_here("sync", "failing", "--json").stdout.strip() == '{"sent": 0}'

    from_mlflow = wattune_here(
        "rank",
        "failing",
        "--tracking-uri",
        f"sqlite:///{storage / 'mlflow.db'}",
        "--objective",
        "maximize tokens_per_s",
        "--json",
    )
    assert from_mlflow.returncode == 0, from_mlflow.stderr
    assert len(json.loads(from_mlflow.stdout)["failed"]) == 2


def test_an_unknown_cluster_is_one_clear_line(wattune, write_space) -> None:
    done = wattune("run", write_space("nowhere"), "--address", "127.0.0.1:1", timeout_s=200)
    assert done.returncode == 1
    assert "127.0.0.1:1 did not answer" in done.stderr
    assert "Traceback" not in done.stderr
