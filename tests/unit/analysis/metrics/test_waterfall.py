"""Parts of a step that add up, for time and for energy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.analysis.metrics.energy import powers, total_energy_j
from wattune.analysis.metrics.phases import phase_table, segments
from wattune.analysis.metrics.step_breakdown import divide
from wattune.analysis.metrics.throttle import Throttle
from wattune.analysis.metrics.waterfall import breakdown
from wattune.analysis.signals.align import align
from wattune.plans.axes import Plan

DEVICES = [("n0", "gpu0"), ("n0", "gpu1")]


def throttle(loss_frac):
    nothing = {"power": loss_frac, "thermal": 0.0, "hw": 0.0}
    return Throttle(
        by_cause_frac=nothing,
        loss_by_cause_frac=nothing,
        any_frac=1.0,
        loss_frac=0.0,  # of the window: it says nothing of compute
        computing_loss_frac=loss_frac,
        deficit_frac=loss_frac,
    )


def data_parallel(step, at_s):
    """Rank 0 computes 0.4 s and rank 1 0.5 s; both reduce until 0.8 and optimize until 0.9 s of a second."""
    rows = []
    for rank, (device, backward_end) in enumerate(zip(DEVICES, (0.4, 0.5), strict=True)):
        parts = [("step", 0, 0.9), ("forward", 0, 0.2), ("backward", 0.2, backward_end), ("wait", backward_end, 0.8)]
        rows += [(device, rank, step, name, at_s + a, at_s + b) for name, a, b in [*parts, ("optimizer", 0.8, 0.9)]]
    return rows


def of(bench, rows, plan, watts=None, losses=None, profiled=None):
    spans = bench.spans(rows)
    waves = {device: (watts or (lambda t: np.full(len(t), 400.0))) for device in DEVICES}
    aligned = align({"ring": bench.ring(waves)}, spans, {})
    traces = powers(aligned)
    found = breakdown(
        aligned,
        divide(spans, aligned.steps, plan, num_micro_batches=2),
        phase_table(aligned, traces, segments(aligned, spans)),
        dict(zip(DEVICES, map(throttle, losses), strict=True)) if losses else {},
        profiled=profiled,
    )
    energy_j = total_energy_j(traces, aligned.duration_s)
    assert found.step_energy_j == pytest.approx(energy_j / len(aligned.steps.number))
    assert sum(time_s for time_s, _ in found.parts.values()) == pytest.approx(found.step_s, rel=1e-12)
    assert sum(energy_j for _, energy_j in found.parts.values()) == pytest.approx(found.step_energy_j, rel=1e-12)
    return found


def times_s(found):
    return {name: time_s for name, (time_s, _) in found.parts.items()}


def two_steps():
    # The second step ends the window: no time is left between.
    return data_parallel(0, 0.0) + data_parallel(1, 1.0)


def test_a_data_parallel_step(bench):
    found = of(bench, two_steps(), Plan(), losses=(0.1, 0.2))
    assert found.step_s == pytest.approx(0.95)
    assert times_s(found) == pytest.approx(
        {
            "compute": (0.5 * 0.9 + 0.6 * 0.8) / 2,
            "throttle": (0.5 * 0.1 + 0.6 * 0.2) / 2,
            "straggler": 0.05,
            "exposed_comm": 0.3,
            "bubble": 0.0,
            "other": 0.05,
        }
    )
    # Two devices of 400 W each: energy is 800 W times each part's time.
    assert {name: energy_j for name, (_, energy_j) in found.parts.items()} == pytest.approx(
        {name: 800 * time_s for name, time_s in times_s(found).items()}, rel=1e-6, abs=1e-6
    )
    assert found.to_json()["parts"][0]["name"] == "compute"
    assert found.indicative


def test_compute_has_the_watts_of_computing_and_waiting_those_of_waiting(bench):
    # 600 W while rank 0 computes, 200 W after: both devices the same.
    found = of(bench, two_steps(), Plan(), watts=lambda t: np.where(np.mod(t + 0.01, 1.0) < 0.4, 600.0, 200.0))
    energy_j = {name: energy_j for name, (_, energy_j) in found.parts.items()}
    # Forward and backward of rank 0 at 600 W, 0.1 s of rank 1's backward and both optimizers at 200 W.
    assert energy_j["compute"] == pytest.approx(2 * 0.4 * 600 + 0.1 * 200 + 2 * 0.1 * 200, rel=0.03)
    assert energy_j["exposed_comm"] + energy_j["straggler"] == pytest.approx((0.4 + 0.3) * 200, rel=0.06)


def test_a_profile_divides_what_spans_cannot(bench):
    profiled = {"compute": 0.6, "exposed_comm:tp": 0.25, "exposed_comm:dp": 0.1, "bubble": 0.0}
    found = of(bench, two_steps(), Plan(tp=2), losses=(0.1, 0.1), profiled=profiled)
    assert times_s(found) == pytest.approx(
        {
            "compute": 0.9 * 0.54,
            "throttle": 0.9 * 0.06,
            "exposed_comm:tp": 0.9 * 0.25,
            "exposed_comm:dp": 0.9 * 0.1,
            "bubble": 0.0,
            "other": 0.05 + 0.9 * 0.05,
        }
    )


def test_without_power_there_are_times_alone(bench):
    spans = bench.spans(two_steps())
    aligned = align({}, spans, {})
    phases = phase_table(aligned, powers(aligned), segments(aligned, spans))
    found = breakdown(aligned, divide(spans, aligned.steps, Plan(), num_micro_batches=1), phases, {})
    assert found.step_energy_j is None and all(energy_j is None for _, energy_j in found.parts.values())
    assert sum(times_s(found).values()) == pytest.approx(found.step_s)


def test_a_recording_has_none(bench):
    aligned = align({"ring": bench.ring({DEVICES[0]: lambda t: t})}, None, {}, window=(0, 10**9))
    assert breakdown(aligned, None, phase_table(aligned, powers(aligned), {}), {}) is None


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1),
            st.sampled_from(["forward", "backward", "optimizer", "wait"]),
            st.floats(0, 1),
            st.floats(0, 1),
        ),
        max_size=15,
    ),
    st.integers(1, 4),
    st.tuples(st.floats(0, 0.6), st.floats(0, 0.6)),
)
def test_parts_add_up_whatever_the_spans(make_bench, spans, pp, losses):
    rows = [(device, rank, 0, "step", 0.0, 1.0) for rank, device in enumerate(DEVICES)]
    rows += [(device, rank, 0, "forward", 0.0, 0.1) for rank, device in enumerate(DEVICES)]
    rows += [(DEVICES[0], 0, 0, "wait", 0.1, 0.2)]
    rows += [(DEVICES[rank], rank, 0, name, min(a, b), max(a, b)) for rank, name, a, b in spans]
    found = of(make_bench(), rows, Plan(pp=pp), losses=losses, watts=lambda t: 300 + 200 * np.sin(9 * t))
    assert min(time_s for time_s, _ in found.parts.values()) >= -1e-9
