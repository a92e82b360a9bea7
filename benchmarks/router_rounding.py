"""Shows what rounding does to a mixture of experts: the torch engine against itself with another attention kernel.

Both runs have the same weights and tokens, in fp32 on a CPU. The kernels of `scaled_dot_product_attention` differ by
the order of sums alone. Each line names a step, the relative deviations of its loss and gradient norm, and how many
tokens were sent to other experts, of all tokens of all layers. With a forced routing no token can be.

The exit code is 1 if a forced run exceeds 1e-5, or a free one does before a token was sent elsewhere.

    python benchmarks/router_rounding.py    # two minutes
"""

import sys
from dataclasses import replace
from typing import Final

import torch
import torch.distributed as dist
from huggingface_parity import MIXTRAL
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from wattune.catalog.hardware import ClusterSpec
from wattune.engines.model import weights
from wattune.engines.model.routing import LayerRouting
from wattune.engines.torch.engine import TorchEngine
from wattune.plans.axes import Plan
from wattune.trial import Routing, TrialSpec, Workload
from wattune.workers.engine import Ranks

NUM_STEPS: Final = 6
BOUND: Final = 1e-5
MODEL: Final = replace(
    MIXTRAL, hidden_size=256, ffn_hidden_size=704, num_heads=4, num_kv_heads=1, vocab_size=4096
)  # fmt: skip
ROUTINGS: Final = {"router": None, "forced": Routing(by="balanced")}

Steps = list[tuple[float, float, list[Tensor]]]
"""Loss, gradient norm and the experts of every layer's tokens."""


def run(routing: Routing | None, kernel: SDPBackend) -> Steps:
    """Trains some steps with one kernel of attention."""
    sent: list[Tensor] = []
    counted = LayerRouting._by_sequence

    def noted(self: LayerRouting, experts: Tensor, num_experts: int) -> Tensor:
        sent.append(experts.sort(-1).values)
        return counted(self, experts, num_experts)

    spec = TrialSpec(
        model=MODEL,
        cluster=ClusterSpec(device="cpu", devices_per_node=1),
        engine="torch",
        workload=Workload(seq_len=512, global_batch_size=4, routing=routing),
        plan=Plan(micro_batch_size=4, dtype="fp32"),
    )
    engine, steps = TorchEngine(), []
    engine.build(spec, Ranks(rank=0, world_size=1, local_rank=0, device="cpu"), seed=5)
    LayerRouting._by_sequence = noted  # type: ignore[method-assign]
    try:
        for _ in range(NUM_STEPS):
            with sdpa_kernel(kernel):
                step = engine.step()
            steps.append((step.loss, step.grad_norm, list(sent)))
            sent.clear()
    finally:
        LayerRouting._by_sequence = counted  # type: ignore[method-assign]
        engine.close()
    return steps


def main() -> int:
    """Runs both routings; the exit code."""
    weights.INIT_STD = 0.04  # type: ignore[misc]  # as in `huggingface_parity.py`
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print("routing,step,loss_deviation_ratio,norm_deviation_ratio,num_tokens_elsewhere,num_tokens")
    num_bad = 0
    for name, routing in ROUTINGS.items():
        pair = (run(routing, kernel) for kernel in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH))
        elsewhere = 0
        for number, (one, other) in enumerate(zip(*pair, strict=True), start=1):
            loss, norm = (abs(a / b - 1) for a, b in zip(one[:2], other[:2], strict=True))
            moved = sum(int((a != b).any(-1).sum()) for a, b in zip(one[2], other[2], strict=True))
            elsewhere += moved
            num_bad += not elsewhere and max(loss, norm) > BOUND
            print(f"{name},{number},{loss:.1e},{norm:.1e},{moved},{sum(map(len, one[2]))}", flush=True)
    dist.destroy_process_group()
    print(f"torch {torch.__version__}: {num_bad} bad")
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
