"""Outputs of training programs and of programs that train nothing, in the shape they really have, with times.

Each function of `TRAINS` and `NOTHING` plays one; `python outputs.py NAME` prints it in real time. What is right stands
in `TRAINS`: steps, seconds of a step, and tokens a second, None where the output has none.
"""

# ruff: noqa: E501 - lines are as long as programs write them

import sys
import time
from collections.abc import Callable, Iterable
from typing import Any


class Output:
    """Text that a program writes, with its times."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.written: list[tuple[float, str]] = []

    def say(self, text: str, after_s: float = 0.0, end: str = "\n") -> None:
        self.now_s += after_s
        self.written.append((self.now_s, text + end))

    def bar(
        self,
        n: int,
        total: int | str,
        since_s: float,
        words: str = "",
        unit: str = "it",
        more: str = "",
        after_s: float = 0.0,
    ) -> None:
        """Draws a bar of tqdm over the one before it."""
        self.now_s += after_s
        elapsed_s = self.now_s - since_s
        rate = "?" + unit + "/s"
        if n and elapsed_s > 0:
            rate = f"{n / elapsed_s:5.2f}{unit}/s" if n > elapsed_s else f"{elapsed_s / n:5.2f}s/{unit}"
        left_s = elapsed_s / n * (total - n) if n and isinstance(total, int) else 0
        times = f"{int(elapsed_s) // 60:02d}:{int(elapsed_s) % 60:02d}<{int(left_s) // 60:02d}:{int(left_s) % 60:02d}"
        share = f"{100 * n // total:3d}%|{'█' * (10 * n // total):10}|" if isinstance(total, int) else " |          |"
        self.written.append((self.now_s, f"\r{words}{share} {n}/{total} [{times}, {rate}{more}]"))

    def bars(self, total: int, each_s: float, words: str = "", unit: str = "it", more: str = "", by: int = 1) -> None:
        """Draws a bar from its begin to its end."""
        since_s = self.now_s
        for n in range(0, total + 1, by):
            self.bar(n, total, since_s, words, unit, more, after_s=each_s * by if n else 0.0)
        self.say("")


def spoken(name: str, lines: Iterable[tuple[float, str]], end: str = "\n") -> Callable[[Output], None]:
    """Makes a program that writes these lines, each so many seconds after the one before."""
    written = [*lines]

    def play(out: Output) -> None:
        for after_s, text in written:
            out.say(text, after_s, end)

    play.__name__ = name
    return play


def said(
    name: str, numbers: Iterable[int], each_s: float, text: Callable[[int], str], end: str = "\n"
) -> Callable[[Output], None]:
    """Makes a program that writes one line for each number, so many seconds after the one before."""
    return spoken(name, ((each_s, text(number)) for number in numbers), end)


def barred(name: str, *args: Any, **given: Any) -> Callable[[Output], None]:
    """Makes a program that draws one bar."""

    def play(out: Output) -> None:
        out.bars(*args, **given)

    play.__name__ = name
    return play


def hf_trainer(out: Output) -> None:
    """Hugging Face Trainer: weights, a map, 60 steps of 0.2 s, losses in between, an evaluation each 20 steps."""
    out.bars(4, 0.3, "Loading checkpoint shards: ")
    out.bars(2000, 0.0005, "Map: ", " examples", by=100)
    since_s = out.now_s
    out.bar(0, 60, since_s)
    for step in range(1, 61):
        out.bar(step, 60, since_s, after_s=0.2)
        if step % 10 == 0:
            out.say(
                f"\r{{'loss': {3 - step / 60:.4f}, 'grad_norm': 1.25, 'learning_rate': 5e-05, 'epoch': {step / 30:.2f}}}"
            )
        if step % 20 == 0:
            out.bars(13, 0.05)
            out.say("\r{'eval_loss': 2.9, 'eval_runtime': 0.65, 'eval_steps_per_second': 20.0, 'epoch': 0.67}")
    out.say(
        "\r{'train_runtime': 14.1, 'train_samples_per_second': 34.0, 'train_steps_per_second': 4.26, 'train_loss': 2.5, 'epoch': 2.0}"
    )


def hf_trainer_quoted(out: Output) -> None:
    """transformers 5 shows losses as texts."""
    since_s = out.now_s
    out.bar(0, 50, since_s)
    for step in range(1, 51):
        out.bar(step, 50, since_s, after_s=0.11)
        if step % 5 == 0:
            out.say(
                f"\r{{'loss': '{3 - step / 60:.3f}', 'grad_norm': '1.25', 'learning_rate': '5e-05', 'epoch': '{step / 25:.2f}'}}"
            )
    out.say(
        "{'train_runtime': '5.52', 'train_samples_per_second': '72.5', 'train_steps_per_second': '9.06', 'train_loss': '2.1', 'epoch': '2'}"
    )


def hf_trainer_without_bar(out: Output) -> None:
    """disable_tqdm: losses each 10 steps, and only the last line says how many there were."""
    out.now_s = 3.0
    for step in range(10, 81, 10):
        out.say(
            f"{{'loss': {3 - step / 90:.4f}, 'grad_norm': 2.1, 'learning_rate': 1e-05, 'epoch': {step / 80:.2f}}}", 2.5
        )
    out.say(
        "{'train_runtime': 20.05, 'train_samples_per_second': 31.9, 'train_steps_per_second': 3.99, 'train_loss': 2.4, 'epoch': 1.0}",
        0.05,
    )


def lightning(out: Output) -> None:
    """Three epochs of 20 batches of 0.1 s, a sanity check before, a validation after each."""
    out.bars(2, 0.1, "Sanity Checking DataLoader 0: ")
    for epoch in range(3):
        since_s = out.now_s
        for n in range(21):
            val = ", val_loss=2.30" if epoch else ""
            out.bar(
                n, 20, since_s, f"Epoch {epoch}: ", more=f", v_num=0, train_loss=2.20{val}", after_s=0.1 if n else 0
            )
        out.bars(6, 0.08, "Validation DataLoader 0: ")
    out.say("`Trainer.fit` stopped: `max_epochs=3` reached.")


def lightning_endless(out: Output) -> None:
    """An iterable data set has no length."""
    for n in range(81):
        out.bar(n, "?", 0.0, "Epoch 0:", more=", v_num=3", after_s=0.05 if n else 0)


def megatron(out: Output) -> None:
    for at in range(1, 13):
        out.say(
            f" [2025-08-01 07:19:{at:02d}] iteration {10 * at:8d}/    5000 | consumed samples: {2560 * at:12d} | elapsed time per iteration (ms): 500.0 | throughput per GPU (TFLOP/s/GPU): 118.7 | learning rate: 1.4E-07 | global batch size:   256 | lm loss: 1.1E+01 | loss scale: 1.0 | grad norm: 3.1 | number of skipped iterations:   0 | number of nan iterations:   0 |",
            5.0,
        )
        if at % 4 == 0:
            out.say("(min, max) time across ranks (ms):\n    evaluate .......................: (2010.32, 2010.41)", 2.0)
            out.say(
                "----------------------------------\n validation loss at iteration 40 | lm loss value: 1.07E+01 | lm loss PPL: 4.4E+04 |"
            )


def torchtitan(out: Output) -> None:
    for step in (1, *range(10, 101, 10)):
        out.say(
            f"\x1b[0m[rank0]:[titan] 2026-01-02 03:04:05,006 - root - INFO - \x1b[31mstep: {step:2}  \x1b[32mloss:  7.9921  \x1b[38;2;180;60;0mgrad_norm:  1.40  \x1b[39mmemory: 21.0GiB(26.5%)  \x1b[34mtps: 6,150  \x1b[36mtflops: 301.20  \x1b[35mmfu: 30.46%\x1b[39m",
            9 * 0.25 if step == 10 else 2.5 if step > 1 else 20,
        )
        if step == 50:
            out.say(
                "[rank0]:[titan] 2026-01-02 03:04:05,006 - root - INFO - validate step: 50  loss:  7.10  memory: 21.0GiB(26.5%)  tps: 16,150",
                1.5,
            )


def nemo_1(out: Output) -> None:
    """tqdm's `format_num` shows three digits where that is shorter."""
    for n in range(9960, 10060):
        short, plain = f"{n:.3g}".replace("e+0", "e+"), f"{n}.0"
        out.bar(
            n,
            90000,
            0.0,
            "Epoch 0: : ",
            more=f", reduced_train_loss=3.09, global_step={short if len(short) < len(plain) else plain}, consumed_samples=2.5e+5, train_step_timing in s=0.100",
            after_s=0.1,
        )


def nanogpt(out: Output) -> None:
    """The time of a line is that of its iteration alone, with the evaluation before it."""
    out.say("step 0: train loss 10.98, val loss 10.98", 9.0)
    out.say("iter 0: loss 10.9897, time 12045.00ms, mfu -100.00%", 3.0)
    for at in range(1, 21):
        took_ms = 250.11
        out.now_s += 9 * 0.25
        if at % 5 == 0:
            out.say(f"step {10 * at}: train loss 3.01, val loss 3.11", 8.0)
            out.say("saving checkpoint to out", 0.5)
            took_ms += 8500
        out.say(f"iter {10 * at}: loss 3.1234, time {took_ms:.2f}ms, mfu 30.12%", 0.25)


def llamafactory(out: Output) -> None:
    out.bars(300, 0.005, "Running tokenizer on dataset (num_proc=16): ", " examples", by=20)
    since_s = out.now_s
    out.bar(0, 40, since_s)
    for step in range(1, 41):
        out.bar(step, 40, since_s, after_s=0.5)
        if step % 5 == 0:
            out.say(f"\r{{'loss': 1.2345, 'grad_norm': 0.9, 'learning_rate': 9.9e-05, 'epoch': {step / 20:.2f}}}")
            out.say(
                f"[INFO|2025-05-05 10:00:00] llamafactory.train.callbacks:143 >> {{'loss': 1.2345, 'learning_rate': 9.9000e-05, 'epoch': {step / 20:.2f}, 'throughput': 8000.00}}"
            )


def diffusers(out: Output) -> None:
    """A bar of steps with losses, images drawn in between."""
    since_s = out.now_s
    for step in range(61):
        out.bar(step, 60, since_s, "Steps: ", more=", lr=0.0001, step_loss=0.0231", after_s=0.3 if step else 0)
        if step in (20, 40):
            out.bars(25, 0.06)


def epochs_and_steps(out: Output) -> None:
    """An outer bar of epochs, an inner one of batches (SimpleTransformers, old Hugging Face examples)."""
    begun_s = out.now_s
    for epoch in range(4):
        out.bar(epoch, 4, begun_s, "Epoch: ")
        since_s = out.now_s
        for n in range(26):
            out.bar(n, 25, since_s, "\nIteration: ", after_s=0.12 if n else 0)
            out.say("\x1b[A", end="")
        out.bar(epoch + 1, 4, begun_s, "Epoch: ")


def resumed(out: Output) -> None:
    """Goes on from step 500: the bar jumps there at its first step."""
    since_s = out.now_s
    out.bar(0, 560, since_s)
    for step in range(501, 561):
        out.bar(step, 560, since_s, after_s=0.2)
        if step % 10 == 0:
            out.say(f"\r{{'loss': 1.1, 'grad_norm': 1.25, 'learning_rate': 5e-05, 'epoch': {step / 100:.2f}}}")


def checkpoints(out: Output) -> None:
    """Saving takes 3 s each 20 steps and belongs to no step."""
    since_s = out.now_s
    for step in range(81):
        out.bar(step, 80, since_s, "Training: ", more=", loss=2.1", after_s=0.1 if step else 0)
        if step and step % 20 == 0:
            out.say("\nSaving model checkpoint to out/checkpoint-20")
            out.now_s += 3.0


def torchtune(out: Output) -> None:
    since_s = out.now_s
    for step in range(51):
        out.bar(step, 50, since_s, f"1|{step}|Loss: 1.2345678: ", after_s=0.4 if step else 0)


def keras(out: Output) -> None:
    for epoch in (1, 2, 3):
        out.say(f"Epoch {epoch}/3")
        for n in range(1, 41):
            out.say(
                f"\r{n}/40 [{'=' * (n * 29 // 40)}>{'.' * (29 - n * 29 // 40)}] - ETA: 2s - loss: 0.6931 - accuracy: 0.5000",
                0.1,
                end="",
            )
        out.say(" - val_loss: 0.69 - val_accuracy: 0.5", 0.4)


def mlx(out: Output) -> None:
    for it in range(10, 201, 10):
        out.say(
            f"Iter {it}: Train loss 2.101, Learning Rate 1.000e-05, It/sec 5.000, Tokens/sec 1234.500, Trained Tokens {2469 * it // 10}, Peak mem 3.4 GB",
            2.0,
        )
        if it % 100 == 0:
            out.say(f"Iter {it}: Val loss 2.2, Val took 1.5s", 1.5)


def held_back(out: Output) -> None:
    """A buffer gives twenty lines at once."""
    for at in range(1, 9):
        out.now_s += 20 * 0.1
        for step in range(20 * (at - 1) + 1, 20 * at + 1):
            out.say(f"INFO:trainer:global_step={step} loss=2.34 lr=1e-4")


TRAINS: dict[Callable[[Output], None], tuple[int, float, float | None]] = {
    hf_trainer: (60, 0.2, None), hf_trainer_quoted: (50, 0.11, None), hf_trainer_without_bar: (80, 0.25, None),
    lightning: (60, 0.1, None), lightning_endless: (80, 0.05, None),
    megatron: (120, 0.5, None),
    torchtitan: (99, 0.25, 6150.0), nemo_1: (100, 0.1, None), nanogpt: (200, 0.25, None),
    llamafactory: (40, 0.5, 8000.0), diffusers: (60, 0.3, None), epochs_and_steps: (100, 0.12, None),
    resumed: (59, 0.2, None), checkpoints: (80, 0.1, None),
    torchtune: (50, 0.4, None),
    keras: (119, 0.1, None), mlx: (190, 0.2, 1234.5), held_back: (140, 0.1, None),
    # torchrun --tee: four ranks, each a little later than the one before.
    spoken("torchtitan_all_ranks", (
        (0.15 if rank == 2 else 0.0167, f"[rank{rank}]:[titan] 2026-01-02 03:04:05,006 - root - INFO - step: {step}  loss:  7.9  grad_norm:  1.40  memory: 21.0GiB(26.5%)  tps: 4,096")
        for step in range(1, 41) for rank in (2, 0, 3, 1))): (39, 0.2, 4096.0),
    spoken("deepspeed", (line for at in range(1, 13) for line in (
        (1.5, f"[2024-09-23 10:11:02,482] [INFO] [logging.py:96:log_dist] [Rank 0] step={10 * at}, skipped=0, lr=[0.001], mom=[[0.8, 0.999]]"),
        (0.001, f"[2024-09-23 10:11:02,482] [INFO] [timer.py:260:stop] epoch=0/micro_step={40 * at}/global_step={10 * at}, RunningAvgSamplesPerSec=649.9, CurrSamplesPerSec=589.2, MemAllocated=0.06GB, MaxMemAllocated=0.06GB")))): (110, 0.15, None),
    spoken("maxtext", (
        (18.2, "completed step: 0, seconds: 18.205, TFLOP/s/device: 23.4, Tokens/s/device: 169.9, total_weights: 65536, loss: 10.9"),
        *((0.5, f"I0804 08:14:00.000000 1 metric_logger.py:196] completed step: {step}, seconds: 0.500, TFLOP/s/device: 451.2, Tokens/s/device: 8123.462, total_weights: 65536, loss: 6.765")
            for step in range(1, 25)))): (25, 0.5, 8123.5),
    # pytorch/examples/imagenet/main.py, ProgressMeter.display: each ten batches, a test after each epoch.
    spoken("imagenet", (line for epoch in range(2) for line in (
        *((1.0 if n else 0.1, f"Epoch: [{epoch}][{n:4d}/101]\tTime  0.100 (  0.104)\tData  0.001 (  0.004)\tLoss 6.9e+00 (6.9e+00)\tAcc@1   0.00 (  0.10)")
            for n in range(0, 101, 10)),
        *((0.5, f"Test: [{n:2d}/21]\tTime  0.050 (  0.054)\tLoss 6.8e+00 (6.9e+00)\tAcc@1   0.00 (  0.10)")
            for n in range(0, 21, 10))))): (201, 0.1, None),
    spoken("docker_compose", (
        (0.2 if rank == 1 else 0.02, f"\x1b[36mtrainer-{rank}  | \x1b[0mstep {step}/1000 loss 3.21 lr 1e-4")
        for step in range(1, 31) for rank in (1, 2))): (29, 0.22, None),
    # The other rank's lines come only each second time.
    spoken("ray_train", (
        (0.1, f"\x1b[36m(RayTrainWorker pid=4711, ip=10.0.0.7)\x1b[0m {{'step': {step}, 'loss': 2.31, 'lr': 1e-4}}") if rank == 0
        else (0.01, f"\x1b[36m(RayTrainWorker pid=4712, ip=10.0.0.7)\x1b[0m {{'step': {step}, 'loss': 2.32, 'lr': 1e-4}} [repeated 2x across cluster]")
        for step in range(1, 41) for rank in range(2 - step % 2))): (39, 0.105, None),
    spoken("mpirun", (
        (0.1 if rank else 0.03, f"[1,{rank}]<stdout>:Step: {step}, Loss: 3.1, LR: 0.001")
        for step in range(1, 41) for rank in (1, 0))): (39, 0.13, None),
    # The number begins anew at each epoch, after a validation.
    spoken("epochs_of_lines", (line for epoch in range(1, 5) for line in (
        *((0.15, f"2026-01-02 03:04:05 | INFO | epoch {epoch} | step {step}/20 | loss 1.234") for step in range(1, 21)),
        (1.0, f"2026-01-02 03:04:05 | INFO | epoch {epoch} | validation loss 1.3")))): (79, 0.15, None),
    # unit_scale of tqdm: 1.20k/5.00k.
    said("rounded", range(990, 1200, 3), 0.3,
        lambda n: f"\rTraining:  20%|██        | {n if n < 1000 else f'{n / 1000:.2f}k'}/5.00k [02:00<09:00, 10.0it/s, loss=2.3]", end=""): (207, 0.1, None),
    # The last rank prints; srun --label puts its number before the line.
    said("megatron_deepspeed_slurm", range(1, 31), 0.4,
        lambda at: f"7:  iteration {at:8d}/   30517 | consumed samples: {16 * at:12d} | consumed tokens: {32768 * at:12d} | elapsed time per iteration (ms): 400.2 | learning rate: 6.000E-07 | global batch size:    16 | lm loss: 1.183278E+01 | samples per second: 40.0 | tokens per gpu per second (tgs): 10240.0 | TFLOPs: 25.55 |"): (30, 0.4, 32768 / 0.4),
    said("nemo_2", range(40), 0.3,
        lambda step: f"Training epoch 0, iteration {step}/249 | lr: 3.9e-06 | global_batch_size: 8 | global_step: {step} | reduced_train_loss: 1.653 | train_step_timing in s: 0.3 | consumed_samples: {8 * step}"): (40, 0.3, None),
    said("deepspeed_pipeline", range(1, 25), 1.2,
        lambda at: f"steps: {10 * at} loss: 2.3026 iter time (s): 0.120 samples/sec: 1066.7"): (240, 0.12, None),
    # Four iterations make a step.
    said("litgpt", range(4, 121, 4), 0.2,
        lambda it: f"Epoch 1 | iter {it} step {it // 4} | loss train: 1.203, val: n/a | iter time: 50.11 ms (step) remaining time: 0:10:20"): (29, 0.2, None),
    said("llm_c", range(1, 41), 0.25,
        lambda step: f"step {step:4d}/19560 | loss 7.123456 (+1.23z)| norm 1.2345 (+0.11z)| lr 1.23e-04 | 250.12 ms | 45.1% bf16 MFU | 209612 tok/s"): (39, 0.25, 209612.0),
    said("nanochat", range(60), 0.1,
        lambda step: f"step {step:05d}/21400 ({step / 214:.2f}%) | loss: 9.104500 | grad norm: 0.2 | lrm: 1.00 | dt: 100.12ms | tok/sec: 1,096,321 | mfu: 47.30 | total time: 0.10m"): (59, 0.1, 1096321.0),
    said("maxtext_kubectl", range(30), 0.2,
        lambda step: f"[pod/train-0/main] 2026-01-02T03:04:05.006789Z completed step: {step}, seconds: 0.200, TFLOP/s/device: 451.2, Tokens/s/device: 812.4, total_weights: 65536, loss: 6.7"): (30, 0.2, 812.4),
}  # fmt: skip


def pip_install(out: Output) -> None:
    for name in ("torch-2.9.0", "numpy-2.3.0"):
        out.say(f"Downloading {name}-cp312-cp312-manylinux_2_28_x86_64.whl (899.8 MB)")
        for at in range(1, 30):
            out.say(
                f"\r     ━━━━━━━━━━━━━━━━━━━━ {at * 30.0:.1f}/899.8 MB 12.3 MB/s eta 0:00:{30 - at:02d}", 0.1, end=""
            )
        out.say("")


def hub_download(out: Output) -> None:
    out.bars(30, 0.2, "Fetching 30 files: ")
    out.bars(4000, 0.001, "model-00001-of-00004.safetensors: ", "MB", by=100)
    out.bars(4, 0.4, "Loading checkpoint shards: ")


def tokenizing(out: Output) -> None:
    out.bars(5000, 0.001, "Tokenizing train dataset (num_proc=8): ", " examples", by=250)
    out.bars(5000, 0.001, "Packing train dataset: ", " examples", by=250)
    out.bars(40, 0.05, "Grouping texts in chunks of 1024: ")


def batch_inference(out: Output) -> None:
    out.bars(100, 0.1, "Processed prompts: ", more=", est. speed input: 123.45 toks/s, output: 456.7 toks/s")
    out.bars(100, 0.1)


def evaluation_only(out: Output) -> None:
    out.bars(200, 0.05, "Evaluating: ", more=", loss=2.31")
    out.say(
        "{'eval_loss': 2.31, 'eval_runtime': 10.0, 'eval_samples_per_second': 160.0, 'eval_steps_per_second': 20.0}"
    )


def lm_eval(out: Output) -> None:
    out.bars(1000, 0.001, "Building contexts for arc_easy on rank 0...: ", by=50)
    out.bars(300, 0.03, "Running loglikelihood requests: ")
    out.say("|arc_easy|      1|none  |     0|acc     |↑  |0.7626|±  |0.0087|")


printed_again = said("printed_again", range(1, 400), 0.0001, lambda at: f" iteration {at:8d}/    5000 | consumed samples: {256 * at} | elapsed time per iteration (ms): 900.0 | lm loss: 1.1E+01 |")  # fmt: skip
"""`cat train.log`: the lines of an hour in a moment."""


def diffusion_sampling(out: Output) -> None:
    for _ in range(4):
        out.bars(50, 0.06)


def compile_model(out: Output) -> None:
    for at in range(1, 31):
        out.say(f"AUTOTUNE mm(4096x4096, 4096x4096)\n  triton_mm_{at} 0.{at:04d} ms 100.0%", 0.2)
    out.bars(67, 0.05, "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE): ")


NOTHING = (
    pip_install, hub_download, tokenizing, batch_inference, evaluation_only, lm_eval,
    printed_again, diffusion_sampling, compile_model,
    spoken("vllm_serve", (line for at in range(30) for line in (
        (1.0, f"INFO 01-02 03:04:{at:02d} [loggers.py:116] Engine 000: Avg prompt throughput: 123.4 tokens/s, Avg generation throughput: 456.7 tokens/s, Running: 12 reqs, Waiting: 0 reqs, GPU KV cache usage: 3.4%"),
        (0.0, 'INFO:     127.0.0.1:4711 - "POST /v1/completions HTTP/1.1" 200 OK')))),
    spoken("pytest_run", (
        *((0.1, f"tests/test_step_{at}.py::test_loss_of_step_{at} PASSED                     [{at * 100 // 60:3d}%]")
            for at in range(1, 60)),
        (0.0, "====== 59 passed, 2 skipped in 6.12s ======"))),
    said("bar_printed_again", range(200), 0.002,
        lambda at: f"\rTraining: {at // 2:3d}%|     | {at}/200 [{at // 60:02d}:{at % 60:02d}<03:00,  1.00s/it, loss=2.3]", end=""),
    said("ninja_build", range(1, 121), 0.1,
        lambda at: f"[{at}/120] Building CXX object src/CMakeFiles/train_step.dir/loss_{at}.cpp.o"),
    said("docker_build", range(1, 21), 0.5,
        lambda at: f"Step {at}/20 : RUN make install\n ---> Running in 0a1b2c3d4e5f"),
    said("rsync", range(1, 50), 0.1,
        lambda at: f"\r  {at * 32768:>12,} {at * 2:3d}%   31.25MB/s    0:00:{50 - at:02d} (xfr#{at}, to-chk={99 - at}/100)", end=""),
)  # fmt: skip


def play(function: Callable[[Output], None]) -> list[tuple[float, str]]:
    """Returns what a function writes: seconds since its start, and the text."""
    out = Output()
    function(out)
    return out.written


if __name__ == "__main__":
    (chosen,) = (each for each in (*TRAINS, *NOTHING) if each.__name__ == sys.argv[1])
    begun_s = time.monotonic()
    for at_s, text in play(chosen):
        time.sleep(max(begun_s + at_s - time.monotonic(), 0.0))
        sys.stdout.write(text)
        sys.stdout.flush()
