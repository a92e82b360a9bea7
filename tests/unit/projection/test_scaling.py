"""The fit of a step by size: what it recovers, what it leaves to its priors, and how sure it is."""

from dataclasses import replace

import numpy as np
import pytest

from wattune.projection.scaling import (
    FIXED_LOG_STD,
    GROWTH,
    NOISE_LOG_STD,
    SizedStep,
    at_size,
    behind,
    slowest_of,
    waiting,
)


def steps(residual: float, share: float, growth: float, sizes: list[tuple[int, int]]) -> list[SizedStep]:
    """Steps of a known curve at devices and micro-batches."""
    return [
        SizedStep(
            num_devices=devices,
            work_s=batches + 0.75,
            fixed_s=0.5,
            step_time_s=residual * (batches + 0.75 + share * 0.5) * np.exp(growth * np.log2(devices / 512)),
        )
        for devices, batches in sizes
    ]


def test_one_size_keeps_its_residual_and_grows_as_publications_do() -> None:
    (small,) = steps(1.3, 1.0, 0.0, [(512, 64)])
    for doublings in range(5):
        found = at_size([small], replace(small, num_devices=512 * 2**doublings))
        assert found.value == pytest.approx(small.step_time_s * np.exp(GROWTH[0] * doublings), rel=1e-4)


def test_two_sizes_tell_what_happens_once_a_step() -> None:
    small, large, truth = steps(0.12, 3.0, GROWTH[0], [(512, 240), (2048, 60), (8192, 15)])
    found, blind = at_size([small, large], truth), at_size([small], truth)
    assert blind.value < found.value == pytest.approx(truth.step_time_s, rel=0.04)
    assert found.low < truth.step_time_s < found.high and found.high / found.low < blind.high / blind.low


def test_intervals_widen_with_the_distance_and_narrow_with_sizes() -> None:
    sizes = [(512, 32), (1024, 32), (2048, 32), (4096, 32), (65536, 32)]
    one, two, three, four, far = steps(1.0, 1.0, 0.01, sizes)

    def half(measured: list[SizedStep], target: SizedStep) -> float:
        found = at_size(measured, target)
        return float(np.log(found.high / found.low))

    assert half([one], two) < half([one], four) < half([one], far)
    assert half([one, two, three], four) < half([three], four)
    assert half([replace(one, log_std=0.05)], two) > half([one], two)


def test_nine_of_ten_truths_of_its_own_priors_are_inside() -> None:
    random, inside = np.random.default_rng(3), 0
    for _ in range(200):
        share, growth = np.exp(random.normal(0, FIXED_LOG_STD)), random.normal(*GROWTH)
        curve = steps(1.0, share, growth, [(512, 64), (2048, 16), (8192, 8)])
        seen = [replace(one, step_time_s=one.step_time_s * np.exp(random.normal(0, NOISE_LOG_STD))) for one in curve]
        found = at_size(seen[:2], seen[2])
        inside += found.low < seen[2].step_time_s < found.high
    assert inside > 0.97 * 200  # what is published scatters more than the priors


@pytest.mark.parametrize("number", [2, 8, 64, 1024])
def test_the_slowest_of_many_is_that_of_normal_draws(number: int) -> None:
    drawn = np.random.default_rng(number).normal(size=(4000, number)).max(axis=1).mean()
    assert slowest_of(number) == pytest.approx(drawn, abs=0.05)


def test_waiting_counts_effects_of_devices_and_no_common_cause() -> None:
    random = np.random.default_rng(4)
    common, own = random.normal(0, 0.2, (3000, 1)), random.normal(0, 0.01, (3000, 1024))
    times = np.exp(common + own)
    measured, truth = times[:, :8], float(np.log(times.max(axis=1) / times[:, :8].max(axis=1)).mean())
    straggler_frac = float((1 - measured.mean(axis=1) / measured.max(axis=1)).mean())
    assert waiting(straggler_frac, 8, 1024) * 7 == pytest.approx(truth, rel=0.1)
    assert waiting(0.0, 8, 1024) == waiting(0.1, 1, 8) == waiting(0.1, 8, 8) == 0.0


def test_the_slowest_group_of_experts_is_behind_by_independent_micro_batches() -> None:
    times = np.random.default_rng(5).normal(1.0, 0.1, (500, 64, 16)).sum(axis=2).max(axis=1).mean() / 16
    assert 1 + 0.1 * behind(64, 16) == pytest.approx(times, rel=2e-3)
