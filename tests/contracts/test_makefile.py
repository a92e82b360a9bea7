"""The Makefile: what `make` would do, without doing it."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("linked", [True, False])
def test_make_installs_nothing_into_the_environment_of_another_checkout(tmp_path: Path, linked: bool) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "constraints").mkdir()
    for name in ("pyproject.toml", "constraints/cpu.txt"):
        (tmp_path / name).touch()
    (tmp_path / "other" / "bin").mkdir(parents=True)
    if linked:
        (tmp_path / ".venv").symlink_to(tmp_path / "other")
    told = subprocess.run(["make", "-n", "reference"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert ("pip install" in told) is not linked and "PYTHONPATH=platform" in told
