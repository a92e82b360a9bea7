"""A bundle: the same verdicts elsewhere, each damage told by file, and no zip file that does harm."""

import hashlib
import io
import json
import math
import shutil
import zipfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from small_study import make_study

from wattune.api.bundles import check_bundle, packed
from wattune.cli.shell import main
from wattune.storage.digests import object_of, with_digest

EXPERIMENTS = Path(__file__).parents[3] / "experiments"


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return packed(str(make_study(tmp_path_factory.mktemp("storage")).path))


@pytest.fixture(scope="module")
def asked() -> bytes:
    return packed(str(EXPERIMENTS))


def files_of(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        return {one: file.read(one) for one in file.namelist()}


def zipped(files: dict[str, bytes]) -> bytes:
    packet = io.BytesIO()
    with zipfile.ZipFile(packet, "w") as file:
        for name, content in files.items():
            file.writestr(name, content)
    return packet.getvalue()


def forged(content: bytes, **changed: bytes) -> bytes:
    """Replaces files, and writes checksums that agree with them."""
    files = files_of(content) | changed
    told = object_of(files.pop("bundle.json"))
    digests = {name: hashlib.sha256(each).hexdigest() for name, each in files.items()}
    return zipped(files | {"bundle.json": with_digest(told | {"files": digests})})


def checked(content: bytes, folder: Path) -> dict:
    (folder / "a.zip").write_bytes(content)
    return check_bundle(folder / "a.zip")


def test_a_study_is_ranked_alike_where_its_folder_is_not(study: bytes, tmp_path: Path) -> None:
    told = checked(study, tmp_path)
    assert told["verdicts"] == {"feasible": 1, "infeasible": 1, "failed": 1} and not told["differences"]
    files = files_of(study)
    assert pq.read_table(io.BytesIO(files["repeats.parquet"])).num_rows == 3
    cited = yaml.safe_load(files["CITATION.cff"])
    assert {"authors", "cff-version", "message", "title", "type"} <= cited.keys() and cited["title"] == "dense_h200x4"
    assert b"<html" in files["report.html"] and b"objective" in files["study/study.yaml"]


def test_results_of_experiments_are_judged_alike(asked: bytes, tmp_path: Path) -> None:
    told = checked(asked, tmp_path)
    results = [json.loads(path.read_text()) for path in (EXPERIMENTS / "results").glob("*.json")]
    assert sum(told["verdicts"].values()) == len(results) and not told["differences"]
    assert told["verdicts"]["agrees"] == sum(one["verdict"] == "agrees" for one in results)
    assert {name for name in files_of(asked) if name.endswith(".svg")} and "prefill.py" in files_of(asked)
    shutil.copytree(EXPERIMENTS / "results", tmp_path / "alone")
    assert checked(packed(str(tmp_path / "alone")), tmp_path)["verdicts"] == told["verdicts"]


def test_each_file_that_differs_is_told(study: bytes, asked: bytes, tmp_path: Path) -> None:
    files = files_of(asked)
    del files["results/prefill.svg"]
    told = checked(zipped(files | {"prefill.py": b"", "more.txt": b""}), tmp_path)
    assert set(told["differences"]) == {"results/prefill.svg", "prefill.py", "more.txt"}
    assert "checksum" in told["differences"]["prefill.py"] and "list" in told["differences"]["more.txt"]
    victim = tmp_path / "victim.txt"
    victim.write_text("x")
    listed = object_of(files_of(asked)["bundle.json"])
    listed["files"] |= {str(victim): "0", "../" * 9 + str(victim)[1:]: "0"}
    told = checked(zipped(files_of(asked) | {"bundle.json": with_digest(listed)}), tmp_path)
    assert len(told["differences"]) == 2 and victim.exists()
    run = next(name for name in files_of(study) if name.endswith("run.json"))
    told = checked(zipped(files_of(study) | {run: b"{}"}), tmp_path)
    assert "checksum" in told["differences"][run] and "derived none" in told["differences"]["ranking.parquet"]


def changed(asked: bytes, name: str, **keys: object) -> bytes:
    result = json.loads(files_of(asked)[name])
    result["claims"][0] |= keys
    return forged(asked, **{name: json.dumps(result).encode()})


def test_a_verdict_that_was_typed_is_found_although_checksums_agree(study: bytes, asked: bytes, tmp_path: Path) -> None:
    name = "results/prefill.json"
    assert "derived agrees" in checked(changed(asked, name, verdict="contests"), tmp_path)["differences"][name]
    far = {"low": math.log(5), "effect": math.log(6), "high": math.log(7)}
    assert "its runs" in checked(changed(asked, name, **far), tmp_path)["differences"][name]
    other = {"low": -1.1, "effect": -0.85, "high": -0.6, "expected": "lower"}  # one claim turned, others not
    assert "its runs" in checked(changed(asked, name, **other), tmp_path)["differences"][name]
    claim = json.loads(files_of(asked)[name])["claims"][0]
    near = {"low": claim["effect"] - 0.02, "high": claim["effect"] + 0.02}  # narrower than its runs scatter
    for edited in (near, {"low": claim["low"] + 0.001}, {"high": claim["high"] * 2}, {"low": None}):
        assert "not that of its runs" in checked(changed(asked, name, **edited), tmp_path)["differences"][name], edited
    told = json.loads(files_of(asked)[name]) | {"hardware": "1x8 h200_sxm"}
    assert "not of 1x8" in checked(forged(asked, **{name: json.dumps(told).encode()}), tmp_path)["differences"][name]
    assert "no verdict" in checked(changed(asked, name, low="wide"), tmp_path)["differences"][name]
    assert "no verdict" in checked(forged(asked, **{name: b"[1"}), tmp_path)["differences"][name]
    told = checked(forged(study, **{"study/study.yaml": b"a: 1\n"}), tmp_path)
    assert [*told["differences"]] == ["ranking.parquet"] and told["verdicts"] == {"unknown": 1}
    table = pq.read_table(io.BytesIO(files_of(study)["ranking.parquet"]))
    turned = table.set_column(2, "verdict", table["verdict"].take([1, 0, 2]))
    packet = io.BytesIO()
    pq.write_table(turned, packet)
    told = checked(forged(study, **{"ranking.parquet": packet.getvalue()}), tmp_path)
    assert told["differences"]["ranking.parquet"].count("derived") == 2


def with_size(content: bytes, size: int) -> bytes:
    """Says another size of the first file, in the directory at the end."""
    at = content.rindex(b"PK\x01\x02", 0, content.index(b"PK\x01\x02") + 4) + 24
    return content[:at] + size.to_bytes(4, "little") + content[at + 4 :]


def broken(study: bytes) -> dict[str, bytes]:
    files = files_of(study)
    return {
        "truncated": study[: len(study) // 2],
        "empty": b"",
        "of another kind": b"no zip",
        "a flipped bit": zipped(files).replace(b"objective", b"objectivf", 1),
        "huge": with_size(study, 2**31),
        "larger than it says": with_size(study, 3),
        "up": zipped(files | {"../up.txt": b"x"}),
        "absolute": zipped(files | {"/tmp/bundle_was_here": b"x"}),
        "of windows": zipped(files | {"..\\up.txt": b"x"}),
        "a file that is a folder": zipped(files | {"study": b"x"}),
        "no list": zipped({"a.txt": b"x"}),
        "list edited": zipped(files | {"bundle.json": files["bundle.json"].replace(b"study", b"other", 1)}),
        "list of others": zipped(files | {"bundle.json": with_digest({"kind": "study"})}),
        "list of lists": zipped(
            files | {"bundle.json": with_digest({"kind": [], "files": 3, "name": 1, "version": 1})}
        ),
    }


def test_a_bad_zip_file_is_one_line_and_nothing_is_written(
    study: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place, scratch = tmp_path / "in" / "a.zip", tmp_path / "in" / "scratch"
    scratch.mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    for what, content in broken(study).items():
        place.write_bytes(content)
        monkeypatch.setattr("sys.argv", ["wattune", "experiments", "check", str(place)])
        with pytest.raises(SystemExit) as left:
            main()
        said = capsys.readouterr()
        assert left.value.code == 2 and len(said.err.strip().splitlines()) == 1, (what, said)
        assert "is no whole bundle" in said.err and "Traceback" not in said.err, what
        assert {path.name for path in tmp_path.rglob("*")} == {"in", "a.zip", "scratch"}, what
    assert not Path("/tmp/bundle_was_here").exists()
