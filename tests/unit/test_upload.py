"""Sending beside a study: one place that fails holds neither the study nor the other place back."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from small_study import make_study, ranking_of, without_steps
from study_files import DOCUMENT, SPEC, measured, result_of

from wattune import upload
from wattune.errors import PlanError, TrackingError
from wattune.objective import Question
from wattune.ranking.order import rank
from wattune.run import Run, RunStatus
from wattune.storage.measured import MeasuredFolder
from wattune.storage.remote import RemoteStorage
from wattune.storage.study import StudyFolder
from wattune.tracking.reader import read_study
from wattune.tracking.tracker import Sent, Tracker
from wattune.upload import NO_CHARTS, Delivery, Uploader, charts_of, send_all, to_storage


@pytest.fixture(autouse=True)
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The telemetry of these trials is a stand-in that nothing can be drawn of."""
    monkeypatch.setattr(upload, "charts_of", lambda *_: NO_CHARTS)


@pytest.fixture
def here(tmp_path: Path) -> StudyFolder:
    return StudyFolder.create(tmp_path / "here", "mine", DOCUMENT)


class FakeTracker:
    """The part of a tracker that `Delivery` needs."""

    def __init__(self, problem: str = "") -> None:
        self.problem, self.trials, self.studies = problem, [], 0

    def log_trial(self, spec, result, folder, series, picture) -> bool:
        if self.problem:
            raise TrackingError(self.problem)
        self.trials.append(result.repeat)
        return True

    def log_study(self, *_: object) -> None:
        self.studies += 1

    def delivered(self) -> dict[tuple[str, int], Sent]:
        return {(SPEC.trial_id, repeat): Sent(attempt=1, end_ms=2**62, quality=("", "")) for repeat in self.trials}


class Ranking:
    def to_json(self) -> dict[str, object]:
        return {}


def attempts_sent(uri: str, study: StudyFolder) -> dict[tuple[str, int], int]:
    return {key: sent.attempt for key, sent in Tracker(uri, study.name).delivered().items()}


def test_tables_of_another_kind_cost_a_trial_its_charts_alone(here: StudyFolder) -> None:
    folder = here.trial("0" * 12, 0)
    recorded = MeasuredFolder(Path(__file__).parents[1] / "golden" / "h200x4" / "dp4")
    folder.write_telemetry("node0", recorded.telemetry(), {})
    folder.write_spans(recorded.spans())
    series, svg = charts_of(folder, SPEC, result_of(tokens_per_s=131_200.0))
    assert list(series) == ["node0/node_device_power_w"]
    (power_w,) = [watts for _, watts in series.values()]
    picture = ElementTree.fromstring(svg)
    texts = [one.text for one in picture.iter() if one.tag.endswith("text")]
    assert texts[:3] == [f"{SPEC.label} #0", "131.2 k/s tokens", "node power [W]"] and "step [ms]" in texts
    assert {one.get("stroke") for one in picture.iter() if one.tag.endswith("polyline")} == {"#0072B2", "#1b2430"}
    assert power_w.max() > 2000
    folder.write_spans(recorded.telemetry()["fast"])
    assert charts_of(folder, SPEC, result_of()) == NO_CHARTS


def test_a_trial_without_steps_is_drawn_over_the_run_of_its_command(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    best = ranking_of(study).best
    result = without_steps(study, best.trial_id)
    series, svg = charts_of(study.trial(best.trial_id, 0), best.spec, result)
    ((_, power_w),) = series.values()
    assert power_w.max() > 2000
    assert sum(one.tag.endswith("polyline") for one in ElementTree.fromstring(svg).iter()) == 1


def test_both_places_get_every_trial_and_the_study(here: StudyFolder, tmp_path: Path) -> None:
    tracker, url = FakeTracker(), (tmp_path / "there").as_uri()
    with Delivery(here, tracker, RemoteStorage(url)) as delivery:
        for repeat in (0, 1):
            result = result_of(repeat=repeat)
            measured(here, result)
            delivery.send(SPEC, result)
        here.write_report("<html>")
        delivery.conclude(Ranking())
    assert (delivery.tracking_problem, delivery.storage_problem) == ("", "")
    assert tracker.trials == [0, 1] and tracker.studies == 1
    there = tmp_path / "there" / "mine"
    assert {path.name for path in there.iterdir()} == {"study.yaml", "space.1.yaml", "report.html", "trials"}
    assert len(list(there.glob("trials/*/run.json"))) == 2


@pytest.mark.parametrize("call", ["this", "next"])
def test_a_trial_that_completes_while_its_study_is_stopped_is_tracked_as_completed(
    here: StudyFolder, tmp_path: Path, store_in: Callable[[Path], str], call: str
) -> None:
    """The controller says interrupted and tells the store so; then the trial's own result arrives and stays."""
    uri, stopped = store_in(tmp_path), result_of(RunStatus.INTERRUPTED)
    completed = replace(result_of(), start_wall_ns=10**18, end_wall_ns=10**18 + 10**9)
    ranking = rank([(SPEC, stopped)], Question.of(DOCUMENT["objective"]))

    def tracked() -> list[RunStatus]:
        return [result.status for _, result in read_study(uri, here.name)[0]]

    measured(here, stopped)
    here.write_report("<html>")
    with Delivery(here, Tracker(uri, here.name, document=DOCUMENT), None) as delivery:
        delivery.send(SPEC, stopped)
        sent = threading.Event()
        delivery._trackers["tracking"][1].call(sent.set)
        assert sent.wait(60)
        if call == "next":
            delivery.conclude(ranking)
        assert tracked() == ["interrupted"]
        measured(here, completed)
        if call == "this":
            delivery.conclude(ranking)
    if call == "next":
        with Delivery(here, Tracker(uri, here.name, document=DOCUMENT), None) as delivery:
            delivery.conclude(ranking)
    assert delivery.tracking_problem == ""
    assert tracked() == ["completed"]
    assert attempts_sent(uri, here) == {(SPEC.trial_id, 0): 1}


def test_a_further_run_sends_what_a_killed_one_had_not(
    here: StudyFolder, tmp_path: Path, store_in: Callable[[Path], str]
) -> None:
    uri = store_in(tmp_path)
    for repeat in range(3):
        measured(here, result_of(repeat=repeat))
    here.write_report("<html>")
    Tracker(uri, here.name, document=DOCUMENT).log_trial(SPEC, result_of(repeat=1), here.trial(SPEC.trial_id, 1).path)
    before = attempts_sent(uri, here)
    assert before == {(SPEC.trial_id, 1): 1}
    ranking = rank(here.results(), Question.of(DOCUMENT["objective"]))
    for _ in range(2):  # the second sends nothing more
        with Delivery(here, Tracker(uri, here.name, document=DOCUMENT), None) as delivery:
            delivery.conclude(ranking)
        assert delivery.tracking_problem == ""
        assert attempts_sent(uri, here) == {(SPEC.trial_id, repeat): 1 for repeat in range(3)}
    assert sorted(result.repeat for _, result in read_study(uri, here.name)[0]) == [0, 1, 2]


@pytest.mark.parametrize("dead", ["tracking", "storage"])
def test_a_dead_place_is_a_problem_of_its_own(here: StudyFolder, tmp_path: Path, dead: str) -> None:
    tracker = FakeTracker("no server" if dead == "tracking" else "")
    url = "ftp://127.0.0.1:1/x" if dead == "storage" else (tmp_path / "there").as_uri()
    result = result_of()
    measured(here, result)
    with Delivery(here, tracker, RemoteStorage(url)) as delivery:
        delivery.send(SPEC, result)
        delivery.conclude(Ranking())
    assert (delivery.tracking_problem == "no server") is (dead == "tracking")
    assert ("wattune sync" in delivery.storage_problem) is (dead == "storage")
    assert tracker.studies == 1


def test_a_further_tracker_gets_what_the_first_gets_whatever_becomes_of_either(here: StudyFolder) -> None:
    dead, alive = FakeTracker("no server"), FakeTracker()
    measured(here, result_of())
    for first, further in ((dead, alive), (alive, dead)):
        with Delivery(here, first, None, {"wandb": further}) as delivery:
            delivery.send(SPEC, result_of())
            delivery.conclude(Ranking())
        assert delivery.tracking_problem == "no server"
    assert set(alive.trials) == {0} and alive.studies == 2 and dead.studies == 2


def test_what_an_earlier_run_could_not_store_is_stored_and_what_others_did_is_fetched(here, tmp_path) -> None:
    url = (tmp_path / "there").as_uri()
    other = StudyFolder.create(tmp_path / "other", "mine", DOCUMENT)
    remote = RemoteStorage(url)
    remote.send_study(other)
    remote.send_trial("mine", measured(other, result_of(repeat=7)))
    result = result_of()
    measured(here, result)
    with Delivery(here, FakeTracker(), RemoteStorage(url)) as delivery:
        assert here.trial(SPEC.trial_id, 7).result() is not None
        delivery.send_again(SPEC, result)
    assert len(list((tmp_path / "there" / "mine").glob("trials/*/run.json"))) == 2


def test_sending_takes_no_time_of_the_study() -> None:
    release, sent = threading.Event(), []
    with Uploader("slow", lambda _spec, _result: sent.append(release.wait(60))) as uploader:
        for _ in range(100):
            uploader.send(SPEC, result_of())
        assert sent == []
        release.set()
    assert uploader.problem == "" and sent == [True] * 100


def test_sync_goes_on_with_the_other_place_and_then_says_what_failed(here: StudyFolder, tmp_path: Path) -> None:
    measured(here, result_of())
    concluded = []

    def refuse(_spec: object, _result: object) -> bool:
        raise TrackingError("refused")

    remote = RemoteStorage((tmp_path / "there").as_uri())
    senders = {"sent": (refuse, list), "stored": (to_storage(here, remote), lambda: concluded.append(1))}
    with pytest.raises(TrackingError, match="refused"):
        send_all(here, senders)
    assert concluded == [1] and len(list((tmp_path / "there").rglob("run.json"))) == 1
    assert send_all(here, {"stored": senders["stored"]}) == {"stored": 0}


def test_sync_sends_all_it_can_read_and_then_names_the_rest(here: StudyFolder) -> None:
    broken = measured(here, result_of())
    measured(here, result_of(repeat=1))
    (broken.path / "run.json").write_text("{")
    sent, concluded = [], []

    def send(_spec: object, result: Run) -> bool:
        sent.append(result.repeat)
        return True

    with pytest.raises(PlanError, match=f"{broken.path}: no trial of this version"):
        send_all(here, {"sent": (send, lambda: concluded.append(1))})
    assert sent == [1] and concluded == [1]


def test_what_nobody_foresaw_is_a_problem_and_the_rest_is_sent() -> None:
    sent = []

    def send(_spec: object, result: object) -> bool:
        if result.repeat == 0:
            raise KeyError("node")
        sent.append(result.repeat)
        return True

    with Uploader("odd", send) as uploader:
        for repeat in (0, 1):
            uploader.send(SPEC, result_of(repeat=repeat))
    assert sent == [1] and "KeyError" in uploader.problem
