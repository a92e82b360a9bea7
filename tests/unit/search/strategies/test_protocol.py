"""Every status of a trial teaches a strategy success, failure or nothing."""

from wattune.run import RunStatus
from wattune.search.strategies.protocol import FAILED, TEACHES_NOTHING, draw


def test_every_status_has_one_meaning():
    rest = set(RunStatus) - FAILED - TEACHES_NOTHING
    assert rest == {RunStatus.COMPLETED, RunStatus.INVALID}
    assert not FAILED & TEACHES_NOTHING


def test_failures_of_the_cluster_teach_nothing():
    assert RunStatus.INFRA_FAILED in TEACHES_NOTHING and RunStatus.OUT_OF_MEMORY in FAILED


def test_a_draw_is_the_same_everywhere():
    assert draw(3, "abc").hex()[:8] == "265d5c11"
    assert draw(3, "abc") != draw(4, "abc")
