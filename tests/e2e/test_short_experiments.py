"""Every experiment that measures runs short on processors, with simulated sensors, and its arms take turns."""

import json
from pathlib import Path

import pytest

from wattune.api.experiments import find_experiments

FOLDER = Path(__file__).parents[2] / "experiments"
MEASURED = [name for name, declared in find_experiments(FOLDER).items() if "EVIDENCE" not in declared]
QUICK = "recomputation"
"""The one of the quick tests; the others run in `make nightly`."""

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600), pytest.mark.usefixtures("on_standing_cluster")]


@pytest.mark.parametrize(
    "name", [name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MEASURED]
)
def test_an_experiment_runs_short(wattune, storage: Path, tmp_path: Path, name: str) -> None:
    found = wattune("experiments", "run", name, "--folder", FOLDER, "--short", "--results", tmp_path / "here", "--json")
    assert found.returncode == 0, found.stderr
    result = json.loads(found.stdout)
    assert result["evidence"] == "simulated" and "simulating" in result["hardware"]
    assert result["claims"] and all(claim["repeats"] == 2 or claim["effect"] is None for claim in result["claims"])
    assert "SIMULATED SENSORS" in (tmp_path / "here" / f"{name}.svg").read_text()
    began = []
    for path in storage.glob("experiment_*/trials/*/run.json"):
        run = json.loads(path.read_text())
        began.append((run["start_wall_ns"], run["trial_id"]))
    ids = [trial for _, trial in sorted(began)]
    assert len(ids) == 4 and ids[0] == ids[2] != ids[1] == ids[3], "arms take turns"
