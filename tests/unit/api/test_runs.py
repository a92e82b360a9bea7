"""Previews of a run, and bounds that are refused: nothing is started, nothing is written."""

import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml
from specs import made_run, store_run
from without_plotly import hide_plotly

import wattune
import wattune.api
from wattune.api import preview
from wattune.api.beforehand import Beforehand
from wattune.api.environment import environment_tags, git_commit
from wattune.api.runs import StudyController, StudyRun, _hours_until
from wattune.api.spaces import StudyPlan
from wattune.cli import app
from wattune.cli.shell import exit_code_of
from wattune.errors import NothingToTryError, PlanError
from wattune.orchestrate.scheduling.durations import BESIDE_STEPS_S
from wattune.run import Numbers, RunStatus
from wattune.search.strategies.protocol import Strategy
from wattune.storage.study import StudyFolder

ROOT = Path(__file__).parents[3]
SPACE: dict[str, Any] = {
    **yaml.safe_load((ROOT / "search_spaces" / "cpu_smoke.yaml").read_text()),
    "search": {"strategy": "grid"},  # asks for every trial at once, so that a preview knows them
}


def fitting(planned: StudyPlan, study: StudyFolder) -> Beforehand:
    """Returns what is known of the plans that fit their devices."""
    return Beforehand(planned, study.path.parent).fitting(study)


def test_a_preview_counts_what_is_left_and_writes_nothing(tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    planned = wattune.plan(SPACE)
    whole = preview(planned, storage=str(storage))
    repeats = planned.spec.measure.repeats
    assert whole.num_left - whole.num_references - whole.num_finalists == planned.num_trials * repeats
    assert whole.done == {} and not storage.exists()

    study = StudyFolder.create(storage, planned.name, planned.spec.document)
    spec = planned.kept[0].spec
    folder = study.trial(spec.trial_id, 0)
    folder.write_spec(spec)
    files = sorted(storage.rglob("*"))
    begun = preview(planned, storage=str(storage))
    assert (begun.num_left, begun.done) == (whole.num_left, {})  # it runs, or was killed: either way it is left
    assert sorted(storage.rglob("*")) == files
    folder.write_result(made_run(spec, status=RunStatus.CRASHED, reason="x"))
    left = preview(planned, storage=str(storage), max_trials=2)
    assert (left.num_left, left.num_now) == (whole.num_left - repeats, 2)
    assert left.done == {RunStatus.CRASHED: 1}


FULL: dict[str, Any] = {
    "study": "full",
    "model": {"name": "mixtral_8x7b", "num_layers": 4},
    "cluster": {"device": "h100_sxm", "num_nodes": 1, "devices_per_node": 2},
    "engine": "torch",
    "workload": {"mode": "pretrain", "seq_len": 4096, "global_batch_size": 8, "routing": "balanced"},
    "space": {"ep": [1, 2], "pp": [1, 2], "micro_batch_size": [1, 2, 4], "sharding": ["none", "zero1", "zero3"]},
    "objective": "maximize tokens_per_s",
}
"""Mixture on two H100: some of its plans fill them."""


def test_a_study_runs_what_its_estimate_keeps(tmp_path: Path) -> None:
    planned = wattune.plan(FULL)
    kept = {one.trial_id for one in wattune.api.forecast(planned, storage=str(tmp_path)).kept}
    found = preview(planned, storage=str(tmp_path))
    assert 0 < len(kept) < len(planned.kept) and found.num_kept == len(kept)
    assert preview(planned, storage=str(tmp_path), try_all=True).num_kept == len(planned.kept)
    for strategy in ("grid", "random", "model_guided"):
        known = fitting(wattune.plan({**FULL, "search": {"strategy": strategy}}), StudyFolder(tmp_path / "full"))
        assert {one.trial_id for one in known.strategy().ask(100)} <= kept
    rejected = [one for one in known.planned.rejected if one.rule == "memory"]
    assert len(rejected) == len(planned.kept) - len(kept) and "h100_sxm leaves a program 83.3 GB" in rejected[0].reason


def test_what_began_stays_in_its_study_whatever_is_estimated(tmp_path: Path) -> None:
    planned = wattune.plan(FULL)
    study = StudyFolder.create(tmp_path, planned.name, planned.spec.document)
    fit = {one.trial_id for one in fitting(planned, study).planned.kept}
    full = next(one.spec for one in planned.kept if one.trial_id not in fit)
    study.trial(full.trial_id, 0).write_spec(full)
    assert {one.trial_id for one in fitting(planned, study).planned.kept} == fit | {full.trial_id}
    named = {**FULL, "search": {"strategy": "grid", "reference": full.trial_id}}
    known = fitting(wattune.plan(named), StudyFolder(tmp_path / "other"))
    assert known.planned.reference == full, "who names a reference trial gets it"


def test_a_space_of_which_nothing_fits_is_refused_with_the_bytes(tmp_path: Path) -> None:
    nothing = {**FULL, "model": {"name": "mixtral_8x7b"}}
    with pytest.raises(NothingToTryError, match=r"rejected \(memory .*") as error:
        preview(nothing, storage=str(tmp_path))
    assert "needs" in str(error.value) and "use a larger tp or pp" in str(error.value)
    assert not (tmp_path / "full").exists()


def test_a_race_is_previewed_and_its_reference_trial_is_an_ordinary_one(tmp_path: Path) -> None:
    raced = {**SPACE["search"], "finalists": {"until": 0.95, "max_share": 0.5}}
    num_trials = wattune.plan(SPACE).num_trials
    asked = preview({**SPACE, "search": raced}, storage=str(tmp_path))
    assert asked.num_race == num_trials // 2 and asked.num_left == num_trials + asked.num_race
    often = {**SPACE, "measure": {**SPACE["measure"], "reference_every": 2}}
    plain = preview({**often, "measure": {**often["measure"], "reference_every": 0}}, storage=str(tmp_path))
    assert preview(often, storage=str(tmp_path)).num_references == 2 + (plain.num_left - 1) // 2


def test_a_preview_refuses_what_a_run_refuses(tmp_path: Path) -> None:
    planned = wattune.plan(SPACE)
    StudyFolder.create(tmp_path, planned.name, planned.spec.document)
    other = {**SPACE, "cluster": {**SPACE["cluster"], "devices_per_node": 4}}
    for call in (preview, wattune.run_study):
        with pytest.raises(wattune.WattuneError, match=r"cluster\.devices_per_node: stored 2, given 4; keep a stored"):
            call(other, storage=str(tmp_path))
    changed = preview({**SPACE, "objective": "minimize step_time_s"}, storage=str(tmp_path))
    assert changed.changes == ("objective: maximize tokens_per_s -> minimize step_time_s",)


def test_a_start_that_fails_makes_no_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(_address: str | None, _beside: object) -> None:
        raise wattune.WattuneError("no cluster")

    monkeypatch.setattr("wattune.orchestrate.cluster.connect", unreachable)
    with pytest.raises(wattune.WattuneError, match="no cluster"):
        wattune.run_study(SPACE, storage=str(tmp_path / "storage"))
    assert list(tmp_path.iterdir()) == []


def test_devices_that_cannot_be_here_are_said_before_anything_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[object] = []

    def tried(space: dict[str, Any], **more: Any) -> wattune.WattuneError:
        heard.clear()
        with pytest.raises(wattune.WattuneError) as raised:
            wattune.run_study(space, storage=str(tmp_path / "storage"), listener=heard.append, **more)
        return raised.value

    def unreachable(_address: str | None, _beside: object) -> None:
        raise wattune.WattuneError("no cluster")

    monkeypatch.setattr("wattune.orchestrate.cluster.connect", unreachable)
    monkeypatch.setattr("wattune.api.environment.has_nvml", lambda: False)
    refused = tried(FULL)
    assert "1x2 h100_sxm needs 1 node(s) with 2 device(s)" in str(refused) and refused.exit_code == 2
    assert "this machine is one node without NVIDIA GPUs; shrink" in str(refused)
    assert heard == [] and list(tmp_path.iterdir()) == []
    two_nodes = {**SPACE, "cluster": {**SPACE["cluster"], "num_nodes": 2}}
    assert "this machine is one node" in str(tried(two_nodes)) and heard == []
    # Nodes may be elsewhere, or come later, and the driver alone knows which GPUs it has.
    for more in ({"address": "head:6379"}, {"wait_nodes": 1.0}):
        assert str(tried(FULL, **more)) == "no cluster" and heard
    assert wattune.run_study(FULL, storage=str(tmp_path / "storage"), max_hours=0.0).num_left
    monkeypatch.setattr("wattune.api.environment.has_nvml", lambda: True)
    assert str(tried(FULL)) == "no cluster" and heard
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    monkeypatch.setattr("wattune.api.environment.has_nvml", lambda: False)
    assert str(tried(FULL)) == "no cluster" and heard


def test_a_preview_says_how_many_of_the_kept_are_tried_and_which_comes_first(tmp_path: Path) -> None:
    some = {**SPACE, "search": {"strategy": "random", "num_trials": 3}}
    found = preview(some, storage=str(tmp_path))
    assert (found.num_drawn, found.num_kept) == (3, 10) and len(found.first) == 3
    assert not found.estimated, "processors have no estimates"


def test_device_hours_come_from_estimates_and_trials_beyond_their_time_out_are_said(tmp_path: Path) -> None:
    large = {
        "study": "large",
        "model": {"name": "llama3_70b"},
        "cluster": {"device": "h200_sxm", "num_nodes": 16, "devices_per_node": 8},
        "engine": "megatron",
        "workload": {"seq_len": 8192, "global_batch_size": 2048},
        "space": {"tp": [4, 8], "pp": [4], "sharding": ["zero1"]},
        "measure": {"timeout_s": 900},
        "objective": "maximize tokens_per_s",
    }
    found = preview(large, storage=str(tmp_path))
    assert found.estimated and found.num_timeouts == found.num_left == 2 and found.longest_s > 900
    start_s = BESIDE_STEPS_S["new_workers"] + BESIDE_STEPS_S["new_graphs"]
    assert found.device_s == pytest.approx(128 * (2 * 900 + start_s)), "ended at the time-out"
    patient = preview({**large, "measure": {"timeout_s": 36000}}, storage=str(tmp_path))
    estimated = wattune.plan(large)
    times_s = [wattune.api.forecast(estimated).estimates.columns["step_time_s"].value]
    steps = 2 + 20 + 1  # the one that is profiled
    assert patient.num_timeouts == 0
    assert patient.device_s == pytest.approx(128 * (steps * float(sum(times_s[0])) + start_s), rel=1e-6)
    chosen = preview({**large, "search": {"strategy": "model_guided", "num_trials": 1}}, storage=str(tmp_path))
    assert chosen.estimated and chosen.device_s == pytest.approx(128 * (900 + BESIDE_STEPS_S["new_workers"]))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        *(
            (bounds, r"got -?[0-9.]+, allowed: ")
            for bounds in ({"max_trials": 0}, {"max_trials": -3}, {"max_hours": -1.0})
        ),
        ({"retry": ["completed"]}, '--retry: got "completed", allowed: crashed, timed_out, out_of'),
    ],
)
def test_a_bound_that_is_none_and_a_status_that_cannot_run_again_are_refused_before_anything_is_written(
    tmp_path: Path, wrong: dict[str, Any], says: str
) -> None:
    for call in (preview, wattune.run_study):
        with pytest.raises(wattune.WattuneError, match=says):
            call(SPACE, storage=str(tmp_path / "storage"), **wrong)
    assert not (tmp_path / "storage").exists()


@pytest.fixture
def stored(tmp_path: Path, store_in: Callable[[Path], str]) -> None:
    """The storage has a tracking store: making one takes most of what a run of no hours does."""
    store_in(tmp_path)


@pytest.mark.usefixtures("stored")
def test_trials_carry_the_scatter_that_earlier_studies_led_to_expect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def controller(study: StudyFolder, strategy: Strategy, run: StudyRun, listener: Any) -> StudyController:
        seen.append(run.numbers)
        return StudyController(study, strategy, run, listener)

    monkeypatch.setattr("wattune.api.runs.StudyController", controller)
    monkeypatch.setattr(Beforehand, "scatter", lambda _: Numbers(power_spread_frac=0.02))
    wattune.run_study(SPACE, storage=str(tmp_path), max_hours=0.0)
    assert seen == [Numbers(space=1, power_spread_frac=0.02)]


@pytest.mark.usefixtures("stored")
def test_a_run_without_plotly_keeps_its_results_and_says_in_one_line_how_to_get_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hide_plotly(monkeypatch)
    arguments = ["run", "--storage", str(tmp_path), "--max-hours", "0", str(ROOT / "search_spaces" / "cpu_smoke.yaml")]
    assert exit_code_of(lambda: app(arguments, standalone_mode=False)) == 0, "the study itself ended well"
    study = StudyFolder(tmp_path / "cpu_smoke")
    assert (study.path / "ranking.parquet").is_file() and not study.report_path.exists()
    shown = capsys.readouterr()
    (line,) = [line for line in shown.err.splitlines() if "report of" in line]
    assert line == (
        "note: the report of cpu_smoke cannot be written: the package plotly is not installed; run `pip install "
        f"plotly`, then `wattune report {study.path}`; results are safe in {study.path}"
    )
    assert "error" not in shown.err and "Traceback" not in shown.err and "Report  " not in shown.out
    monkeypatch.undo()
    wattune.api.report(wattune.load_study(study.path))
    assert study.report_path.is_file()


def test_the_versions_of_the_study_are_not_given_as_those_of_its_ranks() -> None:
    tags = environment_tags()
    assert {name for name in tags if name.startswith("version.")} == {"version.wattune"}
    assert "head.version.ray" in tags and "head.version.torch" not in tags


def test_the_commit_is_of_wattunes_own_checkout_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str, at: Path = tmp_path) -> str:
        own = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(at), *own, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    checkout = tmp_path / "checkout"
    package = checkout / "platform" / "wattune"
    installed = checkout / ".venv" / "lib" / "wattune"
    for folder in (package, installed):
        folder.mkdir(parents=True)
        (folder / "version.py").write_text("")
    assert git_commit(package) == "", "no repository"
    git("init", "-q", str(checkout))
    git("add", "platform", at=checkout)
    git("commit", "-q", "-m", "first", at=checkout)
    assert git_commit(package) == git("rev-parse", "HEAD", at=checkout)
    assert git_commit(installed) == "", "somebody's repository with an environment in it"
    git("rm", "-q", "--cached", "-r", "platform", at=checkout)
    assert git_commit(package) == "", "not a part of that repository"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_commit(package) == "", "no git"


def test_a_preview_counts_trials_that_are_asked_for_again(tmp_path: Path) -> None:
    planned = wattune.plan(SPACE)
    study = StudyFolder.create(tmp_path, planned.name, planned.spec.document)
    for kept, status in zip(planned.kept, (RunStatus.CRASHED, RunStatus.OUT_OF_MEMORY), strict=False):
        store_run(study, kept.spec, made_run(kept.spec, status=status, reason="x"))
    asked = {names: preview(planned, storage=str(tmp_path), retry=names) for names in ((), ("crashed",))}
    assert asked[()].num_again == 0 and asked[()].done == {RunStatus.CRASHED: 1, RunStatus.OUT_OF_MEMORY: 1}
    assert asked["crashed",].num_again == 1 and asked["crashed",].done == {RunStatus.OUT_OF_MEMORY: 1}


NOW = datetime(2026, 11, 22, 22, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("deadline", "hours"),
    [
        ("07:00", 8.5),
        ("23:00", 0.5),
        ("22:30", 24.0),
        ("2026-11-23T22:30", 24.0),
        ("2026-11-22T23:30+00:00", 1.0),
        (NOW + timedelta(hours=2), 2.0),
    ],
)
def test_a_deadline_is_the_next_time_of_that_reading(deadline: str | datetime, hours: float) -> None:
    assert _hours_until(deadline, NOW) == pytest.approx(hours)


@pytest.mark.parametrize(
    ("deadline", "offset_h", "hours"),
    [("18:00Z", 12, 4.5), ("13:29Z", 12, 23 + 59 / 60), ("03:00Z", -14, 13.5), ("18:00", 12, 16.5)],
)
def test_a_reading_of_another_zone_is_less_than_a_day_away(deadline: str, offset_h: int, hours: float) -> None:
    now = datetime(2026, 11, 22, 13, 30, tzinfo=UTC).astimezone(timezone(timedelta(hours=offset_h)))
    assert _hours_until(deadline, now) == pytest.approx(hours)


@pytest.fixture
def in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("in_berlin")
@pytest.mark.parametrize("deadline", ["07:00", "2026-10-25T07:00", "2026-10-25T07:00+01:00"])
def test_the_night_in_which_summer_time_ends_is_an_hour_longer(deadline: str) -> None:
    assert _hours_until(deadline, datetime(2026, 10, 24, 22, 0)) == pytest.approx(10)  # noqa: DTZ001 - local


@pytest.mark.parametrize(
    ("deadline", "said"),
    [
        ("tomorrow", 'got "tomorrow", allowed: a time of day such as 07:00'),
        ("25:00", "allowed: a time of day"),
        ("2026-11-22T22:00", "2026-11-22 22:00, which has passed"),
    ],
)
def test_a_deadline_that_cannot_be_kept_is_said(deadline: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        _hours_until(deadline, NOW)


def test_until_decided_a_finished_study_repeats_only_what_may_be_the_best(tmp_path: Path) -> None:
    space = {**SPACE, "objective": "maximize tokens_per_s", "constraints": []}
    space["measure"] = {**SPACE["measure"], "reference_every": 0, "repeats": 1}
    space["search"] = {"strategy": "grid"}

    def left(name: str, lead: float) -> tuple[int, int]:
        planned = wattune.plan({**space, "study": name})
        study = StudyFolder.create(tmp_path, planned.name, planned.spec.document)
        for number, kept in enumerate(planned.kept):
            value = 1000.0 * (lead if number == 0 else 1.0)
            store_run(study, kept.spec, made_run(kept.spec, metrics={"tokens_per_s": value}))
        asked = preview(planned, storage=str(tmp_path), until_decided=True)
        assert preview(planned, storage=str(tmp_path)).num_left == 0
        return asked.num_left, asked.num_race

    assert left("clear", 2.0) == (0, 0)
    tied = left("tied", 1.0)
    assert tied[0] == tied[1] > 0
