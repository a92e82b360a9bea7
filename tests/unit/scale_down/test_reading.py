"""Results of small trials read as those of large ones, and what a ranking says of that."""

import math
from dataclasses import replace

import pytest
from specs import made_run

from wattune.cost.defaults import default_coefficients
from wattune.cost.estimate import estimate
from wattune.cost.transfer import RATIO_LOG_STD
from wattune.objective import Question
from wattune.ranking.order import rank
from wattune.run import Run, RunStatus
from wattune.scale_down.choice import choose
from wattune.scale_down.cut import parse_target
from wattune.scale_down.invariants import Scaled
from wattune.scale_down.reading import SCALED, as_large, read_run
from wattune.search.prune import prune
from wattune.search.space import parse_space
from wattune.trial import TrialSpec

POWER = "node_device_power_peak_1s_w"


def smalls(to="1x8", allowed=60.0, **axes) -> list[Scaled]:
    document = {
        "study": "s",
        "model": "llama3_70b",
        "cluster": "8x8 h100_sxm",
        "engine": "megatron",
        "workload": {"seq_len": 4096, "global_batch_size": 512},
        "space": {"tp": [8], "pp": [1, 2, 4], "micro_batch_size": [1, 2], "sharding": ["zero1"]} | axes,
        "objective": "maximize tokens_per_s",
    }
    found = choose(prune(parse_space(document)).specs, parse_target(to, allowed))
    return [one for one in found if isinstance(one, Scaled)]


def measured(spec: TrialSpec, slower=1.0, hotter=1.0, repeat=0, **changed) -> Run:
    """The run of a machine that is so much slower, and draws so much more, than estimated."""
    found = {name: one["value"] for name, one in estimate([spec], default_coefficients).one(0).items()}
    step_s, watts, tokens = found["step_time_s"] * slower, found["device_power_mean_w"] * hotter, spec.tokens_per_step
    energy = watts * spec.cluster.world_size * step_s
    metrics = {name: value * (hotter if "_power_" in name else 1.0) for name, value in found.items()}
    metrics |= {"step_time_s": step_s, "tokens_per_s": tokens / step_s, "device_power_mean_w": watts}
    metrics |= {"energy_per_step_j": energy, "energy_per_token_j": energy / tokens, "throttle_frac": 0.2}
    how = {"quality": "publishable", "tags": {"simulated": "false"}}
    return made_run(spec, repeat=repeat, metrics=metrics | changed, **how)


@pytest.mark.parametrize(("slower", "hotter"), [(1.0, 1.0), (1.3, 0.9), (0.8, 1.1)])
def test_a_residual_is_kept_and_the_lacking_network_is_added(slower, hotter):
    for one in smalls():
        large = {name: v["value"] for name, v in estimate([one.large], default_coefficients).one(0).items()}
        read = read_run(one.small, measured(one.small, slower, hotter)).metrics
        network_s = one.predicted_frac * large["step_time_s"]
        assert read["step_time_s"] == pytest.approx((large["step_time_s"] - network_s) * slower + network_s)
        assert read["tokens_per_s"] * read["step_time_s"] == pytest.approx(one.large.tokens_per_step)
        kept = large["device_power_mean_w"] / one.estimated["device_power_mean_w"][0]
        assert read[POWER] == pytest.approx(one.estimated[POWER][0] * hotter * kept), "peaks follow the mean"
        assert read["device_power_mean_w"] == pytest.approx(large["device_power_mean_w"] * hotter)
        joules = read["device_power_mean_w"] * one.large.cluster.world_size * read["step_time_s"]
        assert read["energy_per_step_j"] == pytest.approx(joules)
        assert read["energy_per_token_j"] * one.large.tokens_per_step == pytest.approx(joules)
        assert read["memory_peak_bytes"] == pytest.approx(large["memory_peak_bytes"])
        assert "throttle_frac" not in read, "a share of the small step says nothing of the large one"


def test_reading_twice_is_reading_once_and_other_results_stay():
    pairs = [(one.small, measured(one.small)) for one in smalls()]
    plain = replace(pairs[0][0], stands_for=None)
    once = as_large([*pairs, (plain, measured(plain))])
    assert as_large(once) == once and once[-1] == (plain, measured(plain))
    assert [spec for spec, _ in once[:-1]] == [spec.stands_for for spec, _ in pairs]
    assert [run.trial_id for _, run in once[:-1]] == [run.trial_id for _, run in pairs]
    assert all(run.quality == "indicative" and SCALED in run.tags for _, run in once[:-1])


def test_the_error_grows_with_distance_and_with_what_is_predicted():
    for one in smalls():
        read = read_run(one.small, measured(one.small))
        value, away = read.reading_errors["step_time_s"] / read.metrics["step_time_s"], math.log1p(one.percent / 100)
        part = one.predicted_frac
        least = math.hypot((1 - part) * math.hypot(RATIO_LOG_STD, away / math.sqrt(3)), part * one.predicted_log_std)
        assert value == pytest.approx(least)


def test_a_plan_too_large_for_its_devices_ran_out_of_memory():
    (one, *_) = smalls(pp=[4])
    room = one.large.cluster.sensed_device.memory_bytes
    full = measured(one.small, memory_peak_bytes=1.2 * one.estimated["memory_peak_bytes"][0] * room
                    / one.estimated["memory_peak_bytes"][1])  # fmt: skip
    read = read_run(one.small, full)
    assert read.status is RunStatus.OUT_OF_MEMORY and "1.20 times its device's memory" in read.reason


def ranked(bound: float, **changed):
    question = Question.of("maximize tokens_per_s", f"{POWER} <= {bound:.1f}")
    return rank([(one.small, measured(one.small, repeat=n)) for one in smalls(**changed) for n in range(3)], question)


def test_a_ranking_shows_large_plans_and_what_may_turn():
    found = ranked(1e6)
    assert {row.spec.cluster.label for row in found.feasible} == {"8x8 h100_sxm"}
    assert "SCALED DOWN" in found.stamp and all(SCALED in row.marks for row in found.feasible)
    alone = rank([(one.large, measured(one.large, repeat=n)) for one in smalls() for n in range(3)], found.question)
    best = {ranking.feasible[0].label for ranking in (found, alone)}
    assert len(best) == 1, "read as measured: the estimates of both are those that it is read by"
    wide, narrow = (one.feasible[0].objective.half_width_frac for one in (found, alone))
    assert wide > 1.5 * narrow, "the error of scaling is in the interval"
    assert any(text.startswith("SCALED DOWN") for text in found.warnings)
    assert not any("and turns if the scale-down errs" in text for text in found.warnings)
    peak = found.feasible[0].interval(POWER).value
    near = ranked(peak * 1.01)
    assert any("and turns if the scale-down errs by 1." in text for text in near.warnings), near.warnings
    assert not rank([(one.large, measured(one.large)) for one in smalls()], found.question).stamp


def test_a_bound_that_only_scaling_leaves_open_is_undecided():
    (one, *_) = smalls(pp=[1], micro_batch_size=[1])
    peak = read_run(one.small, measured(one.small)).metrics[POWER]
    question = Question.of("maximize tokens_per_s", f"{POWER} <= {peak * 1.02:.1f}")
    for spec, held in ((one.small, False), (one.large, True)):
        runs = [(spec, measured(spec, repeat=n)) for n in range(8)]
        assert bool(rank(runs, question).feasible) is held
