"""Spreads: which runs of a study enter a metric's model, and what is said of it."""

from dataclasses import replace

import pytest
from made_trials import on_n0, reference_runs, speed, trial

from wattune.fidelity import is_soak, ordinary
from wattune.ranking.spreads import PRIORS, Results, Spreads, learned_scatter, resolution
from wattune.run import NO_NUMBERS, Numbers

PEAK = "node_device_power_peak_1s_w"


def test_temperatures_are_whole_degrees_and_power_is_fine() -> None:
    assert resolution("device_temp_max_c") == 1.0
    assert resolution("node_device_power_peak_1s_w") == 0.0


def test_a_long_run_counts_only_where_there_is_no_other() -> None:
    _, short = speed(1, 100.0)
    long = replace(short, repeat=1, tags={"soak": "true"})
    assert is_soak(long) and not is_soak(short)
    assert list(ordinary([short, long])) == [short]
    assert list(ordinary([long])) == [long]


@pytest.mark.parametrize("error", [800.0, 2.0**63, 1e30])
def test_an_uncertainty_beyond_all_bounds_is_an_interval_of_anything(error: float) -> None:
    """As a file may hold that somebody edited and accepted."""
    spec, result = on_n0(speed(1, 100.0))
    result = replace(result, metrics={**result.metrics, "step_time_uncertainty_frac": error})
    found = Spreads([(spec, result), on_n0(speed(2, 100.0))]).interval([result], "tokens_per_s")
    assert found.low == 0.0 and found.high > 1e300 and found.value > 0.0


def test_repeats_are_counted_and_pooled() -> None:
    spreads = Spreads(reference_runs([100.0, 103.0, 97.0, 104.0, 96.0]))
    assert "pooled from 4 repeats" in spreads.scatter_text("tokens_per_s")
    _, single = reference_runs([100.0])[0]
    assert spreads.interval([single], "tokens_per_s").num_runs == 1
    # Five runs that scatter by 3.5 % leave one run less sure than the prior of 1 % alone would.
    alone = Spreads(reference_runs([100.0])).interval([single], "tokens_per_s")
    assert alone.method == "prior"
    assert spreads.interval([single], "tokens_per_s").half_width_frac > 1.5 * alone.half_width_frac


def test_a_metric_that_nobody_measured_has_no_scatter() -> None:
    assert Spreads([speed(1, 100.0)]).scatter_text("energy_per_token_j") == ""
    assert Spreads([speed(1, 100.0)]).interval([speed(1, 100.0)[1]], "energy_per_token_j") is None


@pytest.mark.parametrize("offset", [0.94, 1.06])
def test_a_node_set_that_is_slower_or_faster_is_corrected_and_said(offset: float) -> None:
    here = reference_runs([100.0, 101.0, 99.0, 100.0])
    there = [
        (
            spec,
            replace(
                result,
                repeat=result.repeat + 10,
                tags={**result.tags, "nodes": "n1"},
                metrics={**result.metrics, "tokens_per_s": result.metrics["tokens_per_s"] * offset},
            ),
        )
        for spec, result in here
    ]
    lines = Spreads([*here, *there]).corrections("tokens_per_s")
    assert len(lines) == 1 and "removed from the objective" in lines[0]
    assert ("+" in lines[0].split("±")[0]) == (offset > 1)


def test_the_next_run_scatters_like_a_run_about_a_mean_of_its_own_error() -> None:
    pairs = reference_runs([100.0, 103.0, 97.0, 104.0])
    (one,) = Spreads(pairs).next_runs([result for _, result in pairs], "tokens_per_s")
    assert one.num_runs == 4 and one.own_variance == pytest.approx(one.run_variance * 1.25)
    elsewhere = (one.scatter.away[one.number] != 0) & (one.scatter.away_variance[one.number] > 0)
    assert elsewhere.any(), "it may be at another time of the drift"
    assert one.scatter.place_share.sum() == pytest.approx(1.0)


def with_host(frac: float, *values: float):
    """Runs of one trial whose device waits so long for its host, beside one that does not wait."""
    runs = [
        (spec, replace(run, metrics={**run.metrics, "host_bound_frac": frac})) for spec, run in reference_runs(values)
    ]
    return [*runs, on_n0(speed(2, 100.0))]


def half_width(runs, metric: str = "tokens_per_s") -> float:
    spec = runs[0][0]
    own = [run for one, run in runs if one.trial_id == spec.trial_id]
    return Spreads(runs).interval(own, metric).half_width_frac


def test_a_plan_that_waits_for_its_host_is_known_less_well() -> None:
    steady, slow, waits = (half_width(with_host(frac, 100.0)) for frac in (0.0, 0.1, 0.5))
    assert slow == steady, "a tenth of a step hides behind the device"
    assert waits > 10 * steady
    (line,) = Spreads(with_host(0.5, 100.0)).corrections("tokens_per_s")
    assert line.startswith("1 trial(s) wait for their host (host_bound) and run at its pace")
    assert line.endswith("device_bound_step_time_s leaves it out")
    assert Spreads(with_host(0.1, 100.0)).corrections("tokens_per_s") == []


def test_repeats_of_a_plan_that_waits_say_nothing_of_one_that_does_not() -> None:
    """Its runs scatter by a third. The trial beside it is known as well as if they agreed."""
    apart, alike = with_host(0.5, 60.0, 100.0, 80.0, 110.0), with_host(0.5, *[100.0] * 4)
    beside = apart[-1][1]
    widths = [Spreads(runs).interval([beside], "tokens_per_s").half_width_frac for runs in (apart, alike)]
    assert widths[0] == pytest.approx(widths[1], rel=0.1) and widths[0] < 0.05
    both = Spreads(apart)
    assert both.scatter_text("tokens_per_s") == (
        "run-to-run scatter: 1 % by a prior of 1 %, 6 degrees of freedom; nothing was repeated; where devices wait for "
        "their host 20 % pooled from 3 repeats and a prior of 15 %, 6 degrees of freedom"
    )
    steady = with_host(0.0, 60.0, 100.0, 80.0, 110.0)
    assert Spreads(steady).interval([beside], "tokens_per_s").half_width_frac > 0.2, "its repeats count for it"


def test_steady_repeats_do_not_narrow_a_plan_that_waits() -> None:
    waits = with_host(0.5, 100.0)
    spec = speed(2, 100.0)
    often = [*waits, *((spec[0], replace(one, repeat=number)) for number, one in enumerate([spec[1]] * 6, start=1))]
    assert half_width(often) == pytest.approx(half_width(waits), rel=0.01)


def test_repeats_show_how_steady_a_host_is() -> None:
    once, often = (half_width(with_host(0.5, *values)) for values in ([100.0], [100.0, 101.0, 99.0, 100.0]))
    assert often < once / 3


def test_a_run_without_a_profile_does_not_make_its_trial_sure() -> None:
    """Its profiled pass failed, so it says nothing of its host. Those of the other run say it."""
    both = with_host(0.5, 100.0, 100.0)
    spec, run = both[1]
    lacks = replace(run, metrics={name: one for name, one in run.metrics.items() if name != "host_bound_frac"})
    unknown = replace(run, metrics={**run.metrics, "host_bound_frac": float("nan")})
    for other in (lacks, unknown):
        assert half_width([both[0], (spec, other), both[2]]) == pytest.approx(half_width(both))


def test_a_long_run_of_a_trial_is_no_second_trial() -> None:
    runs = with_host(0.5, 100.0, 100.0)
    spec, run = runs[1]
    (line,) = Spreads([runs[0], (spec, replace(run, tags={**run.tags, "soak": "true"})), runs[2]]).corrections(
        "tokens_per_s"
    )
    assert line.startswith("1 trial(s)")


def repeated(spread_frac: float, *, simulated: str = "false", told: Numbers = NO_NUMBERS) -> Results:
    """Four plans, each in three runs that lie `spread_frac` apart."""
    runs = []
    for number in range(1, 5):
        for repeat, off in enumerate((-1.0, 0.0, 1.0)):
            metrics = {"step_time_s": 1.0 + off * spread_frac * number, "tokens_per_s": 100.0}
            spec, run = trial(number, metrics, repeat=repeat, tags={"nodes": "n0", "simulated": simulated})
            runs.append((spec, replace(run, numbers=told)))
    return runs


def test_the_storage_s_studies_tell_how_runs_scatter_and_how_alike_plans_do() -> None:
    noisy, quiet = learned_scatter([repeated(0.02)] * 3), learned_scatter([repeated(1e-4)] * 3)
    assert noisy.speed_spread_frac > 0.02 > PRIORS["speed"].spread > quiet.speed_spread_frac > 1e-4
    plan = [repeated(0.01)[0]]
    assert learned_scatter([]) == learned_scatter([plan]) == NO_NUMBERS, "nothing was repeated"
    assert learned_scatter([repeated(0.02, simulated="true")]) == NO_NUMBERS
    assert noisy.power_spread_frac is None, "no study measured it"
    uneven = repeated(1e-4)[:6] + repeated(0.02)[6:]
    assert learned_scatter([uneven] * 3).speed_similar_degrees < noisy.speed_similar_degrees


def test_a_run_says_what_was_expected_of_its_scatter_when_it_ran() -> None:
    noisy = learned_scatter([repeated(0.02)] * 3)
    told, untold = ([repeated(0.0, told=one)[1]] for one in (noisy, NO_NUMBERS))
    widths = [Spreads(one).interval([one[0][1]], "step_time_s").half_width_frac for one in (told, untold)]
    assert widths[0] > 4 * widths[1]
    assert f"by earlier studies of {100 * noisy.speed_spread_frac:.2g} %" in Spreads(told).scatter_text("step_time_s")
    assert "by a prior of 0.37 %" in Spreads(untold).scatter_text("step_time_s")


def disturbed(speed_off: float, power_off: float, *, simulated: str = "false") -> Results:
    """Three plans in two runs each, whose step time and power lie so far apart, and one plan in one run."""
    runs = []
    for number, offs in ((1, (-0.5, 0.5)), (2, (-0.5, 0.5)), (3, (-0.5, 0.5)), (4, (0.0,))):
        for repeat, off in enumerate(offs):
            metrics = {
                "step_time_s": 1.0 + off * speed_off,
                "tokens_per_s": 100.0 / (1.0 + off * speed_off),
                PEAK: 2000.0 * (1.0 + off * power_off),
                "energy_per_step_j": 2000.0,
            }
            runs.append(trial(number, metrics, repeat=repeat, tags={"nodes": "n0", "simulated": simulated}))
    return runs


def width_of_last(runs: Results, metric: str) -> float:
    found = Spreads(runs).interval([runs[-1][1]], metric)
    assert found is not None
    return found.half_width_frac


@pytest.mark.parametrize("metric", [PEAK, "energy_per_step_j", "tokens_per_s", "step_time_s"])
def test_runs_that_scatter_in_one_metric_are_taken_to_scatter_in_the_others(metric: str) -> None:
    """Power that repeats within 0.01 % tells less where the same runs lie 6 % apart in speed, and the other way."""
    of_speed = metric in ("tokens_per_s", "step_time_s")
    quiet, noisy = disturbed(1e-4, 1e-4), disturbed(*((1e-4, 0.06) if of_speed else (0.06, 1e-4)))
    assert width_of_last(noisy, metric) > 2.0 * width_of_last(quiet, metric)


def test_the_host_s_speed_tells_nothing_of_simulated_watts_nor_of_the_step_without_the_host() -> None:
    quiet, noisy = (disturbed(off, 1e-4, simulated="true") for off in (1e-4, 0.06))
    assert width_of_last(noisy, PEAK) == pytest.approx(width_of_last(quiet, PEAK))
    needed = {"device_bound_step_time_s": 0.9}
    alone, both = (
        [(spec, replace(run, metrics=run.metrics | needed)) for spec, run in disturbed(1e-4, off)]
        for off in (1e-4, 0.06)
    )
    assert width_of_last(both, *needed) == pytest.approx(width_of_last(alone, *needed))


def test_a_run_that_measured_speed_alone_counts_for_power_as_if_read_at_once() -> None:
    runs = disturbed(0.06, 1e-4)
    spec, last = runs[1]
    late = spec, replace(last, repeat=7, metrics={"step_time_s": 1.2, "tokens_per_s": 83.0})
    grown = Spreads(runs)
    before = grown.interval([runs[-1][1]], PEAK)
    grown.add(late[1])
    assert grown.interval([runs[-1][1]], PEAK) == Spreads([*runs, late]).interval([runs[-1][1]], PEAK) != before


@pytest.mark.parametrize("spread", [0.0, -1.0, 1e30])
def test_an_expectation_that_a_file_cannot_mean_is_left_out(spread: float) -> None:
    told = Numbers(speed_spread_frac=spread, speed_similar_degrees=4.0)
    assert "a prior of 0.37 %" in Spreads(repeated(0.01, told=told)).scatter_text("step_time_s")
