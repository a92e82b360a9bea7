"""The package as an sdist, and a wheel built of it: all it needs is inside, and it runs without the checkout."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from wattune.version import __version__

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(120)
def test_a_built_wheel_runs_outside_the_checkout(tmp_path: Path, environment: dict[str, str]) -> None:
    source = tmp_path / "source"  # building writes into the source tree
    shutil.copytree(ROOT / "platform", source / "platform", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    (sdist,) = tmp_path.glob("wattune-*.tar.gz")
    (wheel,) = tmp_path.glob("wattune-*.whl")  # built of the sdist
    assert sdist.name == f"wattune-{__version__}.tar.gz" and wheel.name.startswith(f"wattune-{__version__}-")
    assert f"version: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
        names = archive.namelist()
    assert {name.split("/")[0] for name in names if not name.startswith("wattune-")} == {"wattune"}
    in_checkout = {path.relative_to(ROOT / "platform").as_posix() for path in ROOT.glob("platform/wattune/**/*.py")}
    assert in_checkout | {"wattune/py.typed"} <= set(names)
    code = "import sys, wattune.cli as cli; print(cli.__file__); sys.argv[1:] = ['--version']; cli.main()"
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    assert str(site) in ran.stdout and "wattune 0." in ran.stdout
