#!/usr/bin/env python
"""Trains a Llama with random weights by Hugging Face's Trainer, as a program that knows nothing of wattune.

    torchrun --nproc-per-node 2 experiments/own_code/hf_trainer.py
    torchrun --nproc-per-node 4 experiments/own_code/hf_trainer.py --layers 16 --hidden 2048 --seq-len 4096 --bf16

Model and data are made in memory, so it needs no network and no tokenizer. Every size is a flag: the defaults run on a
laptop. wattune finds the steps by a callback of the Trainer, and tokens by the shapes of its batches.
"""

import argparse
import tempfile
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

NUM_SAMPLES = 512
"""Samples that differ; training begins again with the first after the last."""


class RandomTokens(Dataset[dict[str, torch.Tensor]]):
    """Samples of random tokens, the same in every process."""

    def __init__(self, length: int, seq_len: int, vocab_size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(vocab_size, (min(length, NUM_SAMPLES), seq_len), generator=generator)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index % len(self.tokens)]
        return {"input_ids": tokens, "labels": tokens}


def boolean(text: str) -> bool:
    """Reads true or false, so that a search can fill in either."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"got {text}; give true or false")
    return text.lower() == "true"


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64, help="hidden size, a multiple of the heads")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--ffn", type=int, default=None, help="size of the feed-forward layer; 3.5 times hidden")
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--micro-batch-size", type=int, default=2, help="samples of a rank at once")
    parser.add_argument(
        "--global-batch-size", type=int, default=0, help="samples of a step; 0 is one micro-batch a rank"
    )
    parser.add_argument("--gradient-checkpointing", type=boolean, nargs="?", const=True, default=False)
    parser.add_argument("--sharding", choices=["ddp", "fsdp"], default="ddp")
    parser.add_argument("--bf16", type=boolean, nargs="?", const=True, default=False)
    parser.add_argument("--steps", type=int, default=50)
    return parser.parse_args()


def accumulation(global_batch_size: int, micro_batch_size: int, world_size: int) -> int:
    """Returns the micro-batches of a step on each rank."""
    at_once = micro_batch_size * world_size
    if global_batch_size % at_once:
        raise SystemExit(
            f"--global-batch-size {global_batch_size} is not a multiple of {micro_batch_size} samples on each of "
            f"{world_size} ranks"
        )
    return max(global_batch_size // at_once, 1)


def main() -> None:
    """Trains."""
    given = arguments()
    cuda = torch.cuda.is_available()
    chosen: dict[str, Any] = {}
    if given.sharding == "fsdp":
        chosen["fsdp"] = "full_shard auto_wrap"
        chosen["fsdp_config"] = {
            "version": 2,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "activation_checkpointing": given.gradient_checkpointing,  # the Trainer's own would gather weights twice
        }
    elif given.gradient_checkpointing:
        # transformers renamed it, and warns of the old name where it knows the new one.
        new = "activation_checkpointing" in TrainingArguments.__dataclass_fields__
        name = "activation_checkpointing" if new else "gradient_checkpointing"
        chosen |= {name: True, f"{name}_kwargs": {"use_reentrant": False}}
    with tempfile.TemporaryDirectory(prefix="hf-trainer-") as output:
        settings = TrainingArguments(
            output_dir=output,
            max_steps=given.steps,
            per_device_train_batch_size=given.micro_batch_size,
            bf16=given.bf16,
            use_cpu=not cuda,
            optim="adamw_torch_fused" if cuda else "adamw_torch",
            logging_strategy="steps",
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            ddp_find_unused_parameters=False,
            seed=0,
            **chosen,
        )
        micro_batches = accumulation(given.global_batch_size, given.micro_batch_size, settings.world_size)
        settings.gradient_accumulation_steps = micro_batches
        torch.manual_seed(0)
        with settings.device:  # random weights of billions of parameters take minutes on processors
            model = LlamaForCausalLM(
                LlamaConfig(
                    num_hidden_layers=given.layers,
                    hidden_size=given.hidden,
                    intermediate_size=given.ffn or given.hidden * 7 // 2,
                    num_attention_heads=given.heads,
                    num_key_value_heads=given.kv_heads,
                    vocab_size=given.vocab,
                    max_position_embeddings=given.seq_len,
                    use_cache=False,
                )
            )
        if settings.process_index == 0:
            print(f"{sum(each.numel() for each in model.parameters()):,} parameters", flush=True)
        samples = given.steps * given.micro_batch_size * settings.world_size * micro_batches
        data = RandomTokens(samples, given.seq_len, given.vocab)
        Trainer(model=model, args=settings, train_dataset=data).train()


if __name__ == "__main__":
    main()
