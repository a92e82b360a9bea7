"""More outputs of programs, written after the code and before it met them: what it does with those it was not fitted to.

The second set was right in 23 of 30 at first, none wrong without saying so, and the third in 17 of 20, with one wrong.
None of the 30 that train nothing was taken for steps.
"""
# ruff: noqa: E501 - lines are as long as programs write them

from collections.abc import Callable

from program_outputs import Output, barred, said, spoken


def clm_no_trainer(out: Output) -> None:
    out.say("01/02/2026 03:04:05 - INFO - __main__ - ***** Running training *****")
    out.say("01/02/2026 03:04:05 - INFO - __main__ -   Total optimization steps = 90")
    since = out.now_s
    for n in range(91):
        out.bar(n, 90, since, after_s=0.15 if n else 0)
        if n and n % 30 == 0:
            out.say("\n01/02/2026 03:04:05 - INFO - __main__ - epoch 0: perplexity: 12.3 eval_loss: 2.51", 1.0)


def axolotl(out: Output) -> None:
    out.bars(3, 0.5, "Fetching 3 files: ")
    out.bars(1500, 0.0004, "Dropping Long Sequences (num_proc=8): ", " examples", by=100)
    out.bars(1500, 0.0004, "Add position_id column (Sample Packing) (num_proc=8): ", " examples", by=100)
    since = out.now_s
    out.bar(0, 45, since)
    for n in range(1, 46):
        out.bar(n, 45, since, after_s=0.4)
        out.say(
            f"\r{{'loss': 1.0912, 'grad_norm': 0.71, 'learning_rate': 0.00019, 'memory/max_mem_active(gib)': 11.2, 'epoch': {n / 45:.2f}}}"
        )


def trl_sft(out: Output) -> None:
    out.bars(800, 0.001, "Adding EOS to train dataset: ", " examples", by=80)
    out.bars(800, 0.001, "Tokenizing train dataset: ", " examples", by=80)
    since = out.now_s
    out.bar(0, 100, since)
    for n in range(1, 101):
        out.bar(n, 100, since, after_s=0.12)
        if n % 10 == 0:
            out.say(
                f"\r{{'loss': '2.3', 'grad_norm': '1.9', 'learning_rate': '1.8e-05', 'entropy': '2.1', 'num_tokens': '{4096 * n}', 'mean_token_accuracy': '0.51', 'epoch': '{n / 100:.2f}'}}"
            )
        if n == 50:
            out.bars(40, 0.05)


def yolo(out: Output) -> None:
    for epoch in range(1, 4):
        out.say("      Epoch    GPU_mem   box_loss   cls_loss   dfl_loss  Instances       Size")
        since = out.now_s
        for n in range(31):
            out.bar(
                n,
                30,
                since,
                f"        {epoch}/3      2.41G      1.{n:03d}      3.2{n:02d}      1.1{n:02d}         28        640: ",
                after_s=0.12 if n else 0,
            )
        out.say("")
        out.bars(8, 0.1, "                 Class     Images  Instances      Box(P          R      mAP50  mAP50-95): ")
        out.say("                   all        128        929      0.64      0.53      0.6      0.44")


def neox(out: Output) -> None:
    for it in range(10, 201, 10):
        out.say(
            f"  samples/sec: 12.345 | iteration {it:8d}/  320000 | elapsed time per iteration (ms): 410.0 | learning rate: 6.000E-06 | approx flops per GPU: 45.1TFLOPS | lm_loss: 1.0E+01 | loss scale: 4096.0 | number of skipped iterations:   0 | number of nan iterations:   0 |",
            4.1,
        )
        if it == 100:
            out.say(
                "-----------\n validation results at iteration 100 | lm_loss value: 1.0E+01 | lm_loss_ppl value: 3E+04 |",
                3.0,
            )


def composer(out: Output) -> None:
    since = out.now_s
    for n in range(81):
        out.bar(n, 80, since, "train          Epoch   0:  ", more=", loss/train=2.3012", after_s=0.2 if n else 0)
    out.say("")
    out.bars(10, 0.1, "eval           Epoch   0:  ", more=", metrics/eval/LanguagePerplexity=9.1")


def lightning_validates_within(out: Output) -> None:
    since = out.now_s
    for n in range(81):
        out.bar(n, 80, since, "Epoch 0: ", more=", v_num=12, train/loss_step=2.30", after_s=0.1 if n else 0)
        if n in (20, 40, 60, 80):
            out.say("")
            s = out.now_s
            for v in range(13):
                out.bar(v, 12, s, "Validation DataLoader 0: ", after_s=0.1 if v else 0)
            out.say("\x1b[A", end="")


def keras_3(out: Output) -> None:
    for epoch in (1, 2):
        out.say(f"Epoch {epoch}/2")
        for n in range(1, 61):
            out.say(
                f"\r\x1b[1m{n:2d}/60\x1b[0m \x1b[32m{'━' * (n // 3)}\x1b[0m\x1b[37m{'━' * (20 - n // 3)}\x1b[0m \x1b[1m1s\x1b[0m 80ms/step - accuracy: 0.5123 - loss: 0.6931",
                0.08,
                end="",
            )
        out.say(
            "\r\x1b[1m60/60\x1b[0m \x1b[32m━━━━━━━━━━━━━━━━━━━━\x1b[0m\x1b[37m\x1b[0m \x1b[1m6s\x1b[0m 95ms/step - accuracy: 0.51 - loss: 0.69 - val_accuracy: 0.5 - val_loss: 0.7",
            0.9,
        )


def two_ranks_show_bars(out: Output) -> None:
    for n in range(61):
        out.bar(n, 60, 0.0, "Training: ", more=", loss=2.3", after_s=0.18 if n else 0)
        out.bar(n, 60, 0.0, "Training: ", more=", loss=2.4", after_s=0.02 if n else 0)


def labelled_bar(out: Output) -> None:
    for n in range(51):
        out.now_s += 0.2
        out.say(f"[default0]:{2 * n:3d}%|####      | {n}/50 [00:10<00:10,  5.00it/s]")
        if n % 5 == 0 and n:
            out.say(f"[default0]:{{'loss': 1.234, 'grad_norm': 1.0, 'learning_rate': 1e-05, 'epoch': {n / 50}}}")


def modded_nanogpt(out: Output) -> None:
    for step in range(1, 101):
        if step % 25 == 0:
            out.say(f"step:{step}/1750 val_loss:4.5012 train_time:{step * 120}ms step_avg:120.05ms", 1.0)
        out.say(f"step:{step}/1750 train_time:{step * 120}ms step_avg:120.05ms", 0.12)


def kohya(out: Output) -> None:
    out.bars(40, 0.05, "caching latents: ")
    since = out.now_s
    for epoch in range(2):
        out.say(f"\nepoch {epoch + 1}/2")
        for n in range(epoch * 40, epoch * 40 + 41):
            out.bar(
                n,
                80,
                since,
                "steps: ",
                more=", avr_loss=0.121",
                after_s=0.3 if n % 40 or n == 0 else 0.3 if n > epoch * 40 else 0,
            )
        out.say("\nsaving checkpoint: out/lora-000001.safetensors", 0.5)


def held_back_bars(out: Output) -> None:
    """A pipe gives the bar's states of a second at once."""
    for n in range(1, 101):
        out.written.append(
            ((n + 9) // 10 * 1.0, f"\rTraining: {n}%|#   | {n}/100 [00:{n // 10:02d}<00:09, 10.0it/s, loss=2.1]")
        )
    out.now_s = 10.0


def gradient_accumulation(out: Output) -> None:
    """Bar of micro-batches beside lines of optimizer steps."""
    since = out.now_s
    for n in range(1, 161):
        out.bar(n, 160, since, "Epoch 1: ", more=", loss=2.1", after_s=0.05)
        if n % 4 == 0:
            out.say(f"\nglobal_step={n // 4} loss=2.1 lr=1e-4")


TRAINS_2 = {
    clm_no_trainer: (90, 0.15, None),
    axolotl: (45, 0.4, None),
    trl_sft: (100, 0.12, None),
    yolo: (90, 0.12, None),
    said("detectron2", range(19, 400, 20), 2.0,
        lambda it: f"[01/02 03:04:05 d2.utils.events]:  eta: 0:10:11  iter: {it}  total_loss: 1.2  loss_cls: 0.3  loss_box_reg: 0.2  time: 0.1000  last_time: 0.0990  data_time: 0.0112  last_data_time: 0.0034   lr: 1.6e-05  max_mem: 2421M"): (380, 0.1, None),
    spoken("mmdetection", (line for epoch in (1, 2) for line in (
        *((3.0, f"2025/01/02 03:04:05 - mmengine - INFO - Epoch(train)  [{epoch}][{n:4d}/300]  lr: 1.0000e-03  eta: 1:02:03  time: 0.0600  data_time: 0.0101  memory: 3012  loss: 1.2345  loss_cls: 0.5")
            for n in range(50, 301, 50)),
        *((1.5, f"2025/01/02 03:04:05 - mmengine - INFO - Epoch(val)  [{epoch}][{n:4d}/100]    eta: 0:00:10  time: 0.0300  data_time: 0.0012  memory: 800")
            for n in (50, 100))))): (550, 0.06, None),
    said("timm", [*range(0, 1001, 50)], 4.0,
        lambda n: f"Train: 0 [{n:4d}/1251 ({n // 12:3d}%)]  Loss:  6.912 (6.95)  Time: 0.080s,  742.03/s  (0.080s,  721.10/s)  LR: 1.000e-06  Data: 0.010 (0.020)"): (1000, 0.08, None),
    spoken("torchvision", (
        *((0.625, f"Epoch: [0]  [{n:4d}/1252]  eta: 0:10:11  lr: 0.1  img/s: 512.1  loss: 6.9123 (7.0011)  acc1: 0.0000 (0.1)  acc5: 0.1 (0.5)  time: 0.0625  data: 0.0012  max mem: 4321")
            for n in range(0, 1252, 10)),
        *((1.0, f"Test:   [{n:2d}/50]  eta: 0:00:11  loss: 6.9 (7.0)  acc1: 0.0 (0.1)  time: 0.1 data: 0.01 max mem: 4321")
            for n in range(0, 50, 10)))): (1250, 0.0625, None),
    said("fairseq", range(100, 1601, 100), 8.0,
        lambda n: f"2025-01-02 03:04:05 | INFO | train_inner | epoch 001: {n:6d} / 5000 loss=7.123, nll_loss=6.9, ppl=119.6, wps=51200.0, ups=12.5, wpb=4096, bsz=128, num_updates={n}, lr=1.25e-05, gnorm=2.1, loss_scale=128, train_wall=8, wall=45"): (1500, 0.08, 51200.0),
    neox: (200, 0.41, None),
    composer: (80, 0.2, None),
    lightning_validates_within: (80, 0.1, None),
    keras_3: (119, 0.08, None),
    two_ranks_show_bars: (60, 0.2, None),
    labelled_bar: (50, 0.2, None),
    spoken("deepspeed_pdsh", (line for at in range(1, 16) for line in (
        (2.0, f"worker-0: [2025-01-02 03:04:05,482] [INFO] [logging.py:128:log_dist] [Rank 0] step={10 * at}, skipped=0, lr=[0.001], mom=[[0.9, 0.95]]"),
        (0.001, f"worker-0: [2025-01-02 03:04:05,482] [INFO] [timer.py:264:stop] epoch=0/micro_step={10 * at}/global_step={10 * at}, RunningAvgSamplesPerSec=33.1, CurrSamplesPerSec=33.2, MemAllocated=4.3GB, MaxMemAllocated=38.5GB"),
        (0.0, "worker-1: epoch 0 loss 2.2")))): (140, 0.2, None),
    spoken("slurm_two_digits", (
        (0.1 if rank == 10 else 0.01, f'{rank:2d}: {{"step": {step}, "train_loss": 2.31, "tokens_per_sec": 81920.0}}')
        for step in range(1, 51) for rank in (10, 3, 0))): (49, 0.12, 81920.0),
    spoken("verl", (line for step in range(1, 21) for line in (
        *((0.05, f"(WorkerDict pid=9{at}) generate_sequences {at}") for at in range(8)),
        (0.8, f"(TaskRunner pid=4242) step:{step} - actor/pg_loss:0.012 - actor/entropy:0.3 - critic/score/mean:0.4 - timing_s/step:1.20 - perf/throughput:1234.5")))): (19, 1.2, None),
    spoken("titan_slurm_rank", (
        (0.2 if rank else 0.05, f"{rank}: [rank{rank}]:[titan] 2026-01-02 03:04:05,006 - root - INFO - step: {step:2}  loss: 10.12  grad_norm:  1.2  memory: 21.0GiB(26.5%)  tps: 1,024  tflops: 301.20  mfu: 30.46%")
        for step in range(1, 41) for rank in (1, 0))): (39, 0.25, 1024.0),
    modded_nanogpt: (99, 0.12, None),
    kohya: (80, 0.3, None),
    said("flax", range(100, 2100, 100), 2.0,
        lambda step: f"I0102 03:04:05.123456 140 train.py:123] step: {step}, loss: 2.3100, learning_rate: 1e-3, steps_per_second: 50.1"): (1900, 0.02, None),
    said("custom_scientific", range(1, 61), 0.5,
        lambda n: f"iteration: {n:,} | loss: 3.1e+00 | lr: 1.0e-04 | 0.50 s/it"): (59, 0.5, None),
    said("past_thousand_commas", range(970, 1030), 0.25,
        lambda n: f"Step {n:,}/10,000 | Loss: 2.31 | tokens/s: 1.25k | TFLOPS: 301"): (59, 0.25, 1250.0),
    said("unit_scale_epochs", range(1990, 2090), 0.15,
        lambda n: f"\rEpoch 3:  40%|████      | {n / 1000:.2f}k/5.00k [05:00<07:30, 6.67it/s, loss=1.9]", end=""): (99, 0.15, None),
    said("carriage_returns_no_newline", range(1, 61), 0.1,
        lambda n: f"\rstep {n}/60  loss={2.3:.3f}  {0.1:.2f}s/step", end=""): (59, 0.1, None),
    held_back_bars: (90, 0.1, None),
    gradient_accumulation: (39, 0.2, None),
    spoken("accelerate_lines", (
        (0.002 if rank else 0.2, f"[rank{rank}]: Epoch 0, Step {step}, Loss: 2.3012, LR: 1e-5")
        for step in range(1, 41) for rank in range(4))): (39, 0.206, None),
    spoken("gan", (
        (0.1, f"[{epoch}/25][{n}/50]\tLoss_D: 1.2345\tLoss_G: 3.4567\tD(x): 0.5\tD(G(z)): 0.4 / 0.1")
        for epoch in range(2) for n in range(50))): (99, 0.1, None),
    spoken("lightning_rich", (line for epoch in range(2) for line in (
        *((0.1, f"\rEpoch {epoch}/1  {'━' * n}{' ' * (40 - n)} {n}/40 0:00:{n // 10:02d} • 0:00:0{4 - n // 10} 10.1it/s v_num: 0.000 train_loss: 2.301")
            for n in range(1, 41)),
        *((0.05, f"\rValidation {'━' * n} {n}/10 0:00:01 • 0:00:00 20.1it/s") for n in range(1, 11)))), end=""): (79, 0.1, None),
}  # fmt: skip


def cargo(out: Output) -> None:
    for n in range(1, 80):
        out.say(f"   Compiling serde_step{n} v1.0.{n}", 0.1)
        out.say(f"\r    Building [=====>                    ] {n}/120: syn, loss", end="")


def gptq(out: Output) -> None:
    out.bars(32, 0.5, "Quantizing model.layers blocks : ")
    for n in range(32):
        out.say(f"INFO  {{'layer': {n}, 'module': 'self_attn.k_proj', 'loss': '0.01234', 'time': '0.5'}}", 0.5)


def rerank_eval(out: Output) -> None:
    since = out.now_s
    for n in range(101):
        out.bar(n, 100, since, "Validation: ", more=", val_loss=2.31", after_s=0.1 if n else 0)


NOTHING_2 = (
    said("apt", range(1, 60), 0.1,
        lambda n: f"Get:{n} http://archive.ubuntu.com/ubuntu noble/main amd64 libfoo{n} amd64 1.2.3-{n} [1,234 kB]"),
    cargo,
    said("git_clone", range(1, 100), 0.05,
        lambda n: f"\rReceiving objects:  {n}% ({n * 10}/1000), {n / 10:.2f} MiB | 1.10 MiB/s", end=""),
    said("wget", range(1, 100), 0.05,
        lambda n: f"\rmodel.bin  {n:3d}%[{'=' * (n // 5)}>{' ' * (20 - n // 5)}] {n * 12345:,}  1.21MB/s    eta {100 - n}s", end=""),
    said("ffmpeg", range(1, 60), 0.2,
        lambda n: f"\rframe={n * 25:5d} fps= 25 q=28.0 size=    {n * 256}KiB time=00:00:{n:02d}.00 bitrate= 512.1kbits/s speed=1.01x", end=""),
    said("split_generation", range(1, 60), 0.2,
        lambda n: f"\rGenerating train split: {n * 1000} examples [00:{n // 5:02d}, 5000.12 examples/s]", end=""),
    barred("encode_batches", 80, 0.1, "Batches: "),
    gptq,
    spoken("nccl_tests", (
        (0.0, "#       size         count      type   redop    root     time   algbw   busbw #wrong"),
        *((0.3, f"{2 ** (n + 3):12d} {2 ** (n + 1):12d}     float     sum      -1    12.34    0.65    1.23      0")
            for n in range(20)))),
    said("optuna", range(30), 0.5,
        lambda n: f"[I 2025-01-02 03:04:05,123] Trial {n} finished with value: 0.3123 and parameters: {{'lr': 0.001, 'steps': {100 + n}}}. Best is trial 3 with value: 0.1."),
    said("test_loop", range(100), 0.1, lambda n: f"Test batch {n}/100 test loss 2.3012 acc 0.51"),
    said("kmeans", range(40), 0.1, lambda n: f"Iteration {n}, inertia 12034.5."),
    spoken("llama_cpp", (line for n in range(30) for line in (
        (0.4, f"slot print_timing: id  0 | task {n} | prompt eval time =     123.45 ms /    12 tokens (   10.29 ms per token,    97.20 tokens per second)"),
        (0.4, "       eval time =    1234.56 ms /   128 tokens (    9.64 ms per token,   103.68 tokens per second)")))),
    barred("tqdm_of_files", 300, 0.03),
    said("s3_cp", range(1, 60), 0.1,
        lambda n: f"\rCompleted {n * 12}.5 MiB/1.2 GiB (98.1 MiB/s) with 1 file(s) remaining", end=""),
    rerank_eval,
    said("titan_printed_again", range(1, 500), 0.00002,
        lambda n: f"[titan] 2026-01-02 03:04:05,006 - root - INFO - step: {n}  loss:  5.1  grad_norm:  1.2  memory: 21.0GiB(26.5%)  tps: 6,150"),
    said("workflow_steps", range(1, 20), 0.4,
        lambda n: f"Step {n}/19: validate inputs, loss of packets 0.1 %" if n == 7 else f"Step {n}/19: run stage {n}"),
)  # fmt: skip


def slurm_hf_bar(out: Output) -> None:
    for n in range(61):
        out.now_s += 0.25
        out.say(f"\r0: {100 * n // 60:3d}%|████      | {n}/60 [00:10<00:10,  4.00it/s]", end="")
        if n % 10 == 0 and n:
            out.say(f"\n0: {{'loss': 1.234, 'grad_norm': 1.0, 'learning_rate': 1e-05, 'epoch': {n / 60:.2f}}}")


def download_meanwhile(out: Output) -> None:
    since = out.now_s
    for n in range(1, 101):
        out.bar(n, 100, since, "Training: ", more=", loss=2.20", after_s=0.06)
        out.bar(n * 37, 3700, since, "Downloading shard 2: ", "MB", after_s=0.04)


def colossal(out: Output) -> None:
    for epoch in range(2):
        since = out.now_s
        for n in range(41):
            out.bar(n, 40, since, f"[Epoch {epoch}/2]: ", more=", loss=2.31", after_s=0.1 if n else 0)


def json_lines(out: Output) -> None:
    for n in range(1, 91):
        out.say(
            f'{{"ts": "2026-01-02T03:04:05Z", "event": "train", "global_step": {n}, "loss": 2.31, "tokens_per_second_per_gpu": 5120.0}}',
            0.2,
        )
        if n % 30 == 0:
            out.say(f'{{"ts": "2026-01-02T03:04:05Z", "event": "eval", "global_step": {n}, "eval_loss": 2.4}}', 2.0)


def pl_two_loops(out: Output) -> None:
    """Fit, then test: the test's bar is no training."""
    since = out.now_s
    for n in range(61):
        out.bar(n, 60, since, "Epoch 0: ", more=", v_num=1", after_s=0.1 if n else 0)
    out.say("")
    out.bars(200, 0.05, "Testing DataLoader 0: ")


def accelerate_two_bars(out: Output) -> None:
    """A bar of steps over all, a bar of batches of each epoch with four batches a step."""
    begun = out.now_s
    for epoch in range(2):
        since = out.now_s
        for n in range(1, 81):
            out.bar(n, 80, since, f"Epoch {epoch} batches: ", after_s=0.05)
            if n % 4 == 0:
                out.bar(epoch * 20 + n // 4, 40, begun, "\nTraining steps: ", more=", loss=2.1")


def epochs_without_total(out: Output) -> None:
    for epoch in range(3):
        for n in range(1, 31):
            out.now_s += 0.1
            out.say(f"\rTrain epoch {epoch}: {n}it [00:0{n // 10}, 10.00it/s, loss=2.3]", end="")
        out.say("")
        for n in range(1, 11):
            out.now_s += 0.1
            out.say(f"\rEval epoch {epoch}: {n}it [00:00, 10.00it/s]", end="")


def log_every_25_epochs_of_110(out: Output) -> None:
    for epoch in range(3):
        for n in (25, 50, 75, 100):
            out.say(
                f"epoch {epoch + 1}/3 batch {n}/110 loss: 0.8123 lr: 0.001",
                25 * 0.02 + (10 * 0.02 if n == 25 and epoch else 0),
            )
        out.say(f"epoch {epoch + 1} val loss 0.9 val acc 0.7", 0.2 + 0.6)


TRAINS_3 = {
    slurm_hf_bar: (60, 0.25, None),
    said("megatron_default_labels", range(1, 21), 0.8,
        lambda at: f"[default7]: [2025-08-01 07:19:03] iteration {at:8d}/    5000 | consumed samples: {256 * at:12d} | elapsed time per iteration (ms): 800.0 | throughput per GPU (TFLOP/s/GPU): 118.7 | learning rate: 1.4E-07 | global batch size:   256 | lm loss: 1.1E+01 |"): (20, 0.8, None),
    spoken("nemo_mpirun", (
        (0.15 if rank else 0.05, f"[1,{rank}]<stdout>:Training epoch 0, iteration {step}/249 | lr: 3.9e-06 | global_batch_size: 8 | global_step: {step} | reduced_train_loss: 1.653 | train_step_timing in s: 0.2")
        for step in range(50) for rank in (7, 0))): (50, 0.2, None),
    said("ray_bar", range(51), 0.1,
        lambda n: f"\x1b[36m(RayTrainWorker pid=991, ip=10.1.2.3)\x1b[0m Epoch 0: {2 * n}%|##   | {n}/50 [00:01<00:04, 10.00it/s, v_num=0, train_loss=2.3]"): (50, 0.1, None),
    said("compose_hf", range(1, 81), 0.125,
        lambda n: f"trainer-1  | {{'loss': 2.1, 'grad_norm': 0.3, 'learning_rate': 1e-05, 'epoch': {n / 80:.2f}, 'step': {n}}}"): (79, 0.125, None),
    download_meanwhile: (99, 0.1, None),
    spoken("tf_estimator", (line for step in range(0, 2000, 100) for line in (
        (1.99, "INFO:tensorflow:global_step/sec: 50.0"),
        (0.01, f"INFO:tensorflow:loss = 2.3012, step = {step} (2.000 sec)")))): (1900, 0.02, None),
    said("paddle", range(10, 310, 10), 1.5,
        lambda step: f"[2025-01-02 03:04:05,123] [    INFO] - loss: 2.30120000, learning_rate: 1e-05, global_step: {step}, interval_runtime: 1.5, interval_samples_per_second: 21.3, interval_steps_per_second: 6.6, progress_or_epoch: 0.01"): (290, 0.15, None),
    colossal: (80, 0.1, None),
    said("opennmt", range(50, 1050, 50), 2.5,
        lambda step: f"[2025-01-02 03:04:05,123 INFO] Step {step}/100000; acc: 5.1; ppl: 1234.5; xent: 7.1; lr: 0.00001; sents: 3000; bsz: 3000/3200/30; 60000/64000 tok/s;     45 sec;"): (950, 0.05, 64000.0),
    said("mmengine_iter", range(10, 210, 10), 2.5,
        lambda n: f"01/02 03:04:05 - mmengine - INFO - Iter(train) [{n:6d}/1000]  lr: 2.0000e-05  eta: 1:02:03  time: 0.2500  data_time: 0.0101  memory: 3012  loss: 1.2345"): (190, 0.25, None),
    said("dllogger", range(1, 61), 0.3,
        lambda it: f"DLL 2025-01-02 03:04:05.123456 - Training Epoch: 0 Training Iteration: {it} step_loss : 9.1234  learning_rate : 0.001"): (59, 0.3, None),
    spoken("neox_and_deepspeed", (line for it in range(10, 201, 10) for line in (
        (4.0, f"[2025-01-02 03:04:05,123] [INFO] [logging.py:60:log_dist] [Rank 0] step={it}, skipped=0, lr=[6e-06], mom=[[0.9, 0.95]]"),
        (0.005, f"  samples/sec: 12.345 | iteration {it:8d}/  320000 | elapsed time per iteration (ms): 400.5 | learning rate: 6.000E-06 | lm_loss: 1.0E+01 |")))): (200, 0.4005, None),
    json_lines: (89, 0.2, 5120.0),
    said("jax_steps", range(1, 61), 0.2,
        lambda n: f"Step {n} | loss=3.21 | 5.0 steps/s | 1.2M tok/s | 45% MFU"): (59, 0.2, 1.2e6),
    said("pretrain_bar_rounded", range(995, 1080), 0.2,
        lambda n: f"\rEpoch 1: 20%|██   | {n}/5000 [03:20<13:20, 5.0it/s, loss=2.3, global_step={n if n < 1000 else f'{n:.3g}'.replace('e+0', 'e+')}]", end=""): (84, 0.2, None),
    pl_two_loops: (60, 0.1, None),
    accelerate_two_bars: (39, 0.2, None),
    epochs_without_total: (89, 0.1, None),
    log_every_25_epochs_of_110: (295, 0.02, None),
}  # fmt: skip


def bench_throughput(out: Output) -> None:
    out.bars(200, 0.05)
    out.say("Throughput: 16.6 requests/s, 8000.1 total tokens/s, 4000.2 output tokens/s")


NOTHING_3 = (
    bench_throughput,
    said("docker_pull", range(1, 60), 0.1,
        lambda n: f"\ra1b2c3d4e5f6: Downloading [{'=' * n}>{' ' * (60 - n)}]  {n * 5}.1MB/345MB", end=""),
    said("bench_matmul", range(1, 101), 0.05, lambda n: f"iter {n}/100: 12.34 ms, 512.1 TFLOP/s"),
    barred("whisper", 12000, 0.001, unit="frames", by=200),
    said("profiler_table", range(50), 0.05,
        lambda n: f"  ProfilerStep*  {n}.00%  12.345ms  {n}.00%  12.345ms  1.234ms  {n}"),
    said("mnist_test", range(5), 2.0, lambda n: f"Test set: Average loss: 0.0{n}12, Accuracy: 987{n}/10000 (99%)"),
    barred("generating", 64, 0.2, "Generating: ", more=", tok/s=123.4"),
    said("hub_upload", range(1, 50), 0.1,
        lambda n: f"\rProcessing Files (1 / 2)      : {2 * n}%|####  |  {n * 20}MB / 1.0GB, 50.1MB/s  ", end=""),
    said("spark_stages", range(1, 100), 0.05,
        lambda n: f"\r[Stage 3:==========>                                       ({n} + 8) / 100]", end=""),
    said("build_numbers", range(1, 40), 0.1, lambda n: f"[{n}/345] //src/train:step_{n}_loss_test PASSED in 1.{n}s"),
    said("torchrun_failure", range(1, 10), 1.0,
        lambda n: f"[rank{n % 4}]:[E102 03:04:05.123 ProcessGroupNCCL.cpp:632] [Rank {n % 4}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={n}, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600012 milliseconds"),
    barred("search_progress", 200, 0.05, "Best trial: 12. Best value: 0.0123: "),
)  # fmt: skip


TRAINS: dict[Callable[[Output], None], tuple[int, float, float | None]] = {**TRAINS_2, **TRAINS_3}
NOTHING = (*NOTHING_2, *NOTHING_3)
