"""Programs that wattune did not write, with the libraries as they are: their steps are found, and they run as ever."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from recorded import record

from wattune.api.spaces import plan
from wattune.plans.program import filled_arguments, values_of
from wattune.recording import recorder
from wattune.recording.recording import run_of
from wattune.run import Cause, RunStatus
from wattune.steps.launch import environment
from wattune.steps.reader import Step, StepReader
from wattune.steps.source import AUTO
from wattune.trial import Measure
from wattune.workers.command.measured_run import MeasuredRun

pytestmark = pytest.mark.timeout(300)  # these libraries take long to load on a busy machine

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "experiments" / "own_code"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

OPTIMIZER = """
import torch
model = torch.nn.Linear(8, 8)
both = torch.optim.AdamW(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(12):
    model(torch.ones(2, 8)).sum().backward()
    for each in both:
        each.step()
"""


def told(folder: Path, command: Sequence[str]) -> tuple[StepReader, Mapping[int, Sequence[Step]]]:
    """Runs a command under the hooks."""
    base = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment(folder, base), cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    reader = StepReader(folder, AUTO)
    steps = reader.poll()
    assert not reader.problems and not reader.errors()
    return reader, steps


def test_torchs_optimizers_tell_the_steps_of_any_program(tmp_path: Path) -> None:
    reader, steps = told(tmp_path, [sys.executable, "-c", OPTIMIZER])
    assert reader.source.startswith("optimizer") and len(steps[0]) == 11


@pytest.mark.slow
def test_the_plain_loop_is_recorded_with_its_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATTUNE_RUNTIME", str(tmp_path / "runtime"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(recorder, "LEAD_S", 0.5)
    command = [*TORCHRUN, str(EXAMPLES / "plain_loop.py"), "--steps", "120", "--micro-batch-size", "4"]
    path = record(command, storage=tmp_path, backends=["host", "simulated:h200_sxm"], output="log")
    run = run_of(path)
    found, metrics = run.recorded, run.metrics
    assert found is not None and found.exit_code == 0
    assert found.steps["num_steps"] == 120 and found.steps["ranks"] == [0, 1]
    assert found.steps["tokens_per_step"] == 2 * 4 * 64
    assert metrics["tokens_per_s"] > 0 and metrics["energy_per_token_j"] > 0
    assert found.command_s is not None and found.window_s is not None
    assert found.window_s < found.command_s - 1  # torch alone takes longer to load


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_hugging_faces_trainer_tells_steps_and_tokens_unchanged(tmp_path: Path, sharding: str) -> None:
    options = ["--steps", "6", "--global-batch-size", "8", "--sharding", sharding, "--gradient-checkpointing", "true"]
    reader, steps = told(tmp_path, [*TORCHRUN, str(EXAMPLES / "hf_trainer.py"), *options])
    assert reader.source.startswith("transformers")
    assert {rank: len(each) for rank, each in steps.items()} == {0: 6, 1: 6}
    assert {step.tokens for each in steps.values() for step in each} == {8 // 2 * 64}


NEEDS_TITAN = pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed")

TITAN = """
import importlib.util, sys, types
# Without its __init__, which loads all models, and with them triton.
package = types.ModuleType("torchtitan")
package.__path__ = list(importlib.util.find_spec("torchtitan").submodule_search_locations)
sys.modules["torchtitan"] = package
"""

TITAN_LINES = (
    TITAN
    + """
import time
from types import SimpleNamespace
from torchtitan.components.metrics import DeviceMemStats, MetricsProcessor
from torchtitan.tools.logging import init_logger
from torchtitan.tools.utils import {color}
init_logger()
metrics = object.__new__(MetricsProcessor)  # its own __init__ asks a GPU for its name
stats = DeviceMemStats(40.0, 50.0, 42.5, 53.1, 0, 0)
metrics.device_memory_monitor = SimpleNamespace(get_peak_stats=lambda: stats, reset_peak_stats=lambda: None)
metrics.logger = SimpleNamespace(log=lambda *_: None)
metrics.job_config = SimpleNamespace(metrics=SimpleNamespace(log_freq=2))
metrics.parallel_dims = SimpleNamespace(non_data_parallel_size=1)
metrics.color, metrics.gpu_peak_flops, metrics.num_flops_per_token = {color}(), 1e15, 1e9
for step in (1, 2, 4, 6, 8):
    metrics.ntokens_since_last_log, metrics.data_loading_times, metrics.time_last_log = 4096, [0.1], time.perf_counter()
    metrics.log(step, 7.9921, 8.1, 1.4011)
    if step == 4:
        metrics.log_validation(7.5, step)
"""
)


@NEEDS_TITAN
@pytest.mark.slow
@pytest.mark.parametrize("color", ["Color", "NoColor"])
def test_torchtitans_own_lines_tell_its_steps(tmp_path: Path, color: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TITAN_LINES.replace("{color}", color)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    reader = StepReader(tmp_path, AUTO)
    lines = (done.stdout + done.stderr).splitlines()
    assert sum("step:" in line for line in lines) == 6
    for second, line in enumerate(lines, start=1):
        reader.feed(line, second * 10**9)
    assert [step.index for step in reader.poll()[0]] == list(range(7))  # from the end of step 1 to that of step 8
    assert reader.source.startswith("pattern torchtitan")


TITAN_FLAGS = (
    TITAN
    + """
import json
from torchtitan.config import ConfigManager
found = ConfigManager().parse_args(sys.argv[1:])
print(json.dumps([found.model.flavor, found.training.local_batch_size, found.training.global_batch_size,
                  found.training.seq_len, found.parallelism.tensor_parallel_degree, found.activation_checkpoint.mode,
                  found.compile.enable, found.job.dump_folder]))
"""
)


@NEEDS_TITAN
@pytest.mark.slow
@pytest.mark.parametrize("space", ["torchtitan_h200x4.yaml", "torchtitan_h200.yaml"])
def test_torchtitan_takes_every_argument_of_its_space(space: str) -> None:
    specs = plan(EXAMPLES / space).candidates.specs
    spec = next(one for one in specs if dict(one.flags)["compiled"])
    assert spec.program is not None
    own = {"node_rank": 0, "rendezvous": "127.0.0.1:1", "output_dir": "there", "trial": "one"}
    arguments = filled_arguments(spec.program.command, {**values_of(spec, spec.program.flags), **own})
    after = arguments[arguments.index("torchtitan.train") + 1 :]
    done = subprocess.run([sys.executable, "-c", TITAN_FLAGS, *after], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    expected = [
        "8B",
        spec.plan.micro_batch_size,
        spec.workload.global_batch_size,
        4096,
        spec.plan.tp,
        dict(spec.flags)["checkpointing"],
        True,
        "there",
    ]
    assert json.loads(done.stdout.splitlines()[-1]) == expected


@NEEDS_TITAN
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="triton is installed")
def test_without_triton_torchtitan_fails_in_one_clear_line(tmp_path: Path) -> None:
    for name in ("steps", "output"):
        (tmp_path / name).mkdir()
    torchrun = [*TORCHRUN[:-1], "1", "-m", "torchtitan.train", "--training.steps", "10"]
    outcome = MeasuredRun(
        torchrun,
        {**os.environ, "OMP_NUM_THREADS": "1"},
        steps_folder=tmp_path / "steps",
        source=AUTO,
        measure=Measure(timeout_s=200),
        leads=True,
        orders=lambda timeout_s: time.sleep(timeout_s),
    ).until_over()
    assert outcome.status is RunStatus.INFRA_FAILED and outcome.cause is Cause.SURROUNDINGS
    assert "exit code 1: rank 0: ModuleNotFoundError: No module named 'triton'" in outcome.reason
    assert "\n" not in outcome.reason
