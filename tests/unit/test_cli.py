"""The command line on input it must refuse, and the verbs that need neither Ray nor training."""

import gc
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from wattune import __main__, api
from wattune.cli.shell import end_in_order

SPACE: dict[str, Any] = {
    "study": "tiny",
    "model": {"name": "llama3_8b", "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_heads": 4}
    | {"num_kv_heads": 2, "vocab_size": 256},
    "cluster": {"device": "cpu", "num_nodes": 1, "devices_per_node": 2},
    "engine": "torch",
    "workload": {"mode": "pretrain", "seq_len": 32, "global_batch_size": 4},
    "space": {"tp": [1, 2, 4]},
    "objective": "maximize tokens_per_s",
    "search": {"strategy": "grid", "num_trials": 4},
}


class Command:
    """Runs `wattune` in this process."""

    def __init__(self, run: Callable[..., tuple[int, str, str]], folder: Path) -> None:
        self._run, self.folder, self.storage = run, folder, folder / "storage"

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        return self._run(*arguments)

    def write(self, document: Any) -> Path:
        path = self.folder / "space.yaml"
        path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
        return path


@pytest.fixture
def wattune(wattune: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    monkeypatch.setenv("WATTUNE_STORAGE", str(tmp_path / "storage"))
    monkeypatch.chdir(tmp_path)
    return Command(wattune, tmp_path)


@pytest.fixture
def stored(wattune: Command, store_in: Callable[[Path], str]) -> None:
    """The storage has a tracking store: making one takes most of what a run of no hours does."""
    store_in(wattune.storage)


BAD_SPACES: dict[str, tuple[Any, str]] = {
    "two_problems": (SPACE | {"modle": 1, "space": {"tp": [0]}}, "space.tp"),
    "not_a_mapping": ("- a\n- b\n", "mapping"),
    "leaves_the_storage": (SPACE | {"study": "../outside"}, "../outside"),
    "unbuilt_strategy": (SPACE | {"search": {"strategy": "annealing", "num_trials": 4}}, "grid, model_guided, random"),
}


@pytest.mark.parametrize("verb", ["plan", "run"])
@pytest.mark.parametrize("case", BAD_SPACES)
def test_bad_input_is_one_message_exit_2_and_nothing_written(wattune: Command, case: str, verb: str) -> None:
    document, named = BAD_SPACES[case]
    code, out, err = wattune(verb, wattune.write(document))
    assert code == 2, err
    assert named in err and "space.yaml" in err
    assert "Traceback" not in err and out == ""
    assert not wattune.storage.exists()
    assert [path.name for path in wattune.folder.iterdir()] == ["space.yaml"]


@pytest.mark.parametrize("verb", ["plan", "run"])
def test_a_space_in_which_everything_is_rejected_ends_with_3_and_counts_the_rules(wattune: Command, verb: str) -> None:
    code, _, err = wattune(verb, wattune.write(SPACE | {"space": {"tp": [4], "pp": [1, 2]}}))
    assert code == 3
    assert "world_size 2" in err
    assert not wattune.storage.exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["analyze", "."], "telemetry"),
        (["rank", "x", "--storage", "s4://bucket"], "s4://bucket"),
        (["dance"], "dance"),
        (["rank"], "Missing argument"),
    ],
)
def test_wrong_arguments_are_exit_2(wattune: Command, arguments: list[str], named: str) -> None:
    code, out, err = wattune(*arguments)
    assert code == 2, err
    assert named in err and "Traceback" not in err and out == ""
    assert not wattune.storage.exists()


def test_plan_as_json_is_one_object_with_every_combination(wattune: Command) -> None:
    code, out, err = wattune("plan", wattune.write(SPACE), "--json")
    assert code == 0 and err == ""
    listed = json.loads(out)
    assert [len(listed[name]) for name in ("kept", "rejected", "equivalent")] == [2, 1, 0]
    assert {"trial_id", "config"} <= listed["kept"][0].keys()
    assert {"config", "rule", "reason"} <= listed["rejected"][0].keys()


def test_a_dry_run_says_what_would_run_and_writes_nothing(wattune: Command) -> None:
    space = wattune.write(SPACE | {"measure": {"min_seconds": 36, "repeats": 2}})
    code, out, err = wattune("run", space, "--dry-run", "--max-trials", 3)
    assert (code, err) == (0, "")
    assert "4 trial(s) to run: at least 0.08 device-hours" in out and "at most 3 of them" in out
    assert out.splitlines()[-1] == "dry run: nothing was started, nothing was written"
    code, out, err = wattune("run", space, "--dry-run", "--json")
    assert code == 0 and "4 trial(s) to run" in err
    said = json.loads(out)
    assert (said["dry_run"], said["num_trials"], said["num_now"], said["done"]) == (True, 4, 4, {})
    assert said["device_s"] == 4 * 36 * 2
    assert not wattune.storage.exists()
    assert [path.name for path in wattune.folder.iterdir()] == ["space.yaml"]


@pytest.mark.parametrize("number", [0, -1])
def test_a_budget_of_no_trials_names_the_dry_run(wattune: Command, number: int) -> None:
    for more in ([], ["--dry-run"]):
        code, out, err = wattune("run", wattune.write(SPACE), "--max-trials", number, *more)
        assert (code, out) == (2, "")
        assert err == (f"error: --max-trials: got {number}, allowed: 1 or more; --dry-run says what would run\n")
        assert not wattune.storage.exists()


@pytest.mark.usefixtures("stored")
def test_a_dry_run_of_a_space_that_contradicts_the_study_is_refused_as_the_run_is(wattune: Command) -> None:
    assert wattune("run", wattune.write(SPACE), "--max-hours", 0)[0] == 0
    changed = wattune.write(SPACE | {"workload": {**SPACE["workload"], "seq_len": 64}})
    refused = [wattune("run", changed, *more) for more in (["--dry-run"], ["--max-hours", 0])]
    assert refused[0] == refused[1]
    code, out, err = refused[0]
    assert (code, out) == (2, "") and "workload.seq_len: stored" in err and "given 64" in err


@pytest.mark.parametrize("arguments", [[], ["run"], ["rank"]])
def test_h_is_help(wattune: Command, arguments: list[str]) -> None:
    short, long = wattune(*arguments, "-h"), wattune(*arguments, "--help")
    assert short == long and short[0] == 0 and "Usage" in short[1]


@pytest.mark.usefixtures("stored")
def test_a_run_of_no_hours_ranks_what_is_there_and_starts_nothing(wattune: Command) -> None:
    space = wattune.write(SPACE | {"measure": {"min_seconds": 36, "repeats": 2}})
    code, out, err = wattune("run", space, "--max-hours", 0, "--json")
    assert code == 0, err
    assert "4 trial(s) to run: at least 0.08 device-hours" in err and "this call: at most 0 s on the clock" in err
    assert "4 trial(s) are left, the same command goes on" in err
    ended = json.loads(out)
    assert (ended["finished"], ended["ending"], ended["num_left"]) == (False, "budget", 4)
    assert not list((wattune.storage / "tiny").glob("trials/*"))
    store = f"sqlite:///{wattune.storage}/mlflow.db"
    files = f"--artifacts-destination {wattune.storage}/mlartifacts"
    assert ended["mlflow"]["uri"] == store
    assert ended["mlflow"]["command"].endswith(f"mlflow ui --backend-store-uri {store} {files}")
    assert ended["mlflow"]["url"].startswith("http://127.0.0.1:5000/#/experiments/1/runs?")


def test_an_anchor_the_space_does_not_have_is_refused(wattune: Command) -> None:
    space = wattune.write(SPACE | {"search": {"strategy": "grid", "reference": "0123456789ab"}})
    code, _, err = wattune("run", space)
    assert code == 2 and "search.reference: 0123456789ab is none of the 2 trials" in err
    assert not wattune.storage.exists()


def test_catalog_and_doctor_as_json(wattune: Command) -> None:
    code, out, _ = wattune("catalog", "--json")
    assert code == 0
    models = {model["name"]: model["num_parameters"] for model in json.loads(out)["models"]}
    assert models["llama3_70b"] == 70_553_706_496
    code, out, _ = wattune("doctor", "--json")
    assert code == 0
    topics = {finding["topic"]: finding for finding in json.loads(out)["findings"]}
    assert topics["torch"]["ok"] and topics["storage"]["ok"]
    assert not wattune.storage.exists()


def test_tables_for_people(wattune: Command) -> None:
    path = wattune.write(SPACE)
    for arguments, shown in (
        (["plan", path], "rejected by rule"),
        (["catalog"], "mixtral_8x22b"),
        (["doctor"], "python"),
    ):
        code, out, _ = wattune(*arguments)
        assert code == 0 and shown in out
    code, out, _ = wattune("--version")
    assert code == 0 and out.startswith("wattune ")


@pytest.mark.parametrize("where", ["plan", "run_study"])
def test_a_ctrl_c_that_no_trial_hears_of_is_one_line_too(
    wattune: Command, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, where, stopped)
    assert wattune("run", wattune.write(SPACE)) == (130, "", "stopped before the end; the same command continues\n")


def test_a_ctrl_c_while_the_program_loads_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def __getattr__(self, _name: str) -> None:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "wattune.cli", Interrupted())
    with pytest.raises(SystemExit) as leaving:
        __main__.main()
    assert leaving.value.code == 130 and gc.isenabled()


@pytest.mark.usefixtures("stored")
def test_every_place_that_was_not_sent_to_is_told_and_so_is_the_end(
    wattune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_study = api.run_study

    def run(*arguments: Any, **options: Any) -> api.StudyOutcome:
        outcome = run_study(*arguments, **options)
        return replace(outcome, tracking_problem="no server", storage_problem="no bucket")

    monkeypatch.setattr(api, "run_study", run)
    code, _, err = wattune("run", wattune.write(SPACE), "--max-hours", 0)
    assert code == 1
    assert err.splitlines()[-4:] == [
        "the budget is used; 2 trial(s) are left, the same command goes on with them",
        "error: no server",
        "no bucket",
        f"results are safe in {wattune.storage / 'tiny'}; run `wattune sync`",
    ]


@pytest.mark.usefixtures("stored")
def test_a_study_that_was_stopped_ends_by_the_signal_also_where_uploads_were_not_done(
    wattune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_study = api.run_study

    def run(*arguments: Any, **more: Any) -> api.StudyOutcome:
        outcome = run_study(*arguments, **more)
        return replace(outcome, ending="interrupted", tracking_problem="tracking: still sending after 3 s")

    monkeypatch.setattr(api, "run_study", run)
    code, said, err = wattune("run", wattune.write(SPACE), "--max-hours", 0, "--json")
    assert code == 130 == json.loads(said)["error"]["exit_code"]
    assert "error: tracking: still sending after 3 s" in err


@pytest.mark.parametrize("terminal", [signal.SIG_DFL, signal.SIG_IGN], ids=["terminal", "nohup"])
def test_a_closed_terminal_interrupts_unless_nohup_keeps_it_away(terminal: signal.Handlers) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        signal.signal(signal.SIGHUP, terminal)
        end_in_order()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        if terminal is signal.SIG_IGN:
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        else:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGHUP)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


ON_GPUS = SPACE | {
    "model": {"name": "llama3_70b"},
    "cluster": {"device": "h200_sxm", "num_nodes": 2, "devices_per_node": 8},
    "workload": {"mode": "pretrain", "seq_len": 4096, "global_batch_size": 64},
    "space": {"tp": [1, 8, 16], "pp": [1, 2], "sharding": ["none", "zero3"]},
}


def test_estimates_are_one_object_with_every_rejection_and_a_file_of_all(wattune: Command) -> None:
    space = wattune.write(ON_GPUS)
    code, out, _ = wattune("plan", space, "--estimate", "--json", "--top", 1, "--out", wattune.folder / "all.parquet")
    found = json.loads(out)
    assert code == 0 and len(found["kept"]) == 1 < found["num_kept"]
    assert found["kept"][0]["estimate"]["step_time_s"]["value"] > 0
    assert {one["rule"] for one in found["rejected"]} == {"world_size", "kv_heads", "memory"}
    assert pq.read_table(wattune.folder / "all.parquet").num_rows == found["num_kept"]
    link = wattune.folder / "nowhere"
    link.symlink_to("/dev/null")
    assert wattune("plan", space, "--estimate", "--out", link)[0] == 0
    assert link.is_symlink()  # a device or a link keeps its place; a root user once lost /dev/null
    code, out, _ = wattune("plan", space, "--estimate")
    assert code == 0 and "h200_sxm: memory" in out and "rejected by rule memory" in out


def test_a_space_of_which_nothing_fits_ends_with_3(wattune: Command) -> None:
    small = ON_GPUS | {"cluster": {"device": "h200_sxm", "num_nodes": 1, "devices_per_node": 1}, "space": {"tp": [1]}}
    code, _, err = wattune("plan", wattune.write(small), "--estimate")
    assert code == 3 and "nothing fits" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("plan", "--top", 3), "give --estimate too"), (("plan", "--estimate"), '"cpu" has no estimates')],
)
def test_estimates_that_cannot_be_made_are_one_clear_line(
    wattune: Command, arguments: tuple[object, ...], words: str
) -> None:
    verb, *options = arguments
    code, out, err = wattune(verb, wattune.write(SPACE), *options)
    assert code == 2 and words in " ".join(err.split()) and out == ""
