"""The DeepSpeed engine on one rank: what it refuses, what it leaves behind, and what it never compiles."""

import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from specs import trial_spec
from tiny_models import LLAMA, MIXTRAL

from wattune.catalog.models import ModelSpec
from wattune.engines.deepspeed.context import _choose_accelerator, real_accelerator
from wattune.engines.deepspeed.engine import DeepSpeedEngine
from wattune.engines.deepspeed.model import compiler_of
from wattune.engines.model.compiler import EAGER
from wattune.engines.torch.engine import TorchEngine
from wattune.trial import TrialSpec
from wattune.workers.engine import Ranks

SEED = 11
RANKS = Ranks(rank=0, world_size=1, local_rank=0, device="cpu")
TIED = replace(LLAMA, tied_embeddings=True)
ODD = replace(LLAMA, name="odd", num_layers=1, ffn_hidden_size=25, activation="gelu", bias=True)
"""A model with an odd number of parameters."""


def spec(model: ModelSpec = LLAMA, *, world: int = 1, device: str = "cpu", **axes: object) -> TrialSpec:
    return trial_spec(
        model, on=f"1x{world} {device}", engine="deepspeed", seq_len=8, batch=4, **({"dtype": "fp32"} | axes)
    )


def losses(engine: DeepSpeedEngine | TorchEngine, each: TrialSpec, num_steps: int = 3) -> list[float]:
    engine.build(each, RANKS, seed=SEED)
    assert set(engine.facts()) == {"compiler"} | ({"routing"} if each.model.is_moe else set())
    found = [engine.step() for _ in range(num_steps)]
    engine.close()
    return [value for step in found for value in (step.loss, step.grad_norm)]


@pytest.mark.parametrize(
    "each",
    [
        spec(micro_batch_size=2),
        spec(MIXTRAL, micro_batch_size=2),
        spec(sharding="zero3"),
        spec(ODD, sharding="zero1"),
        spec(recompute="selective"),
    ],
    ids=["llama", "mixtral", "zero3", "odd-zero1", "selective"],
)
def test_one_rank_trains_as_the_torch_engine(process_group: None, each: TrialSpec) -> None:
    plain = replace(each, engine="torch", plan=replace(each.plan, sharding="none", recompute="none"))
    assert losses(DeepSpeedEngine(), each) == pytest.approx(losses(TorchEngine(), plain), rel=1e-5)


def test_without_zero_the_first_update_in_bf16_is_as_large_as_it_should_be(process_group: None) -> None:
    """DeepSpeed makes its optimizer's state by an update without gradient, which AdamW would count as the first."""
    each = spec(dtype="bf16", micro_batch_size=4)
    plain = replace(each, engine="torch")
    assert losses(DeepSpeedEngine(), each, 2) == pytest.approx(losses(TorchEngine(), plain, 2), rel=1e-6)


@pytest.mark.parametrize(
    ("model", "plan", "compiles"),
    [
        (LLAMA, {}, True),
        (MIXTRAL, {"sharding": "zero2"}, True),
        (LLAMA, {"pp": 2}, True),
        (TIED, {"pp": 2}, True),
        (TIED, {}, True),
        (LLAMA, {"tp": 2}, False),
        (LLAMA, {"sharding": "zero3"}, True),
        (MIXTRAL, {"sharding": "zero3"}, False),
    ],
)
def test_layers_are_compiled_where_deepspeed_leaves_them_whole(
    model: ModelSpec, plan: dict[str, object], compiles: bool
) -> None:
    each = spec(model, world=4, device="h200_sxm", **plan)
    assert (compiler_of(each, torch.device("cuda", 0)) != EAGER) == compiles
    assert compiler_of(each, torch.device("cpu")) == EAGER


def test_no_global_seed_is_touched_and_the_environment_is_put_back(process_group: None) -> None:
    state, environment = torch.get_rng_state(), dict(os.environ)
    losses(DeepSpeedEngine(), spec(MIXTRAL))
    assert torch.equal(torch.get_rng_state(), state)
    assert {name: value for name, value in os.environ.items() if environment.get(name) != value} == {}


def test_a_build_that_fails_leaves_nothing(process_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no memory left")

    engine = DeepSpeedEngine()
    with monkeypatch.context() as patch:
        patch.setattr("wattune.engines.deepspeed.model.initialise", fail)
        with pytest.raises(torch.OutOfMemoryError):
            engine.build(spec(), RANKS, seed=SEED)
    engine.close()
    assert losses(DeepSpeedEngine(), spec()) == losses(DeepSpeedEngine(), spec())


def test_close_may_come_first_and_twice() -> None:
    engine = DeepSpeedEngine()
    engine.close()
    engine.close()


def test_other_groups_and_other_engines_follow_in_the_same_process() -> None:
    """A worker makes its default group anew for every trial."""
    seen = []
    for engine in (DeepSpeedEngine, TorchEngine, DeepSpeedEngine):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        each = spec() if engine is DeepSpeedEngine else replace(spec(), engine="torch")
        seen.append(losses(engine(), each))
        dist.destroy_process_group()
    assert seen[0] == seen[2] == pytest.approx(seen[1], rel=1e-5)


@pytest.mark.slow
def test_nothing_is_compiled_and_nothing_printed(tmp_path: Path) -> None:
    """Not even with a compiler at hand; and without one the engine runs all the same."""
    code = """
import torch.distributed as dist, sys
sys.path.insert(0, {folder!r})
from test_engine import DeepSpeedEngine, losses, spec
assert "mlflow" not in sys.modules, "DeepSpeed's autotuner would load it"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
losses(DeepSpeedEngine(), spec(sharding="zero2"))
dist.destroy_process_group()
"""
    environment = os.environ | {
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"),
        "PATH": str(tmp_path),  # no g++, no ninja
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", code.format(folder=str(Path(__file__).parent))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "extensions").exists()


def test_a_trial_for_the_processor_takes_it_also_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_accelerator, "ds_accelerator", SimpleNamespace(device_name=lambda: "cuda"))
    _choose_accelerator(torch.device("cpu"))
    assert real_accelerator.get_accelerator().device_name() == "cpu"


def test_deepspeed_logs_as_other_libraries_do(process_group: None, caplog: pytest.LogCaptureFixture) -> None:
    losses(DeepSpeedEngine(), spec(sharding="zero1"), num_steps=1)
    logger = logging.getLogger("DeepSpeed")
    assert (logger.level, logger.propagate, logger.handlers) == (logging.WARNING, True, [])
    logger.warning("something is slow")
    assert [record.message for record in caplog.records if record.name == "DeepSpeed"][-1] == "something is slow"
