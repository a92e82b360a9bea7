"""kill -9 of whoever has a hand in a recording, at random times: what was acknowledged is read back, and no more said.

The writer alone is killed in the midst of its moves from tail to segment; a sampler, its files shared with a reader,
and a sampler's owner at times spread over their lives. Each a few times in CI, and a hundred times where slow tests
run. The telemetry actor is killed in `tests/e2e/test_telemetry_kills.py`.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from wattune.schema import TELEMETRY, table_schema
from wattune.telemetry.files.segments import TierWriter, read_tables
from wattune.telemetry.sampler.process import SamplerProcess

KILLS = 100
FEW_KILLS = 3
RATE_HZ = 50.0
BATCH_ROWS = 20

pytestmark = pytest.mark.timeout(1800)

times = pytest.mark.parametrize("kills", [FEW_KILLS, pytest.param(KILLS, marks=pytest.mark.slow)])


def row(index: int) -> dict[str, Any]:
    keys = {"node": "n0", "device": f"gpu{index % 8}", "mono_ns": index * 5_000_000, "wall_ns": 10**18 + index}
    return keys | {"power_instant_w": float(index % 700), "sm_clock_mhz": index, "event_reasons": 4, "gpu_temp_c": None}


def write_for_ever(folder: Path) -> None:
    """Batches of 0.1 s, moved to the segment twice a second of their own time, a segment every 2 s.

    A byte in the file `<folder>.acknowledged` for each that was written.
    """
    writer = TierWriter(folder, table_schema("fast", backend="replay", simulated=False), 2.0, consolidate_s=0.5)
    with open(f"{folder}.acknowledged", "wb", buffering=0) as acknowledged:
        batch = 0
        while True:
            writer.write([row(index) for index in range(batch * BATCH_ROWS, (batch + 1) * BATCH_ROWS)])
            acknowledged.write(b".")
            batch += 1


def fork_writers() -> None:
    """For every folder on standard input, a process of its own that writes there; its id on standard output."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the dead
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            write_for_ever(Path(line.strip()))
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


@times
def test_every_acknowledged_batch_of_a_killed_writer_is_read_back(tmp_path: Path, kills: int) -> None:
    command = [sys.executable, __file__]
    rng = random.Random(0)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as forks:
        assert forks.stdin is not None and forks.stdout is not None
        for kill in range(kills):
            folder, acknowledged = tmp_path / str(kill), tmp_path / f"{kill}.acknowledged"
            folder.mkdir()
            print(folder, file=forks.stdin, flush=True)
            pid = int(forks.stdout.readline())
            wanted = rng.randint(1, 200)  # batches: up to ten segments, however fast the machine
            while not acknowledged.exists() or acknowledged.stat().st_size < wanted:
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.01))
            os.kill(pid, signal.SIGKILL)
            while Path(f"/proc/{pid}").exists():
                time.sleep(0.001)
            batches = acknowledged.stat().st_size
            tables, notes = read_tables(folder)
            found = tables["fast"].to_pylist()
            assert found == [row(index) for index in range(len(found))]
            assert batches * BATCH_ROWS <= len(found) <= (batches + 1) * BATCH_ROWS
            # Without a manifest only the last segment can tell; killed between two, nothing is missing in either.
            assert len(notes) <= 1
        forks.stdin.close()


def start(folder: Path) -> SamplerProcess:
    return SamplerProcess.start(folder, node="n0", rates_hz={"host": RATE_HZ}, lease_s=60)


def rows_of(sampler: SamplerProcess) -> tuple[list[int], list[str]]:
    tables, notes = read_tables(sampler.folder)
    mono_ns = tables["host"]["mono_ns"].to_pylist()
    assert mono_ns == sorted(set(mono_ns))
    assert tables["host"].schema.names == TELEMETRY["host"].names
    return mono_ns, notes


def before_kill(sampler: SamplerProcess) -> list[int]:
    """Returns the rows that a reader has seen and must find again."""
    tables, _ = read_tables(sampler.folder)
    return tables["host"]["mono_ns"].to_pylist() if "host" in tables else []


@times
def test_a_killed_sampler_leaves_all_but_the_last_second_unclosed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    monkeypatch.setenv("WATTUNE_RUNTIME", str(tmp_path / "runtime"))
    rng, lost_s = random.Random(1), []
    for kill in range(kills):
        sampler = start(tmp_path / str(kill))
        # Mostly early, where files are made; some beyond the move from tail to segment.
        time.sleep(rng.uniform(10.5, 12.5) if kill % 25 == 4 else rng.uniform(0, 1.5))
        acknowledged = before_kill(sampler)
        killed_ns = time.monotonic_ns()
        os.kill(int(sampler.manifest()["sampler"]["pid"]), signal.SIGKILL)
        while sampler.alive():
            time.sleep(0.005)
        manifest = sampler.manifest()
        mono_ns, (note,) = rows_of(sampler)
        assert manifest["closed"] is False and "ended" not in manifest
        assert note.startswith("host-0000.arrows: ") and "no end mark" in note
        assert len(mono_ns) >= manifest["tiers"]["host"]["rows"] and mono_ns[: len(acknowledged)] == acknowledged
        begun_ns = manifest["clock"]["start"]["mono_ns"]
        lost_s.append((killed_ns - (mono_ns[-1] if mono_ns else begun_ns)) / 1e9)
    # Half a second, and one kill, for a machine that is busy with other things.
    assert sorted(lost_s)[-2] < 1.5, lost_s


@times
def test_a_killed_owner_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int) -> None:
    monkeypatch.setenv("WATTUNE_RUNTIME", str(tmp_path / "runtime"))
    rng = random.Random(2)
    code = (
        "import pathlib, sys, time\n"
        "from wattune.telemetry.sampler.process import SamplerProcess\n"
        "sampler = SamplerProcess.start(pathlib.Path(sys.argv[1]), node='n0', rates_hz={'host': 50}, lease_s=2)\n"
        "print('started', flush=True)\n"
        "while True:\n"
        "    sampler.renew()\n"
        "    time.sleep(0.1)\n"
    )
    for kill in range(kills):
        folder = tmp_path / str(kill)
        command = [sys.executable, "-c", code, str(folder)]
        owner = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True, env=os.environ)
        assert owner.stdout is not None and owner.stdout.readline() == b"started\n"
        time.sleep(rng.uniform(0, 1))
        os.killpg(owner.pid, signal.SIGKILL)
        owner.communicate()
        killed_ns = time.monotonic_ns()
        sampler = SamplerProcess(folder)
        acknowledged, at_kill = before_kill(sampler), sampler.manifest()
        assert at_kill["closed"] is False and "ended" not in at_kill
        while sampler.alive():
            time.sleep(0.02)
        manifest = sampler.manifest()
        mono_ns, notes = rows_of(sampler)
        assert manifest["closed"] is True and manifest["ended"] == "lease expired" and notes == []
        assert len(mono_ns) == manifest["tiers"]["host"]["rows"] and mono_ns[-1] > killed_ns
        assert mono_ns[: len(acknowledged)] == acknowledged


if __name__ == "__main__":
    fork_writers()
