"""A study read back from MLflow."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tracked_trials import DOCUMENT, START_NS, folder_of, result_of, spec_of

from wattune.errors import TrackingError
from wattune.objective import Question, parse_constraint
from wattune.ranking.order import rank
from wattune.ranking.sources import Source
from wattune.run import RunStatus
from wattune.storage.files import write_table
from wattune.tracking.reader import read_study
from wattune.tracking.tracker import Tracker
from wattune.units import NS_PER_S


def test_results_are_read_back_as_they_were_sent(tracker, tmp_path):
    long = spec_of(rank_order=tuple(range(3000)))  # too long for a tag: read from the artifact
    sent = [(spec_of(), result_of(spec_of(), repeat=repeat)) for repeat in range(2)]
    sent += [(spec_of(4), result_of(spec_of(4), RunStatus.CRASHED)), (long, result_of(long))]
    for spec, result in sent:
        tracker.log_trial(spec, result, folder_of(tmp_path, spec, result))
    found = read_study(tracker.uri, tracker.study_name)[0]
    key = lambda pair: (pair[1].trial_id, pair[1].repeat)  # noqa: E731
    assert sorted(found, key=key) == sorted(sent, key=key)


def test_a_study_says_from_its_first_trial_on_what_it_is_after(tracker, tmp_path):
    tracker = Tracker(tracker.uri, tracker.study_name, document=DOCUMENT)
    tracker.log_trial(spec_of(), result_of(spec_of()), tmp_path / "none")
    results, _, goals = read_study(tracker.uri, tracker.study_name)
    assert goals["objective"] == "maximize tokens_per_s"
    assert [*map(parse_constraint, goals["constraints"])] == [*map(parse_constraint, DOCUMENT["constraints"])]
    assert len(results) == 1


def test_the_delivery_log_holds_all_results_and_later_runs_are_read_beside_it(tracker, tmp_path):
    ranking = rank([], Question.of("maximize tokens_per_s")).to_json()
    before = [(spec_of(n), result_of(spec_of(n))) for n in (1, 2, 4)]
    tracker.log_study(DOCUMENT, ranking, None, before)  # nothing was sent as a run: all comes from the delivery log
    assert read_study(tracker.uri, tracker.study_name)[0] == before
    late = replace(result_of(spec_of(8)), end_wall_ns=START_NS + 7200 * NS_PER_S)
    again = replace(before[0][1], metrics={"tokens_per_s": 1.0}, end_wall_ns=START_NS + 60 * NS_PER_S)
    tracker.log_trial(spec_of(8), late, tmp_path / "none")
    tracker.log_trial(before[0][0], again, tmp_path / "none")
    found = {result.trial_id: result for _, result in read_study(tracker.uri, tracker.study_name)[0]}
    assert found == {late.trial_id: late, again.trial_id: again} | {r.trial_id: r for _, r in before[1:]}
    # Another folder of the same study adds to the delivery log; it removes nothing.
    tracker.log_study(DOCUMENT, ranking, None, [(spec_of(8), late)])
    assert len(read_study(tracker.uri, tracker.study_name)[0]) == 4


def test_an_unknown_study_is_an_error_that_names_the_known_ones(tracker, tmp_path):
    tracker.log_trial(spec_of(), result_of(spec_of()), tmp_path / "none")
    with pytest.raises(TrackingError, match=f'no study "nobody" in .*{tracker.study_name}'):
        read_study(tracker.uri, "nobody")


def test_a_damaged_row_or_run_costs_itself_alone(tracker, client, tmp_path):
    ranking = rank([], Question.of("maximize tokens_per_s")).to_json()
    pairs = {size: (spec_of(size), result_of(spec_of(size))) for size in (1, 2, 4, 8)}
    for size in (4, 8):
        tracker.log_trial(*pairs[size], tmp_path / "none")
    tracker.log_study(DOCUMENT, ranking, None, [pairs[1], pairs[2], pairs[4]])
    rewrite_log(client, tracker, {pairs[2][1].trial_id: "{", pairs[4][1].trial_id: '{"status": 7}'})
    (run,) = (one for one in runs_of(client, tracker) if one.data.tags.get("trial_id") == pairs[8][1].trial_id)
    client.set_tag(run.info.run_id, "wattune.run", "[]")
    results, reasons, _ = read_study(tracker.uri, tracker.study_name)
    assert {result.trial_id for _, result in results} == {pairs[1][1].trial_id, pairs[4][1].trial_id}, (
        "the fourth is damaged in the log and whole as a run"
    )
    assert reasons.keys() == {f"{pairs[size][1].trial_id}-0" for size in (2, 8)}
    assert all("is damaged" in reason for reason in reasons.values())
    assert len(Source.of_store(tracker.uri, tracker.study_name).unreadable) == 2


def test_where_nothing_can_be_read_the_reason_is_the_error(tracker, client, tmp_path):
    spec = spec_of()
    tracker.log_trial(spec, result_of(spec), tmp_path / "none")
    (run,) = (one for one in runs_of(client, tracker) if "trial_id" in one.data.tags)
    client.set_tag(run.info.run_id, "wattune.spec", "{}")
    with pytest.raises(TrackingError, match="is damaged"):
        read_study(tracker.uri, tracker.study_name)


def test_a_store_of_an_earlier_format_is_one_line(tracker, client, tmp_path):
    tracker.log_trial(spec_of(), result_of(spec_of()), tmp_path / "none")
    client.set_tag(parent_of(client, tracker), "wattune.format", "3")
    with pytest.raises(TrackingError, match=rf"^study {tracker.study_name} in .*: written before 0\.1\.0"):
        read_study(tracker.uri, tracker.study_name)
    with pytest.raises(TrackingError, match=r"written before 0\.1\.0"):
        Tracker(tracker.uri, tracker.study_name).delivered()


def test_a_damaged_delivery_log_is_made_up_for_by_the_runs(tracker, client, tmp_path):
    ranking = rank([], Question.of("maximize tokens_per_s")).to_json()
    pair = spec_of(), result_of(spec_of())
    tracker.log_trial(*pair, tmp_path / "none")
    tracker.log_study(DOCUMENT, ranking, None, [pair])
    client.log_text(parent_of(client, tracker), "PAR1 and no more", "results.parquet")
    assert read_study(tracker.uri, tracker.study_name)[0] == [pair]
    tracker.log_study(DOCUMENT, ranking, None, [pair])
    assert read_study(tracker.uri, tracker.study_name)[0] == [pair]


def runs_of(client, tracker):
    experiment = client.get_experiment_by_name(tracker.study_name)
    return list(client.search_runs([experiment.experiment_id]))


def parent_of(client, tracker) -> str:
    return next(one.info.run_id for one in runs_of(client, tracker) if "wattune.study" in one.data.tags)


def rewrite_log(client, tracker, results: dict[str, str]) -> None:
    """Damages rows of the delivery log, by trial."""
    parent_id = parent_of(client, tracker)
    with TemporaryDirectory() as folder:
        path = client.download_artifacts(parent_id, "results.parquet", folder)
        rows = pq.read_table(path).to_pylist()
        for row in rows:
            row["result"] = results.get(row["trial"].removesuffix("-0"), row["result"])
        write_table(Path(path), pa.Table.from_pylist(rows))
        client.log_artifact(parent_id, path)
