"""Graphs compiled ahead: every part that a rank will compile, and code under the key that its trial looks for."""

import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import tiny_models
import torch
import torch.distributed as dist
from specs import trial_spec
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

from wattune.engines.model.compiler import Compiler, _keep_code
from wattune.engines.torch.ahead import compile_ahead
from wattune.engines.torch.engine import TorchEngine
from wattune.trial import TrialSpec
from wattune.workers.engine import Ranks

RANKS = Ranks(rank=0, world_size=1, local_rank=0, device="cpu")
LLAMA = replace(tiny_models.LLAMA, num_layers=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sees(Compiler):
    """Runs eagerly, and notes the parts it is asked to compile with the shapes of their inputs."""

    backend: str | None = "inductor"
    seen: ClassVar[list[tuple[str, ...]]] = []

    def run(self, function: Callable[..., Tensor], *args: Any) -> Tensor:
        used = ((name, weight) for name, weight in args[0].named_parameters() if "ffn.experts" not in name)
        weights = tuple(str((name, tuple(weight.shape), weight.dtype)) for name, weight in used)
        self.seen.append((function.__name__, *(str(tuple(one.shape)) for one in args[1:]), *weights))
        return function(*args)


@pytest.fixture(autouse=True)
def nothing_seen() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    Sees.seen.clear()
    yield
    Sees.seen.clear()


def one_step(spec: TrialSpec, compiler: Compiler) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        engine = TorchEngine(compiler)
        engine.build(spec, RANKS, seed=3)
        engine.step()
        engine.close()
    finally:
        dist.destroy_process_group()


def seen_ahead(spec: TrialSpec, rank: int = 0) -> list[tuple[str, ...]]:
    Sees.seen.clear()
    ranks = Ranks(rank=rank, world_size=spec.cluster.world_size, local_rank=rank, device="cpu")
    for part in ("layers", "head"):
        compile_ahead(spec, ranks, part, Sees())
    return list(dict.fromkeys(Sees.seen))


@pytest.mark.parametrize("model", [LLAMA, tiny_models.MIXTRAL, tiny_models.GPT])
@pytest.mark.parametrize(
    "axes", [{}, {"recompute": "full", "loss_chunks": 2}, {"recompute": "selective", "dtype": "fp32"}]
)
def test_it_compiles_what_the_trial_compiles(model: Any, axes: dict[str, Any]) -> None:
    spec = trial_spec(model, on="1x1 cpu", seq_len=8, batch=2, micro_batch_size=2, **({"dtype": "bf16"} | axes))
    one_step(spec, Sees())
    own = list(dict.fromkeys(Sees.seen))
    assert seen_ahead(spec) == own and own
    assert not dist.is_initialized()


def test_a_stage_compiles_its_own_parts_and_a_tensor_rank_its_own_pieces() -> None:
    staged = trial_spec(LLAMA, on="1x2 cpu", seq_len=8, batch=4, dtype="bf16", pp=2, layout=(2, 1))
    assert [name for name, *_ in seen_ahead(staged, 0)] == ["mix_all"]
    assert [name for name, *_ in seen_ahead(staged, 1)] == ["mix_all", "loss"]
    cut = trial_spec(LLAMA, on="1x2 cpu", seq_len=8, batch=4, dtype="bf16", tp=2)
    layer, head = seen_ahead(cut, 1)
    assert layer[1] == "(1, 4, 16)" and head[0] == "loss"


def test_a_key_does_not_name_the_module_that_first_imported_torch() -> None:
    """That is one of Ray's in a worker and torch's own in the process beside it, which so compiled in vain."""
    from torch._inductor.codecache import FxGraphCachePickler

    _keep_code()
    with FakeTensorMode():
        kept = FxGraphCachePickler(None).dumps(torch.empty(2))  # type: ignore[arg-type]
    assert b"torch._utils" not in kept and b"wattune.engines.model.compiler" in kept
    assert pickle.loads(pickle.dumps(torch.channels_last)) is torch.channels_last


def test_what_fails_leaves_no_process_group() -> None:
    spec = trial_spec(LLAMA, on="1x2 cpu", seq_len=8, batch=4, dtype="bf16")
    with pytest.raises(AttributeError):
        compile_ahead(spec, Ranks(rank=0, world_size=2, local_rank=0, device="cpu"), "layers", "no compiler")  # type: ignore[arg-type]
    assert not dist.is_initialized()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor on processors needs g++")
def test_a_trial_finds_the_code_of_all_its_graphs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    spec = trial_spec(LLAMA, on="1x1 cpu", seq_len=8, batch=2, dtype="bf16", micro_batch_size=2)
    for part, num_graphs in (("layers", 2), ("head", 4)):
        compile_ahead(spec, RANKS, part)
        assert counters["inductor"]["fxgraph_cache_miss"] == num_graphs, "of a layer and the head, forward and backward"
    counters.clear()
    one_step(spec, Compiler(backend="inductor"))
    assert counters["inductor"]["fxgraph_cache_hit"] == 4 and not counters["inductor"]["fxgraph_cache_miss"]
    assert counters["aot_autograd"]["autograd_cache_hit"] == 2, "whole, so that nothing is derived again"
