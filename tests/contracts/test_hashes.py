"""Pins with hashes: `constraints/hashes.py` writes what `pip install --require-hashes` takes, and pip refuses others.

Wheels are made here and found in a folder, so nothing is asked of an index.
"""

import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "constraints" / "hashes.py"


pytestmark = pytest.mark.slow


def make_wheel(folder: Path, name: str, version: str, text: str = "") -> Path:
    """Makes a wheel of one module that says `text`."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"TEXT = {text!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{each},,\n" for each in [*files, f"{info}/RECORD"])
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for each, content in files.items():
            archive.writestr(each, content)
    return path


def run(*command: object) -> "subprocess.CompletedProcess[str]":
    """Runs Python with no settings of pip's but those given."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    environment = kept | {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    make_wheel(folder, "wt_one", "1.0")
    make_wheel(folder, "wt_one", "1.1")
    make_wheel(folder, "wt_two", "2.0+cpu")
    return folder


def made(tmp_path: Path, wheels: Path, pins: str) -> "tuple[subprocess.CompletedProcess[str], Path]":
    (tmp_path / "pins.txt").write_text(pins)
    out = tmp_path / "pins.hashes.txt"
    return run(SCRIPT, tmp_path / "pins.txt", "--out", out, "--", "--no-index", "--find-links", wheels), out


def test_pins_get_the_hashes_of_their_files_and_pip_refuses_any_other_file(tmp_path: Path, wheels: Path) -> None:
    pins = "# two\nwt_two==2.0\nwt.One==1.0  # not the newest\nwt-three==3.0; python_version < '3'\n"
    done, out = made(tmp_path, wheels, pins)
    assert done.returncode == 0, done.stderr
    digests = {path.name[:10]: hashlib.sha256(path.read_bytes()).hexdigest() for path in wheels.iterdir()}
    lines = [line for line in out.read_text().splitlines() if not line.startswith("#")]
    assert lines == [
        f"wt.One==1.0 --hash=sha256:{digests['wt_one-1.0']}",
        f"wt_two==2.0 --hash=sha256:{digests['wt_two-2.0']}",
    ]
    install = ("-m", "pip", "install", "--no-index", "--find-links", wheels, "--require-hashes", "--no-deps", "-r", out)
    done = run(*install, "--target", tmp_path / "good")
    assert done.returncode == 0 and (tmp_path / "good" / "wt_two.py").exists(), done.stderr
    make_wheel(wheels, "wt_one", "1.0", "somebody else's")
    done = run(*install, "--target", tmp_path / "bad")
    assert done.returncode != 0 and "DO NOT MATCH THE HASHES" in done.stderr
    assert not (tmp_path / "bad" / "wt_one.py").exists()


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        ("wt_one>=1.0\n", 'pins.txt:1: "wt_one>=1.0" is not an exact version'),
        ("wt_one==1.*\n", "is not an exact version"),
        ("wt_one==1.0\nwt-one==1.1\n", "pins.txt:2: wt-one is pinned twice"),
        ("wt_one==9.9\n", "pip finds no files"),
    ],
)
def test_pins_that_cannot_be_hashed_are_one_line_and_no_file(
    tmp_path: Path, wheels: Path, pins: str, said: str
) -> None:
    done, out = made(tmp_path, wheels, pins)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1 and not out.exists()


def test_the_pins_of_the_checkout_can_be_hashed() -> None:
    found = importlib.util.spec_from_file_location("constraints_hashes", SCRIPT)
    assert found is not None and found.loader is not None
    hashes = importlib.util.module_from_spec(found)
    found.loader.exec_module(hashes)
    pins = hashes.pins_of(ROOT / "constraints" / "cpu.txt")
    digest = "0" * 64
    report = {
        "install": [
            {"metadata": {"name": name}, "download_info": {"archive_info": {"hashes": {"sha256": digest}}}}
            for name in pins
        ]
    }
    lines = hashes.hashed(pins, report)
    assert len(lines) == len(pins) > 200 and all(line.endswith(f" --hash=sha256:{digest}") for line in lines)
    report["install"][3]["download_info"] = {"url": "git+https://host/it"}
    with pytest.raises(ValueError, match="no SHA-256"):
        hashes.hashed(pins, report)
