#!/usr/bin/env python
"""Trains a GPT by megatron-core, in the form of its own example `run_simple_mcore_train_loop.py`; needs GPUs.

    torchrun --nproc-per-node 4 experiments/own_code/megatron_gpt.py --tensor-parallel 2 --layers 16 --hidden 2048

It knows nothing of wattune: the steps are those of torch's optimizers. It differs from the example where that would
measure the wrong thing: sizes are flags, tokens are random instead of a mock dataset that is compiled and indexed on
disk, its own optimizer keeps fp32 weights, and there is no checkpoint. Megatron-core needs CUDA.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


def boolean(text: str) -> bool:
    """Reads true or false, so that a search can fill in either."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"got {text}; give true or false")
    return text.lower() == "true"


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--global-batch-size", type=int, default=8)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--pipeline-parallel", type=int, default=1)
    parser.add_argument("--sequence-parallel", type=boolean, nargs="?", const=True, default=False)
    parser.add_argument("--overlap-grad-reduce", type=boolean, nargs="?", const=True, default=False)
    parser.add_argument("--distributed-optimizer", type=boolean, nargs="?", const=True, default=False)
    parser.add_argument("--recompute", choices=["none", "full"], default="none")
    parser.add_argument("--steps", type=int, default=50)
    return parser.parse_args()


def tokens(given: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Yields micro-batches of random tokens, the same on all ranks of a replica."""
    replica = parallel_state.get_data_parallel_rank()
    generator = torch.Generator(device).manual_seed(replica)
    positions = torch.arange(given.seq_len, device=device).expand(given.micro_batch_size, -1)
    while True:
        shape = (given.micro_batch_size, given.seq_len + 1)
        found = torch.randint(given.vocab, shape, generator=generator, device=device)
        yield {"tokens": found[:, :-1], "labels": found[:, 1:], "positions": positions}


def forward_step(batches: Iterator[dict[str, Tensor]], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
    """Runs one micro-batch forward, and returns what turns its output into a loss."""

    def loss_of(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = losses.float().mean()
        return loss, {"lm loss": loss.detach().clone()}  # the schedule divides the loss in place

    batch = next(batches)
    # Without a mask Megatron's own attention masks causally.
    return model(batch["tokens"], batch["positions"], None, labels=batch["labels"]), loss_of


def main() -> None:
    """Trains."""
    given = arguments()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl", device_id=device)
    parallel_state.initialize_model_parallel(given.tensor_parallel, given.pipeline_parallel)
    model_parallel_cuda_manual_seed(123)
    replicas = parallel_state.get_data_parallel_world_size()
    if given.global_batch_size % (given.micro_batch_size * replicas):
        raise SystemExit(
            f"--global-batch-size {given.global_batch_size} is not a multiple of {given.micro_batch_size} samples on "
            f"each of {replicas} replicas"
        )
    config = TransformerConfig(
        num_layers=given.layers,
        hidden_size=given.hidden,
        num_attention_heads=given.heads,
        tensor_model_parallel_size=given.tensor_parallel,
        pipeline_model_parallel_size=given.pipeline_parallel,
        sequence_parallel=given.sequence_parallel,
        pipeline_dtype=torch.bfloat16,
        params_dtype=torch.bfloat16,
        bf16=True,
        recompute_granularity=None if given.recompute == "none" else "full",
        recompute_method=None if given.recompute == "none" else "uniform",
        recompute_num_layers=None if given.recompute == "none" else 1,
        gradient_accumulation_fusion=False,  # a kernel of Apex
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=given.vocab,
        max_sequence_length=given.seq_len,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    replicated = DistributedDataParallel(
        config=config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=given.overlap_grad_reduce,
            use_distributed_optimizer=given.distributed_optimizer,
        ),
        module=model.to(device, torch.bfloat16),
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-4,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=given.distributed_optimizer,
        ),
        [replicated],
    )
    # As Megatron-LM's training loop tells its schedules.
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if given.overlap_grad_reduce:
        config.no_sync_func = replicated.no_sync
    run, batches = get_forward_backward_func(), tokens(given, device)
    for step in range(given.steps):
        replicated.zero_grad_buffer()
        optimizer.zero_grad()
        losses = run(
            forward_step_func=forward_step,
            data_iterator=batches,
            model=replicated,
            num_microbatches=given.global_batch_size // (given.micro_batch_size * replicas),
            seq_length=given.seq_len,
            micro_batch_size=given.micro_batch_size,
            forward_only=False,
        )
        optimizer.step()
        if step % 10 == 0 and losses and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            print(f"step {step}: loss {losses[-1]['lm loss'].item():.3f}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
