"""Shares that are often 0: P falls in what was measured, and other plans say nothing of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_trials import FASTEST, asked, trial

from wattune.metrics import METRICS
from wattune.objective import parse_constraint
from wattune.ranking.assessment import Verdict
from wattune.ranking.order import Ranking, rank
from wattune.ranking.shares import is_share, keeps_probability, settles_probability, size_of

THROTTLED = parse_constraint("throttle_power_frac <= 0.01")

share = st.sampled_from([0.0, 0.0, 0.004, 0.009, 0.02]) | st.floats(0.0, 1.0)
shares = st.lists(share, min_size=1, max_size=5)


def likely(values: list[float], bound: float = 0.01, *, below: bool = True, waiting: float = 0.0) -> float:
    return keeps_probability(values, bound, below=below, waiting=waiting)


def ranked(*figures: float) -> Ranking:
    pairs = [trial(n, {"tokens_per_s": 100.0, THROTTLED.metric: each}) for n, each in enumerate(figures, start=1)]
    return rank(pairs, asked(FASTEST, THROTTLED))


@given(shares, st.integers(0, 4), st.floats(0.0, 0.5), st.floats(0.0, 1.2), st.sampled_from([0.0, 0.4, 1.0]))
def test_p_falls_in_every_figure_that_was_measured(
    values: list[float], place: int, more: float, bound: float, waiting: float
) -> None:
    raised = list(values)
    raised[place % len(values)] = min(raised[place % len(values)] + more, 1.0)
    before, after = (likely(each, bound, waiting=waiting) for each in (values, raised))
    assert after <= before + 1e-6
    assert likely(values, bound + 0.05, waiting=waiting) >= before - 1e-6
    from_below = likely(values, bound, below=False, waiting=waiting)
    assert from_below == (1.0 if bound <= 0.0 else pytest.approx(1.0 - before))


def test_five_plans_that_never_throttled_keep_their_bound() -> None:
    """One run at 0 says 0.95, since levels are tenths apart and a run scatters by hundredths."""
    assert [row.verdict for row in ranked(0.0, 0.0, 0.0, 0.0, 0.0).trials] == [Verdict.FEASIBLE] * 5
    assert 0.95 < likely([0.0]) < 0.96


def test_a_plan_close_to_the_bound_is_never_surer_than_one_at_0() -> None:
    assert likely([0.009]) < 0.6 < likely([0.0])
    assert [row.margins[0].got for row in ranked(0.0, 0.009).undecided] == [0.009]


def test_a_strange_plan_changes_no_other_plans_verdict() -> None:
    quiet = [0.0, 0.0, 0.009]
    alone = {row.trial_id: row.margins for row in ranked(*quiet).trials}
    beside = {row.trial_id: row.margins for row in ranked(*quiet, 0.7, 0.9).trials}
    assert alone.items() <= beside.items()


def test_zeros_add_up_and_a_bound_of_0_asks_for_several() -> None:
    assert likely([0.0], 0.0) < 0.95 < likely([0.0] * 2, 0.0) < likely([0.0] * 5, 0.0)


def test_runs_that_disagree_by_more_than_scatter_decide_nothing() -> None:
    assert all(0.33 < likely([0.0, 0.3], bound) < 0.67 for bound in (0.1, 0.2))
    assert 0.05 < likely([0.2, 0.0, 0.25], 0.1) < 0.95


def test_a_plan_that_waits_for_its_host_is_less_sure() -> None:
    assert likely([0.4], 0.5) > 0.98 > likely([0.4], 0.5, waiting=1.0) > 0.7


def test_what_throttling_loses_scatters_less_than_its_time() -> None:
    """Repeats of 43 plans: by 0.006, where the time scatters by 0.028."""
    of = {name: size_of(name) for name in ("throttle_power_frac", "throttle_loss_frac", "throttle_thermal_loss_frac")}
    assert (
        likely([0.09], 0.1) < 0.75
        and keeps_probability([0.09], 0.1, below=True, waiting=0.0, size=of["throttle_loss_frac"]) > 0.9
    )
    assert of["throttle_power_frac"] == 1.0 and of["throttle_loss_frac"] == of["throttle_thermal_loss_frac"]


@pytest.mark.parametrize(
    ("values", "bound", "share_kept"),
    [
        ([0.0], 0.05, 0.99),
        ([0.04], 0.05, 0.16),
        ([0.02], 0.05, 0.43),
        ([0.0] * 9, 0.05, 0.99),
        ([0.5] * 4, 0.1, 0.0),
        ([0.5] * 4, 0.6, 1.0),
        ([0.9], 1.0, 1.0),
    ],
)
def test_repeats_without_end_would_say_what_p_says(values: list[float], bound: float, share_kept: float) -> None:
    below, above = (
        settles_probability(values, bound=bound, below=below, waiting=0.0, risk=0.05) for below in (True, False)
    )
    assert below == pytest.approx(share_kept, abs=0.08) and below + above <= 1.0


def test_shares_of_time_are_shares_and_others_are_not() -> None:
    assert {name for name in METRICS if name.startswith("throttle_") and name.endswith("_frac")} <= {
        name for name in METRICS if is_share(name)
    }
    assert not any(map(is_share, ("mfu_frac", "excursion_count", "memory_headroom_frac", "tokens_per_s")))
