"""Facts of the study's own process and machine: versions, the commit of a checkout, whether devices are here."""

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from wattune.errors import PlanError
from wattune.orchestrate.events import Preview
from wattune.telemetry.probe import has_nvml
from wattune.version import __version__

_VERSIONED: Final = ("ray", "mlflow", "pyarrow", "numpy")
"""Packages that the study's own process uses. Ranks say themselves what they run with."""


def environment_tags() -> dict[str, str]:
    """Returns versions of what the study's own process runs with, and the commit of wattune where it is a checkout."""
    tags = {"version.wattune": __version__}
    for name in _VERSIONED:
        try:
            tags[f"head.version.{name}"] = version(name)
        except PackageNotFoundError:
            continue
    if commit := git_commit(Path(__file__).parents[1]):
        tags["git_commit"] = commit
    return tags


def git_commit(package: Path) -> str:
    """Returns the commit of wattune's own checkout; empty where it was installed, also inside another repository."""

    def ask(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
        except (OSError, subprocess.TimeoutExpired):  # there is no git, or no answer
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    own = ask("rev-parse", "--show-toplevel") == str(package.resolve().parents[1])
    return ask("rev-parse", "HEAD") if own and ask("ls-files", "version.py") else ""


def require_here(preview: Preview) -> None:
    """Raises `PlanError` where Ray is to start on this machine, which is known to have the devices of no trial."""
    ray, has_gpus, clusters = sys.modules.get("ray"), has_nvml(), preview.load_s  # their kind takes seconds to ask
    if os.environ.get("RAY_ADDRESS") or (ray and ray.is_initialized()) or not preview.num_now or preview.most_s <= 0:
        return
    if all(one.num_nodes > 1 or (one.rank_device.vendor == "nvidia" and not has_gpus) for one in clusters):
        raise PlanError(
            f"{next(iter(clusters)).needs}; this machine is one node{'' if has_gpus else ' without NVIDIA GPUs'}; "
            "shrink `cluster` in the space, run it where they are, or on a Ray cluster that has them by --address"
        )
