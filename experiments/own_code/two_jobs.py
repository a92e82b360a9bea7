#!/usr/bin/env python
"""Two data parallel jobs, each on half of a node's devices, which work for half of a period and wait for the rest.

    torchrun --standalone --nproc-per-node 2 experiments/own_code/two_jobs.py --late-frac 0.5

Waiting stands for what a job waits for: data, a checkpoint, answers of another job. `--late-frac` is the share of a
period by which the second job starts later; both keep that phase, by the node's clock.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn

from wattune import spans


def main() -> None:
    """Trains until it is stopped, or for `--steps`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--late-frac", type=float, default=0.0, help="part of a period that the second job starts later"
    )
    parser.add_argument("--period-s", type=float, help="seconds from step to step; else 2, on processors 0.2")
    parser.add_argument("--steps", type=int, default=100000)
    given = parser.parse_args()
    cuda, rank, size = torch.cuda.is_available(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    jobs = [dist.new_group([*range(size // 2)]), dist.new_group([*range(size // 2, size)])]
    is_second = rank >= size // 2
    width, tokens = (8192, 8192) if cuda else (128, 128)
    torch.manual_seed(0)
    layers = [nn.Linear(width, width, bias=False) for _ in range(4)]
    model = nn.Sequential(*layers).to(device, torch.bfloat16 if cuda else torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    batch = torch.randn(tokens, width, device=device, dtype=layers[0].weight.dtype)

    def work(times: int) -> None:
        """One step of some micro-batches."""
        for _ in range(times):
            model(batch).square().mean().backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad, group=jobs[is_second])
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        if cuda:
            torch.cuda.synchronize()

    times, period_s = (46 if cuda else 30), given.period_s or (2.0 if cuda else 0.2)  # half of a period
    work(times)
    begin = torch.tensor([time.time() + 1.0], device=device, dtype=torch.float64)
    dist.broadcast(begin, 0)
    begin_s = begin.item() + (given.late_frac * period_s if is_second else 0.0)
    for number in range(given.steps):
        time.sleep(max(0.0, begin_s + number * period_s - time.time()))
        with spans.step(tokens=times * tokens):
            work(times)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
