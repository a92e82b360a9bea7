#!/usr/bin/env python
"""A training loop of plain PyTorch with DistributedDataParallel, which tells its steps by two lines.

    torchrun --nproc-per-node 2 experiments/own_code/plain_loop.py
    torchrun --nproc-per-node 4 experiments/own_code/plain_loop.py --layers 16 --hidden 2048 --seq-len 4096 --bf16

Every size is a flag: the defaults run on a laptop. Without wattune around it, `spans.step` does nothing.
"""

import argparse
import contextlib
import os
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wattune import spans  # one of two lines for wattune


class Decoder(nn.Module):
    """A small causal transformer over tokens."""

    def __init__(self, layers: int, hidden: int, heads: int, vocab: int, seq_len: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.positions = nn.Embedding(seq_len, hidden)
        layer = nn.TransformerEncoderLayer(
            hidden, heads, 4 * hidden, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns logits, shape (batch, sequence, vocabulary), of tokens of shape (batch, sequence)."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        hidden = self.embedding(tokens) + self.positions.weight[:length]
        logits: Tensor = self.head(self.layers(hidden, mask=mask, is_causal=True))
        return logits


def boolean(text: str) -> bool:
    """Reads true or false, so that a search can fill in either."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"got {text}; give true or false")
    return text.lower() == "true"


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--micro-batch-size", type=int, default=2, help="samples of a rank at once")
    parser.add_argument("--num-micro-batches", type=int, default=1, help="micro-batches of a step on each rank")
    parser.add_argument("--bucket-mb", type=int, default=25, help="size of DDP's gradient buckets")
    parser.add_argument("--bf16", type=boolean, nargs="?", const=True, default=False)
    parser.add_argument("--steps", type=int, default=50)
    return parser.parse_args()


def main() -> None:
    """Trains."""
    given = arguments()
    cuda = torch.cuda.is_available()
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(0)
    model: nn.Module = Decoder(given.layers, given.hidden, given.heads, given.vocab, given.seq_len).to(device)
    if dist.is_initialized():
        model = DistributedDataParallel(model, device_ids=[local_rank] if cuda else None, bucket_cap_mb=given.bucket_mb)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=cuda)
    generator = torch.Generator(device).manual_seed(rank)
    shape = (given.micro_batch_size, given.seq_len + 1)
    began_s = time.monotonic()
    loss = torch.zeros(())
    for _ in range(given.steps):
        with spans.step(tokens=given.num_micro_batches * given.micro_batch_size * given.seq_len):  # the other one
            for micro_batch in range(given.num_micro_batches):
                tokens = torch.randint(given.vocab, shape, generator=generator, device=device)
                last = micro_batch == given.num_micro_batches - 1
                quiet = contextlib.nullcontext() if last or not dist.is_initialized() else model.no_sync()
                with quiet, torch.autocast(device.type, torch.bfloat16, enabled=given.bf16):
                    logits = model(tokens[:, :-1])
                    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                    (loss / given.num_micro_batches).backward()
            optimizer.step()
            optimizer.zero_grad()
    if rank == 0:
        print(f"{given.steps} steps in {time.monotonic() - began_s:.1f} s, loss {loss.item():.3f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
