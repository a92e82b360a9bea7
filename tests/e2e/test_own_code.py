"""Programs that wattune did not write, with the libraries as they are: their steps are found, and they run as ever."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from wattune.record import recorder
from wattune.record.recorder import record
from wattune.record.recording import Recording
from wattune.steps.launch import environment
from wattune.steps.reader import Step, StepReader
from wattune.steps.source import AUTO

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

LIGHTNING = """
import torch, {package} as lightning
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Embedding(16, 4)
    def training_step(self, batch, index):
        return self.layer(batch["input_ids"]).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
data = [{{"input_ids": torch.zeros(32, dtype=torch.long)}} for _ in range(24)]
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = lightning.Trainer(max_steps=6, accumulate_grad_batches=2, accelerator="cpu", devices=1, **quiet)
trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=1))
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
    found = Recording.read(path)
    assert found.exit_code == 0 and found.steps["num_steps"] == 120 and found.steps["ranks"] == [0, 1]
    assert found.steps["tokens_per_step"] == 2 * 4 * 64
    metrics = found.summary.metrics
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


@pytest.mark.slow
@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_lightnings_trainer_tells_steps_and_tokens_unchanged(tmp_path: Path, package: str) -> None:
    reader, steps = told(tmp_path, [sys.executable, "-c", LIGHTNING.format(package=package)])
    assert reader.source.startswith("lightning")
    assert [step.tokens for step in steps[0]] == [64] * 6
