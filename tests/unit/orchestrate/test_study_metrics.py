"""Metrics of a study: what a scrape says after the events of a call, counted here by hand."""

from collections import defaultdict
from dataclasses import replace

import pytest
from study_files import SPEC, result_of

from wattune.orchestrate import study_metrics
from wattune.orchestrate.events import TrialEvent
from wattune.orchestrate.failures import Cause, Failure
from wattune.orchestrate.study_metrics import STUDY_METRICS, StudyMetrics
from wattune.run import Numbers, Run, RunStatus

S = 10**9


class Page:
    """Takes what is set and counted, as Ray's page shows it: a counter is the sum."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], float] = defaultdict(float)

    def metric(self, name: str, text: str, *, tag_keys: tuple[str, ...]):
        page = self

        def key(tags: dict[str, str]) -> tuple[str, str]:
            assert set(tags) == set(tag_keys) and tags["study"] == "mine" and text.endswith(".")
            return name.removeprefix("wattune_study_"), next((tags[one] for one in tag_keys if one != "study"), "")

        class Metric:
            def set(self, value: float, tags: dict[str, str]) -> None:
                page.values[key(tags)] = value

            def inc(self, value: float = 1.0, tags: dict[str, str] = {}) -> None:  # noqa: B006
                assert value > 0, "Ray refuses others"
                page.values[key(tags)] += value

        return Metric()


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Page:
    page = Page()
    fakes = {name: (page.metric, text, labels) for name, (_, text, labels) in STUDY_METRICS.items()}
    monkeypatch.setattr(study_metrics, "STUDY_METRICS", fakes)
    return page


def ended(status: RunStatus, repeat: int, *, window_s: float = 0.0, wait_s: float = 0.0, length_s: float = 10.0) -> Run:
    numbers = Numbers(measure_time_s=window_s, wait_time_s=wait_s, node_wait_s=7.0 if wait_s else None)
    return replace(result_of(status, repeat), numbers=numbers, start_wall_ns=S, end_wall_ns=round((1 + length_s) * S))


def test_a_call_is_counted_by_state_part_and_cause(page: Page) -> None:
    heard = StudyMetrics("mine")

    def event(kind: str, repeat: int, result: Run | None = None, left: int | None = None, *, again: bool = False):
        heard(TrialEvent(kind=kind, spec=SPEC, repeat=repeat, result=result, num_left=left, again=again))

    event("skipped", 0, ended(RunStatus.COMPLETED, 0, window_s=9.0), 5)
    for repeat in (1, 2, 3):
        event("started", repeat, None, 5 - repeat)
    assert page.values["trials", "running"] == 3 and page.values["trials", "waiting"] == 2
    event("finished", 1, ended(RunStatus.COMPLETED, 1, window_s=4.0, wait_s=2.0), 2)
    lost = Failure(Cause.NODE_LOST, "node n0 left", ("n0",)).of(ended(RunStatus.CRASHED, 2, length_s=6.0))
    event("finished", 2, lost, 3, again=True)
    event("finished", 3, ended(RunStatus.OUT_OF_MEMORY, 3, length_s=2.0), 3)
    event("finished", 4, ended(RunStatus.REJECTED, 4, length_s=0.0), 2)  # it never started
    assert {key: value for key, value in page.values.items() if value} == {
        ("trials", "waiting"): 2,
        ("trials", "completed"): 2,
        ("trials", "out_of_memory"): 1,
        ("trials", "rejected"): 1,
        ("failures", "node_lost"): 1,
        ("failures", "out_of_memory"): 1,
        ("seconds", "window"): 4.0,
        ("seconds", "wait"): 2.0,
        ("seconds", "for nodes"): 7.0,  # in no node's time, and so in no share of it
        ("seconds", "other"): 6.0 + 6.0 + 2.0,
        ("measured_ratio", ""): pytest.approx(4.0 / 20.0),
    }
    assert page.values["trials", "running"] == 0
