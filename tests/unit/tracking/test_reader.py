"""A study read back from MLflow."""

from dataclasses import replace

import pytest
from tracked_trials import DOCUMENT, START_NS, folder_of, result_of, spec_of

from wattune.errors import TrackingError
from wattune.objective import parse_constraint, parse_objective
from wattune.ranking.order import rank
from wattune.tracking.reader import read_study
from wattune.tracking.tracker import Tracker
from wattune.trial import TrialStatus
from wattune.units import NS_PER_S


def test_results_are_read_back_as_they_were_sent(tracker, tmp_path):
    long = spec_of(rank_order=tuple(range(3000)))  # too long for a tag: read from the artifact
    sent = [(spec_of(), result_of(spec_of(), repeat=repeat)) for repeat in range(2)]
    sent += [(spec_of(4), result_of(spec_of(4), TrialStatus.CRASHED)), (long, result_of(long))]
    for spec, result in sent:
        tracker.log_trial(spec, result, folder_of(tmp_path, spec, result))
    found = read_study(tracker.uri, tracker.study_name).results
    key = lambda pair: (pair[1].trial_id, pair[1].repeat)  # noqa: E731
    assert sorted(found, key=key) == sorted(sent, key=key)


def test_a_study_says_from_its_first_trial_on_what_it_is_after(tracker, tmp_path):
    tracker = Tracker(tracker.uri, tracker.study_name, document=DOCUMENT)
    tracker.log_trial(spec_of(), result_of(spec_of()), tmp_path / "none")
    found = read_study(tracker.uri, tracker.study_name)
    assert found.objective == "maximize tokens_per_s"
    assert [parse_constraint(text) for text in found.constraints] == [*map(parse_constraint, DOCUMENT["constraints"])]
    assert len(found.results) == 1


def test_the_delivery_log_holds_all_results_and_later_runs_are_read_beside_it(tracker, tmp_path):
    ranking = rank([], parse_objective("maximize tokens_per_s"), []).to_json()
    before = [(spec_of(n), result_of(spec_of(n))) for n in (1, 2, 4)]
    tracker.log_study(DOCUMENT, ranking, None, before)  # nothing was sent as a run: all comes from the delivery log
    assert read_study(tracker.uri, tracker.study_name).results == before
    late = replace(result_of(spec_of(8)), end_wall_ns=START_NS + 7200 * NS_PER_S)
    again = replace(before[0][1], metrics={"tokens_per_s": 1.0}, end_wall_ns=START_NS + 60 * NS_PER_S)
    tracker.log_trial(spec_of(8), late, tmp_path / "none")
    tracker.log_trial(before[0][0], again, tmp_path / "none")
    found = {result.trial_id: result for _, result in read_study(tracker.uri, tracker.study_name).results}
    assert found == {late.trial_id: late, again.trial_id: again} | {r.trial_id: r for _, r in before[1:]}
    # Another folder of the same study adds to the delivery log; it removes nothing.
    tracker.log_study(DOCUMENT, ranking, None, [(spec_of(8), late)])
    assert len(read_study(tracker.uri, tracker.study_name).results) == 4


def test_an_unknown_study_is_an_error_that_names_the_known_ones(tracker, tmp_path):
    tracker.log_trial(spec_of(), result_of(spec_of()), tmp_path / "none")
    with pytest.raises(TrackingError, match=f'no study "nobody" in .*{tracker.study_name}'):
        read_study(tracker.uri, "nobody")
