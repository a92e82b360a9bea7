#!/usr/bin/env python
"""Trains a small language model by Lightning's Trainer, as a program that knows nothing of wattune.

    torchrun --nproc-per-node 2 experiments/own_code/lightning_trainer.py
    torchrun --nproc-per-node 4 experiments/own_code/lightning_trainer.py --layers 16 --hidden 2048 --bf16

Model and data are made in memory. wattune finds the steps by a callback, and tokens by the shapes of its batches.
"""

import argparse
import os
import tempfile

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

NUM_SAMPLES = 512
"""Samples that differ; training begins again with the first after the last."""


class RandomTokens(Dataset[dict[str, Tensor]]):
    """Samples of random tokens, the same in every process."""

    def __init__(self, seq_len: int, vocab_size: int) -> None:
        self.tokens = torch.randint(vocab_size, (NUM_SAMPLES, seq_len + 1), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.tokens[index % NUM_SAMPLES]
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}


class Model(LightningModule):
    """Layers of attention between an embedding and a head."""

    def __init__(self, given: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = nn.Embedding(given.vocab, given.hidden)
        layer = nn.TransformerEncoderLayer(given.hidden, given.heads, 4 * given.hidden, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, given.layers, enable_nested_tensor=False)
        self.head = nn.Linear(given.hidden, given.vocab)

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        """Mean loss of a micro-batch."""
        tokens = batch["input_ids"]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device)
        logits = self.head(self.layers(self.embedding(tokens), mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"layers": 2, "hidden": 64, "heads": 4, "vocab": 512, "seq-len": 64, "steps": 200}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--micro-batch-size", type=int, default=2, help="samples of a rank at once")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--bf16", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Trains."""
    given, ranks = arguments(), int(os.environ.get("WORLD_SIZE", "1"))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="auto",
            devices=ranks,
            strategy="ddp" if ranks > 1 else "auto",
            precision="bf16-mixed" if given.bf16 else "32-true",
            max_steps=given.steps,
            accumulate_grad_batches=given.accumulate,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
        )
        data = DataLoader(RandomTokens(given.seq_len, given.vocab), batch_size=given.micro_batch_size)
        trainer.fit(Model(given), data)


if __name__ == "__main__":
    main()
