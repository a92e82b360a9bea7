"""A study of a program that knows nothing of wattune but three lines (`own_training.py`)."""

import sys
import time
from pathlib import Path

import psutil
import yaml

PROGRAM = Path(__file__).with_name("own_training.py")


def own_space(folder: Path, study: str, **changes: object) -> Path:
    """Writes a space over the program's `--step-s` on two ranks of a processor, with what the test changes."""
    document = {
        "study": study,
        "cluster": {"device": "cpu", "devices_per_node": 2, "simulate_sensors_of": "h200_sxm"},
        "engine": "command",
        "command": [sys.executable, str(PROGRAM), "--step-s={step_s}", f"--tag={folder}"],
        "env": {"NCCL_ALGO": "{algorithm}"},
        "flags": {"step_s": [0.02], "algorithm": ["Ring"]},
        "measure": {
            "warmup_steps": 5,
            "min_steps": 20,
            "min_seconds": 1,
            "timeout_s": 40,
            "stall_s": 12,
            "reference_every": 0,
        },
        "objective": "maximize tokens_per_s",
        "constraints": ["node_device_power_mean_w <= 5000"],
    } | changes
    path = folder / f"{study}.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def commands(folder: Path) -> list[psutil.Process]:
    """Processes of the program, and its supervisors, that run for a test: those with its `--tag`."""
    of_all = psutil.process_iter(["cmdline"])
    return [one for one in of_all if f"--tag={folder}" in (one.info["cmdline"] or ())]


def wait_gone(folder: Path, within_s: float) -> float:
    """Waits until no process of the program is left; returns the seconds that took."""
    start_s = time.monotonic()
    while left := commands(folder):
        assert time.monotonic() - start_s < within_s, [" ".join(one.cmdline()) for one in left]
        time.sleep(0.1)
    return time.monotonic() - start_s
