"""A study on a ladder as a user runs it: bursts, promotions, a stop between, and what ranking and report say."""

import json
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("on_standing_cluster"),
]


def test_bursts_come_first_the_best_is_promoted_and_no_burst_is_ranked(
    wattune, write_space, results, storage: Path
) -> None:
    space = write_space(
        "climbed",
        space={"micro_batch_size": [1, 2], "recompute": ["none", "full"]},
        measure={"warmup_steps": 1, "min_steps": 30, "min_seconds": 0, "profile_steps": 0, "reference_every": 0},
        search={"ladder": {"burst": {"min_steps": 2, "min_seconds": 0}, "promote": 0.25}},
    )
    first = wattune("run", space, "--max-trials", "3")
    assert "burst" in first.stdout, first.stdout + first.stderr
    found = results(storage / "climbed")
    assert [name.endswith("-2000") for name in found] == [True] * 3
    before = {path: path.stat().st_mtime_ns for path in (storage / "climbed").glob("trials/*/run.json")}

    second = wattune("run", space)
    assert second.returncode == 0, second.stdout + second.stderr
    found = results(storage / "climbed")
    bursts = {name: one for name, one in found.items() if one["tags"].get("fidelity") == "burst"}
    full = {name: one for name, one in found.items() if name not in bursts}
    assert len(bursts) == 4 and all(name.endswith("-2000") for name in bursts)
    assert all(path.stat().st_mtime_ns == time_ns for path, time_ns in before.items()), "no burst is repeated"
    assert [name[-2:] for name in full] == ["-0"]
    assert all("burst" in one["quality_reasons"] and one["quality"] != "publishable" for one in bursts.values())
    fastest = max(bursts.values(), key=lambda one: one["metrics"]["tokens_per_s"])
    (promoted,) = full.values()
    assert promoted["trial_id"] == fastest["trial_id"]

    ranking = json.loads(wattune("rank", "climbed", "--json").stdout)
    assert [row["trial_id"] for row in ranking["feasible"]] == [promoted["trial_id"]]
    assert len(ranking["burst"]) == 3 and all(row["rank"] is None for row in ranking["burst"])
    assert "3 only a burst" in wattune("rank", "climbed").stdout
    assert "Only a few steps of each were measured" in (storage / "climbed" / "report.html").read_text()

    third = wattune("run", space)
    assert third.returncode == 0 and "0 trial(s) to run" in third.stdout, third.stdout
