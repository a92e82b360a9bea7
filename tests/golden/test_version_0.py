"""Folders that version 0 wrote open, rank and resume; its last commit made those in `version_0`."""

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import yaml

from wattune import api
from wattune.errors import PlanError, SpaceError
from wattune.inspection import inspect
from wattune.plans.axes import Plan
from wattune.search.prune import prune
from wattune.search.space import parse_space
from wattune.storage import versions
from wattune.storage.measured import RecordingFolder
from wattune.storage.study import StudyFolder
from wattune.storage.versions import VERSION, completed_space
from wattune.trial import TrialSpec, TrialStatus

HERE = Path(__file__).parent / "version_0"
ENDED = {"664a69b4ab77", "718443cd2b9a", "6ab1b16ad5f6", "585a64df2745", "99fe450c66be", "c0ff569343c9"}
REFERENCE = "c0ff569343c9"


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    shutil.copytree(HERE / "before_versions", tmp_path / "before_versions")
    return tmp_path


def todays_space(study: StudyFolder) -> dict[str, object]:
    """The space as its author would write it today, from what the study kept."""
    kept = yaml.safe_load((study.path / "study.yaml").read_text())
    measure, search = dict(kept["measure"]), dict(kept["search"])
    measure["reference_every"], search["reference"] = measure.pop("anchor_every"), search.pop("anchor")
    return {**kept, "measure": measure, "search": search}


def keys_without(found: object, space: object, path: str = "") -> list[str]:
    """The keys of a space, by dotted path, that another one lacks."""
    if isinstance(found, list) and isinstance(space, list):
        return [key for one, other in zip(found, space, strict=True) for key in keys_without(one, other, path)]
    if not isinstance(found, dict) or not isinstance(space, dict):
        return []
    paths = {name: f"{path}.{name}".lstrip(".") for name in found}
    lacking = [paths[name] for name in found if name not in space]
    both = [keys_without(found[name], space[name], paths[name]) for name in found if name in space]
    return [*lacking, *(key for keys in both for key in keys)]


def test_every_result_is_read_in_todays_words(storage: Path) -> None:
    study = StudyFolder.open("before_versions", storage)
    results = study.results()
    assert {spec.trial_id for spec, _ in results} == ENDED and len(results) == 8
    assert all(result.status is TrialStatus.COMPLETED for _, result in results)
    references = sorted(result.repeat for _, result in results if result.tags.get("reference") == "true")
    assert references == [1000, 1001]
    assert not any("anchor" in result.tags for _, result in results)
    assert {row["status"] for row in study.candidates()} == {"kept", "equivalent"}


def test_ids_of_old_trials_are_what_they_were(storage: Path) -> None:
    for folder in StudyFolder.open("before_versions", storage).trials():
        assert folder.spec().trial_id == folder.path.name.split("-")[0]


def test_a_neutral_axis_of_tomorrow_changes_no_id(storage: Path) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Tomorrow(Plan):
        fp8_recipe: str = "none"

    spec = StudyFolder.open("before_versions", storage).trials()[0].spec()
    written = {name: getattr(spec.plan, name) for name in Plan.__dataclass_fields__}
    assert replace(spec, plan=Tomorrow(**written)).trial_id == spec.trial_id
    assert replace(spec, plan=Tomorrow(**written, fp8_recipe="mxfp8")).trial_id != spec.trial_id


def test_a_later_field_with_a_default_factory_changes_no_id(storage: Path) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Tomorrow(Plan):
        hooks: list[str] = field(default_factory=list)

    spec = StudyFolder.open("before_versions", storage).trials()[0].spec()
    written = {name: getattr(spec.plan, name) for name in Plan.__dataclass_fields__}
    assert replace(spec, plan=Tomorrow(**written)).trial_id == spec.trial_id
    assert replace(spec, plan=Tomorrow(**written, hooks=["optimizer"])).trial_id != spec.trial_id


def test_an_old_study_ranks(storage: Path) -> None:
    ranking = api.rank(["before_versions"], storage=str(storage))
    assert [row.trial_id for row in ranking.feasible][:1] == ["664a69b4ab77"]
    assert {row.trial_id for row in ranking.unknown} == {REFERENCE}  # one of its runs has no power


def test_an_old_study_resumes_with_every_trial_done(storage: Path) -> None:
    study = StudyFolder.open("before_versions", storage)
    space = parse_space(todays_space(study))
    again = StudyFolder.create(storage, "before_versions", space.document)
    assert {kept.spec.trial_id for kept in prune(space).kept} == ENDED
    assert yaml.safe_load((again.path / "study.yaml").read_text())["version"] == VERSION
    assert parse_space(yaml.safe_load((again.path / "study.yaml").read_text())).document == space.document


def test_every_later_key_of_a_space_has_the_value_old_studies_ran_with(storage: Path) -> None:
    """A key that is named here needs a line in `storage.versions.ADDED`, or old studies cannot be continued."""
    study = StudyFolder.open("before_versions", storage)
    today = parse_space(todays_space(study)).document
    assert keys_without(today, completed_space(study.document())) == []


def test_a_later_key_without_a_value_for_old_studies_is_named(storage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = StudyFolder.open("before_versions", storage)
    today = dict(parse_space(todays_space(study)).document)
    today |= {"search": {**today["search"], "patience": 3}, "cluster": [{**today["cluster"][0], "cooling": "air"}]}
    assert keys_without(today, completed_space(study.document())) == ["cluster.cooling", "search.patience"]
    with pytest.raises(SpaceError, match=r"cluster\.cooling: stored nothing, given air"):
        study.require_space(today)
    later = {**versions.ADDED, "search.patience": 3, "cluster.cooling": "air"}
    monkeypatch.setattr(versions, "ADDED", later)
    assert keys_without(today, completed_space(study.document())) == []
    assert study.require_space(today) == []
    assert study.require_space({**today, "search": {**today["search"], "patience": 4}}) == ["search.patience: 3 -> 4"]


def test_an_old_study_grows(storage: Path) -> None:
    study = StudyFolder.open("before_versions", storage)
    first = todays_space(study)
    grown = parse_space({**first, "measure": {**first["measure"], "repeats": 4}})  # type: ignore[dict-item]
    assert StudyFolder.create(storage, "before_versions", grown.document).space().number == 2
    assert completed_space(study.spaces()[0].document) == completed_space(parse_space(first).document)
    assert {row["space"] for row in _with_table(study)} == {1}
    assert len(study.results()) == 8


def _with_table(study: StudyFolder) -> list[dict[str, object]]:
    study.write_candidates(study.candidates())
    return study.candidates()


def test_another_workload_is_still_another_study(storage: Path) -> None:
    study = StudyFolder.open("before_versions", storage)
    other = {**todays_space(study), "workload": {"mode": "pretrain", "seq_len": 64, "global_batch_size": 8}}
    with pytest.raises(SpaceError, match=r"workload\.seq_len: stored 32, given 64"):
        StudyFolder.create(storage, "before_versions", parse_space(other).document)


def test_old_keys_of_a_space_are_named_with_their_new_names(storage: Path) -> None:
    kept = yaml.safe_load((storage / "before_versions" / "study.yaml").read_text())
    with pytest.raises(SpaceError) as caught:
        parse_space(kept)
    assert "measure.anchor_every: is now reference_every; rename it" in str(caught.value)
    assert "search.anchor: is now reference; rename it" in str(caught.value)


def test_spans_and_telemetry_of_an_old_trial_are_analysed(storage: Path) -> None:
    study = StudyFolder.open("before_versions", storage)
    folder = study.trial("664a69b4ab77", 0)
    assert not (folder.path / "spans.parquet").exists()
    stored = folder.result()
    assert stored is not None
    metrics = inspect(folder.path).summary.metrics
    assert metrics["tokens_per_s"] == pytest.approx(stored.metrics["tokens_per_s"], rel=1e-9)
    assert metrics["node_device_power_peak_1s_w"] == pytest.approx(
        stored.metrics["node_device_power_peak_1s_w"], rel=1e-9
    )
    assert study.dataset("spans").count_rows() > 100


def test_an_old_recording_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "recordings" / "sleeping"
    shutil.copytree(HERE / "recordings" / "sleeping", folder)
    assert "version" not in RecordingFolder(folder).facts()
    summary = inspect(folder).summary
    assert summary.metrics["node_device_power_peak_1s_w"] == pytest.approx(704, rel=0.01)


@pytest.mark.parametrize("version", [VERSION + 1, "two", -1, True])
def test_a_folder_of_a_later_version_is_refused_in_one_line(storage: Path, version: object) -> None:
    path = storage / "before_versions" / "study.yaml"
    path.write_text(yaml.safe_dump({"version": version, **yaml.safe_load(path.read_text())}))
    with pytest.raises(PlanError, match=f"got version .*, allowed: up to {VERSION}; read it with"):
        StudyFolder.open("before_versions", storage).document()


def test_a_specification_reads_back_as_it_was(storage: Path) -> None:
    for folder in StudyFolder.open("before_versions", storage).trials():
        spec = folder.spec()
        assert TrialSpec.from_json(spec.to_json()) == spec
