"""Ranks of a count of matrix products: `engine_worker.py`, whose cases train one step while products are counted."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

FOLDER = Path(sys.argv[1])
if '"megatron"' in (FOLDER / "cases.json").read_text():
    import megatron_shim

    megatron_shim.install()

import engine_worker  # noqa: E402 - it must not load Megatron earlier
import torch  # noqa: E402
from torch._subclasses import FakeTensor  # noqa: E402
from torch.distributed._functional_collectives import AsyncCollectiveTensor  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.flop_counter import flop_registry  # noqa: E402

from wattune.trial import TrialSpec  # noqa: E402
from wattune.workers.engine import Ranks  # noqa: E402


def grouped_flops(rows: torch.Tensor, weight: torch.Tensor) -> int:
    """Operations of [R, in] times each group's [in, out], or of a weight's gradient [in, R] times [R, out]."""
    return 2 * rows.numel() * weight.shape[-1]


def attention_flops(query: torch.Tensor, key: torch.Tensor) -> int:
    """Operations of two products of every query with every key, [batch, heads, sequence, head size]."""
    return 4 * query.numel() * key.shape[-2]


class Products(TorchDispatchMode):
    """Counts the operations of matrix products and attention by kind and data type."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented  # they call again, with what this rank holds
        out = func(*args, **(kwargs or {}))
        packet, name = func._overloadpacket, func._overloadpacket.__name__
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        # DTensor finds out shapes by operations on tensors without values.
        if any(issubclass(kind, FakeTensor) for kind in types):
            return out
        if "attention_for_cpu" in name:
            gradient = "backward" in name
            self.flops[f"attention{'_backward' * gradient} {tensors[0].dtype}"] += attention_flops(
                *tensors[gradient:][:2]
            )
        elif name == "_grouped_mm":
            self.flops[f"product {tensors[0].dtype}"] += grouped_flops(*tensors[:2])
        elif packet in flop_registry:
            self.flops[f"product {tensors[0].dtype}"] += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        return out


def run_case(spec: TrialSpec, compiler: str | None, ranks: Ranks) -> dict[str, Any]:
    engine = engine_worker.engine_for(spec, compiler)
    engine.build(spec, ranks, seed=engine_worker.SEED)
    with Products() as products:
        engine.step()
    engine.close()
    return {"flops": products.flops}


if __name__ == "__main__":
    engine_worker.run_case = run_case
    engine_worker.main(FOLDER, sys.argv[2], int(sys.argv[3]))
