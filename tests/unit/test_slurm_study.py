"""`deploy/slurm/study.sbatch` with stand-ins for Slurm, Ray and wattune: order, ports, token, SIGTERM, exit code.

It has run under Slurm 22.05 too: docs/slurm.md says what ran.
"""

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm" / "study.sbatch"

PROGRAMS = {
    # A step: its own node's number, and SIGTERM to its command as from Slurm at the job's end.
    "srun": """while [[ $1 == -* ]]; do
  [[ $1 == -w ]] && shift
  [[ $1 == --exclude=* ]] && export SLURM_NODEID=1
  shift
done
export SLURM_NODEID=${SLURM_NODEID:-0}
exec "$@" """,
    "ray": """echo "ray $*" >> "$SAID"
[ "$1" = start ] || exec grep -q ^token "$SAID"
[[ " $* " == *--head* && -n ${LATE:-} && $(grep -c "^ray start.*--head" "$SAID") = 1 ]] && exit 1
echo "token ${#RAY_AUTH_TOKEN} $RAY_AUTH_MODE, $RAY_worker_niceness, ${ROCR_VISIBLE_DEVICES-none}" >> "$SAID"
echo $$ >> "$PIDS"
trap 'exit 0' TERM
while true; do sleep 0.1; done""",
    "python": """cat > /dev/null
until [ "$(grep -c ^token "$SAID")" = 2 ]; do sleep 0.05; done
echo waited >> "$SAID" """,
    "wattune": """echo "wattune $*" >> "$SAID"
echo $$ >> "$PIDS"
trap 'echo termed >> "$SAID"; sleep 0.5; exit 7' TERM
[ -n "${ENDS:-}" ] && exit "$ENDS"
while true; do sleep 0.1; done""",
}


def end(pids: Path) -> None:
    """Ends what still runs, as Slurm ends the steps of a job that is over."""
    for pid in pids.read_text().split() if pids.exists() else ():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGTERM)


@pytest.fixture
def job(tmp_path: Path):
    """Starts the script as Slurm does; what ran is in `said`."""
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o700)
    started: list[subprocess.Popen[str]] = []

    def start(job_id: int, **more: str) -> "subprocess.Popen[str]":
        environment = {
            **os.environ,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "SAID": str(tmp_path / "said"),
            "PIDS": str(tmp_path / "pids"),
            "SLURM_JOB_ID": str(job_id),
            "SLURM_NNODES": "3",
            "SLURMD_NODENAME": "n1",
            "WATTUNE_ENVIRONMENT": "",
            "ROCR_VISIBLE_DEVICES": "0,1",
            **more,
        }
        command = ["bash", str(SCRIPT), "space.yaml", "/shared/studies", "--max-trials", "3"]
        started.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
        return started[-1]

    yield start
    pids = tmp_path / "pids"
    end(pids)
    for process in started:
        process.communicate(timeout=60)  # the steps' shells have its output


def said_until(path: Path, wanted: str) -> list[str]:
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        lines = path.read_text().splitlines() if path.exists() else []
        if any(wanted in line for line in lines):
            return lines
        time.sleep(0.05)
    raise AssertionError((wanted, lines))


def test_a_study_runs_on_rays_own_ports_hears_sigterm_once_and_gives_its_exit_code(job, tmp_path: Path) -> None:
    running = job(4711)
    lines = said_until(tmp_path / "said", "wattune run")
    head, worker = [line for line in lines if line.startswith("ray start")]
    port = int(re.search(r"--port=(\d+)", head)[1])
    address = re.search(r"--address=(\S+)", worker)[1]
    host = re.search(r"--node-ip-address=(\S+)", head)[1]
    assert address == f"{host}:{port}"
    (told,) = [line for line in lines if line.startswith("wattune run")]
    assert told == f"wattune run space.yaml --storage /shared/studies --address {address} --max-trials 3"
    order = [line.split()[0] for line in lines if not line.startswith(("token", "ray health-check"))]
    assert order == ["ray", "ray", "waited", "wattune"]
    assert [line for line in lines if line.startswith("token")] == ["token 64 token, 0, none"] * 2
    ports = [int(one) for line in (head, worker) for one in re.findall(r"port=(\d+)", line) if one != "0"]
    assert len(ports) == len(set(ports)) and all(port <= one < port + 20 for one in ports), "other jobs have the others"
    folders = [Path(re.search(r"--temp-dir=(\S+)", line)[1]) for line in (head, worker)]
    assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in folders)

    running.send_signal(signal.SIGTERM)
    lines = said_until(tmp_path / "said", "termed")
    end_s = time.monotonic() + 60
    while running.poll() is None and time.monotonic() < end_s:
        time.sleep(0.05)
    assert running.returncode == 7 and (tmp_path / "said").read_text().count("termed") == 1
    end(tmp_path / "pids")
    while any(folder.exists() for folder in folders):
        assert time.monotonic() < end_s
        time.sleep(0.05)


def test_a_head_that_came_too_late_for_ray_is_started_again(job, tmp_path: Path) -> None:
    assert job(4713, LATE="1", ENDS="0").wait(60) == 0
    lines = said_until(tmp_path / "said", "wattune run")
    first, second = [line for line in lines if line.startswith("ray start") and "--head" in line]
    assert first == second and lines.index(second) < lines.index("waited")


def test_another_job_has_other_ports_and_the_script_the_exit_code_of_its_study(job, tmp_path: Path) -> None:
    assert job(4712, ENDS="3").wait(60) == 3
    lines = said_until(tmp_path / "said", "wattune run")
    head = next(line for line in lines if "--head" in line)
    assert int(re.search(r"--port=(\d+)", head)[1]) == 20_000 + 712 * 20
