"""The AMD SMI backend against a library without hardware, through the real `amdsmi`, in an environment of its own.

The package's wrapper, its structures and its conversions are the real ones; what the library says is scripted
(`amd_smi_stub/`). No AMD device is needed, and none has confirmed what is scripted.
"""

import json
import os
import re
import shutil
import site
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pyarrow.compute as pc
import pytest
from limit_deaths import build_amd_smi

from wattune.analysis.metrics.energy import powers, total_energy_j
from wattune.analysis.signals.align import align
from wattune.telemetry.files.segments import read_manifest, read_tables

ROOT = Path(__file__).parents[2]
STUB = Path(__file__).parent / "amd_smi_stub"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="the stub library is built with g++"),
]


def run(*command: object, env: dict[str, str] | None = None, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout_s
    )


@dataclass(frozen=True)
class Place:
    """An environment with one release of the real `amdsmi`, and a ROCM_PATH that holds the stub for it alone."""

    python: Path
    rocm: Path

    def env(self, profile: str, **more: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("ROCM", "PYTHON"))}
        return kept | {"ROCM_PATH": str(self.rocm), "ROCM_HOME": str(self.rocm), "AMDSMI_STUB_PROFILE": profile, **more}

    def pytest(self, env: dict[str, str], *arguments: object) -> str:
        there = run(self.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, env=env, timeout_s=100)
        assert there.returncode == 0, there.stdout + there.stderr
        return there.stdout


def make_place(release: str, folder: Path) -> Place:
    python, rocm = folder / "bin/python", folder / "rocm"
    run(sys.executable, "-m", "venv", "--without-pip", folder).check_returncode()
    pip = (sys.executable, "-m", "pip", "--python", python, "--retries", "0", "--timeout", "20")
    installed = run(*pip, "install", "--no-deps", "-q", f"amdsmi=={release}")
    if "(from versions: none)" in installed.stderr:
        pytest.skip(f"no package index can be reached from this machine, and it has no amdsmi {release} of its own")
    assert installed.returncode == 0, installed.stderr
    (packages,) = folder.glob("lib/python*/site-packages")
    # This environment's packages come after its own, and the project from where it stands.
    (packages / "wattune.pth").write_text("\n".join([str(ROOT / "platform"), *site.getsitepackages()]))
    build_amd_smi(rocm, packages, release[0])
    return Place(python, rocm)


@pytest.fixture(scope="session", params=["7.0.2", "6.4.4"])
def each(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """One release after the other."""
    return make_place(request.param, tmp_path_factory.mktemp("amdsmi"))


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The newest release alone."""
    return make_place("7.0.2", tmp_path_factory.mktemp("amdsmi"))


@pytest.mark.parametrize("profile", ["mi250", "mi300"])
def test_scripted_values_come_through_the_real_package(each: Place, profile: str) -> None:
    said = each.pytest(each.env(profile), STUB / "check_real_package.py")
    assert int(re.findall(r"(\d+) passed", said)[0]) >= 13


@pytest.mark.parametrize("profile", ["mi250", "mi300"])
def test_it_keeps_what_every_backend_promises(place: Place, profile: str) -> None:
    contract = ROOT / "tests/contracts/test_backends.py"
    said = place.pytest(place.env(profile), contract, "-k", "amd_smi")
    assert "skipped" not in said and int(re.findall(r"(\d+) passed", said)[0]) >= 6


def test_a_recording_counts_each_package_once(place: Place, tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from wattune.telemetry.sampler.process import SamplerProcess\n"
        "sampler = SamplerProcess.start(Path(sys.argv[1]), node='n', backends=['amd_smi'])\n"
        "time.sleep(2.5); sampler.stop()"
    )
    env = place.env("mi250", WATTUNE_RUNTIME=str(tmp_path))
    recorded = run(place.python, "-c", code, tmp_path / "recording", env=env)
    assert recorded.returncode == 0, recorded.stderr
    manifest = read_manifest(tmp_path / "recording")
    tables, notes = read_tables(tmp_path / "recording")
    assert notes == [] and set(tables) == {"fast", "counter", "slow"}
    wall_ns = tables["fast"]["wall_ns"]
    aligned = align(tables, None, {"n": manifest}, window=(pc.min(wall_ns).as_py(), pc.max(wall_ns).as_py()))
    assert aligned is not None and len(aligned.devices) == 4
    found = powers(aligned)
    assert found.usable and [trace.devices[0][1] for trace in found.traces] == ["gpu0", "gpu2"]
    assert [trace.share for trace in found.traces] == [2, 2]
    # The stub draws 400 W and 500 W.
    assert total_energy_j(found, aligned.duration_s) / aligned.duration_s == pytest.approx(900, rel=0.02)
    assert manifest["devices"]["gpu1"]["power_domain"] == "gpu0"


def error_of_opening(place: Place, **more: str) -> str:
    code = (
        "import json\nfrom wattune.errors import TelemetryError\nfrom wattune.telemetry.registry import load_backend\n"
        "try: load_backend('amd_smi')\n"
        "except TelemetryError as error: print(json.dumps({'error': str(error)}))"
    )
    opened = run(place.python, "-c", code, env=place.env("mi250", **more))
    assert opened.returncode == 0, opened.stderr
    # Nothing else on standard output: the package prints to it where its library is missing.
    return str(json.loads(opened.stdout)["error"])


@pytest.mark.parametrize("major", ["25", "27"])
def test_a_library_of_another_generation_is_refused(place: Place, major: str) -> None:
    said = error_of_opening(place, AMDSMI_STUB_MAJOR=major)
    assert "amdsmi 7.0.2 is made for a library 26.x" in said and f"libamd_smi.so is {major}.0.2" in said


def test_a_missing_library_is_said_and_nothing_is_printed(place: Place, tmp_path: Path) -> None:
    said = error_of_opening(Place(place.python, rocm=tmp_path))
    assert "amdsmi cannot load libamd_smi.so: KeyError" in said and "ROCM_PATH" in said
