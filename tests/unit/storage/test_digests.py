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
        lambda d: "digest" not in d
    )
)
def test_an_object_reads_back_and_is_json_for_everybody(data: dict[str, object]) -> None:
    content = with_digest(data)
    assert object_of(content) == (data, True) and agrees(content)
    assert {name: value for name, value in json.loads(content).items() if name != "digest"} == data


def test_every_single_byte_counts() -> None:
    content = with_digest({"metrics": {"tokens_per_s": 123.4}, "repeat": 0})
    read = 0
    for at in range(len(content)):
        for bit in range(8):
            changed = bytearray(content)
            changed[at] ^= 1 << bit
            try:
                data, digested = object_of(bytes(changed))
            except (ValueError, TypeError):
                continue
            # Only the key itself can be lost: a reader of known keys refuses what is then there.
            assert not digested and len(data) == 3
            read += 1
    assert read > 0


def test_an_object_of_an_earlier_version_has_no_digest() -> None:
    assert object_of(b'{"a": 1}') == ({"a": 1}, False)
    with pytest.raises(DigestError):
        object_of(b'{"digest": "00", "a": 1}')
    assert object_of(b'{"digest": "00", "a": 1}', accept=True) == ({"a": 1}, True)


def test_files_that_changed_were_added_or_are_gone_are_named(tmp_path: Path) -> None:
    for name in ("spans.parquet", "spec.json", "result.json", "telemetry/n0/ring.parquet"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    files = digests_of(tmp_path, "result.json")
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
