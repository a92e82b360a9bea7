"""The callbacks of a user's own Trainer, on real ones: steps and tokens exact, nothing where nobody listens."""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from wattune.steps.launch import environment
from wattune.steps.reader import StepReader
from wattune.steps.source import AUTO

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "fakes" / "trainer_programs.py"
KINDS = ("huggingface", "lightning")
BATCHES, PER_STEP = 11, 3
"""Of an epoch: 22 samples in pairs, three pairs a step; the last step of an epoch has two."""


def run(folder: Path, *arguments: str, hooks: bool = False, listening: bool = True, ranks: int = 0) -> list[dict]:
    """Runs the program beside a folder for its steps; returns what each rank printed of itself."""
    base = {**os.environ, "PYTHONPATH": str(ROOT / "platform"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    env = environment(folder, base, hooks=hooks) if listening else base
    launcher = [sys.executable]
    if ranks:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        arguments += ("--ranks", str(ranks))
    done = subprocess.run([*launcher, str(PROGRAM), *arguments], env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]


def tokens_by_step(batches: list[int], per_epoch: int) -> list[int]:
    """Sums the tokens of batches by step: a step never goes over the end of an epoch."""
    epochs = [batches[at : at + per_epoch] for at in range(0, len(batches), per_epoch)]
    return [sum(epoch[at : at + PER_STEP]) for epoch in epochs for at in range(0, len(epoch), PER_STEP)]


@pytest.mark.parametrize("kind", ["both", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS)])
@pytest.mark.parametrize(
    "hooks", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["beside the hooks", "alone"]
)
def test_steps_and_tokens_are_the_programs_own(kind: str, hooks: bool, tmp_path: Path) -> None:
    """Gradient accumulation, padding, a last partial step, evaluations, a resume; the callback was pickled before."""
    num_steps = 24 if kind == "both" else 12
    (own,) = run(tmp_path, kind, "--callback", "--resume", hooks=hooks)
    reader = StepReader(tmp_path, AUTO)
    (steps,) = reader.poll().values()
    assert reader.source == "spans (told by the program)" and reader.problems == []
    assert len(own["tokens"]) == 3 * BATCHES * (num_steps // 12)
    assert [one.tokens for one in steps] == tokens_by_step(own["tokens"], BATCHES)
    assert [one.index for one in steps] == list(range(num_steps)) and len(own["ends_s"]) == num_steps
    # The program's clock begins at a step's first batch; the loading before it is the step's as well. A busy machine
    # holds up what lies between the two clocks too: the steps that it left alone say what the callback itself adds.
    own_s = [end - start for start, end in zip(own["starts_s"], own["ends_s"], strict=True)]
    apart_s = sorted(abs(one.duration_ns / 1e9 - took_s) for one, took_s in zip(steps, own_s, strict=True))
    assert apart_s[len(apart_s) // 4] < 0.02 * median(own_s), apart_s


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_where_nobody_listens_the_program_is_as_it_was(kind: str, tmp_path: Path) -> None:
    assert len(run(tmp_path, kind, "--callback", listening=False)[0]["ends_s"]) == 8
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_tell_their_own_tokens(kind: str, tmp_path: Path) -> None:
    owns = {one["rank"]: one for one in run(tmp_path, kind, "--callback", hooks=True, ranks=2)}
    found = StepReader(tmp_path, AUTO).poll()
    assert found.keys() == owns.keys() == {0, 1}
    for rank, own in owns.items():
        per_epoch = len(own["tokens"]) // 2
        assert [one.tokens for one in found[rank]] == tokens_by_step(own["tokens"], per_epoch)


def test_names_are_exact_and_nothing_loads_before_they_are_used() -> None:
    code = (
        "import sys, wattune.callbacks\n"
        "print(sorted({'torch', 'transformers', 'lightning', 'numpy'} & set(sys.modules)))\n"
        "try: wattune.callbacks.Callback\n"
        "except AttributeError as error: print(error)"
    )
    base = {"PYTHONPATH": str(ROOT / "platform")}
    seen = subprocess.run([sys.executable, "-c", code], env=base, capture_output=True, text=True, timeout=60)
    assert seen.stdout.splitlines() == [
        "[]",
        "module 'wattune.callbacks' has no attribute 'Callback'; it has HuggingFaceCallback, LightningCallback",
    ]
