"""A trial's specification and result against what they say of themselves."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from small_study import make_study

from wattune.errors import PlanError
from wattune.storage.study import TrialFolder
from wattune.storage.trial_files import accept, key_of, read_result, require_own, spec_of


@pytest.fixture
def trial(tmp_path: Path) -> TrialFolder:
    return next(one for one in make_study(tmp_path).trials() if one.spans() is not None)


@pytest.mark.parametrize("name", ["", "a", "a-", "-1", "a-x", "a-١", "a-" + "9" * 10])
def test_a_folder_of_another_name_is_no_trials(name: str) -> None:
    with pytest.raises(ValueError, match="no folder of a trial"):
        key_of(name)


def test_a_name_says_id_and_repeat() -> None:
    assert key_of("0517fb8c0ffe-1000") == ("0517fb8c0ffe", 1000)


def test_folder_specification_and_result_are_of_one_trial(trial: TrialFolder) -> None:
    spec, result = trial.read()
    assert result is not None
    require_own(trial.path.name, spec, result)
    for other in (replace(result, repeat=1), replace(result, trial_id="0" * 12)):
        with pytest.raises(ValueError, match="is of"):
            require_own(trial.path.name, spec, other)
    with pytest.raises(ValueError, match="folder is of"):
        require_own("0" * 12 + "-0", spec, result)
    small = replace(spec, cluster=replace(spec.cluster, devices_per_node=1), plan=replace(spec.plan, tp=4))
    with pytest.raises(ValueError, match="needs more than the 1 rank"):
        spec_of(json.dumps({**small.to_json(), "format": 4}).encode())


def test_an_id_is_compared_with_its_content(trial: TrialFolder) -> None:
    data = json.loads((trial.path / "spec.json").read_text())
    assert spec_of(json.dumps(data).encode()).trial_id == data["trial_id"]
    data["workload"]["seq_len"] += 1
    with pytest.raises(ValueError, match=r"trial_id of spec\.json: got"):
        spec_of(json.dumps(data).encode())


def test_nothing_is_accepted_where_nothing_changed_or_no_result_is_there(trial: TrialFolder, tmp_path: Path) -> None:
    before = (trial.path / "run.json").read_bytes()
    assert accept(trial.path) == () and (trial.path / "run.json").read_bytes() == before
    with pytest.raises(PlanError, match="no trial of this version"):
        accept(tmp_path)
    with pytest.raises(PlanError, match=r"written before 0\.1\.0"):
        read_result(b"{}", tmp_path)
