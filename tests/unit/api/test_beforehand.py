"""Knowledge before the first trial: limits take the low ends, earlier studies teach, nothing is read twice."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from pytest import MonkeyPatch
from specs import made_run, store_run

from wattune import api
from wattune.api import beforehand
from wattune.api.beforehand import Beforehand
from wattune.api.spaces import plan_again
from wattune.run import NO_NUMBERS, RunStatus
from wattune.search.forecast import Forecast
from wattune.search.strategies.model_guided import ModelGuided
from wattune.search.strategies.protocol import Problem
from wattune.storage.study import StudyFolder
from wattune.trial import TrialSpec

SPACES = Path(__file__).parents[3] / "search_spaces"
SPACE = SPACES / "moe_ep_h200x4.yaml"


def test_limits_are_held_to_the_low_end_of_an_estimate(tmp_path) -> None:
    planned = api.plan(SPACE)
    free = replace(planned, spec=replace(planned.spec, limits={}))
    assert Beforehand(free, tmp_path).lowest_figures() is None, "nothing is limited"
    limited = replace(planned, spec=replace(planned.spec, limits={"node_device_power_w": 100.0}))
    lowest = Beforehand(limited, tmp_path).lowest_figures()
    one = planned.kept[0].spec
    figure = api.forecast(planned, storage=str(tmp_path))
    place = [each.spec for each in figure.kept].index(one)
    expected = figure.estimates.one(place)["node_device_power_peak_1s_w"]
    assert (
        lowest(one)["node_device_power_peak_1s_w"] == pytest.approx(expected["low"])
        and expected["low"] < expected["value"]
    )


def test_a_simulated_trial_has_no_estimate_to_be_refused_by(tmp_path) -> None:
    planned = api.plan(SPACES / "cpu_smoke.yaml")
    limited = replace(planned, spec=replace(planned.spec, limits={"node_device_power_w": 1.0}))
    assert Beforehand(limited, tmp_path).lowest_figures()(planned.kept[0].spec) == {}


def test_plans_of_small_kernels_may_wait_for_their_host(tmp_path) -> None:
    planned = api.plan(SPACES.parent / "benchmarks" / "data" / "dense_gpt_1b_h200.yaml")
    waits = Beforehand(planned, tmp_path).waits_for_host
    by_size = {size: [] for size in (1, 2, 4, 8)}
    for spec in planned.candidates.specs:
        by_size[spec.plan.micro_batch_size].append(waits(spec))
    assert all(by_size[1]) and not all(by_size[8])
    assert [sum(one) for one in by_size.values()] == sorted((sum(one) for one in by_size.values()), reverse=True)
    simulated = api.plan(SPACES / "cpu_smoke.yaml")
    assert not Beforehand(simulated, tmp_path).waits_for_host(simulated.kept[0].spec), "nothing is known of processors"


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
    first = Beforehand(planned, tmp_path).strategy().ask(1)[0]
    assert first.trial_id in best_of(api.forecast(planned, storage=str(tmp_path)), len(planned.kept) // 10)


def test_a_guided_search_learns_from_earlier_studies_of_the_same_device(tmp_path: Path) -> None:
    planned = guided(tmp_path, constraints=[])
    first = Beforehand(planned, tmp_path).strategy().ask(1)[0]
    other = StudyFolder.create(tmp_path, "earlier", {"study": "earlier"})
    # The same plans, elsewhere measured: all that resemble the first are ten times slower than estimated.
    for spec in [kept.spec for kept in planned.kept if kept.spec.plan.ep == first.plan.ep][:40]:
        completed(other, spec, 1000.0)
    assert Beforehand(planned, tmp_path).strategy().ask(1)[0].plan.ep != first.plan.ep


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
    learner = Beforehand(resumed, tmp_path).strategy()
    learner.tell(*own.results()[0])
    left = [one.trial_id for one in learner.ask(len(resumed.kept))]
    assert sorted(left) == sorted(one.trial_id for one in resumed.kept[1:])
    warm = Beforehand(resumed, tmp_path).warm()
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
    warm = Beforehand(own, tmp_path).warm()
    learner = ModelGuided(
        Problem(specs=own.candidates.specs, seed=0, question=own.spec.question, warm=warm), stops=False
    )
    assert len(learner._warm) == num_known
    assert simulated or len(warm) == num_known


def completed(study: StudyFolder, spec: TrialSpec, tokens_per_s: float) -> None:
    store_run(study, spec, made_run(spec, quality="indicative", metrics={"tokens_per_s": tokens_per_s}))


def test_a_repeated_trial_of_an_earlier_study_is_one_plan(tmp_path: Path) -> None:
    """A reference trial that ran thirty times is not thirty plans that agree, and leaves room for the others."""
    planned = guided(tmp_path, constraints=[])
    other = StudyFolder.create(tmp_path, "earlier", {"study": "earlier"})
    one, two = (kept.spec for kept in planned.kept[:2])
    runs = [(one, repeat, RunStatus.COMPLETED, 1000.0, {}) for repeat in (0, 1, *range(1000, 1030))]
    runs += [(one, 3000, RunStatus.COMPLETED, 800.0, {"soak": "true"})]
    runs += [(two, 0, RunStatus.ABORTED, 1.0, {}), (two, 1, RunStatus.COMPLETED, 2000.0, {})]
    for spec, repeat, status, speed, tags in runs:
        metrics = {"tokens_per_s": speed}
        run = made_run(spec, repeat=repeat, status=status, quality="indicative", metrics=metrics, tags=tags)
        store_run(other, spec, run)
    warm = Beforehand(planned, tmp_path).warm()
    assert {each.spec: each.result.metrics["tokens_per_s"] for each in warm} == {one: 1000.0, two: 2000.0}
    assert len(warm) == 2


def test_other_studies_are_read_once_and_candidates_estimated_once(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """A run asks for durations, hard limits, hosts and a strategy: four readers of one storage."""
    for name in ("a", "b"):
        completed(StudyFolder.create(tmp_path, name, {"study": name}), api.plan(SPACE).kept[0].spec, 900.0)
    planned = guided(tmp_path)
    read, estimated = Counter(), Counter()
    finished, estimate = StudyFolder.finished, beforehand.estimate

    def counted(folder: StudyFolder) -> object:
        read[folder.name] += 1
        return finished(folder)

    def noted(specs: Sequence[TrialSpec], find: object) -> object:
        estimated[len(specs)] += 1
        return estimate(specs, find)

    monkeypatch.setattr(StudyFolder, "finished", counted)
    monkeypatch.setattr(beforehand, "estimate", noted)
    assert api.preview(planned, storage=str(tmp_path)).num_left
    assert read == {"a": 1, "b": 1, planned.name: 1}
    assert estimated == {len(planned.kept): 1, 1: 1}, "the candidates, and the trial that two studies measured"


def test_a_study_with_simulated_sensors_reads_no_other_study_for_their_scatter(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    def read(_: StudyFolder) -> None:
        raise AssertionError("another study was read")

    monkeypatch.setattr(StudyFolder, "results", read)
    StudyFolder.create(tmp_path, "earlier", {"study": "earlier"})
    assert Beforehand(api.plan(SPACES / "cpu_smoke.yaml"), tmp_path).scatter() == NO_NUMBERS
    with pytest.raises(AssertionError):
        Beforehand(api.plan(SPACE), tmp_path).scatter()


def test_scatter_is_learned_from_the_other_studies_of_the_same_device(tmp_path: Path) -> None:
    planned = guided(tmp_path, constraints=[])
    spec = planned.kept[0].spec
    assert Beforehand(planned, tmp_path).scatter() == NO_NUMBERS
    for name, repeated in (
        (planned.name, spec),
        ("elsewhere", replace(spec, cluster=replace(spec.cluster, device="h100_sxm"))),
        ("earlier", spec),
    ):
        assert Beforehand(planned, tmp_path).scatter() == NO_NUMBERS, "its own runs, and another device's"
        study = StudyFolder.create(tmp_path, name, {"study": name})
        for repeat, step_time_s in enumerate((1.0, 1.1, 0.9)):
            how = {"quality": "indicative", "tags": {"simulated": "false"}}
            run = made_run(repeated, repeat=repeat, metrics={"step_time_s": step_time_s}, **how)
            store_run(study, repeated, run)
    assert Beforehand(planned, tmp_path).scatter().speed_spread_frac > 0.01


def test_what_a_study_leaves_at_its_end_is_not_computed_again(tmp_path, monkeypatch):
    for where in ("wattune.api.spaces", "wattune.storage.known_results"):
        monkeypatch.setattr(f"{where}.LEAST_KEPT", 1)
    planned = api.plan(SPACE)
    study = StudyFolder.create(tmp_path, planned.name, planned.spec.document)
    (study.path / "trials").mkdir()
    known = Beforehand(planned, tmp_path)
    known.keep(study.path)
    for made in ("wattune.api.spaces.prune", "wattune.api.beforehand.estimate"):
        monkeypatch.setattr(made, None)
    again = Beforehand(plan_again(study.document(), study.path), tmp_path, study=study.path)
    assert again.planned.candidates.specs == planned.candidates.specs
    assert again.estimates.table().equals(known.estimates.table())
