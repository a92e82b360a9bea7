"""Holds the torch engine to Hugging Face's Llama, Mixtral and GPT-2 on one device, from the same weights.

The models of `tests/contracts/test_huggingface.py`, wider: fp32, and bf16 with fp32 weights in the optimizer. Each line
names a case and relative deviations over five steps: the largest of a loss, the largest of a gradient norm, and that of
the first loss. The first group is the engine from transformers in the same type, then come the control from the same,
and the losses of the engine, of transformers and of the control from those of transformers in fp32. Last is the ratio
of the median times of steps 3 to 5: transformers' eager model with sdpa attention over the engine.

The control is transformers again with attention written out, which differs by rounding alone. Two programs in bf16
round each in their own way, so the engine's distance from another bf16 program does not say which of them is off.
Losses are therefore held to transformers in fp32, and `verdict` has the rule. The exit code is 1 if a case is bad.

    python benchmarks/huggingface_parity.py                    # one GPU, about three minutes
    python benchmarks/huggingface_parity.py --models mixtral --device cpu --dtypes fp32    # the same widths, on a CPU
    python benchmarks/huggingface_parity.py --quick            # tiny models on a CPU
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from wattune.plans.axes import Plan
from wattune.trial import TrialSpec, Workload
from wattune.workers.engine import Ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fakes"))

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


def round_weights(made: nn.Module, dtype: torch.dtype) -> None:
    """Rounds the weights to a type, as every engine does.

    Buffers stay in fp32, as they do where transformers itself loads a model in bf16. `Module.to` would round the
    frequencies of rotary positions, and then places are turned by other angles.
    """
    for each in made.parameters():
        each.data = each.data.to(dtype)


def theirs(spec: TrialSpec, device: str, attention: str = "sdpa") -> tuple[list[tuple[float, float]], list[float]]:
    """The same of transformers: the model in the training type, clipping and AdamW on fp32 weights."""
    from huggingface_models import model_of  # here, since transformers takes seconds to import

    made = model_of(spec.model, SEED, attention=attention, device=device)
    if spec.plan.dtype == "bf16":
        round_weights(made, torch.bfloat16)
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


Steps = Sequence[tuple[float, float]]
"""Loss and gradient norm of every step."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """Relative deviations of a run from another one with the same weights and tokens."""

    loss: float
    """The largest of a loss."""
    norm: float
    """The largest of a gradient norm."""
    first_loss: float
    """That of the first loss, before any update could make a rounding grow."""


def deviation(one: Steps, other: Steps) -> Deviation:
    """Compares two runs step by step."""
    losses, norms = ([abs(a[part] / b[part] - 1) for a, b in zip(one, other, strict=True)] for part in (0, 1))
    return Deviation(max(losses), max(norms), losses[0])


@dataclass(frozen=True, slots=True)
class Case:
    """The deviations of one model in one type."""

    engine: Deviation
    """The engine from transformers in the same type."""
    control: Deviation
    """transformers with attention written out from transformers, in the same type."""
    engine_fp32: Deviation
    """The engine from transformers in fp32."""
    peer_fp32: Deviation
    """transformers from transformers in fp32: 0 where the type is fp32."""
    control_fp32: Deviation
    """The control from transformers in fp32."""

    @classmethod
    def of(cls, engine: Steps, peer: Steps, control: Steps, reference: Steps) -> "Case":
        """Compares the runs of one type, `peer` being transformers and `reference` transformers in fp32."""
        return cls(
            engine=deviation(engine, peer),
            control=deviation(control, peer),
            engine_fp32=deviation(engine, reference),
            peer_fp32=deviation(peer, reference),
            control_fp32=deviation(control, reference),
        )

    def cells(self) -> str:
        """The figures in the order of `COLUMNS`."""
        figures = [self.engine.loss, self.engine.norm, self.engine.first_loss, self.control.loss, self.control.norm]
        for each in (self.engine_fp32, self.peer_fp32, self.control_fp32):
            figures += [each.loss, each.first_loss]
        return ",".join(f"{each:.1e}" for each in figures)


COLUMNS: Final = (
    "loss_deviation_ratio,norm_deviation_ratio,first_loss_deviation_ratio,"
    "control_loss_deviation_ratio,control_norm_deviation_ratio,"
    "engine_loss_from_fp32_ratio,engine_first_loss_from_fp32_ratio,"
    "transformers_loss_from_fp32_ratio,transformers_first_loss_from_fp32_ratio,"
    "control_loss_from_fp32_ratio,control_first_loss_from_fp32_ratio"
)


def verdict(case: Case, dtype: str) -> str:
    """Judges a case: met, undecided or bad.

    The bound on losses is one on the distance from transformers in fp32. The bound on norms is one on the distance from
    transformers in the same type. A first loss is bad if it is beyond the bound and further from fp32 than that of both
    runs of transformers in the same type. What exceeds a bound otherwise is bad if both runs of transformers hold that
    bound. Where one of them exceeds it too, the model tells roundings apart, as a router does with two nearly equal
    experts, and the case is undecided.
    """
    most_loss, most_norm = BOUND[dtype]
    if case.engine_fp32.first_loss > max(most_loss, case.peer_fp32.first_loss, case.control_fp32.first_loss):
        return "bad"
    past = [
        (case.engine_fp32.loss, max(case.peer_fp32.loss, case.control_fp32.loss), most_loss),
        (case.engine.norm, case.control.norm, most_norm),
    ]
    exceeded = [peers > most for own, peers, most in past if own > most]
    if not all(exceeded):
        return "bad"
    return "undecided" if exceeded else "met"


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
    print(f"model,dtype,{COLUMNS},step_time_over_engine_ratio,verdict", flush=True)
    for of in MODELS:
        if given.models and of.name not in given.models:
            continue
        model = replace(of, **TINY, num_kv_heads=4 if of is GPT2 else 2) if given.quick else of
        fp32 = TrialSpec(
            model=model,
            cluster=ClusterSpec(device="cpu" if device == "cpu" else "h200_sxm", devices_per_node=1),
            engine="torch",
            workload=Workload(seq_len=32 if given.quick else 1024, global_batch_size=4),
            plan=Plan(micro_batch_size=4, dtype="fp32"),
        )
        reference, reference_s = theirs(fp32, device)
        for dtype in given.dtypes:
            spec = replace(fp32, plan=replace(fp32.plan, dtype=dtype))
            one, one_s = ours(spec, device)
            other, other_s = (reference, reference_s) if dtype == "fp32" else theirs(spec, device)
            control, _ = theirs(spec, device, attention="eager")
            case = Case.of(one, other, control, reference)
            found = verdict(case, dtype)
            num_bad += found == "bad"
            ratio = statistics.median(other_s[2:]) / statistics.median(one_s[2:])
            print(f"{of.name},{dtype},{case.cells()},{ratio:.2f},{found}", flush=True)
            for name, steps in (("engine", one), ("transformers", other), ("control", control)):
                print(f"# {name}: {' '.join(f'{loss:.7f}' for loss, _ in steps)}", flush=True)
    dist.destroy_process_group()
    print(f"{num_bad} bad")
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
