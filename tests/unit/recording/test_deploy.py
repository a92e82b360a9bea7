"""The job files under `deploy/`: their own commands run, with a replay's devices and without a cluster."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
REPLAY = f"replay:{ROOT}/tests/golden/h200x4/dp4?start_s=5"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Programs as on a node: `wattune` reads a replay of four devices, and `srun` starts one task."""
    programs = {
        "wattune": f'exec {sys.executable} -m wattune record --backend host --backend "{REPLAY}" "${{@:2}}"',
        "srun": 'shift; SLURM_JOB_ID=17 SLURM_NODEID=0 CUDA_VISIBLE_DEVICES=2,3 exec "$@"',
        "torchrun": "exit 3",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o700)
    return {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "WATTUNE_RUNTIME": str(tmp_path / "runtime"),
        "WATTUNE_STORAGE": str(tmp_path / "storage"),
    }


def test_a_slurm_job_has_its_own_devices_and_its_program_s_exit_code(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    script = ROOT / "deploy" / "slurm" / "record.sbatch"
    done = subprocess.run(
        ["bash", str(script), "sh", "-c", "echo out $CUDA_VISIBLE_DEVICES; sleep 1; exit 3"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3 and done.stdout == "out 2,3\n", done.stderr
    (line,) = done.stderr.splitlines()
    assert "exit code 3" in line and "devices gpu2, gpu3 (CUDA_VISIBLE_DEVICES=2,3 of the command)" in line
    facts = json.loads((tmp_path / "storage/recordings/job17-node0/manifest.json").read_text())
    assert facts["devices"]["counted"] == ["gpu2", "gpu3"]


def test_a_kubernetes_job_runs_what_its_manifest_says(tmp_path: Path, environment: dict[str, str]) -> None:
    claim, job = yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "record.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (mount,), (volume,) = container["volumeMounts"], pod["volumes"]
    assert mount["name"] == volume["name"] and volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    command = [*container["command"], *container["args"]]
    assert command[command.index("--storage") + 1] == mount["mountPath"]
    assert f"0.0.0.0:{container['ports'][0]['containerPort']}" in command
    own = {mount["mountPath"]: str(tmp_path / "storage"), "$(POD_NAME)": "pod-7", "0.0.0.0:9400": "0.0.0.0:0"}
    done = subprocess.run(
        [own.get(word, word) for word in command], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3, done.stderr
    assert (tmp_path / "storage/recordings/pod-7/run.json").exists()
