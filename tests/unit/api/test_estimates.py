"""Estimates of a space use the storage's fit unasked and say so; limits take the low ends."""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from wattune import api
from wattune.api.estimates import host_bound_trials, informed_strategy, known_before, lowest_figures
from wattune.catalog.hardware import DEVICES
from wattune.cost.defaults import default_coefficients
from wattune.cost.sweep import COLUMNS, TABLE
from wattune.errors import PlanError
from wattune.fitting.store import LINKS, StoredFit, write_fit
from wattune.metrics import METRICS
from wattune.run import Run, RunStatus
from wattune.search.forecast import Forecast
from wattune.search.strategies.model_guided import ModelGuided
from wattune.search.strategies.protocol import Problem
from wattune.storage.files import write_table
from wattune.storage.study import StudyFolder
from wattune.trial import TrialSpec

SPACES = Path(__file__).parents[3] / "search_spaces"
SPACE = SPACES / "moe_ep_h200x4.yaml"


def stored(tmp_path: Path) -> None:
    default = default_coefficients(DEVICES["h200_sxm"])
    write_fit(
        tmp_path,
        StoredFit(
            device="h200_sxm",
            device_uuids=(),
            fitted_at="2026-11-22T12:00:00+00:00",
            studies=("a",),
            num_trials=12,
            num_configurations=10,
            memory=None,
            step_time=replace(default.step_time, error_frac=0.01),
            power=None,
            hold_out={},
            sharpen=(),
        ),
    )


def test_a_stored_fit_is_used_unasked_and_said(tmp_path) -> None:
    before = api.estimate(SPACE, storage=str(tmp_path))
    stored(tmp_path)
    after = api.estimate(SPACE, storage=str(tmp_path))
    assert before.sources[0].coefficients.fit == "" and "fit" not in before.sources[0].text
    assert "(fit 2026-11-22, 12 trials)" in after.sources[0].text
    step = after.estimates.columns["step_time_s"]
    assert float((step.high - step.low)[0] / step.value[0]) == pytest.approx(0.02, rel=1e-3)


def test_hard_limits_are_bounds_of_the_forecast(tmp_path) -> None:
    planned = api.plan(SPACE)
    limited = replace(planned, spec=replace(planned.spec, limits={"node_device_power_w": 100.0}))
    found = api.estimate(limited, storage=str(tmp_path))
    assert (found.risks["node_device_power_peak_1s_w <= 100"] > 0.99).all()


def test_limits_are_held_to_the_low_end_of_an_estimate(tmp_path) -> None:
    planned = api.plan(SPACE)
    free = replace(planned, spec=replace(planned.spec, limits={}))
    assert lowest_figures(free, tmp_path) is None, "nothing is limited"
    limited = replace(planned, spec=replace(planned.spec, limits={"node_device_power_w": 100.0}))
    lowest = lowest_figures(limited, tmp_path)
    one = planned.kept[0].spec
    figure = api.estimate(planned, storage=str(tmp_path))
    place = [each.spec for each in figure.kept].index(one)
    expected = figure.estimates.one(place)["node_device_power_peak_1s_w"]
    assert (
        lowest(one)["node_device_power_peak_1s_w"] == pytest.approx(expected["low"])
        and expected["low"] < expected["value"]
    )


def test_a_simulated_trial_has_no_estimate_to_be_refused_by(tmp_path) -> None:
    planned = api.plan(SPACES / "cpu_smoke.yaml")
    limited = replace(planned, spec=replace(planned.spec, limits={"node_device_power_w": 1.0}))
    assert lowest_figures(limited, tmp_path)(planned.kept[0].spec) == {}


def test_plans_of_small_kernels_may_wait_for_their_host(tmp_path) -> None:
    planned = api.plan(SPACES.parent / "benchmarks" / "data" / "dense_gpt_1b_h200.yaml")
    waits = host_bound_trials(planned, tmp_path)
    by_size = {size: [] for size in (1, 2, 4, 8)}
    for spec in planned.candidates.specs:
        by_size[spec.plan.micro_batch_size].append(waits(spec))
    assert all(by_size[1]) and not all(by_size[8])
    assert [sum(one) for one in by_size.values()] == sorted((sum(one) for one in by_size.values()), reverse=True)
    simulated = api.plan(SPACES / "cpu_smoke.yaml")
    assert not host_bound_trials(simulated, tmp_path)(simulated.kept[0].spec), "nothing is known of processors"


def test_a_study_that_is_not_there_cannot_be_fitted(tmp_path) -> None:
    with pytest.raises(PlanError):
        api.fit(["nothing"], storage=str(tmp_path))


def guided(tmp_path: Path, **changes: object) -> api.StudyPlan:
    document = yaml.safe_load(SPACE.read_text())
    document["search"] = {"strategy": "model_guided", "num_trials": 20}
    return api.plan({**document, **changes})


def best_of(found: Forecast, num: int) -> set[str]:
    speed = found.estimates.columns["tokens_per_s"].value
    order = sorted(range(len(speed)), key=lambda place: -speed[place])
    return {found.kept[place].trial_id for place in order[:num]}


def test_a_guided_search_begins_with_what_is_estimated_to_be_good(tmp_path: Path) -> None:
    planned = guided(tmp_path, constraints=[])
    first = informed_strategy(planned, tmp_path).ask(1)[0]
    assert first.trial_id in best_of(api.estimate(planned, storage=str(tmp_path)), len(planned.kept) // 10)


def test_a_guided_search_learns_from_earlier_studies_of_the_same_device(tmp_path: Path) -> None:
    planned = guided(tmp_path, constraints=[])
    first = informed_strategy(planned, tmp_path).ask(1)[0]
    other = StudyFolder.create(tmp_path, "earlier", {"study": "earlier"})
    # The same plans, elsewhere measured: all that resemble the first are ten times slower than estimated.
    for spec in [kept.spec for kept in planned.kept if kept.spec.plan.ep == first.plan.ep][:40]:
        folder = other.trial(spec.trial_id, 0)
        folder.write_spec(spec)
        folder.write_result(
            Run(
                trial_id=spec.trial_id,
                repeat=0,
                status=RunStatus.COMPLETED,
                quality="indicative",
                metrics={"tokens_per_s": 1000.0},
            )
        )
    assert informed_strategy(planned, tmp_path).ask(1)[0].plan.ep != first.plan.ep


@pytest.mark.parametrize("strategy", ["model_guided", "tpe", "grid"])
def test_results_of_a_model_and_a_device_of_ones_own_are_learned_from(tmp_path: Path, strategy: str) -> None:
    """A study's file keeps what they are, and not the file or catalog entry that said so."""
    model = {"name": "mine", "like": "llama3_8b", "num_layers": 4}
    cluster = {"device": {"name": "h200_500w", "like": "h200_sxm", "power_limit_w": 500}, "devices_per_node": 4}
    search = {"strategy": strategy, "num_trials": 20}
    workload, space = {"seq_len": 2048, "global_batch_size": 16}, {"tp": [1, 2], "micro_batch_size": [1, 2]}
    planned = guided(
        tmp_path, model=model, cluster=cluster, search=search, constraints=[], workload=workload, space=space
    )
    own = StudyFolder.create(tmp_path, planned.name, planned.spec.document)
    spec = planned.kept[0].spec
    completed(own, spec, 1000.0)
    completed(StudyFolder.create(tmp_path, "earlier", {"study": "earlier"}), spec, 900.0)
    resumed = api.plan(own.document())
    completed(StudyFolder.create(tmp_path, "later", {"study": "later"}), resumed.kept[0].spec, 900.0)
    learner = informed_strategy(resumed, tmp_path)
    learner.tell(*own.results()[0])
    left = [one.trial_id for one in learner.ask(len(resumed.kept))]
    assert sorted(left) == sorted(one.trial_id for one in resumed.kept[1:])
    _, warm = known_before(resumed, tmp_path)
    assert len(warm) == 1, "one trial that two studies measured"


@pytest.mark.parametrize(
    ("figures", "num_known"),
    [({}, 1), ({"peak_fp8_flop_per_s": 1e15}, 1), ({"power_limit_w": 300}, 0), ({"memory_bytes": 80_000_000_000}, 0)],
)
@pytest.mark.parametrize("simulated", [False, True])
def test_another_device_of_the_same_name_teaches_nothing(
    tmp_path: Path, figures: dict[str, float], num_known: int, *, simulated: bool
) -> None:
    def made(**changed: float) -> api.StudyPlan:
        device = {"name": "mine", "like": "h200_sxm", "power_limit_w": 500, **changed}
        cluster = {"device": "cpu", "simulate_sensors_of": device} if simulated else {"device": device}
        workload, space = {"seq_len": 2048, "global_batch_size": 16}, {"tp": [1, 2]}
        model = {"name": "llama3_8b", "num_layers": 4}
        return guided(
            tmp_path,
            model=model,
            cluster=cluster | {"devices_per_node": 4},
            constraints=[],
            workload=workload,
            space=space,
        )

    earlier = made(**figures)
    completed(StudyFolder.create(tmp_path, "earlier", {"study": "earlier"}), earlier.kept[0].spec, 900.0)
    own = made()
    _, warm = known_before(own, tmp_path)
    learner = ModelGuided(
        Problem(specs=own.candidates.specs, seed=0, question=own.spec.question, warm=warm), stops=False
    )
    assert len(learner._warm) == num_known
    assert simulated or len(warm) == num_known


def completed(study: StudyFolder, spec: TrialSpec, tokens_per_s: float) -> None:
    folder = study.trial(spec.trial_id, 0)
    folder.write_spec(spec)
    metrics = {"tokens_per_s": tokens_per_s}
    folder.write_result(
        Run(trial_id=spec.trial_id, repeat=0, status=RunStatus.COMPLETED, quality="indicative", metrics=metrics)
    )


def test_a_repeated_trial_of_an_earlier_study_is_one_plan(tmp_path: Path) -> None:
    """A reference trial that ran thirty times is not thirty plans that agree, and leaves room for the others."""
    planned = guided(tmp_path, constraints=[])
    other = StudyFolder.create(tmp_path, "earlier", {"study": "earlier"})
    one, two = (kept.spec for kept in planned.kept[:2])
    runs = [(one, repeat, RunStatus.COMPLETED, 1000.0, {}) for repeat in (0, 1, *range(1000, 1030))]
    runs += [(one, 3000, RunStatus.COMPLETED, 800.0, {"soak": "true"})]
    runs += [(two, 0, RunStatus.ABORTED, 1.0, {}), (two, 1, RunStatus.COMPLETED, 2000.0, {})]
    for spec, repeat, status, speed, tags in runs:
        folder = other.trial(spec.trial_id, repeat)
        folder.write_spec(spec)
        metrics = {"tokens_per_s": speed}
        folder.write_result(
            Run(trial_id=spec.trial_id, repeat=repeat, status=status, quality="indicative", metrics=metrics, tags=tags)
        )
    _, warm = known_before(planned, tmp_path)
    assert {each.spec: each.result.metrics["tokens_per_s"] for each in warm} == {one: 1000.0, two: 2000.0}
    assert len(warm) == 2


def test_other_strategies_and_simulated_sensors_get_no_estimates(tmp_path: Path) -> None:
    listed = api.plan(SPACE)
    assert informed_strategy(listed, tmp_path).ask(3) == listed.strategy().ask(3)
    cluster = {"device": "cpu", "num_nodes": 1, "devices_per_node": 4, "simulate_sensors_of": "h200_sxm"}
    planned = guided(tmp_path, cluster=cluster)
    assert informed_strategy(planned, tmp_path).ask(3) == planned.strategy().ask(3)


def h200_study(tmp_path: Path, name: str, more_bytes: float = 0.0) -> TrialSpec:
    """Writes a study with one measured trial of `benchmarks/data`, its memory raised."""
    path = Path(__file__).parents[3] / "benchmarks" / "data" / "moe_ep_h200x4.parquet"
    row = next(one for one in pq.read_table(path).to_pylist() if one["status"] == "completed" and one["step_time_s"])
    spec = TrialSpec.from_json(json.loads(row["spec"]))
    folder = StudyFolder.create(tmp_path, name, {"study": name}).trial(spec.trial_id, 0)
    folder.write_spec(spec)
    metrics = {metric: row[metric] for metric in METRICS if row.get(metric) is not None}
    metrics["memory_peak_bytes"] += more_bytes
    folder.write_result(
        Run(trial_id=spec.trial_id, repeat=0, status=RunStatus.COMPLETED, quality="indicative", metrics=metrics)
    )
    return spec


def test_memory_that_earlier_trials_held_beyond_their_estimate_is_carried_over_and_said(tmp_path: Path) -> None:
    before = api.estimate(SPACE, storage=str(tmp_path))
    h200_study(tmp_path, "earlier", more_bytes=2e10)
    after = api.estimate(SPACE, storage=str(tmp_path))
    trial = before.kept[0].trial_id
    place = next(index for index, one in enumerate(after.kept) if one.trial_id == trial)
    peaks = before.estimates.columns["memory_peak_bytes"].value[0], after.estimates.columns["memory_peak_bytes"].value
    assert peaks[1][place] - peaks[0] == pytest.approx(2e10, rel=0.1)
    assert "GB, as measured trials held" in after.sources[0].text
    assert "as measured trials held" not in before.sources[0].text


def test_an_estimate_is_laid_beside_a_measured_trial(tmp_path: Path) -> None:
    spec = h200_study(tmp_path, "measured")
    found = api.beside_result(f"measured:{spec.trial_id[:6]}", storage=str(tmp_path))
    assert found.trial == f"measured:{spec.trial_id}-0"
    assert not found.was_fitted
    assert all(one.measured is not None for one in found.metrics if one.name == "step_time_s")
    stored(tmp_path)  # a fit to the study `a`
    other = h200_study(tmp_path, "a")
    assert api.beside_result(f"a:{other.trial_id}", storage=str(tmp_path)).was_fitted


def test_links_without_a_table_are_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="nothing to fit"):
        api.fit(storage=str(tmp_path))
    (tmp_path / "x.parquet").write_text("no table")
    with pytest.raises(PlanError, match="is not a table of"):
        api.fit(links=str(tmp_path / "x.parquet"), storage=str(tmp_path))


def test_a_swept_table_is_fitted_unasked_and_said(tmp_path: Path) -> None:
    rows = [
        {
            "kind": "all_gather",
            "device": "h200_sxm",
            "device_uuid": "GPU-1",
            "date": "2026-11-22T21:00:00+00:00",
            "in_graph": False,
            "size_bytes": size,
            "group_size": 4,
            "num_nodes": 1,
            "time_s": 20e-6 + size / 50e9,
            "bus_bytes_per_s": 50e9,
        }
        for size in (2**12, 2**20, 2**28)
    ]
    folder = tmp_path / LINKS / "20261122T210000Z"
    folder.mkdir(parents=True)
    write_table(folder / TABLE, pa.Table.from_pylist([{n: r.get(n) for n in COLUMNS.names} for r in rows], COLUMNS))
    stored(tmp_path)
    before = api.estimate(SPACE, storage=str(tmp_path))
    ((path, fit),) = api.fit(storage=str(tmp_path))
    assert path.exists()
    assert fit.num_trials == 12, "the trials of the earlier fit stay in it"
    assert fit.device_uuids == ("GPU-1",)
    after = api.estimate(SPACE, storage=str(tmp_path))
    assert "links of 2026-11-22" in after.sources[0].text
    slowest = [float(one.estimates.columns["step_time_s"].value.max()) for one in (before, after)]
    assert slowest[1] > 1.2 * slowest[0], "gathers at a tenth of the rate"
