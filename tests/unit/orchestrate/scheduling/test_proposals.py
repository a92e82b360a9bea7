"""Proposals: earlier calls' trials first, or last where they may have ended their call, and new ones between them."""

from wattune.fidelity import FIRST_REFERENCE_REPEAT, FIRST_SOAK_REPEAT
from wattune.orchestrate.scheduling.proposals import Proposals
from wattune.run import Run, RunStatus
from wattune.trial import TrialSpec


def stopped(spec: TrialSpec, repeat: int = 0) -> Run:
    return Run(trial_id=spec.trial_id, repeat=repeat, status=RunStatus.INTERRUPTED, reason="stopped")


def drained(proposals: Proposals, room: int) -> list[TrialSpec]:
    found = []
    while room and (more := proposals.next(room, None)):
        found += more
        room -= 1
    return found


def test_trials_of_earlier_calls_keep_their_places(make_specs, learner) -> None:
    specs = make_specs(6)
    proposals = Proposals(learner(specs))
    for spec, runs_last in ((specs[5], True), (specs[4], False), (specs[3], False)):
        proposals.add(spec, stopped(spec), runs_last=runs_last)
    proposals.keep({specs[3].trial_id}, lambda trial_id: True)
    assert drained(proposals, 4) == [specs[4], specs[0], specs[1], specs[5]]


def test_what_the_space_lost_and_other_runs_than_the_searchs_are_not_proposed(make_specs, learner) -> None:
    lost, reference, soak = make_specs(3)
    proposals = Proposals(learner([]))
    proposals.add(lost, stopped(lost), runs_last=False)
    proposals.add(reference, stopped(reference, FIRST_REFERENCE_REPEAT), runs_last=False)
    proposals.add(soak, stopped(soak, FIRST_SOAK_REPEAT), runs_last=True)
    proposals.keep(set(), lambda trial_id: trial_id != lost.trial_id)
    assert drained(proposals, 3) == []
