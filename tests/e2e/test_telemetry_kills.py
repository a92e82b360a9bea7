"""kill -9 of a node's telemetry actor a hundred times: while it samples, starts a recording and brings one home.

Before every kill the recording is read as it is: what is there counts as acknowledged, and has to be there afterwards.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from script_results import results

from wattune.orchestrate.telemetry_actor import RENEW_INTERVAL_S
from wattune.telemetry.sampler.lease import LEASE_S

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

RECORDINGS = 5
KILLS_EACH = 10
"""Of them the first comes while the recording is started and the last while it is brought home."""

SCRIPT = """
import json, os, random, signal, sys, time
from contextlib import suppress
from pathlib import Path
import ray
from wattune.orchestrate.cluster import connect
from wattune.orchestrate.telemetry_actor import telemetry_actor
from wattune.storage.digests import digests_of
from wattune.storage.study import TrialFolder
from wattune.telemetry.sampler.process import SamplerProcess
from wattune.telemetry.files.segments import read_manifest, read_tables

recordings, kills_each, seed = map(int, sys.argv[1:4])
rng, kills, found = random.Random(seed), 0, []
died_s, away_s = 0.0, 0.0  # of the latest kill, and the longest an actor was gone during a recording

def stamps(tables):
    return tables["host"]["mono_ns"].to_pylist() if "host" in tables else []

def kill(pid):
    global kills, died_s
    os.kill(pid, signal.SIGKILL)
    kills, died_s = kills + 1, time.monotonic()

with connect() as cluster:
    node = cluster.nodes[0]
    actor = telemetry_actor(node, ["host"])
    spool = ray.get(actor.__ray_call__.remote(lambda self: self._spool))

    def pid():
        global away_s
        answer = ray.get(actor.__ray_call__.remote(lambda self: os.getpid()), timeout=60)
        away_s = max(away_s, time.monotonic() - died_s) if died_s else 0.0
        return answer

    for number in range(recordings):
        key, victim = f"killed-{seed}-{number}", pid()
        away_s = 0.0
        starting = actor.start.remote(key)
        time.sleep(rng.uniform(0, 1))
        kill(victim)
        ray.get(starting, timeout=60)
        died_s = time.monotonic()  # its sampler has started since
        folder, acknowledged, open_each_time = spool / key, [], True
        for _ in range(kills_each - 3):
            victim = pid()
            time.sleep(rng.uniform(0, 0.7))
            before = stamps(read_tables(folder)[0])
            assert before[: len(acknowledged)] == acknowledged
            acknowledged = before
            kill(victim)
            manifest = read_manifest(folder)
            open_each_time &= manifest["closed"] is False and "ended" not in manifest
        victim = pid()
        if number % 2:  # and its sampler with it: then nobody can close the file
            with suppress(ProcessLookupError):  # on so busy a machine its lease may have run out
                os.kill(read_manifest(folder)["sampler"]["pid"], signal.SIGKILL)
        stopping = actor.stop.remote(key)
        time.sleep(rng.uniform(0, 0.3))
        kill(victim)
        ray.get(stopping, timeout=60)
        trial = TrialFolder(Path(sys.argv[4]) / key)
        trial.path.mkdir(parents=True)
        (trial.path / ".seen").touch()
        victim, coming = pid(), actor.recording.remote(key, trial.path / ".seen")
        time.sleep(rng.uniform(0, 0.1))
        kill(victim)  # while it writes: it does so again
        home = ray.get(coming, timeout=60)
        away_s = max(away_s, time.monotonic() - died_s)
        assert home.digests == digests_of(trial.path, "run.json") and not home.files
        rows = stamps(trial.telemetry())
        found.append({
            "sampler_killed": bool(number % 2),
            "away_s": away_s,
            "open_each_time": open_each_time,
            "acknowledged": len(acknowledged),
            "rows": len(rows),
            "kept": rows[: len(acknowledged)] == acknowledged and rows == sorted(set(rows)),
            "closed": home.manifest["closed"],
            "ended": home.manifest.get("ended"),
            "losses": list(home.losses),
        })
        ray.get(actor.forget.remote(key), timeout=60)
        assert not SamplerProcess(folder).folder.exists()
print("RESULT " + json.dumps({"kills": kills, "recordings": found}), flush=True)
"""


@pytest.mark.parametrize("seed", [0, 1])
def test_fifty_kills_of_a_telemetry_actor_lose_nothing(tmp_path: Path, environment: dict[str, str], seed: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(RECORDINGS), str(KILLS_EACH), str(seed), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=570,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = results(done.stdout)
    assert found["kills"] == RECORDINGS * KILLS_EACH
    for one in found["recordings"]:
        assert one["kept"] and one["rows"] >= one["acknowledged"] > 0
        if one["away_s"] > LEASE_S - RENEW_INTERVAL_S - 1:
            continue  # so busy a machine that Ray brought no actor back within the sampler's lease
        assert one["open_each_time"]
        if one["sampler_killed"]:
            assert one["closed"] is False and one["ended"] is None
            assert len(one["losses"]) == 1 and "no end mark" in one["losses"][0]
        else:
            assert one["closed"] is True and one["ended"] == "SIGTERM" and one["losses"] == []
