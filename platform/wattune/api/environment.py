"""Facts of the study's own process, kept with every result: versions, and the commit of a checkout."""

import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

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
