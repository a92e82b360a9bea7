"""Times that are announced for recorded studies on GPUs, against what these took."""

import json
import statistics
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from wattune.cost.defaults import default_coefficients
from wattune.cost.estimate import estimate
from wattune.orchestrate.scheduling.durations import BESIDE_STEPS_S, NEW_WORKERS_S, Durations, Pace
from wattune.orchestrate.scheduling.graphs import WarmGraphs, waited_for_workers
from wattune.run import Numbers, Run, RunStatus
from wattune.search.forecast import duration_s
from wattune.trial import Measure, TrialSpec

DATA = Path(__file__).parents[4] / "benchmarks" / "data"
FITTED = ("dense_llama_h200x2", "moe_ep_h200x2", "moe_ep_h200x2_guided")
"""Tables that `BESIDE_STEPS_S` comes from."""

FIRST_TRIALS_S = (24.1, 19.6, 21.7, 18.8, 20.4, 16.0)
"""First trials of studies on two H200 beside their steps, since workers start while Tune does (study_economics.md)."""

OTHERS = (
    "dense_llama_h100x2",
    "dense_llama_repeats_h100x2",
    "moe_ep_h100x2",
    "dense_llama_1b_h200",
    "dense_gpt_1b_h200_guided",
    "moe_ep_h200x4",
    "dense_llama_h200x4",
    "dense_gpt_h200x4",
    "dense_llama_megatron_h200x2",
)
"""Tables of other chips, numbers of ranks, models and engines. Torch, DeepSpeed and Megatron are among them."""


def recorded(name: str) -> list[tuple[TrialSpec, Run]]:
    """Returns the completed trials of a table in the order they ran."""
    found = []
    for row in pq.read_table(DATA / f"{name}.parquet").to_pylist():
        if row["status"] == "completed" and row["step_time_s"]:
            told = {**json.loads(row["tags"]), **json.loads(row.get("numbers") or "{}")}
            numbers = {key: float(told[key]) for key in ("group_start_s", "warmup_steps", "window_s") if key in told}
            result = Run(
                trial_id=row["trial_id"],
                repeat=row["repeat"],
                status=RunStatus.COMPLETED,
                metrics={"step_time_s": row["step_time_s"]},
                numbers=Numbers(**{"window_s": row.get("window_s"), **numbers}),
                start_wall_ns=row["start_wall_ns"],
                end_wall_ns=row["end_wall_ns"],
            )
            found.append((TrialSpec.from_json(json.loads(row["spec"])), result))
    return sorted(found, key=lambda one: one[1].start_wall_ns)


def announced_over_taken(name: str, earlier: list[tuple[TrialSpec, Run]]) -> float:
    """Announces a study's trials before the first of them, by estimates and other studies' trials."""
    trials = recorded(name)
    steps_s = estimate([spec for spec, _ in trials], default_coefficients).columns["step_time_s"].value.tolist()
    predicted = {spec: step_s for (spec, _), step_s in zip(trials, steps_s, strict=True)}
    asked = yaml.safe_load((DATA / f"{name.replace('_repeats', '')}.yaml").read_text())["measure"]
    durations = Durations(Pace(), lambda spec, measure: duration_s(predicted[spec], measure, on_cpu=False))
    durations.beside.take(earlier)
    announced_s, warm = 0.0, WarmGraphs()
    for spec, result in trials:
        # Warm-up went on longer then than it is asked for now, and two steps were profiled.
        warmup = int(result.numbers.warmup_steps or 5)
        least = {key: asked[key] for key in ("min_steps", "min_seconds") if key in asked}
        measure = Measure(**least, warmup_steps=warmup, profile_steps=2)
        start = warm.start_of(spec, "")
        announced_s += durations.expected_s(spec, measure, start)
        warm.ran(spec, "", new_workers=start == "new_workers" or waited_for_workers(result))
    return announced_s / sum((one.end_wall_ns - one.start_wall_ns) / 1e9 for _, one in trials)


@pytest.mark.parametrize("name", OTHERS)
def test_an_empty_storage_announces_recorded_studies_within_30_percent(name: str) -> None:
    assert 0.7 < announced_over_taken(name, []) < 1.3


@pytest.mark.parametrize("name", OTHERS)
def test_a_storage_with_other_studies_announces_recorded_ones_within_30_percent(name: str) -> None:
    earlier = [one for other in (*FITTED, *OTHERS) if other != name for one in recorded(other)]
    assert 0.7 < announced_over_taken(name, earlier) < 1.3


def test_graphs_of_megatron_that_nothing_has_compiled_before_take_longer_than_foretold() -> None:
    """Seven trials on four GPUs, whose kernels no cache had: 30 s for new graphs where others take 8."""
    earlier = [one for other in (*FITTED, *OTHERS) for one in recorded(other)]
    assert 0.5 < announced_over_taken("moe_mixtral_megatron_h200x4", []) < 0.7
    assert 0.6 < announced_over_taken("moe_mixtral_megatron_h200x4", earlier) < 0.8


def test_what_is_shipped_is_what_the_tables_of_two_h200_say() -> None:
    durations = Durations(Pace(), lambda _spec, _measure: 1.0)
    for name in FITTED:
        warm = WarmGraphs()
        for spec, result in recorded(name):
            start = warm.ran(spec, "", new_workers=waited_for_workers(result))
            measure = Measure(warmup_steps=int(result.numbers.warmup_steps or 5), profile_steps=2)
            durations.beside.add(spec, measure, result, start)
    for start, shipped_s in BESIDE_STEPS_S.items():
        assert durations.beside.expected_s(spec, start) == pytest.approx(shipped_s, rel=0.15)
    assert pytest.approx(statistics.median(FIRST_TRIALS_S), rel=0.15) == NEW_WORKERS_S
