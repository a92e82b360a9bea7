from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specs import made_run, trial_spec

from wattune.analysis.metrics.waterfall import Breakdown
from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import model
from wattune.ranking.comparison import Comparison, Side, compare
from wattune.ranking.difference import Counted
from wattune.ranking.evidence import recorded_side
from wattune.ranking.spreads import Spreads
from wattune.run import Recorded, Run, RunStatus
from wattune.trial import TrialSpec

SPEC = trial_spec()


def broken_down(**parts_s: float) -> Breakdown:
    """A step of these parts; every second takes 2,500 J."""
    parts = {name: (time_s, 2500 * time_s) for name, time_s in parts_s.items()}
    step_s = sum(parts_s.values())
    return Breakdown(parts=parts, step_s=step_s, step_energy_j=2500 * step_s)


def side(breakdown: Breakdown | None, spec: TrialSpec = SPEC, speeds: Sequence[float] = (), **changes) -> Side:
    results = [
        made_run(spec, repeat=repeat, metrics={"tokens_per_s": speed} if speed else {}, quality="publishable")
        for repeat, speed in enumerate(speeds or [0.0])
    ]
    counted = Counted(results, Spreads([(spec, result) for result in results]))
    made = Side(name="s:1", spec=spec, result=results[0], breakdown=breakdown, counted=counted, simulated=False)
    return replace(made, **changes)


FAST = broken_down(compute=0.20, exposed_comm=0.01, other=0.0)
SLOW = broken_down(compute=0.19, bubble=0.05, other=0.01)


def test_the_changes_of_the_parts_are_the_change():
    found = compare(side(FAST), side(SLOW))
    changes = found.time.changes
    assert changes == pytest.approx({"compute": -0.01, "exposed_comm": -0.01, "bubble": 0.05, "other": 0.01})
    assert (found.time.a, found.time.b, found.time.per) == (pytest.approx(0.21), pytest.approx(0.25), "step")
    assert sum(found.time.share_frac(name) for name in found.time.parts) == pytest.approx(1.0)
    assert [*found.time.parts][-1] == "other"
    assert found.energy.b - found.energy.a == pytest.approx(100.0)


parts = st.dictionaries(
    st.sampled_from(["compute", "throttle", "exposed_comm", "bubble", "straggler", "undivided"]),
    st.floats(0, 10),
    min_size=1,
)


@settings(deadline=None)
@given(parts, parts, st.floats(-0.1, 1), st.integers(1, 64))
def test_parts_add_up_whatever_they_are(a, b, other, batch):
    spec = replace(SPEC, workload=replace(SPEC.workload, global_batch_size=batch))
    left, right = broken_down(**a, other=other), broken_down(**b, other=0.1)
    found = compare(side(left), side(right, spec))
    scale = 1.0 if batch == 16 else 1e6 / SPEC.workload.tokens_per_step
    assert found.time.a == pytest.approx(scale * left.step_s, abs=1e-9)
    assert found.energy.a == pytest.approx(scale * left.step_energy_j, abs=1e-6)
    total = sum(found.time.changes.values())
    assert total == pytest.approx(found.time.b - found.time.a, abs=1e-9)
    assert found.time.per == ("step" if batch == 16 else "million tokens")


def test_parts_that_cancel_out_are_no_shares_of_what_is_left():
    found = compare(side(broken_down(compute=0.20, straggler=0.02)), side(broken_down(compute=0.18, straggler=0.041)))
    assert found.time.cancels and [found.time.share_frac(name) for name in found.time.parts] == [None] * 3
    assert found.to_json()["time"]["parts"][0]["share_frac"] is None
    assert [*found.time.parts] == ["compute", "straggler", "other"], "what is nowhere is no part"
    assert not compare(side(FAST), side(SLOW)).time.cancels
    assert not compare(side(FAST), side(FAST)).time.cancels


def test_two_devices_simulated_on_one_machine_are_no_race():
    a, b = (
        replace(SPEC, cluster=ClusterSpec(device="cpu", devices_per_node=2, simulate_sensors_of=device))
        for device in ("h100_sxm", "h200_sxm")
    )
    (warning,) = [
        text
        for text in compare(side(FAST, a, simulated=True), side(FAST, b, simulated=True)).warnings
        if "do not compare h100_sxm with h200_sxm" in text
    ]
    assert warning.startswith("both ran on cpu")
    alike = compare(side(FAST, a, simulated=True), side(FAST, a, simulated=True))
    assert not any("both ran" in text for text in alike.warnings)


def test_a_whole_is_not_held_against_parts():
    found = compare(side(FAST), side(broken_down(undivided=0.24, other=0.01)))
    assert found.time.parts == {
        "undivided": (pytest.approx(0.21), pytest.approx(0.24)),
        "other": (0.0, 0.01),
    }
    assert any(text.startswith("spans of B do not show") for text in found.warnings)


def test_steps_of_other_devices_and_batches_are_compared_by_the_token():
    twice = replace(
        SPEC,
        cluster=ClusterSpec(device="h100_sxm", devices_per_node=8),
        workload=replace(SPEC.workload, global_batch_size=32),
    )
    found = compare(side(FAST), side(FAST, twice))
    assert found.time.b == pytest.approx(found.time.a / 2)
    assert found.differences["cluster.device"] == ("h200_sxm", "h100_sxm")
    assert found.differences["workload.global_batch_size"] == (16, 32)
    assert "model.source" not in found.differences


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        ([110.0], [100.0], "A trains 10.0 % more tokens a second (95 % interval 6.3 to 13.9 %): told apart"),
        ([100.0], [103.0], "B trains 3.0 % more tokens a second (95 % interval -0.5 to 6.6 %): not told apart"),
        (
            [100.0, 100.1, 99.9, 100.0],
            [103.0, 103.1, 102.9, 103.0],
            "B trains 3.0 % more tokens a second (95 % interval 1.9 to 4.1 %): told apart",
        ),
        ([], [107.0], "tokens_per_s was not measured on both sides"),
    ],
)
def test_the_conclusion_claims_no_more_than_was_measured(a, b, says):
    assert compare(side(FAST, speeds=a), side(SLOW, speeds=b)).conclusion == says


def test_unlike_sides_are_said():
    found = compare(side(None), side(FAST, replace(SPEC, model=model("llama3_70b")), simulated=True))
    said = " ".join(found.warnings)
    for text in (
        "no spans of measured steps in A",
        "telemetry of B is SIMULATED",
        "models differ (llama3_8b, llama3_70b)",
    ):
        assert text in said
    assert (found.time, found.energy) == (None, None)
    assert isinstance(found, Comparison)
    assert found.to_json()["time"] is None


def test_a_recorded_command_that_failed_is_said_beside_a_trial_too():
    for code, said in ((3, "with exit code 3"), (None, "with its end not seen")):
        of = Recorded(command=("train.py",), exit_code=code, ended=code is not None)
        run = Run(trial_id="r", repeat=0, status=RunStatus.COMPLETED, quality="indicative", recorded=of)
        recording = recorded_side(run)
        for pair, name in (((side(FAST), recording), "B"), ((recording, side(FAST)), "A")):
            assert f"the command of {name} ended {said}: it may not have done its work" in compare(*pair).warnings


def test_communication_by_group_is_one_part_where_the_other_side_knows_no_groups():
    groups = Breakdown(
        parts={
            "compute": (0.2, 500.0),
            "exposed_comm:tp": (0.02, 30.0),
            "exposed_comm:dp": (0.01, 20.0),
            "other": (0.0, 0.0),
        },
        step_s=0.23,
        step_energy_j=550.0,
    )
    found = compare(side(groups), side(FAST))
    assert found.time.parts["exposed_comm"] == (pytest.approx(0.03), 0.01)
    both = compare(side(groups), side(groups))
    assert [*both.time.parts] == ["compute", "exposed_comm:tp", "exposed_comm:dp", "other"]


def test_sides_of_different_sizes_have_different_names():
    long = replace(SPEC, workload=replace(SPEC.workload, seq_len=2 * SPEC.workload.seq_len))
    found = compare(side(FAST), side(SLOW, spec=long))
    assert found.a.label == f"{SPEC.label} seq{SPEC.workload.seq_len} on {SPEC.cluster.label}"
    assert found.b.label == f"{SPEC.label} seq{long.workload.seq_len} on {SPEC.cluster.label}"
    assert compare(side(FAST), side(SLOW)).a.label == f"{SPEC.label} on {SPEC.cluster.label}"
