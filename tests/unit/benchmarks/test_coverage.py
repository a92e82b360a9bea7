"""Coverage of intervals and of P against the next run, and errors of "told apart", in small simulated studies."""

import coverage as benchmark
import pytest


@pytest.mark.parametrize("num_runs", [1, 2, 6])
def test_what_is_claimed_at_95_percent_holds_so_often(num_runs: int) -> None:
    rows = [benchmark.count(case, num_runs, 40, 1) for case in benchmark.CASES if case.judged]
    assert {row.case: row.falls_short for row in rows if row.falls_short} == {}
    assert 0.94 < sum(row.intervals_frac for row in rows) / len(rows) < 0.98
    assert 0.93 < sum(row.next_run_frac for row in rows) / len(rows) < 0.98


def test_a_prior_far_too_narrow_is_seen_to_fall_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "Prior", lambda: benchmark.fit.__globals__["Prior"](spread=0.001))
    row = benchmark.count(benchmark.CASES[0], 1, 40, 1)
    assert "intervals" in row.falls_short
