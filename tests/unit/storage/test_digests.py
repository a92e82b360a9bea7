"""Digests of files and of the object that carries them."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.storage.digests import DigestError, agrees, check_files, digest_of, digests_of, object_of, with_digest


@given(
    st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=4).filter(
        lambda d: not {"digest", "format"} & d.keys()
    )
)
def test_an_object_reads_back_and_is_json_for_everybody(data: dict[str, object]) -> None:
    content = with_digest(data)
    assert object_of(content) == data and agrees(content)
    assert {name: value for name, value in json.loads(content).items() if name not in ("digest", "format")} == data


def test_every_single_byte_counts() -> None:
    content = with_digest({"metrics": {"tokens_per_s": 123.4}, "repeat": 0})
    for at in range(len(content)):
        for bit in range(8):
            changed = bytearray(content)
            changed[at] ^= 1 << bit
            with pytest.raises((ValueError, TypeError)):
                object_of(bytes(changed))


def test_an_object_without_its_digest_is_damaged_where_it_must_have_one() -> None:
    bare = b'{"a": 1, "format": 4}'
    with pytest.raises(DigestError, match="it has no digest: damaged, or edited"):
        object_of(bare)
    assert object_of(bare, bare=True) == object_of(bare, accept=True) == {"a": 1}
    wrong = b'{"digest": "00", "a": 1, "format": 4}'
    for bare_too in (False, True):
        with pytest.raises(DigestError, match="does not agree"):
            object_of(wrong, bare=bare_too)
    assert object_of(wrong, accept=True) == {"a": 1}


def test_files_that_changed_were_added_or_are_gone_are_named(tmp_path: Path) -> None:
    for name in ("spans.parquet", "spec.json", "run.json", "telemetry/n0/ring.parquet"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    files = digests_of(tmp_path, "run.json")
    assert sorted(files) == ["spans.parquet", "spec.json", "telemetry/n0/ring.parquet"]
    found = check_files(tmp_path, files, None)
    assert found.digested and not (found.changed or found.missing)
    (tmp_path / "spans.parquet").write_text("spans.parqueT")
    (tmp_path / "telemetry/n0/ring.parquet").unlink()
    (tmp_path / "telemetry/n0/fast.parquet").write_text("new")
    (tmp_path / "error.txt").write_text("an error is no measurement")
    found = check_files(tmp_path, files, ["spec.json"])
    assert found.changed == ("spans.parquet", "telemetry/n0/fast.parquet")
    assert found.missing == ("telemetry/n0/ring.parquet",) and found.accepted == ("spec.json",)


def test_a_file_is_read_again_when_its_time_changes_and_while_it_is_new(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("one")
    first = digest_of(path)
    path.write_text("two")
    assert digest_of(path) != first, "of one size, and perhaps of one time"
    os.utime(path, ns=(10**18, 10**18))
    settled = digest_of(path)
    path.write_text("six")
    os.utime(path, ns=(10**18, 10**18))
    assert digest_of(path) == settled, "nobody reads a file again whose size and time stayed"
    os.utime(path, ns=(10**18, 10**18 + 1))
    assert digest_of(path) != settled
