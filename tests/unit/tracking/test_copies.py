"""Trackers beside MLflow: what each is given, that nothing is sent twice, and what a dead or missing one costs."""

import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tracked_trials import DOCUMENT, START_NS, result_of, spec_of

from wattune.errors import PlanError, TrackingError
from wattune.objective import Question
from wattune.ranking.order import rank
from wattune.run import Numbers, RunStatus
from wattune.tracking import destinations
from wattune.tracking.destinations import StudyTracker, out_of_reach, trackers_of
from wattune.units import NS_PER_S

SPEC = spec_of()
NO_WANDB = "wandb is not installed: pip install 'wattune[wandb]'"
CURVES = {"node0/power_w": (START_NS + np.arange(0, 4 * NS_PER_S, NS_PER_S // 2), np.arange(8.0))}
KEY = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has wandb keep its runs here; its process ends with the test."""
    wandb = pytest.importorskip("wandb", reason=NO_WANDB)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    yield
    wandb.teardown()


@pytest.fixture(params=["wandb", "tensorboard"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], StudyTracker]:
    """Makes a tracker of the study `mine` below `tmp_path`, as often as it is called."""
    name = request.param
    if name == "wandb":
        request.getfixturevalue("offline")
    asked = {"wandb": None, "tensorboard": None, name: "project" if name == "wandb" else str(tmp_path / "board")}
    return lambda: trackers_of("mine", tmp_path / "storage", **asked)[name]


def records(path: Path) -> Iterator[bytes]:
    """Yields what an event file of TensorBoard holds: lengths and data, each with a checksum (TFRecord)."""
    data, at = path.read_bytes(), 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        yield data[at + 12 : at + 12 + length]
        at += 16 + length


def board(folder: Path) -> tuple[dict[str, list[tuple[float, int, float]]], dict[str, str], dict[str, object]]:
    """Reads scalars, texts and parameters of a run of TensorBoard's."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

    scalars, texts, params = {}, {}, {}
    (path,) = folder.glob("*tfevents*")
    for event in map(Event.FromString, records(path)):
        for value in event.summary.value:
            plugin = value.metadata.plugin_data
            if plugin.plugin_name == "hparams":
                given = HParamsPluginData.FromString(plugin.content).session_start_info.hparams
                params |= {name: one.number_value or one.string_value for name, one in given.items()}
            elif plugin.plugin_name == "text":
                texts[value.tag] = value.tensor.string_val[0].decode()
            elif value.HasField("simple_value"):
                scalars.setdefault(value.tag, []).append((event.wall_time, event.step, value.simple_value))
    return scalars, texts, params


def wandb_runs(storage: Path) -> dict[str, dict[str, object]]:
    """Reads what offline runs of W&B hold, by name: id, group, configuration, summary and history."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    wandb.teardown()  # its service closes the files of a run that has finished when it comes to it
    runs = {}
    for path in storage.glob("wandb/offline-run-*/*.wandb"):
        store = DataStore()
        store.open_for_scan(str(path))
        run = {"config": {}, "summary": {}, "history": []}
        while (data := store.scan_data()) is not None:
            record = Record.FromString(data)
            for one in record.run.config.update:
                run["config"][one.key] = json.loads(one.value_json)
            for one in record.summary.update:
                run["summary"][one.key] = json.loads(one.value_json)
            if record.history.item:
                run["history"].append(
                    {one.key or one.nested_key[0]: json.loads(one.value_json) for one in record.history.item}
                )
            if record.run.run_id:
                run |= {"id": record.run.run_id, "group": record.run.run_group, "name": record.run.display_name}
            if record.HasField("exit"):
                run["exit"] = record.exit.exit_code
        runs[run["name"]] = run
    return runs


def ranking_of(*results: object) -> dict[str, object]:
    return rank([(SPEC, one) for one in results], Question.of(DOCUMENT["objective"])).to_json()


def test_tensorboard_gets_parameters_metrics_tags_curves_and_the_answer(tmp_path: Path) -> None:
    tracker, result = trackers_of("mine", tmp_path, None, str(tmp_path / "board"))["tensorboard"], result_of(SPEC)
    assert tracker.log_trial(SPEC, result, tmp_path / "none", CURVES)
    scalars, texts, params = board(tmp_path / "board" / "mine" / f"{SPEC.trial_id}-0")
    assert {"tp": 2.0, "sharding": "zero1", "model": "mixtral_8x7b"}.items() <= params.items()
    assert scalars["tokens_per_s"] == [(START_NS / NS_PER_S + 31.005, 0, pytest.approx(48_123.456, rel=1e-6))]
    curve = scalars["trace/node0/power_w"]
    assert [(time_s - START_NS / NS_PER_S, step, value) for time_s, step, value in curve] == [
        (second, second, 2.0 * second + 0.5) for second in range(4)
    ]
    (tags,) = [text for name, text in texts.items() if name.startswith("trial")]
    assert "| status | completed |" in tags and "| quality_reasons | simulated, short |" in tags
    assert "wattune.run" not in tags and "mlflow" not in tags
    tracker.log_study(DOCUMENT, ranking_of(result), None)
    texts = "\n".join(board(tmp_path / "board" / "mine" / "study")[1].values())
    assert f"| best | {SPEC.label} ({SPEC.trial_id}) |" in texts and "| objective | maximize tokens_per_s |" in texts


@pytest.mark.usefixtures("offline")
def test_wandb_gets_the_same_offline_and_no_key_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["wattune", "run", "--tracking-uri", f"https://me:{KEY}@host"])
    tracker, result = trackers_of("mine", tmp_path, "team/project", None)["wandb"], result_of(SPEC)
    failed = replace(result_of(SPEC, RunStatus.OUT_OF_MEMORY, repeat=1), metrics={})
    assert tracker.log_trial(SPEC, result, tmp_path / "none", CURVES)
    assert tracker.log_trial(SPEC, failed, tmp_path / "none")
    tracker.log_study(DOCUMENT, ranking_of(result), None)
    runs = wandb_runs(tmp_path)
    good, bad, study = (runs.pop(name) for name in (f"{SPEC.label} #0", f"{SPEC.label} #1", "mine"))
    assert runs == {}
    assert (good["group"], good["exit"]) == ("mine", 0)
    expected = {"tp": 2, "sharding": "zero1", "status": "completed", "quality_reasons": "simulated, short"}
    assert expected.items() <= good["config"].items()
    assert result.metrics.items() <= good["summary"].items()
    begin_s = START_NS / NS_PER_S
    assert [(one["trace_s"] - begin_s, one["trace/node0/power_w"]) for one in good["history"]] == [
        (second, 2 * second + 0.5) for second in range(4)
    ]
    assert (bad["config"]["reason"], bad["summary"]["status"], bad["exit"]) == ("why", "out_of_memory", 1)
    assert study["summary"]["best"] == f"{SPEC.label} ({SPEC.trial_id})" and study["config"]["space"]["study"] == "x"
    assert [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()] == []
    assert "_wandb" not in json.dumps(study["summary"])


def test_nothing_is_sent_twice_and_a_later_result_is_sent(make, tmp_path: Path) -> None:
    stopped, result = result_of(SPEC, RunStatus.INTERRUPTED), result_of(SPEC)
    again = replace(result, numbers=Numbers(attempt=2), end_wall_ns=result.end_wall_ns + NS_PER_S)
    accepted = replace(again, quality_reasons=("edited",))
    sent = [make().log_trial(SPEC, one, tmp_path / "none") for one in (stopped, stopped, result, result, stopped)]
    assert sent == [True, False, True, False, False]
    assert make().delivered()[SPEC.trial_id, 0].holds(result)
    assert [make().log_trial(SPEC, one, tmp_path / "none") for one in (again, result, accepted)] == [True, False, True]
    assert make().delivered().keys() == {(SPEC.trial_id, 0)}


def test_an_interrupted_trial_counts_as_lacking(make, tmp_path: Path) -> None:
    assert make().delivered() == {}
    make().log_trial(SPEC, result_of(SPEC, RunStatus.INTERRUPTED), tmp_path / "none")
    assert make().delivered() == {}


def test_a_part_that_was_written_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "board" / "mine"
    (folder / f".{SPEC.trial_id}-0.new").mkdir(parents=True)
    (folder / f".{SPEC.trial_id}-0.new" / "events.out.tfevents.1").write_bytes(b"half")
    tracker = trackers_of("mine", tmp_path, None, str(tmp_path / "board"))["tensorboard"]
    assert tracker.log_trial(SPEC, result_of(SPEC), tmp_path / "none")
    assert {path.name for path in folder.iterdir()} == {f"{SPEC.trial_id}-0", "sent.json"}
    assert "tokens_per_s" in board(folder / f"{SPEC.trial_id}-0")[0]


def test_a_folder_that_takes_nothing_is_an_error_of_that_tracker_alone(tmp_path: Path) -> None:
    tracker = trackers_of("mine", tmp_path, None, str(tmp_path / "board"))["tensorboard"]
    (tmp_path / "board").write_text("a file")
    with pytest.raises(TrackingError, match=r"board/mine cannot be reached .*; results stay in the study folder, make"):
        tracker.log_trial(SPEC, result_of(SPEC), tmp_path / "none")
    with pytest.raises(TrackingError, match="not tried again for 60 s"):
        tracker.log_study(DOCUMENT, ranking_of(result_of(SPEC)), None)


def test_all_that_is_wrong_with_what_is_asked_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(destinations, "find_spec", lambda _name: None)
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError) as caught:
        trackers_of("mine", tmp_path, "a/b/c", str(tmp_path / "file"))
    assert caught.value.exit_code == 2
    said = str(caught.value).splitlines()
    assert [line.split(";")[0] for line in said] == [
        "--wandb: wandb is not installed",
        '--wandb: got "a/b/c", allowed: PROJECT or ENTITY/PROJECT',
        "--tensorboard: tensorboardX is not installed",
        f"--tensorboard: {tmp_path}/file/mine cannot be written",
    ]
    with pytest.raises(PlanError, match='--tensorboard: got "", allowed: a folder'):  # of a variable that is not set
        trackers_of("mine", tmp_path, None, "")


def test_servers_that_are_not_there_are_named_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        alive = f"http://127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("WANDB_BASE_URL", alive)
        (said,) = out_of_reach(None, "project")
        assert said.startswith(f"Weights & Biases: {alive}: there is no key: run `wandb login`")
        (tmp_path / "netrc").write_text(f"machine 127.0.0.1 login user password {KEY}")
        assert out_of_reach(alive, "project") == []
    dead = alive.replace("//", f"//me:{KEY}@")
    said = out_of_reach(dead, "project")
    assert len(said) == 2 and all("cannot be reached" in line and "wattune sync" in line for line in said)
    assert KEY not in str(said)
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert out_of_reach("sqlite:///x.db", "project") == [] == out_of_reach()


def test_the_server_of_wandb_login_is_the_one_that_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "settings").write_text("[default]\nbase_url = http://127.0.0.1:1\n")
    (said,) = out_of_reach(None, "project")
    assert said.startswith("Weights & Biases: http://127.0.0.1:1: cannot be reached")
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text("[default]\nmode = offline\n")  # as `wandb offline` leaves it
    assert out_of_reach(None, "project") == []


def test_naming_trackers_loads_no_library(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from wattune.tracking.destinations import trackers_of\n"
        "trackers_of('a', Path(sys.argv[1]), None, sys.argv[1])\n"
        "sys.exit(len({'wandb', 'tensorboardX', 'mlflow'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60).returncode == 0
