"""Every experiment that measures runs short on processors, with simulated sensors; those of one work are one study."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from wattune.api.experiments import find_experiments

FOLDER = Path(__file__).parents[2] / "experiments"
MEASURED = {name: one for name, one in find_experiments(FOLDER).items() if "EVIDENCE" not in one}
WORK = {key: MEASURED["recomputation"]["SPACE"][key] for key in ("model", "workload")}
ALIKE = [
    name
    for name, one in MEASURED.items()
    if WORK.items() <= one["SPACE"].items() and not any("workload" in arm for arm in one["ARMS"].values())
]
OTHERS = sorted({*MEASURED} - {*ALIKE})
"""Each of them starts workers of its own."""

NIGHTLY = [pytest.param(names, marks=pytest.mark.slow) for names in (ALIKE, OTHERS)]
"""Two gloo ranks with tensor parallelism may wait for each other for ever: one run of three of all that are alike."""

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900), pytest.mark.usefixtures("on_standing_cluster")]


@pytest.mark.parametrize("names", [["recomputation"], *NIGHTLY], ids=["one", "of one work", "of others"])
def test_experiments_run_short_in_one_command(wattune, storage: Path, tmp_path: Path, names: list[str]) -> None:
    here = tmp_path / "here"
    ran = wattune("experiments", "run", *names, "--folder", FOLDER, "--short", "--results", here, "--json")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found.keys() == {*names}
    runs = [path.parent.name.split("-")[0] for path in storage.glob("experiment_*/trials/*/run.json")]
    if names == ALIKE:
        assert len(names) >= 8 and len(list(storage.glob("experiment_*"))) == 1
        assert len(runs) == len({*runs}) < 2 * len(names), "an arm of several experiments runs once"
    for name, result in found.items():
        assert result["evidence"] == "simulated" and "simulating" in result["hardware"]
        assert result["claims"] and all(claim["repeats"] == 1 or claim["effect"] is None for claim in result["claims"])
        assert "SIMULATED SENSORS" in (here / f"{name}.svg").read_text()
        ids = pq.read_table(here / f"{name}.parquet")["trial_id"].to_pylist()
        assert len(ids) == len({*ids}) == 2 and {*ids} <= {*runs}
