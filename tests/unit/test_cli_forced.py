"""A study that hangs while it ends is ended by force, and what is measured is ranked all the same."""

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from specs import store_run
from study_files import result_of

import wattune
from wattune.storage.study import StudyFolder

SPACE = Path(__file__).parents[2] / "search_spaces" / "cpu_smoke.yaml"

HANGS = """
import sys, time
from contextlib import contextmanager
from wattune import forced_exit
from wattune.cli import main, study
from wattune.orchestrate import cluster, lost_cluster

@contextmanager
def hang(*_):
    LOST
    print("ready", file=sys.stderr, flush=True)
    while True:
        try:
            time.sleep(600)
        except KeyboardInterrupt:  # as a library that keeps it to itself
            pass
    yield

cluster.connect = hang
forced_exit.ended_in_time.__wrapped__.__kwdefaults__["within_s"] = 1.0
main()
"""


def stopped(tmp_path: Path, *, lost: bool, number: signal.Signals) -> tuple[int, dict[str, Any], str]:
    """Stops a run whose start of Ray hangs; its exit code, the object it printed, and what it said beside."""
    planned = wattune.plan(SPACE)
    study = StudyFolder.create(tmp_path / "storage", planned.name, planned.spec.document)
    store_run(study, planned.kept[0].spec, replace(result_of(tokens_per_s=7.0), trial_id=planned.kept[0].trial_id))
    script = HANGS.replace("LOST", 'lost_cluster._found.append("its head ended")' if lost else "")
    process = subprocess.Popen(
        [sys.executable, "-c", script, "run", str(SPACE), "--storage", str(study.path.parent), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        assert any(line == "ready\n" for line in process.stderr)
        process.send_signal(number)
        said, complaint = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, json.loads(said), complaint


@pytest.mark.usefixtures("in_foreground")
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_what_is_measured_is_ranked_also_where_the_end_is_forced(tmp_path: Path, number: signal.Signals) -> None:
    code, said, complaint = stopped(tmp_path, lost=False, number=number)
    assert code == 128 + number, complaint
    assert (said["ending"], said["finished"], said["num_left"]) == ("interrupted", False, 9)
    assert [row["objective"]["value"] for row in said["feasible"] + said["unknown"] + said["undecided"]] == [7.0]
    assert (tmp_path / "storage" / "cpu_smoke" / "ranking.parquet").is_file()
    assert "stopping: running trials end" in complaint
    assert complaint.endswith("what did not end in time was ended by force\n") and "Traceback" not in complaint


@pytest.mark.usefixtures("in_foreground")
def test_a_lost_cluster_that_holds_the_process_is_told_as_one_error(tmp_path: Path) -> None:
    code, said, complaint = stopped(tmp_path, lost=True, number=signal.SIGINT)
    assert code == 1 == said["error"]["exit_code"], complaint
    assert said["error"]["what"].startswith("the study was cut short: its head ended; finished trials are kept")
    assert "error: the study was cut short: its head ended" in complaint
