"""A hard limit in a real study: what breaks it is stopped while it runs; the trials after it are as good as ever."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from script_results import results

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

LIMIT_W = 1010
"""Between a pipeline, whose two simulated GPUs wait for each other a third of the time (920 to 950 W), and tensor
parallelism, whose all-reduces keep both busy (1,084 to 1,095 W). Both are the plans', however fast the host is."""


@pytest.mark.slow
def test_a_trial_above_a_hard_limit_is_stopped_and_the_next_one_completes(
    wattune: Callable[..., Any],
    write_space: Callable[..., Path],
    results: Callable[[Path], dict[str, dict[str, Any]]],
    storage: Path,
) -> None:
    space = write_space(
        "limited",
        space={"tp": [2, 1], "pp": [1, 2], "micro_batch_size": [2]},
        measure={"warmup_steps": 2, "min_steps": 4, "min_seconds": 8, "reference_every": 0},
        limits={"node_device_power_w": LIMIT_W},
        constraints=[],
        search={"strategy": "grid", "num_trials": 10, "order": "listed"},
    )
    done = wattune("run", space)
    assert done.returncode == 0, done.stdout + done.stderr
    ended = sorted(results(storage / "limited").values(), key=lambda result: result["start_wall_ns"])
    assert len(ended) == 3
    aborted, dp2, pp2 = ended  # in the order in which they are listed
    assert aborted["status"] == "aborted" and not aborted["metrics"], aborted
    said = re.search(
        r"stopped while running: power of node \S+ was ([\d.]+) W over 1 s, the hard limit is", aborted["reason"]
    )
    assert said is not None, aborted["reason"]
    assert LIMIT_W < float(said[1]) < 1400, "two H200s at their limits"
    assert aborted["reason"] in done.stdout
    # It cost nobody their workers: the next trials run on the same ones.
    assert "group_lost" not in aborted["tags"] and aborted["numbers"]["lane_trial"] == 1
    assert dp2["numbers"]["lane_trial"] == 3, "between the two the ranks were asked to meet"
    assert pp2["status"] == "completed", pp2
    assert pp2["metrics"]["node_device_power_peak_1s_w"] <= LIMIT_W
    seeing, looks = pp2["numbers"]["limit_looks_seeing"], pp2["numbers"]["limit_looks"]
    assert 3 <= seeing <= looks, "it was watched, too"


REAL_SENSORS = """
import json, sys
from dataclasses import replace
from pathlib import Path
from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import ModelSpec
from wattune.orchestrate import trial_telemetry
from wattune.orchestrate.attempt import Attempt
from wattune.orchestrate.cluster import connect
from wattune.orchestrate.lanes.client import Lanes
from trial_overhead import run_trial
from wattune.orchestrate.run_trial import drive
from wattune.plans.axes import Plan
from wattune.trial import Measure, TrialSpec
from wattune.workload import Workload

root, recording = map(Path, sys.argv[1:])
# A load on four H200s, from 18.5 to 33.5 s of the recording; every trial's sampler plays it from the beginning.
trial_telemetry._BACKENDS_OF_VENDOR["cpu"] = ("host", f"replay:{recording}?start_s=19")
model = ModelSpec(name="tiny", num_layers=2, hidden_size=64, ffn_hidden_size=128, num_heads=4, num_kv_heads=2,
                  vocab_size=256, source="made up")
spec = TrialSpec(model=model, cluster=ClusterSpec(device="cpu", devices_per_node=2), engine="torch",
                 workload=Workload(seq_len=32, global_batch_size=4), plan=Plan(dtype="fp32"))
with connect() as cluster, Lanes(drive) as lanes:
    # The first one has the workers start: a busy machine may take longer for that than the load lasts.
    for repeat, (limit_w, seconds) in enumerate([(9999.0, 1.0), (2000.0, 60.0), (3000.0, 4.0)]):
        folder = root / "study" / "trials" / f"{spec.trial_id}-{repeat}"
        how = Measure(warmup_steps=2, min_steps=4, min_seconds=seconds)
        asked = Attempt(spec=spec, repeat=repeat, measure=how, seed=0, folder=folder,
                        limits={"node_device_power_w": limit_w})
        result = run_trial(asked, cluster, lanes)
        print("RESULT " + json.dumps({"reason": result.reason, "status": result.status, "tags": dict(result.tags),
                                      "numbers": result.numbers.known,
                                      "took_s": (result.end_wall_ns - result.start_wall_ns) / 1e9}), flush=True)
"""


@pytest.mark.slow
def test_real_readings_above_a_limit_stop_a_trial_within_seconds(tmp_path: Path, environment: dict[str, str]) -> None:
    recording = Path(__file__).parents[1] / "golden" / "h200x4" / "dp4"
    script = tmp_path / "script.py"
    script.write_text(REAL_SENSORS)
    command = [sys.executable, str(script), str(tmp_path), str(recording)]
    parts = [str(Path(__file__).parents[2] / "benchmarks"), environment.get("PYTHONPATH", "")]
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, parts))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    _, hot, cool = results(done.stdout)
    said = re.search(r"was ([\d.]+) W over 1 s, the hard limit is 2000 W", hot["reason"])
    assert hot["status"] == "aborted" and said is not None, hot
    assert 2000 < float(said[1]) < 2980, "the highest 1 s mean that the recording holds is 2974 W"
    assert hot["took_s"] - hot["numbers"]["group_start_s"] < 40, "its measured steps alone would have taken 60 s"
    # What the sensors say is another machine's, so how good the measurement is, is not asked; it ran to its end.
    assert cool["status"] != "aborted" and cool["numbers"]["lane_trial"] == 4, cool
    assert "group_lost" not in hot["tags"]
