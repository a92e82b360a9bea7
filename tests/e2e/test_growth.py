"""A study grows on real workers, and nothing is measured twice."""

import json
from pathlib import Path

import pytest
import yaml

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.usefixtures("on_standing_cluster"),
]


def test_a_value_two_repeats_and_a_looser_bound_run_only_what_is_new(
    wattune, write_space, results, storage: Path, tmp_path
) -> None:
    first = write_space(
        "before_growth",
        workload={"seq_len": 32, "global_batch_size": 8},
        space={"tp": [1, 2], "micro_batch_size": [1]},
        measure={
            "warmup_steps": 2,
            "min_steps": 4,
            "min_seconds": 0.5,
            "reference_every": 0,
            "soak_finalists": 1,
            "soak_seconds": 1.5,
        },
        constraints=["node_device_power_peak_100ms_w <= 1500"],
    )
    done = wattune("run", first, "--json", timeout_s=600)
    assert done.returncode == 0, done.stderr
    study = storage / "before_growth"
    measured = {path.parent.name: path.read_bytes() for path in study.glob("trials/*/run.json")}
    space = yaml.safe_load(first.read_text())
    space["space"]["micro_batch_size"] = [1, 2]
    space["measure"]["repeats"] = 3
    space["constraints"] = ["node_device_power_peak_100ms_w <= 1600"]
    path = tmp_path / "grown.yaml"
    path.write_text(yaml.safe_dump(space))

    done = wattune("run", path, "--json", timeout_s=1200)
    assert done.returncode == 0, done.stderr
    assert (
        "11 trial(s) to run, 1 finalist(s) among them" in done.stderr
        and "space.micro_batch_size: adds 2" in done.stderr
    )
    outcome = json.loads(done.stdout)
    assert outcome["finished"]
    found = results(study)
    new = {name.rpartition("-")[2] for name in found.keys() - measured.keys()}
    long = [name for name in found if name.endswith("-3000")]  # two where the best is another one now
    assert len(found) - len(long) == 12 and 1 <= len(long) <= 2 and new <= {"0", "1", "2", "3000"}
    assert {one["status"] for one in found.values()} == {"completed"}
    assert {name: (study / "trials" / name / "run.json").read_bytes() for name in measured} == measured
    assert {name: one["tags"].get("space", "1") for name, one in found.items()} == {
        name: "1" if name in measured else "2" for name in found
    }
    assert {path.name for path in study.glob("space.*.yaml")} == {"space.1.yaml", "space.2.yaml"}
    page = (study / "report.html").read_text()
    assert "space.micro_batch_size: adds 2" in page

    last = wattune("run", path, "--json", timeout_s=200)
    assert json.loads(last.stdout)["finished"] and "0 trial(s) to run" in last.stderr
