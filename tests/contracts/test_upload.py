"""Uploads of `ray job submit --working-dir .`: sources, and nothing that was measured or installed."""

import shutil
import zipfile
from pathlib import Path

from ray._private.ray_constants import get_runtime_env_default_excludes
from ray._private.runtime_env.packaging import create_package

ROOT = Path(__file__).parents[2]

PRIVATE = (
    ".venv/bin/python",
    ".venv/lib/python3.11/site-packages/torch/__init__.py",
    ".git/config",
    "wattune-studies/moe/study.yaml",
    "wattune-studies/moe/trials/0123456789ab-0/telemetry/node0/ring.parquet",
    "wattune-studies/mlflow.db",
    "build/lib/wattune/trial.py",
    "site/index.html",
    "platform/wattune.egg-info/PKG-INFO",
    "platform/wattune/__pycache__/trial.cpython-311.pyc",
)


def sent_of(checkout: Path, package: Path) -> set[str]:
    create_package(str(checkout), package, include_gitignore=True, excludes=get_runtime_env_default_excludes())
    with zipfile.ZipFile(package) as opened:
        return set(opened.namelist())


def test_a_job_uploads_the_sources_without_environment_and_studies(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    sources = {
        str(path.relative_to(ROOT)) for room in ("platform", "experiments") for path in (ROOT / room).rglob("*.py")
    }
    assert len(sources) > 100
    for name in (*sources, *PRIVATE):
        target = checkout / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(b"private" if name in PRIVATE else (ROOT / name).read_bytes())
    assert sent_of(checkout, tmp_path / "before.zip") & set(PRIVATE)  # without the list they would be sent

    shutil.copy(ROOT / ".gitignore", checkout)
    assert sent_of(checkout, tmp_path / "package.zip") == sources | {".gitignore"}
