"""Steps of a recorded command: start-up is left out, the figures are of steps, and each choice is in the manifest."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from recorded import record

from wattune.analysis.metrics.energy import LEAST_COVERAGE_FRAC
from wattune.analysis.run_data import RunData
from wattune.errors import PlanError
from wattune.inspection import inspect
from wattune.recording import recorder
from wattune.recording.recording import load, run_of
from wattune.recording.steps import FOLDER, devices_of_ranks, steps_of_open
from wattune.steps.files import Step
from wattune.steps.process.writer import StepWriter
from wattune.steps.source import parse_source
from wattune.workers.command.program_run import LINES, ProgramOutcome, ProgramRun

STARTUP_S = 0.6
STEP_S = 0.05
NUM_STEPS = 20

LOOP = f"""
import time
from wattune import spans
time.sleep({STARTUP_S})
for at in range({NUM_STEPS}):
    with spans.step(tokens=1000):
        time.sleep({STEP_S})
    print(f"step {{at}} took {STEP_S * 1000} ms")
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WATTUNE_RUNTIME", str(tmp_path / "runtime"))
    monkeypatch.setattr(recorder, "LEAD_S", 0.3)
    monkeypatch.setattr(recorder, "TAIL_S", 0.1)


def run(storage: Path, code: str = LOOP, source: str = "auto", window: str = "steady", **more: Any) -> Path:
    return record(
        [sys.executable, "-c", code],
        storage=storage,
        backends=["host", "simulated:h200_sxm"],
        name="a",
        output="log",
        steps=source,
        window=window,
        **more,
    )


def manifest(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "manifest.json").read_text())
    return found


def run_sampled(storage: Path, tries: int = 5) -> Path:
    """Records until the sampler had its turn: other processes may keep it from the processors for most of a second."""
    for number in range(tries):
        path = run(storage / str(number))
        if run_of(path).metrics["sample_coverage_frac"] >= LEAST_COVERAGE_FRAC:
            return path
    pytest.fail(f"in none of {tries} recordings was power read for {LEAST_COVERAGE_FRAC:.0%} of the window")


def test_startup_is_left_out_and_tokens_have_a_rate_and_an_energy(tmp_path: Path) -> None:
    path = run_sampled(tmp_path)
    facts, one = manifest(path), run_of(path)
    metrics, found = one.metrics, one.recorded
    assert metrics["step_time_s"] == pytest.approx(STEP_S, rel=0.5)
    assert metrics["tokens_per_s"] == pytest.approx(1000 / STEP_S, rel=0.5)
    assert metrics["energy_per_token_j"] == pytest.approx(metrics["energy_per_step_j"] / 1000)
    assert not {"window_s", "total_energy_j", "mfu_frac"} & metrics.keys()
    assert found is not None and found.window_s is not None and found.command_s is not None
    assert found.window_s <= found.command_s - STARTUP_S and found.window_s == pytest.approx(
        NUM_STEPS * STEP_S, rel=0.5
    )
    assert facts["steps"]["source"].startswith("spans") and facts["steps"]["num_steps"] == NUM_STEPS
    assert facts["window_why"].startswith("steps ") and not (path / FOLDER).exists()
    assert metrics["memory_peak_bytes"] > 2**20
    assert inspect(path).summary.metrics == metrics
    assert all("step_time_s" in each for each in found.devices.values())


def test_a_command_without_steps_is_recorded_as_it_was_with_the_exception_that_ended_it(tmp_path: Path) -> None:
    path = run(tmp_path, "import time; time.sleep(1.7); raise MemoryError('3 GiB')")
    facts, metrics = manifest(path), run_of(path).metrics
    assert facts["window"] == facts["command_window"] and facts["window_why"] == "the whole command"
    assert "total_energy_j" in metrics and "step_time_s" not in metrics and not (path / "spans.parquet").exists()
    assert facts["steps"]["errors"]["0"].startswith("MemoryError: 3 GiB")


@pytest.mark.slow
def test_steps_that_are_asked_for_are_those_measured(tmp_path: Path) -> None:
    path = run(tmp_path, window="steps:10:20", tokens_per_step=64.0)
    spans = load(path).spans
    assert spans is not None and max(spans["step"].to_pylist()) == 9 and min(spans["step"].to_pylist()) == -10
    assert manifest(path)["window_why"] == "steps 10 to 19 of 20: as asked for"
    assert manifest(path)["steps"]["tokens_per_step"] == 64.0


@pytest.mark.slow
def test_lines_of_output_tell_steps_and_are_still_passed_on(tmp_path: Path) -> None:
    path = run(tmp_path, source="pattern/ms:took ([0-9.]+) ms")
    assert manifest(path)["steps"]["num_steps"] == NUM_STEPS
    assert run_of(path).metrics["step_time_s"] == pytest.approx(STEP_S, rel=0.2)
    assert (path / "command.log").read_text().splitlines()[-1] == f"step {NUM_STEPS - 1} took 50.0 ms"


@pytest.mark.slow
def test_none_leaves_the_environment_alone(tmp_path: Path) -> None:
    path = run(tmp_path, "import os; print(os.environ.get('WATTUNE_STEPS'))", source="none")
    assert (path / "command.log").read_text() == "None\n" and manifest(path)["steps"]["num_steps"] == 0


def test_the_steps_of_a_recorder_that_was_killed_are_read_from_its_processes_files(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    writer = StepWriter("spans", str(tmp_path / FOLDER))
    for at in range(20):
        writer.step(at * 10**8, (at + 1) * 10**8, 5)  # each later than the last write
    asked = {"source": "auto", "window": "steady", "tokens_per_step": None}
    facts = {"node": "n", "window": {"start_mono_ns": 0}, "steps_asked": asked}
    spans, found = steps_of_open(tmp_path, facts, {"devices": {"gpu0": {}}}, 3 * 10**9)
    assert spans is not None and set(spans["device"].to_pylist()) == {"gpu0"}
    assert found["steps"]["tokens_per_step"] == 5 and found["command_window"] == {"start_mono_ns": 0}
    assert steps_of_open(tmp_path / "other", facts, {}, 1) == (None, {})
    assert steps_of_open(tmp_path, {"window": {"start_mono_ns": 0}}, {}, 1) == (None, {})


@pytest.mark.parametrize("source", ["pattern/ms:took ([0-9.]+) ms", "megatron"])
def test_lines_that_a_killed_recorder_heard_are_steps(tmp_path: Path, source: str) -> None:
    megatron = "\x1b[31m iteration {}/ 100 | x | elapsed time per iteration (ms): 100.0 | y"
    line = megatron if source == "megatron" else "\x1b[31mstep {} \x1b[32mtook 100.0 ms, “done”"
    (tmp_path / FOLDER).mkdir()
    told = ProgramRun(tmp_path / FOLDER, parse_source(source), keeps_lines=True)
    for at in range(1, 31):
        told.hear(line.format(at), at * 10**8)
        told.hear("loss 3.0", at * 10**8)
    kept = tmp_path / FOLDER / LINES
    assert len(kept.read_bytes().splitlines()) == 30, "the lines that its pattern is found in"
    with kept.open("ab") as out:
        out.write(b'[3100000000, "' + line.encode()[:9])  # killed here
    asked = {"source": parse_source(source).text, "window": "steps:0:", "tokens_per_step": 7.0}
    facts = {"node": "n", "window": {"start_mono_ns": 0}, "steps_asked": asked}
    spans, found = steps_of_open(tmp_path, facts, {"devices": {"gpu0": {}}}, 2 * 10**9)
    assert spans is not None and found["steps"]["num_steps"] == spans.num_rows == 20, "as far as the sensors were read"
    assert found["window"] == {"start_mono_ns": 0, "end_mono_ns": 2 * 10**9} and "pattern" in found["steps"]["source"]
    kept.write_bytes(b"[")
    assert steps_of_open(tmp_path, facts, {"devices": {"gpu0": {}}}, 2 * 10**9)[0] is None
    told.discard()
    assert not (tmp_path / FOLDER).exists()


def test_devices_that_no_rank_named_are_said(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    writer = StepWriter("spans", str(tmp_path / FOLDER))
    for at in range(20):
        writer.step(at * 10**8, (at + 1) * 10**8, 5)
    asked = {"source": "auto", "window": "steady", "tokens_per_step": None}
    facts = {"node": "n", "window": {"start_mono_ns": 0}, "steps_asked": asked}
    devices = {"gpu0": {}, "gpu1": {}, "gpu2": {}, "host": {}}
    spans, found = steps_of_open(tmp_path, facts, {"devices": devices}, 3 * 10**9)
    assert spans is not None and set(spans["device"].to_pylist()) == {"gpu0", "gpu1", "gpu2"}
    (note,) = found["steps"]["problems"]
    assert "no rank named (gpu1, gpu2)" in note
    _, found = steps_of_open(tmp_path, facts, {"devices": {"gpu0": {}}}, 3 * 10**9)
    assert "problems" not in found["steps"]


def test_ranks_have_their_own_device_and_every_device_has_steps() -> None:
    devices: dict[str, dict[str, Any]] = {f"gpu{at}": {"uuid": f"GPU-{at}{at}"} for at in range(12)} | {"host": {}}
    headers = {0: {"local_rank": 0, "device_uuid": "11"}, 1: {"local_rank": 1}, 2: {"local_rank": 10}}
    told: dict[int, list[Step]] = {0: [], 1: [], 2: []}
    found = devices_of_ranks(ProgramOutcome(steps=told, headers=headers), devices)
    assert [found[rank] for rank in (0, 1, 2)] == ["gpu1", "gpu1", "gpu10"]
    assert set(found.values()) == {f"gpu{at}" for at in range(12)} and min(set(found) - {0, 1, 2}) == 3
    assert devices_of_ranks(ProgramOutcome(steps={0: [], 4: []}), {"host": {}}) == {0: "host", 4: "host"}


@pytest.mark.parametrize(
    "steps", [None, {}, {"tokens_per_step": "many", "memory_peak_bytes": -1}, {"tokens_per_step": 0}]
)
def test_facts_that_cannot_be_are_none(steps: Any) -> None:
    data = RunData().of_recording({"steps": steps})
    assert data.tokens_per_step is None and data.memory_peak_bytes == []


def test_a_window_that_cannot_be_read_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="--window"):
        record(["true"], storage=tmp_path, window="soon")
    assert not list(tmp_path.glob("recordings/*"))
