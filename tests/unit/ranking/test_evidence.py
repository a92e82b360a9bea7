"""Evidence from trials' folders beyond their metrics, names of trials, and two trials side by side."""

import shutil
from dataclasses import replace

import pytest
from small_study import make_study, ranking_of, without_steps

import wattune
from wattune.errors import PlanError
from wattune.ranking.evidence import Compared, gather, split_reference
from wattune.storage.study import StudyFolder


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> StudyFolder:
    return make_study(tmp_path_factory.mktemp("storage"))


def test_real_recordings_are_ranked_and_compared(study):
    ranking = ranking_of(study)
    (best,), (over,) = ranking.feasible, ranking.infeasible
    assert (best.label, over.label) == ("tp2 pp2 mbs1", "dp4 mbs1 overlap=grad_param")
    assert best.margins[0].got == pytest.approx(2644, rel=0.01)  # the recordings' own notes
    assert over.margins[0].got == pytest.approx(2788, rel=0.01)
    found = wattune.compare(f"{study.path}/trials/{best.trial_id}-0", f"{study.path}:{over.trial_id[:6]}")
    assert found.time is not None
    assert found.time.a == pytest.approx(best.spec.workload.tokens_per_step / best.objective.value, rel=1e-6)
    assert found.time.b == pytest.approx(over.spec.workload.tokens_per_step / over.objective.value, rel=1e-6)
    assert found.energy is not None
    assert found.energy.a == pytest.approx(best.counted[0].metrics["energy_per_step_j"], rel=1e-6)
    assert set(found.differences) == {"plan.tp", "plan.pp", "plan.etp", "plan.overlap"}


def test_a_trial_whose_result_cannot_be_read_is_compared_by_its_other_repeats_or_not_at_all(tmp_path):
    study = make_study(tmp_path)
    best = ranking_of(study).best
    lost, again = study.trial(best.trial_id, 0), study.trial(best.trial_id, 1)
    shutil.copytree(lost.path, again.path)
    again.write_result(replace(best.repeats[0], repeat=1))
    (lost.path / "run.json").write_text("{")
    assert Compared(study).side(best.trial_id).name.endswith("-1")
    with pytest.raises(PlanError, match=f"{lost.path}: no trial of this version"):
        Compared(study).side(f"{best.trial_id}-0")
    shutil.rmtree(again.path)
    with pytest.raises(PlanError, match=f"{lost.path}: no trial of this version"):
        Compared(study).side(best.trial_id)


def test_evidence_is_what_the_folder_holds(study):
    (best,) = ranking_of(study).feasible
    found = gather(study.trial(best.trial_id, 0))
    assert found is not None
    assert found.highest_node == "node0"
    time_s, watts = found.power_w["node0"]
    assert watts.mean() == pytest.approx(best.counted[0].metrics["node_device_power_mean_w"], rel=0.01)
    assert (time_s[0] >= 0) and (time_s[-1] <= best.counted[0].numbers.window_s)
    start_s, length_s = (found.steps[name].to_numpy() for name in ("start_s", "time_s"))
    assert found.steps["step"][0].as_py() == best.counted[0].numbers.first_step
    assert start_s[0] == pytest.approx(0.0, abs=1e-3)
    assert (length_s > 0).all()
    assert found.slots["slot"].to_pylist() == [0, 1, 2, 3]


def test_evidence_of_a_trial_without_steps_is_of_the_window_that_its_run_is(tmp_path):
    study = make_study(tmp_path)
    best = ranking_of(study).best
    result = without_steps(study, best.trial_id)
    found = gather(study.trial(best.trial_id, 0))
    assert found is not None and not found.steps.num_rows and found.breakdown is None
    (time_s, watts) = found.power_w["node0"]
    start_ns, end_ns = (result.numbers.window_start_mono_ns, result.numbers.window_end_mono_ns)
    assert 0 <= time_s[0] < time_s[-1] <= (end_ns - start_ns) / 1e9 and watts.max() > 2000
    side = Compared(study).side(best.trial_id)
    assert side.simulated is False and side.breakdown is None


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("moe:0517fb8c0ffe", ("moe", "0517fb8c0ffe")),
        ("/a/b/moe/trials/0517fb8c0ffe-1/", ("/a/b/moe", "0517fb8c0ffe-1")),
        ("s3://bucket/x/moe:0517", ("s3://bucket/x/moe", "0517")),
    ],
)
def test_a_trial_is_named_by_study_and_id_or_by_its_folder(text, pair):
    assert split_reference(text) == pair


@pytest.mark.parametrize("text", ["moe", ":0517", "moe:", ""])
def test_what_names_no_trial_says_how_to(text):
    with pytest.raises(PlanError, match="give STUDY:TRIAL_ID"):
        split_reference(text)


def test_a_trial_that_is_not_there_or_did_not_complete_is_an_error_that_says_what_is(study):
    ranking = ranking_of(study)
    with pytest.raises(PlanError, match=ranking.best.trial_id):
        Compared(study).side("ffffffffffff")
    with pytest.raises(PlanError, match="no completed repeat to compare: repeat 0 out_of_memory"):
        Compared(study).side(ranking.failed[0].trial_id)
    with pytest.raises(PlanError, match="no completed repeat"):
        Compared(study).side(f"{ranking.best.trial_id}-7")
