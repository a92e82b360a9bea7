"""The twelve questions of the paper run short on processors, with simulated sensors, in one command of two studies."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from wattune.api.experiments import find_experiments

FOLDER = Path(__file__).parents[2] / "experiments"
KNOWN = find_experiments(FOLDER)
TWELVE = {
    "parallelism against power": ["parallelism"],
    "traffic by slot": ["traffic"],
    "recomputation and overlap": ["recomputation", "overlap"],
    "micro-batch": ["micro_batch"],
    "LoRA": ["lora"],
    "prefill": ["prefill"],
    "scale-up against scale-out": ["scale_up", "scale_out"],
    "uneven pipelines": ["uneven_pipeline"],
    "swing and phase of two jobs": ["swing", "two_jobs"],
    "limit against plan": ["power_limit", "thermal_bound"],
    "slice against whole": ["slice_of_a_model"],
    "8K projection": ["faster_network_8k"],
}
ALL = [name for names in TWELVE.values() for name in names]
OTHERS = sorted({*KNOWN} - {*ALL})
QUICK = ["parallelism", "traffic", "two_jobs", "power_limit", "faster_network_8k"]
"""One of each kind: arms that another one shares, of two studies, of two jobs, of a setting, and estimated alone."""

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900), pytest.mark.usefixtures("on_standing_cluster")]


@pytest.mark.parametrize(
    "names",
    [QUICK, *(pytest.param(names, marks=pytest.mark.slow) for names in (ALL, OTHERS))],
    ids=["of each kind", "the twelve", "the others"],
)
def test_experiments_run_short_in_one_command(wattune, storage: Path, tmp_path: Path, names: list[str]) -> None:
    here = tmp_path / "here"
    ran = wattune("experiments", "run", *names, "--folder", FOLDER, "--short", "--results", here, "--json")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found.keys() == {*names}
    runs = [path.parent.name.split("-")[0] for path in storage.glob("experiment_*/trials/*/run.json")]
    if names != OTHERS:
        assert len(TWELVE) == 12
        studies = {path.name for path in storage.glob("experiment_*")}
        assert studies == {"experiment_parallelism", "experiment_two_jobs"}, "workers start once for all of one engine"
        assert len(runs) == len({*runs}) < min(20, 2 * len(names)), "an arm of several experiments runs once"
    for name, result in found.items():
        assert result["claims"] and len({*result["arms"]}) == 2
        picture = (here / f"{name}.svg").read_text()
        if KNOWN[name].get("EVIDENCE") == "estimated":
            assert result["evidence"] == "estimated" and "ESTIMATED" in picture
            continue
        assert result["evidence"] == "simulated" and "simulating" in result["hardware"]
        assert all(claim["repeats"] == 1 or claim["effect"] is None for claim in result["claims"])
        assert "SIMULATED SENSORS" in picture
        ids = pq.read_table(here / f"{name}.parquet")["trial_id"].to_pylist()
        assert len(ids) == len({*ids}) == 2 and {*ids} <= {*runs}
