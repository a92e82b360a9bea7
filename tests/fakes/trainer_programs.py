"""Small programs of Hugging Face's Trainer and Lightning, each with a clock of its own: `trainer_programs.py KIND ...`.

Every program prints one JSON object: the seconds and the tokens of each optimizer step as it counted them itself.
"""

import argparse
import json
import os
import pickle
import sys
import tempfile
import time
from typing import Any

SAMPLES, LONGEST, VOCABULARY = 22, 16, 64
PAUSE_S = 0.02
"""Added to each micro-batch: steps are long beside the scatter of a busy machine's clock."""


OWN: dict[str, list[Any]] = {"starts_s": [], "ends_s": [], "tokens": []}
"""Counts of the program itself: times of its steps, and tokens of its micro-batches."""


def lengths() -> list[int]:
    """Lengths of the samples, which differ: batches are padded to their longest."""
    return [4 + 5 * index % 13 for index in range(SAMPLES)]


def padded(rows: list[list[int]]) -> Any:
    import torch

    longest = max(map(len, rows))
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows])


def collate(samples: list[dict[str, list[int]]]) -> dict[str, Any]:
    ids = padded([one["input_ids"] for one in samples])
    return {"input_ids": ids, "labels": ids}


def data() -> list[dict[str, list[int]]]:
    return [{"input_ids": [1 + k % (VOCABULARY - 1) for k in range(length)]} for length in lengths()]


def sent(callback: Any) -> Any:
    """The callback as ranks have it that are spawned."""
    there = pickle.loads(pickle.dumps(callback))
    assert type(there) is type(callback)
    return there


def huggingface(given: argparse.Namespace) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class Clock(TrainerCallback):
        """Notes the program's own times and tokens."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            OWN["starts_s"].append(time.perf_counter())

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            OWN["ends_s"].append(time.perf_counter())

    class Slow(Trainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            time.sleep(PAUSE_S)
            OWN["tokens"].append(inputs["input_ids"].numel())
            return super().training_step(model, inputs, *args, **kwargs)

    callbacks: list[Any] = [Clock]
    if given.callback:
        from wattune.callbacks import HuggingFaceCallback

        callbacks.insert(0, sent(HuggingFaceCallback()))
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(num_hidden_layers=1, vocab_size=VOCABULARY, max_position_embeddings=64, **shape)
    with tempfile.TemporaryDirectory() as output:

        def train(epochs: int, resume: bool) -> None:
            torch.manual_seed(0)
            settings = TrainingArguments(
                output_dir=output,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=3,
                num_train_epochs=epochs,
                eval_strategy="steps",
                eval_steps=3,
                save_strategy="epoch" if not given.ranks else "no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
                dataloader_pin_memory=False,
            )
            rows = data()
            model = LlamaForCausalLM(config)
            trainer = Slow(
                model=model,
                args=settings,
                train_dataset=rows,
                eval_dataset=rows[:4],
                data_collator=collate,
                callbacks=callbacks,
            )
            trainer.train(resume_from_checkpoint=resume)

        train(2, False)
        if given.resume:
            train(3, True)


def lightning(given: argparse.Namespace) -> None:
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torch.utils.data import DataLoader

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Embedding(VOCABULARY, VOCABULARY)

        def loss(self, batch: Any, index: int = 0) -> Any:
            return torch.nn.functional.cross_entropy(
                self.layer(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()
            )

        def training_step(self, batch: Any, index: int) -> Any:
            time.sleep(PAUSE_S)
            OWN["tokens"].append(batch["input_ids"].numel())
            return self.loss(batch)

        validation_step = loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Clock(Callback):
        done = 0

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if len(OWN["starts_s"]) == len(OWN["ends_s"]):
                OWN["starts_s"].append(time.perf_counter())

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step != Clock.done:
                Clock.done = trainer.global_step
                OWN["ends_s"].append(time.perf_counter())

    callbacks: list[Any] = [Clock()]
    if given.callback:
        from wattune.callbacks import LightningCallback

        callbacks.insert(0, sent(LightningCallback()))
    rows = data()
    with tempfile.TemporaryDirectory() as output:

        def train(epochs: int, resume: str | None) -> Any:
            torch.manual_seed(0)
            trainer = Trainer(
                max_epochs=epochs,
                accelerator="cpu",
                devices=given.ranks or 1,
                strategy="ddp" if given.ranks else "auto",
                accumulate_grad_batches=3,
                logger=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                enable_checkpointing=False,
                callbacks=callbacks,
                default_root_dir=output,
            )
            loaders = (DataLoader(part, batch_size=2, collate_fn=collate) for part in (rows, rows[:4]))
            trainer.fit(Model(), *loaders, ckpt_path=resume)
            return trainer

        trainer = train(2, None)
        if given.resume:
            trainer.save_checkpoint(f"{output}/last.ckpt")
            train(3, f"{output}/last.ckpt")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["huggingface", "lightning", "both"])
    parser.add_argument("--callback", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--ranks", type=int, default=0)
    given = parser.parse_args()
    for kind, train in (("huggingface", huggingface), ("lightning", lightning)):
        if given.kind in (kind, "both"):  # one after the other, in a process that loads torch once
            train(given)
    sys.stdout.write(json.dumps({"rank": int(os.environ.get("RANK", "0")), **OWN}) + "\n")


if __name__ == "__main__":
    main()
