"""The file of results beside the trials: whatever becomes of it or of them, a study reads as its trials say."""

import hashlib
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from specs import made_run, store_run
from study_files import SPEC, write_trial

from wattune.plans.axes import Plan
from wattune.plans.program import Program
from wattune.run import Numbers, Prediction, RunStatus
from wattune.storage import known_results
from wattune.storage import study as study_module
from wattune.storage.digests import with_digest
from wattune.storage.format import FORMAT
from wattune.storage.known_results import FITS, PLAN, RESULTS, read_known, write_known
from wattune.storage.study import StudyFolder

TICK_S = 0.012
"""Longer than a file system's clock stands still: what is changed after it has another time."""


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StudyFolder:
    """A study whose file is written for a single trial, also one of just now."""
    monkeypatch.setattr(known_results, "LEAST_NEW", 1)
    monkeypatch.setattr(known_results, "SETTLED_NS", -(10**18))
    made = StudyFolder.create(tmp_path, "mine", {"study": "mine", "objective": "maximize tokens_per_s"})
    for number in range(6):
        put(made, number)
    return made


def put(study: StudyFolder, number: int, tokens_per_s: float = 1.5) -> Path:
    """Writes a trial whose plan and figures follow from its number."""
    spec = replace(SPEC, plan=Plan(tp=2, micro_batch_size=1 + number // 2))
    result = made_run(
        spec,
        repeat=number % 2,
        metrics={"tokens_per_s": tokens_per_s, "excursion_count": number, "mfu_frac": 0.1 + 1e-17 * number},
        quality="indicative",
        quality_reasons=("räume",),
        tags={"nodes": f"n{number % 3}"},
        numbers=Numbers(window_s=1 / 3, space=1) if number % 2 else Numbers(),
        prediction=Prediction(metric="tokens_per_s", value=1, low=0.5, high=2.0, feasible_probability=1.0),
        start_wall_ns=10**18 + number,
        end_wall_ns=2 * 10**18,
    )
    return store_run(study, spec, result).path


def told(study: StudyFolder) -> str:
    """All that a reader is told, to the last digit and type."""
    try:
        return repr(study.finished())
    except Exception as error:
        return repr(error)


def truth(study: StudyFolder) -> str:
    """The same by the trials' own files alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(known_results, "RESULTS", "trials/.of-nobody")
        patch.setattr(known_results, "LEAST_NEW", 10**9)
        return told(study)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files of trials that were opened."""
    found: list[str] = []
    read = study_module.read_bounded

    def noted(path: Any, *rest: Any) -> bytes:
        found.append(str(path))
        return read(path, *rest)

    monkeypatch.setattr(study_module, "read_bounded", noted)
    return found


def test_a_second_reader_opens_no_file_of_a_trial_and_reads_the_same(study: StudyFolder, opened: list[str]) -> None:
    expected, before_ns = truth(study), study.path.stat().st_mtime_ns
    assert told(study) == expected and len(opened) > 0
    assert study.path.stat().st_mtime_ns == before_ns, "by which studies are the newest"
    opened.clear()
    assert told(study) == expected and opened == []
    put(study, 6)
    assert told(study) == truth(study) != expected


def test_specifications_of_commands_and_small_trials_come_back_whole(study: StudyFolder) -> None:
    program = Program(command=("python", "train.py", "{tp}"), flags=(("lr", 0.1), ("fused", True)))
    for number, changed in enumerate(({"program": program}, {"stands_for": replace(SPEC, plan=Plan(tp=1))})):
        spec = replace(SPEC, plan=Plan(rank_order=(1, 0)), **changed)
        result = made_run(spec, repeat=number, status=RunStatus.CRASHED, reason="x")
        write_trial(study.trial(spec.trial_id, number), spec, result)
    before = study.finished()[0]
    after = study.finished()[0]
    assert (study.path / RESULTS).exists() and repr(before) == repr(after)
    assert [spec.trial_id for spec, _ in after] == [spec.trial_id for spec, _ in before]
    assert len({spec for spec, _ in after}) == 5


def test_a_file_that_may_still_change_within_its_time_is_read_again(
    study: StudyFolder, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_results, "SETTLED_NS", 3600 * 10**9)
    told(study)
    opened.clear()
    told(study)
    assert len(opened) == 12 and not (study.path / RESULTS).exists()


def test_a_file_with_lines_of_an_earlier_version_is_as_no_file(study: StudyFolder) -> None:
    one = next(iter(study.trials())).path
    line = [one.name, known_results.KnownResults(study.path).files_of(str(one)), 0, {}, {}]
    lines = [[FORMAT, ["{}"]], line]
    with pa.CompressedOutputStream(sink := pa.BufferOutputStream(), "zstd") as stream:
        stream.write(b"\n".join(json.dumps(each).encode() for each in lines))
    content = sink.getvalue().to_pybytes()
    (study.path / RESULTS).write_bytes(hashlib.sha256(content).digest() + content)
    assert told(study) == truth(study)


def test_small_studies_have_no_such_file(study: StudyFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    told(study)
    assert not (study.path / RESULTS).exists()


def edit_in_place(path: Path) -> None:
    """Changes a figure without another size or time of change."""
    known, content = path.stat(), path.read_bytes()
    time.sleep(TICK_S)
    with path.open("r+b") as file:
        file.write(content.replace(b"1.5", b"9.5", 1))
    os.utime(path, ns=(known.st_atime_ns, known.st_mtime_ns))


def edit_with_digest(path: Path) -> None:
    data = json.loads(path.read_bytes())
    data["metrics"]["tokens_per_s"] = 9.5
    path.write_bytes(with_digest({name: value for name, value in data.items() if name not in ("digest", "format")}))


def swap(path: Path) -> None:
    other = next(one for one in sorted(path.parent.parent.iterdir()) if one != path.parent)
    aside = path.parent.with_name("aside")
    path.parent.rename(aside)
    other.rename(path.parent)
    aside.rename(other)


CHANGES: dict[str, Callable[[Path], object]] = {
    "edited in place": edit_in_place,
    "edited with its digest": edit_with_digest,
    "emptied": lambda path: path.write_bytes(b""),
    "specification of another": lambda path: path.with_name("spec.json").write_text("{}"),
    "removed": lambda path: path.unlink(),
    "folder removed": lambda path: shutil.rmtree(path.parent),
    "swapped": swap,
    "a folder in its place": lambda path: (path.unlink(), path.mkdir()),
    "elsewhere by a link": lambda path: (
        path.parent.rename(path.parents[3] / "far") and path.parent.symlink_to(path.parents[3] / "far")
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_trial_that_changed_is_read_from_its_own_files(study: StudyFolder, change: str) -> None:
    before = told(study)
    assert (study.path / RESULTS).exists()
    CHANGES[change](study.trial(put(study, 0).name[:12], 0).path / "run.json")
    assert told(study) == truth(study) != before
    assert told(study) == truth(study)


def test_a_file_that_is_torn_or_damaged_anywhere_counts_for_nothing(study: StudyFolder) -> None:
    expected, path, dice = told(study), study.path / RESULTS, random.Random(5)
    content = path.read_bytes()
    for place in (0, 1, 31, 32, 39, 40, 41, len(content) - 1, *(dice.randrange(len(content)) for _ in range(40))):
        path.write_bytes(content[:place])
        assert told(study) == expected, f"torn at {place}"
        flipped = bytearray(content)
        flipped[place % len(content)] ^= 1 << dice.randrange(8)
        path.write_bytes(flipped)
        assert told(study) == expected, f"flipped at {place}"
        if place % 5 == 0:
            path.write_bytes(content + b"more")
            assert told(study) == expected, "with more behind it"


def test_where_it_cannot_be_written_the_trials_are_read(study: StudyFolder, opened: list[str]) -> None:
    (study.path / f"{RESULTS}.new").mkdir()
    for _ in range(2):
        opened.clear()
        assert told(study) == truth(study)
        assert len([path for path in opened if RESULTS not in path]) == 24


def test_it_is_no_more_open_than_the_results_it_has(study: StudyFolder) -> None:
    (study.trial(put(study, 1).name[:12], 1).path / "run.json").chmod(0o600)
    told(study)
    assert (study.path / RESULTS).stat().st_mode & 0o777 == 0o600


def test_readers_that_are_killed_at_any_moment_leave_what_the_trials_say(study: StudyFolder) -> None:
    dice = random.Random(7)
    for number in range(12):
        put(study, number % 8, tokens_per_s=float(number))
        expected, child = truth(study), os.fork()
        if child == 0:
            try:
                while True:
                    (study.path / RESULTS).unlink(missing_ok=True)
                    study.finished()
            finally:
                os._exit(1)
        time.sleep(dice.uniform(0.0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert told(study) == expected == told(study)
    left = sorted(path.name for path in (study.path / "trials").iterdir() if path.name.startswith("."))
    assert set(left) <= {".results"}, "the next writer takes the place of what a dead one left"


def test_any_order_of_changes_reads_as_the_trials_say(study: StudyFolder) -> None:
    dice, kept = random.Random(3), b""
    for step in range(120):
        match dice.randrange(8):
            case 0 | 1 | 2:
                put(study, dice.randrange(12), tokens_per_s=dice.choice((1.5, 2.5, 3.0)))
            case 3:
                time.sleep(TICK_S)
                if runs := sorted(study.path.glob("trials/*/run.json")):
                    CHANGES[dice.choice([*CHANGES][:4])](dice.choice(runs))
            case 4:
                if folders := sorted(study.path.glob("trials/*-*")):
                    shutil.rmtree(dice.choice(folders))
            case 5:
                kept = (study.path / RESULTS).read_bytes() if (study.path / RESULTS).exists() else kept
            case 6:
                (study.path / RESULTS).write_bytes(kept)  # an earlier one comes back
            case 7:
                (study.path / RESULTS).unlink(missing_ok=True)
        assert told(study) == truth(study), step


def test_arrays_are_read_as_they_were_written_and_damage_is_as_none(study: StudyFolder) -> None:
    path, own = study.path / FITS, {"a": np.array([0.1 + 0.2, -1e-300, 1 / 3]), "b": np.arange(3, dtype=np.uint8)}
    write_known(path, own)
    assert {name: each.tolist() for name, each in read_known(path).items()} == {k: v.tolist() for k, v in own.items()}
    assert told(study) == truth(study), "no trial"
    whole = path.read_bytes()
    one_bit = whole[:200] + bytes([whole[200] ^ 1]) + whole[201:]
    for damaged in (whole[:-5], one_bit, b"[1]", known_results._digest((), b"[1]") + b"[1]", b""):
        path.write_bytes(damaged)
        assert read_known(path) == {}


def test_arrays_that_follow_from_other_code_or_texts_are_none(study: StudyFolder) -> None:
    path = study.path / PLAN
    write_known(path, {"value": np.arange(3.0)}, "this space", 1)
    assert read_known(path, "this space", 1)["value"].tolist() == [0, 1, 2]
    assert read_known(path, "this space", 2) == read_known(path, "that space", 1) == read_known(path) == {}
    with patch.object(known_results, "_code", lambda: b"of another version"):
        assert read_known(path, "this space", 1) == {}
        write_known(path, {"value": np.arange(2.0)}, "this space", 1)
    assert read_known(path, "this space", 1) == {}
    path.unlink()
    path.mkdir()  # as in storage that cannot be written
    write_known(path, {"value": np.arange(3.0)}, "this space", 1)
    assert read_known(path, "this space", 1) == {} and {one.name for one in path.parent.glob(".*")} <= {
        PLAN[7:],
        RESULTS[7:],
    }
