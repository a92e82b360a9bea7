"""The ledger of a study: what runs next, what is skipped, what becomes of what did not finish."""

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import model
from wattune.orchestrate.run_study import StudyRun, TrialEvent, _Ledger, _LedgerSearcher
from wattune.plan.axes import Plan
from wattune.search.strategy import make_strategy
from wattune.study import StudyFolder
from wattune.trial import Measure, TrialResult, TrialSpec, TrialStatus, Workload

SPECS = [
    TrialSpec(
        model=model("llama3_8b"),
        cluster=ClusterSpec(device="cpu", devices_per_node=1),
        engine="torch",
        workload=Workload(seq_len=8, global_batch_size=8),
        plan=Plan(micro_batch_size=size),
    )
    for size in (1, 2, 4)
]


@pytest.fixture
def study(tmp_path: Path) -> StudyFolder:
    return StudyFolder.create(tmp_path, "tested", {"study": "tested"})


@pytest.fixture
def heard() -> list[TrialEvent]:
    return []


@pytest.fixture
def ledger(study: StudyFolder, heard: list[TrialEvent]) -> Callable[..., _Ledger]:
    def make(
        *,
        num_trials: int = 3,
        measure: Measure | None = None,
        finalists: Sequence[TrialSpec] = (),
        listener=heard.append,
    ) -> _Ledger:
        run = StudyRun(
            measure=measure or Measure(),
            num_trials=num_trials,
            seed=0,
            limits={},
            tags={"version.wattune": "x"},
            finalists=lambda: finalists,
        )
        return _Ledger(study, make_strategy("grid", SPECS, seed=0), run, listener)

    return make


def finish(study: StudyFolder, spec: TrialSpec, repeat: int = 0, status: TrialStatus = TrialStatus.COMPLETED) -> None:
    folder = study.trial(spec.trial_id, repeat)
    folder.write_spec(spec)
    folder.write_result(TrialResult(trial_id=spec.trial_id, repeat=repeat, status=status))


def drain(ledger: _Ledger, study: StudyFolder) -> list[tuple[int, int, float]]:
    """Runs all that is proposed; micro-batch size, repeat and least seconds of each turn."""
    turns = []
    while (turn := ledger.next(f"t{len(turns)}")) is not None:
        turns.append((turn.spec.plan.micro_batch_size, turn.repeat, turn.measure.min_seconds))
        finish(study, turn.spec, turn.repeat)
        ledger.finish(f"t{len(turns) - 1}", error=False)
    return turns


def test_every_repeat_runs_once_in_order(ledger, study, heard) -> None:
    turns = drain(ledger(measure=Measure(repeats=2, min_seconds=5)), study)
    assert turns == [(size, repeat, 5) for size in (1, 2, 4) for repeat in (0, 1)]
    assert [event.kind for event in heard] == ["started", "finished"] * 6


def test_the_budget_counts_what_was_done_before(ledger, study, heard) -> None:
    finish(study, SPECS[0])
    assert [turn[0] for turn in drain(ledger(num_trials=2), study)] == [2]
    assert [event.kind for event in heard] == ["skipped", "started", "finished"]


@pytest.mark.parametrize(
    ("status", "runs_again"),
    [(TrialStatus.INTERRUPTED, True), (TrialStatus.CRASHED, False), (TrialStatus.ABORTED, False)],
)
def test_only_an_interrupted_trial_runs_again(ledger, study, status: TrialStatus, runs_again: bool) -> None:
    finish(study, SPECS[0], status=status)
    assert (1 in [turn[0] for turn in drain(ledger(), study)]) is runs_again


def test_finalists_run_once_more_and_longer(ledger, study) -> None:
    measure = Measure(min_seconds=5, soak_finalists=1, soak_seconds=60)
    turns = drain(ledger(measure=measure, finalists=[SPECS[1], SPECS[0]]), study)
    assert turns == [(1, 0, 5), (2, 0, 5), (4, 0, 5), (2, 1, 60)]


@pytest.mark.parametrize("error", [True, False])
def test_a_trial_that_left_no_result_is_crashed(ledger, study, error: bool) -> None:
    book = ledger(num_trials=1)
    turn = book.next("t0")
    book.finish("t0", error=error)
    result = study.trial(turn.spec.trial_id, 0).result()
    assert result is not None and result.status is TrialStatus.CRASHED and result.reason
    assert result.tags == {"version.wattune": "x"}


def test_an_interrupt_marks_what_runs_and_keeps_what_arrived(ledger, study, heard) -> None:
    book = ledger()
    first, second = book.next("t0"), book.next("t1")
    finish(study, first.spec)
    book.interrupt()
    assert study.trial(first.spec.trial_id, 0).result().status is TrialStatus.COMPLETED
    assert study.trial(second.spec.trial_id, 0).result().status is TrialStatus.INTERRUPTED
    assert heard[-1].result.status is TrialStatus.INTERRUPTED


def test_a_listener_that_fails_stops_nothing(ledger, study, caplog: pytest.LogCaptureFixture) -> None:
    def broken(event: TrialEvent) -> None:
        raise OSError("no terminal")

    assert len(drain(ledger(listener=broken), study)) == 3
    assert "a listener failed" in caplog.text


def test_the_searcher_speaks_tunes_language_and_survives_its_pickling(ledger, study) -> None:
    searcher = _LedgerSearcher(ledger(num_trials=1))
    config = searcher.suggest("t0")
    assert TrialSpec.from_json(config["spec"]) == SPECS[0]
    assert (config["repeat"], Measure(**config["measure"])) == (0, Measure())
    finish(study, SPECS[0])
    searcher.on_trial_complete("t0", {"done_trials": 1})
    assert searcher.suggest("t1") == "FINISHED"
    pickle.loads(pickle.dumps(searcher))
