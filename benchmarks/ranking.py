"""Times the ranking of ten thousand trials, from a study folder and from MLflow.

    python benchmarks/ranking.py            # prints the rows of benchmarks/results/ranking.md; some three minutes

Every trial has every metric; each hundredth is another run of the reference trial. MLflow's database is filled by
copying the rows of one trial that was sent the ordinary way, as sending ten thousand takes a quarter of an hour. Peer:
the same study read run by run through MLflow's own search, a tenth of it, multiplied.
"""

import json
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import time
import uuid
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from harness import Found, Rows, benchmark, timed

from wattune import api
from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import model
from wattune.metrics import METRICS
from wattune.plans.axes import Plan
from wattune.ranking.order import Ranking
from wattune.ranking.sources import Source, rank_sources
from wattune.run import Run, RunStatus
from wattune.storage.study import StudyFolder
from wattune.tracking.run import TRIAL_TAG, read_run
from wattune.tracking.store import Store, default_uri, search
from wattune.tracking.tracker import Tracker
from wattune.trial import TrialSpec
from wattune.view.files import ranking_csv, ranking_table
from wattune.workload import Workload

NUM_TRIALS: Final = 10_000
ANCHOR_EVERY: Final = 100
TRIAL_S: Final = 20
START_NS: Final = 1_790_000_000_000_000_000
TARGETS_S: Final = {"folder": 2.0, "mlflow": 10.0}
RUNS: Final = 3
PLACES: Final = {"folder": "the study folder", "mlflow": "MLflow (sqlite)"}

DOCUMENT: Final = {
    "study": "ten_thousand",
    "space": {"micro_batch_size": [1, 2]},
    "objective": "maximize tokens_per_s",
    "constraints": ["node_device_power_peak_1s_w <= 2750", "throttle_thermal_frac <= 0.01"],
}


def results() -> list[tuple[TrialSpec, Run]]:
    """Trials that differ in batch; every metric drawn, the reference trial's within one percent."""
    dice = random.Random(0)
    cluster, work = ClusterSpec(device="h200_sxm", devices_per_node=8), Workload(seq_len=4096, global_batch_size=8)
    plan = Plan(tp=2, etp=2)
    base = TrialSpec(model=model("llama3_8b"), cluster=cluster, engine="torch", workload=work, plan=plan)
    found = []
    for number in range(NUM_TRIALS):
        is_reference = number % ANCHOR_EVERY == 0
        spec = base if is_reference else replace(base, workload=replace(base.workload, global_batch_size=8 * number))
        metrics = {name: dice.uniform(0.1, 0.9) for name in METRICS}
        metrics |= {
            "tokens_per_s": 1e5 * (dice.gauss(1.0, 0.01) if is_reference else dice.uniform(0.5, 1.5)),
            "node_device_power_peak_1s_w": dice.gauss(2600, 20) if is_reference else dice.uniform(2000, 3000),
            "throttle_thermal_frac": 0.0,
        }
        start_ns = START_NS + number * TRIAL_S * 10**9
        found.append(
            (
                spec,
                Run(
                    trial_id=spec.trial_id,
                    repeat=1000 + number if is_reference else 0,
                    status=RunStatus.COMPLETED,
                    metrics=metrics,
                    quality="publishable",
                    tags={"simulated": "false", "nodes": "n0", "version.torch": "2.13.0"}
                    | ({"reference": "true"} if is_reference else {}),
                    start_wall_ns=start_ns,
                    end_wall_ns=start_ns + TRIAL_S * 10**9,
                ),
            )
        )
    return found


def write_folder(storage: Path, pairs: list[tuple[TrialSpec, Run]]) -> StudyFolder:
    """Writes the study folder, without the syncs to disk that finished trials are written with."""
    study = StudyFolder.create(storage, "ten_thousand", DOCUMENT)
    with patch("os.fsync"):
        for spec, result in pairs:
            folder = study.trial(result.trial_id, result.repeat)
            folder.write_spec(spec)
            folder.write_result(result)
    return study


def fill_store(uri: str, study: StudyFolder, pairs: list[tuple[TrialSpec, Run]]) -> None:
    """One trial sent the ordinary way, its rows copied for all the others, and the study as a whole."""
    tracker = Tracker(uri, study.name, document=DOCUMENT)
    spec, result = pairs[0]
    tracker.log_trial(spec, result, study.trial(result.trial_id, result.repeat).path)
    database = sqlite3.connect(uri.removeprefix("sqlite:///"))
    (run,) = database.execute("select run_uuid from tags where key = ?", (TRIAL_TAG,)).fetchone()
    for table in ("runs", "tags", "params", "metrics", "latest_metrics"):
        columns = [row[1] for row in database.execute(f"pragma table_info({table})")]
        rows = [list(row) for row in database.execute(f"select * from {table} where run_uuid = ?", (run,))]
        database.executemany(
            f"insert into {table} values ({','.join('?' * len(columns))})", _copies(table, columns, rows, pairs[1:])
        )
    database.commit()
    database.close()
    ranking = rank_sources([Source.of_folder(study)])
    tracker.log_study(DOCUMENT, ranking.to_json(), None, pairs)


def _copies(
    table: str, columns: list[str], rows: list[list[Any]], pairs: list[tuple[TrialSpec, Run]]
) -> Iterator[list[Any]]:
    """The rows of one run for every other one, with what is its own."""
    key = columns.index("run_uuid")
    for number, (spec, result) in enumerate(pairs):
        own: dict[str, Any] = {}
        if table == "runs":
            own = {"start_time": result.start_wall_ns // 10**6, "end_time": result.end_wall_ns // 10**6}
        if table == "tags":
            own = {TRIAL_TAG: f"{result.trial_id}-{result.repeat}", "trial_id": result.trial_id}
            own |= {"wattune.spec": json.dumps(spec.to_json()), "wattune.run": json.dumps(result.to_json())}
        for row in rows:
            copy = list(row)
            copy[key] = uuid.UUID(int=number).hex
            if table == "runs":
                for name, value in own.items():
                    copy[columns.index(name)] = value
            elif table == "tags" and copy[columns.index("key")] in own:
                copy[columns.index("value")] = own[copy[columns.index("key")]]
            yield copy


def run_by_run(uri: str, name: str, most: int) -> float:
    """Seconds for so many runs through MLflow's search alone, page by page."""

    def read(client: Any) -> None:
        experiment = client.get_experiment_by_name(name)
        for count, run in enumerate(search(client, experiment.experiment_id, {})):
            if TRIAL_TAG in run.data.tags:
                read_run(client, run)
            if count == most:
                break

    start_s = time.perf_counter()
    Store(uri).do("read", read)
    return time.perf_counter() - start_s


@benchmark(
    claim=f"{NUM_TRIALS:,} trials are ranked from a study folder in {TARGETS_S['folder']:g} s, from MLflow in "
    f"{TARGETS_S['mlflow']:g} s.",
    bar="wall time of `rank` below both; the peer is MLflow's search, run by run",
)
def main(_: Namespace) -> Found:
    """Times every way to rank."""
    with tempfile.TemporaryDirectory() as temporary:
        storage, pairs = Path(temporary), results()
        study = write_folder(storage, pairs)
        uri = default_uri(storage)
        fill_store(uri, study, pairs)
        ranking: Ranking = api.rank(study)
        assert api.rank(study.name, tracking_uri=uri).to_json() == ranking.to_json()
        command = [sys.executable, "-m", "wattune", "rank", study.name, "--top", "20"]
        environment = os.environ | {"WATTUNE_STORAGE": str(storage)}

        def typed(*more: str, study: str = study.name) -> None:
            done = [*command[:4], study, *command[5:], *more]
            subprocess.run(done, env=environment, check=study != "none", capture_output=True)

        timings: dict[str, tuple[float, float, Any]] = {
            "rank, from the study folder": timed(lambda: api.rank(study)),
            "of it: reading the folder": timed(study.results),
            "rank, from MLflow (sqlite)": timed(lambda: api.rank(study.name, tracking_uri=uri)),
            "`wattune rank --top 20`, start of Python included": timed(typed),
            "the same from MLflow": timed(lambda: typed("--tracking-uri", uri)),
            "of it: `wattune rank` of no study": timed(lambda: typed(study="none")),
            "CSV of all": timed(lambda: ranking_csv(ranking), runs=1),
            "`ranking.parquet`": timed(lambda: ranking_table(ranking), runs=1),
        }
        peer_s = 10 * run_by_run(uri, study.name, NUM_TRIALS // 10)
    rows = Rows("what", "wall_s", "processor_s")
    for name, (wall_s, cpu_s, _) in timings.items():
        rows.add(name, wall_s, cpu_s)
    rows.add("peer: MLflow's search, run by run (a tenth, times 10)", peer_s, None)
    walls_s = {place: timings[f"rank, from {at}"][0] for place, at in PLACES.items()}
    many = f"{NUM_TRIALS:,} runs, {len(ranking.trials):,} trials, {len(METRICS)} metrics each"
    notes = [
        f"{many}, least of {RUNS} (files written: of 1).",
        f"From MLflow it is {peer_s / walls_s['mlflow']:.0f} times as fast as run by run.",
    ]
    return Found(rows, notes, [f"{place} {s:.2f} s" for place, s in walls_s.items() if s >= TARGETS_S[place]])


if __name__ == "__main__":
    main()
