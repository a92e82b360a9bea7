"""Searches two public training scripts, unmodified, and lays each trial beside the program's own clock.

    python benchmarks/public_scripts.py --lightning transformer.py --work FOLDER
    python benchmarks/public_scripts.py --lightning transformer.py --work FOLDER --device h100_sxm --ranks 2

- `trl.scripts.sft`, as `pip install trl` has it: Hugging Face's Trainer. Its micro-batch is searched. Its clock is
  `train_runtime`, of all its steps.
- Lightning's own `examples/pytorch/basics/transformer.py`, which is given as a file. It takes no arguments: what is
  searched are variables of its environment. Its clock are the times of its losses in the event files of its own logger.

The model is made from a configuration, and the data at random: nothing is downloaded. `wattune run` is told nothing of
steps. It needs `pip install trl datasets` beside wattune. On GPUs Lightning takes all that the command sees.
"""

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq
import yaml
from harness import Found, Rows, benchmark

ROOT: Final = Path(__file__).parents[1]
WITHIN: Final = 0.02
SIZES: Final = {
    "cpu": {
        "hidden": 128,
        "layers": 4,
        "vocab": 2048,
        "length": 128,
        "steps": 60,
        "batches": [2, 4, 8],
        "lightning_steps": 150,
    },
    "gpu": {
        "hidden": 2048,
        "layers": 8,
        "vocab": 32_000,
        "length": 2048,
        "steps": 60,
        "batches": [1, 2, 4],
        "lightning_steps": 600,
    },
}
"""Sizes of the model and of its samples by kind of device, and the values of the searched flag."""


def make_trainer_inputs(folder: Path, size: dict[str, Any]) -> None:
    """Makes a model, a tokenizer of words, and samples of random words, for `trl.scripts.sft`."""
    import random

    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {"<unk>": 0, "<eos>": 1, "<pad>": 2} | {f"w{index}": index for index in range(3, size["vocab"])}
    own = Tokenizer(WordLevel(words, unk_token="<unk>"))
    own.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=own,
        unk_token="<unk>",
        eos_token="<eos>",
        pad_token="<pad>",
    )
    torch.manual_seed(0)
    heads = size["hidden"] // 64
    config = LlamaConfig(
        hidden_size=size["hidden"],
        intermediate_size=size["hidden"] * 3,
        num_hidden_layers=size["layers"],
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=size["vocab"],
        max_position_embeddings=size["length"],
        eos_token_id=1,
        pad_token_id=2,
    )
    for each in (LlamaForCausalLM(config), tokenizer):
        each.save_pretrained(folder / "model")
    draw = random.Random(0)
    (folder / "data").mkdir(exist_ok=True)
    with (folder / "data" / "train.jsonl").open("w") as file:
        for _ in range(512):
            text = " ".join(f"w{draw.randrange(3, size['vocab'])}" for _ in range(size["length"] - 1))
            file.write(json.dumps({"text": text}) + "\n")


def make_lightning_inputs(folder: Path, script: Path, size: dict[str, Any]) -> Path:
    """Puts a copy of the script beside random words in the file that it would download; returns its place."""
    import random

    place, draw = folder / "lightning" / script.name, random.Random(0)
    (place.parent / "data").mkdir(parents=True, exist_ok=True)
    shutil.copyfile(script, place)
    # Its samples have 35 words and its batches 20 samples; 4,000 samples are not trained.
    num_lines = (4000 + 20 * size["lightning_steps"]) * 35 // 7 + 20
    lines = (" ".join(f"w{draw.randrange(size['vocab'])}" for _ in range(6)) for _ in range(num_lines))
    (place.parent / "data" / "wikitext-2.txt").write_text("\n".join(lines) + "\n")
    return place


def launcher(ranks: int) -> str:
    """Returns the beginning of a command for so many ranks."""
    if ranks == 1:
        return sys.executable
    torchrun = "-m torch.distributed.run --nproc-per-node {devices_per_node} --rdzv-backend c10d"
    return f"{sys.executable} {torchrun} --rdzv-endpoint {{rendezvous}}"


def spaces(given: Namespace) -> dict[str, dict[str, Any]]:
    """Makes the inputs of both programs, and returns the space of each by its name."""
    work, size = given.work.absolute(), SIZES["cpu" if given.device == "cpu" else "gpu"]
    work.mkdir(parents=True, exist_ok=True)
    cluster: dict[str, Any] = {"device": given.device, "devices_per_node": given.ranks}
    cluster |= {"simulate_sensors_of": "h100_sxm"} if given.device == "cpu" else {}
    cpu = given.device == "cpu"
    shared = {
        "cluster": cluster,
        "engine": "command",
        "env": {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        "objective": "minimize step_time_s",
        # More than the programs have: each ends by itself and tells its own time.
        "measure": {"warmup_steps": 3, "min_steps": 100_000, "min_seconds": 1, "reference_every": 0, "timeout_s": 300},
        "search": {"strategy": "grid", "order": "listed"},
    }
    found = {}
    if given.lightning is not None:
        place = make_lightning_inputs(work, given.lightning, size)
        # Its data lies in ./data. Lightning starts its other ranks itself.
        command = ["bash", "-c", f"cd {shlex.quote(str(place.parent))} && exec {sys.executable} {place.name}"]
        flags = {"arenas": [1, 4]} if cpu else {"tf32": [0, 1]}
        env = {"MALLOC_ARENA_MAX": "{arenas}"} if cpu else {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "{tf32}"}
        env |= {"OMP_NUM_THREADS": "1"}
        measure = {**shared["measure"], "min_steps": size["lightning_steps"] - 10, "timeout_s": 240}
        own = {"study": "public_lightning", "command": command, "flags": flags, "env": env, "measure": measure}
        found["lightning"] = {**shared, **own}
    make_trainer_inputs(work, size)
    command = f"{launcher(given.ranks)} -m trl.scripts.sft --model_name_or_path {work}/model --dataset_name {work}/data"
    command += f" --max_steps {size['steps']} --per_device_train_batch_size {{micro_batch_size}} --logging_steps 1000"
    command += f" --max_length {size['length']} --output_dir {{output_dir}}/out --report_to none --save_strategy no"
    command += " --use_cpu --bf16 false" if cpu else " --bf16 true"
    found["transformers"] = {
        "study": "public_transformers",
        "command": command,
        "space": {"micro_batch_size": size["batches"]},
        **shared,
    }
    return found


Timed = tuple[range, float]
"""Steps that a program timed by itself, counted from 0, and their seconds together."""


def trainer_clock(output: str, num_steps: int) -> list[Timed]:
    """Returns what a Trainer of Hugging Face says of all its steps at its end."""
    return [(range(num_steps), float(runtime_s)) for runtime_s in re.findall(r"'train_runtime': '?([\d.]+)", output)]


def logger_clock(folder: Path, per_epoch: int) -> list[Timed]:
    """Returns the times between two losses of one epoch in the event file of Lightning's own logger."""
    from tensorboardX.proto.event_pb2 import Event

    times: dict[int, float] = {}
    for path in folder.glob("events.out.tfevents.*"):
        data, at = path.read_bytes(), 0
        while at + 12 < len(data):  # a record is its length, a checksum, the event, and a checksum
            length = int.from_bytes(data[at : at + 8], "little")
            event, at = Event.FromString(data[at + 12 : at + 12 + length]), at + 16 + length
            if any(value.tag == "train_loss" for value in event.summary.value):
                times[event.step] = event.wall_time
    pairs = [(a, b) for a, b in itertools.pairwise(sorted(times)) if a // per_epoch == b // per_epoch]
    return [(range(a + 1, b + 1), times[b] - times[a]) for a, b in pairs]


def told_s(trial: Path, timed: Sequence[Timed]) -> tuple[int, float, float]:
    """Returns how many steps both clocks have, and their seconds by wattune's spans and by the program's own clock."""
    rows = pq.read_table(trial / "spans.parquet", columns=["rank", "step", "start_mono_ns", "end_mono_ns"]).to_pylist()
    spans = sorted((one["step"], one["end_mono_ns"] - one["start_mono_ns"]) for one in rows if not one["rank"])
    both = [(steps, own_s) for steps, own_s in timed if steps[-1] < len(spans)]
    ours_s = sum(spans[at][1] / 1e9 for steps, _ in both for at in steps)
    return sum(len(steps) for steps, _ in both), ours_s, sum(own_s for _, own_s in both)


def options(parser: ArgumentParser) -> None:
    """Adds the script, the folder and the devices."""
    parser.add_argument("--lightning", type=Path, help="Lightning's examples/pytorch/basics/transformer.py")
    parser.add_argument("--program", choices=["lightning", "transformers"], help="only this one")
    parser.add_argument("--work", type=Path, required=True, help="folder for inputs, studies and the program's words")
    parser.add_argument("--device", default="cpu", help="cpu, or a device of the catalog such as h100_sxm")
    parser.add_argument("--ranks", type=int, default=1, help="devices of this machine")


@benchmark(
    claim="Unmodified public training scripts are searched, and their steps found without a word.",
    bar=f"step time within {WITHIN:.0%} of the program's own clock in each trial",
    options=options,
)
def main(given: Namespace) -> Found:
    """Runs both studies and compares."""
    columns = (
        "program",
        "plan",
        "status",
        "source",
        "num_steps",
        "window_step_time_s",
        "step_time_s",
        "own_step_time_s",
    )
    rows, missed = Rows(*columns, "step_time_ratio"), list[str]()
    size = SIZES["cpu" if given.device == "cpu" else "gpu"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT / "platform"), os.getenv("PYTHONPATH"))))}
    for kind, space in spaces(given).items():
        if given.program not in (None, kind):
            continue
        path, storage = given.work / f"{kind}.yaml", given.work / "studies"
        path.write_text(yaml.safe_dump(space))
        run = [sys.executable, "-m", "wattune", "run", path, "--storage", storage, "--json"]
        done = subprocess.run(run, env=env, capture_output=True, text=True, timeout=540, stdin=subprocess.DEVNULL)
        (given.work / f"{kind}.log").write_text(done.stdout + done.stderr)
        trials = sorted((storage / space["study"] / "trials").glob("*/run.json"))
        if not trials:
            missed.append(f"{kind}: no trial ({done.stderr.strip()[-200:]})")
        logs = sorted(
            (given.work / "lightning" / "lightning_logs").glob("version_*"), key=lambda one: one.stat().st_mtime
        )
        trials.sort(key=lambda one: json.loads(one.read_text())["start_wall_ns"])
        for number, one in enumerate(trials):
            result, spec = (json.loads((one.parent / name).read_text()) for name in ("run.json", "spec.json"))
            if kind == "lightning":
                timed = logger_clock(logs[number], size["lightning_steps"]) if number < len(logs) else []
            else:
                timed = trainer_clock((one.parent / "output" / "node0.txt").read_text(errors="replace"), size["steps"])
            count, ours_s, own_s = (
                told_s(one.parent, timed) if (one.parent / "spans.parquet").exists() else (0, 0.0, 0.0)
            )
            plan = dict(spec["program"]["flags"]) or {"micro_batch_size": spec["plan"]["micro_batch_size"]}
            cells = (" ".join(f"{name}={value}" for name, value in plan.items()), result["status"])
            window_s, source = result["metrics"].get("step_time_s"), result["tags"].get("steps_source", "none")
            figures = (ours_s / count, own_s / count, ours_s / own_s) if count else (None, None, None)
            rows.add(kind, *cells, source.split(" ")[0], count, window_s, *figures)
            if not count or abs(ours_s / own_s - 1) > WITHIN:
                missed.append(f"{kind} {cells[0]}: {f'{ours_s / own_s:.3f}' if count else 'no figure'}")
    return Found(rows, missed=missed)


if __name__ == "__main__":
    main()
