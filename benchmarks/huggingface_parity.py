"""Holds the torch engine to Hugging Face's Llama, Mixtral and GPT-2 on one device, from the same weights.

The models of `tests/contracts/test_huggingface.py`, wider: fp32, and bf16 with fp32 weights in the optimizer. Each line
names a case and the largest relative deviation of a loss and of a gradient norm over five steps, that of the first
step's loss, and the ratio of the median step times: transformers' eager model with sdpa attention over the engine.

The control is transformers against itself: the same model with attention written out, which differs by rounding alone.
Where the control exceeds the bound as well, the model tells roundings apart, as a router does with two nearly equal
experts, and the case decides nothing. The exit code is 1 if the engine exceeds a bound that the control holds, or
exceeds the bound at the first step, before any update could make a rounding grow.

    python benchmarks/huggingface_parity.py                    # one GPU, about three minutes
    python benchmarks/huggingface_parity.py --models mixtral --device cpu --dtypes fp32    # the same widths, on a CPU
    python benchmarks/huggingface_parity.py --quick            # tiny models on a CPU
"""

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import ModelSpec
from wattune.engines.model import weights
from wattune.engines.model.hyperparameters import BETAS, CLIP_NORM, LEARNING_RATE, WEIGHT_DECAY
from wattune.engines.model.tokens import Batches
from wattune.engines.torch.engine import TorchEngine
from wattune.plan.axes import Plan
from wattune.trial import TrialSpec, Workload
from wattune.workers.engine import Ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fakes"))

from huggingface_models import model_of

SEED: Final = 5
NUM_STEPS: Final = 5
BOUND: Final = {"fp32": (1e-5, 1e-5), "bf16": (2e-3, 2e-2)}
"""Largest relative deviation of a loss and of a norm. In bf16 both sides round every activation to 2^-9, each in its
own kernels."""

LLAMA: Final = ModelSpec(
    name="llama",
    num_layers=4,
    hidden_size=1024,
    ffn_hidden_size=2816,
    num_heads=16,
    num_kv_heads=4,
    vocab_size=32000,
    rope_base=5e5,
)
MIXTRAL: Final = replace(LLAMA, name="mixtral", rope_base=1e6, num_experts=8, num_experts_per_token=2)
GPT2: Final = replace(
    LLAMA,
    name="gpt2",
    num_kv_heads=16,
    norm="layernorm",
    activation="gelu",
    positions="learned",
    max_positions=1024,
    rope_base=1e4,
    bias=True,
    tied_embeddings=True,
)
MODELS: Final = (LLAMA, MIXTRAL, GPT2)
TINY: Final[dict[str, Any]] = {
    "hidden_size": 64, "ffn_hidden_size": 128, "num_heads": 4, "vocab_size": 128, "num_layers": 2
}  # fmt: skip


def ours(spec: TrialSpec, device: str) -> tuple[list[tuple[float, float]], list[float]]:
    """Loss and norm of every step of the engine, and seconds."""
    engine, steps, seconds = TorchEngine(), [], []
    engine.build(spec, Ranks(rank=0, world_size=1, local_rank=0, device=device), seed=SEED)
    for _ in range(NUM_STEPS):
        start_s = time.perf_counter()
        step = engine.step()
        seconds.append(time.perf_counter() - start_s)
        steps.append((step.loss, step.grad_norm))
    engine.close()
    return steps, seconds


def theirs(spec: TrialSpec, device: str, attention: str = "sdpa") -> tuple[list[tuple[float, float]], list[float]]:
    """The same of transformers: the model in the training type, clipping and AdamW on fp32 weights."""
    made = model_of(spec.model, SEED, attention=attention, device=device)
    low = torch.bfloat16 if spec.plan.dtype == "bf16" else torch.float32
    made = made.to(low)  # rounds the weights, as every engine does
    masters = [nn.Parameter(each.detach().float()) for each in made.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)
    workload = spec.workload
    batches = Batches(
        seed=SEED,
        vocab_size=spec.model.vocab_size,
        seq_len=workload.seq_len,
        replica_batch_size=workload.global_batch_size,
        replica=0,
        device=torch.device(device),
    )
    steps, seconds = [], []
    for step in range(NUM_STEPS):
        tokens, targets = batches.at(step)
        start_s = time.perf_counter()
        loss = made(input_ids=tokens, labels=targets, shift_labels=targets, use_cache=False).loss
        loss.backward()
        for master, each in zip(masters, made.parameters(), strict=True):
            assert each.grad is not None
            master.grad, each.grad = each.grad.float(), None
        norm = nn.utils.clip_grad_norm_(masters, CLIP_NORM)
        optimizer.step()
        with torch.no_grad():
            for master, each in zip(masters, made.parameters(), strict=True):
                each.copy_(master)
        steps.append((loss.item(), norm.item()))
        seconds.append(time.perf_counter() - start_s)
    return steps, seconds


def deviations(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> tuple[float, float, float]:
    """Largest relative deviation of a loss, of a norm, and that of the first loss."""
    losses, norms = (
        [abs(a[part] / b[part] - 1) for a, b in zip(one, other, strict=True)] for part in (0, 1)
    )  # fmt: skip
    return max(losses), max(norms), losses[0]


def is_bad(ours_away: tuple[float, float, float], control: tuple[float, float, float], dtype: str) -> bool:
    """Tells whether the engine exceeds a bound at the first step, or one that the control holds."""
    loss, norm = BOUND[dtype]
    return ours_away[2] > loss or any(
        away > most >= same for away, same, most in zip(ours_away, control, (loss, norm), strict=False)
    )


def main() -> int:
    """Runs every case; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny models on a CPU")
    parser.add_argument("--device", default="cuda:0", help="cuda:0 or cpu")
    parser.add_argument("--models", nargs="+", choices=[each.name for each in MODELS], help="some of the models")
    parser.add_argument("--dtypes", nargs="+", choices=list(BOUND), default=list(BOUND))
    given = parser.parse_args()
    device = "cpu" if given.quick else given.device
    import transformers

    where = "cpu" if device == "cpu" else torch.cuda.get_device_name(0)
    print(
        f"{where}, torch {torch.__version__}, transformers {transformers.__version__}, Python {sys.version.split()[0]}"
    )
    # Wide enough that attention tells tokens apart.
    weights.INIT_STD = 0.1 if given.quick else 0.04  # type: ignore[misc]
    dist.init_process_group("gloo" if device == "cpu" else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    num_bad = 0
    print(
        "model,dtype,loss_deviation_ratio,norm_deviation_ratio,first_loss_deviation_ratio,control_loss_deviation_ratio,"
        "control_norm_deviation_ratio,step_time_over_engine_ratio",
        flush=True,
    )
    for of in MODELS:
        if given.models and of.name not in given.models:
            continue
        model = replace(of, **TINY, num_kv_heads=4 if of is GPT2 else 2) if given.quick else of
        for dtype in given.dtypes:
            spec = TrialSpec(
                model=model,
                cluster=ClusterSpec(device="cpu" if device == "cpu" else "h200_sxm", devices_per_node=1),
                engine="torch",
                workload=Workload(seq_len=32 if given.quick else 1024, global_batch_size=4),
                plan=Plan(micro_batch_size=4, dtype=dtype),
            )
            (one, one_s), (other, other_s) = ours(spec, device), theirs(spec, device)
            same, _ = theirs(spec, device, attention="eager")
            away, control = deviations(one, other), deviations(same, other)
            bad = is_bad(away, control, dtype)
            num_bad += bad
            ratio = statistics.median(other_s[2:]) / statistics.median(one_s[2:])
            figures = ",".join(f"{each:.1e}" for each in (*away, *control[:2]))
            print(f"{of.name},{dtype},{figures},{ratio:.2f}{' BAD' if bad else ''}", flush=True)
            for name, steps in (("engine", one), ("transformers", other), ("control", same)):
                print(f"# {name}: {' '.join(f'{loss:.7f}' for loss, _ in steps)}", flush=True)
    dist.destroy_process_group()
    print(f"{num_bad} bad")
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
