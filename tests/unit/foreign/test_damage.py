"""Damaged logs: each is refused in a line or read as what it says, and nothing stays half-written."""

from contextlib import suppress

import pytest
from foreign_logs import LOGS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wattune.errors import PlanError
from wattune.foreign.recording import import_logs

TEXTS = {name: log.text if isinstance(log.text, bytes) else log.text.encode() for name, log in LOGS.items()}
LEAST_W, MOST_W = 9.0, 2300.0
"""Powers of all logs, of memory to a chassis, with room for the means of a gap."""

DEVICE_W = 395.0, 705.0


def damaged(content: bytes, kind: str, at: int, length: int) -> bytes:
    lines = content.split(b"\n")
    at %= max(len(content), 1)
    line = at % len(lines)
    if kind == "cut":
        return content[:at]
    if kind == "hole":
        return b"\n".join([*lines[:line], *lines[line + length % 20 :]])
    if kind == "again":
        return b"\n".join([*lines[:line], *lines[max(line - 3, 0) :]])
    if kind == "garbage":
        return b"\n".join([*lines[:line], b"nvidia-smi has failed because it could not communicate", *lines[line:]])
    if kind == "zeros":
        return content[:at] + b"\0" * (length % 50 + 1) + content[at:]
    return content[at:]


@pytest.mark.parametrize("kind", ["cut", "hole", "again", "garbage", "zeros", "late"])
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(name=st.sampled_from(sorted(TEXTS)), at=st.integers(0, 10**6), length=st.integers(1, 1000))
def test_damage_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, kind: str, name: str, at: int, length: int
) -> None:
    folder = tmp_path_factory.mktemp("damage")
    (folder / name).write_bytes(damaged(TEXTS[name], kind, at, length))
    try:
        _, told = import_logs([folder / name], storage=str(folder / "s"))
    except PlanError as error:
        assert "\n" not in str(error) and name in str(error)
        assert not list((folder / "s").rglob("*"))
        return
    energies = told["energies"]
    assert energies
    for key, one in energies.items():
        least, most = DEVICE_W if "/gpu" in key else (LEAST_W, MOST_W)
        if one["span_s"] and "emissions" not in name:
            assert least <= one["energy_j"] / one["span_s"] <= most, key


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(content=st.binary(max_size=400) | st.text(max_size=400).map(str.encode))
def test_noise_is_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("noise")
    (folder / "log").write_bytes(content)
    with pytest.raises(PlanError):
        import_logs([folder / "log"], storage=str(folder / "s"))


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(sorted(TEXTS)),
    changes=st.lists(
        st.tuples(st.integers(0, 10**6), st.sampled_from(list(b',;: \t\n"{}[]-.0123456789eEN|#'))), max_size=9
    ),
)
def test_changed_bytes_end_in_a_line_or_a_recording(
    tmp_path_factory: pytest.TempPathFactory, name: str, changes: list[tuple[int, int]]
) -> None:
    content, folder = bytearray(TEXTS[name]), tmp_path_factory.mktemp("bytes")
    for at, byte in changes:
        content[at % len(content)] = byte
    (folder / name).write_bytes(bytes(content))
    with suppress(PlanError):
        import_logs([folder / name], storage=str(folder / "s"))
        assert list((folder / "s").rglob("run.json"))
