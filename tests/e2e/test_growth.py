"""A study of the version before grows on real workers, and nothing is measured twice."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.usefixtures("on_standing_cluster"),
]

OLD = Path(__file__).parents[1] / "golden" / "version_2" / "before_growth"


def test_a_value_two_repeats_and_a_looser_bound_run_only_what_is_new(wattune, results, storage: Path, tmp_path) -> None:
    study = storage / "before_growth"
    shutil.copytree(OLD, study)
    measured = {path.parent.name: path.read_bytes() for path in study.glob("trials/*/run.json")}
    space = yaml.safe_load((study / "study.yaml").read_text())
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
    long = [name for name in found if name.endswith("-3000")]  # where the best is another one now
    assert len(found) - len(long) == 13 and len(long) <= 1 and new <= {"0", "1", "2", "3", "3000"}
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
