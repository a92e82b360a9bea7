"""The writer in the user's process: what it writes reads back, also from threads and forks; nothing is raised."""

import ast
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from wattune.steps.files import StepFile
from wattune.steps.process import writer
from wattune.steps.process.writer import FLUSH_EVERY_NS, StepWriter, header_of

PROCESS = Path(writer.__file__).parent
OLDEST_PYTHON = (3, 9)


def only_file(folder: Path) -> StepFile:
    (path,) = folder.glob("*.steps")
    file = StepFile(path)
    file.read_on()
    return file


def test_steps_read_back(tmp_path: Path) -> None:
    one = StepWriter("spans", str(tmp_path))
    one.step(5, 9, 128)
    one.step(9, 12)
    one.event("problem", text="ä\n\ud800")
    file = only_file(tmp_path)
    assert [(step.index, step.duration_ns, step.tokens) for step in file.steps] == [(0, 4, 128), (1, 3, None)]
    assert file.events[-1]["text"].startswith("ä\n") and not file.problems
    assert file.events[0]["event"] == "peak" and file.events[0]["host_bytes"] > 2**20
    assert file.path.stat().st_mode & 0o777 == 0o600


def test_short_steps_are_written_together_within_50_ms_and_at_the_exit(tmp_path: Path) -> None:
    one, file = StepWriter("spans", str(tmp_path)), None
    seen = []
    for at in range(200):
        one.step(at * 10**6, (at + 1) * 10**6)
        file = only_file(tmp_path)
        seen.append(len(file.steps))
    assert len(set(seen)) <= 6 and all(0 <= at + 1 - count <= 51 for at, count in enumerate(seen))
    one.flush()
    assert [step.index for step in only_file(tmp_path).steps] == list(range(200))


def test_the_peak_is_told_once_a_second_at_most(tmp_path: Path) -> None:
    one = StepWriter("spans", str(tmp_path))
    for at in range(30):
        one.step(at * 10**8, (at + 1) * 10**8)
    assert len([each for each in only_file(tmp_path).events if each["event"] == "peak"]) == 3


@pytest.mark.parametrize("tokens", ["many", object(), float("nan")])
def test_tokens_that_are_no_number_are_left_out_and_nothing_is_raised(tmp_path: Path, tokens: Any) -> None:
    one = StepWriter("spans", str(tmp_path))
    one.step(5, 9, tokens)
    file = only_file(tmp_path)
    assert [step.tokens for step in file.steps] == [None] and not file.problems


def test_a_signal_in_the_middle_of_a_write_does_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, written = StepWriter("spans", str(tmp_path)), os.write

    def interrupted(descriptor: int, data: bytes) -> int:
        one.step(6, 10**12)  # as a handler does that ran between two bytecodes of the write
        return written(descriptor, data)

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", interrupted)
        one.step(5, 9)
    one.flush()
    assert (5, 9) in [(step.start_mono_ns, step.end_mono_ns) for step in only_file(tmp_path).steps]


def test_steps_of_a_writer_that_failed_take_no_memory(tmp_path: Path) -> None:
    one = StepWriter("spans", str(tmp_path / "gone"))
    for at in range(3):
        one.step(at * 10**9, (at + 1) * 10**9)
    assert one._pending == []


def test_threads_share_a_writer(tmp_path: Path) -> None:
    one = StepWriter("spans", str(tmp_path))
    threads = [threading.Thread(target=lambda: [one.step(at, at + 1) for at in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    one.flush()
    file = only_file(tmp_path)
    assert [step.index for step in file.steps] == list(range(800)) and not file.problems


def test_a_forked_child_and_a_successor_of_the_same_id_begin_files_of_their_own(tmp_path: Path) -> None:
    code = f"""
import os, sys
sys.path.insert(0, {str(PROCESS.parents[2])!r})
from wattune.steps.process.writer import StepWriter
one = StepWriter("spans", {str(tmp_path)!r})
one.step(1, 2)
one.step(1, 2)  # not written yet, and the parent's alone
if os.fork() == 0:
    one.step(3, 4)
    os._exit(0)
os.wait()
StepWriter("spans", {str(tmp_path)!r}).step(5, 6)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
    files = [StepFile(path) for path in tmp_path.glob("*.steps")]
    for file in files:
        file.read_on()
    assert sorted((len(file.steps), file.steps[0].index, file.steps[0].start_mono_ns) for file in files) == [
        (1, 0, 3),
        (1, 0, 5),
        (2, 0, 1),
    ]


def test_where_nothing_can_be_written_nothing_is_raised(tmp_path: Path) -> None:
    one = StepWriter("spans", str(tmp_path / "gone"))
    one.step(1, 2)
    (tmp_path / "gone").mkdir()
    one.step(2, 3)  # not in the middle of a run either
    one.flush()
    assert not list((tmp_path / "gone").iterdir())


def test_a_disk_that_is_full_ends_the_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = StepWriter("spans", str(tmp_path))
    one.step(1, 2)

    def full(_descriptor: int, _data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        one.step(2, 3)
        one.flush()
    one.step(3 + FLUSH_EVERY_NS, 4 + FLUSH_EVERY_NS)
    assert [step.index for step in only_file(tmp_path).steps] == [0]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "GROUP_RANK": "1"}, (3, 1, 8, 1)),
        ({"SLURM_PROCID": "5", "SLURM_LOCALID": "2", "SLURM_NTASKS": "6"}, (5, 2, 6, None)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, (1, 1, None, None)),
        ({"RANK": "many"}, (0, None, None, None)),
        ({}, (0, None, None, None)),
    ],
)
def test_ranks_are_those_of_the_launcher(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: tuple[int | None, ...]
) -> None:
    for name in [name for name in os.environ if name.startswith(("SLURM", "OMPI", "PMI", "RANK", "LOCAL_", "WORLD"))]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "torch.distributed", None)  # type: ignore[arg-type]
    header = header_of("spans")
    assert tuple(header[key] for key in ("rank", "local_rank", "world_size", "node_rank")) == expected


def test_a_process_group_knows_the_rank_better(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        is_available = is_initialized = staticmethod(lambda: True)
        get_rank, get_world_size = staticmethod(lambda: 6), staticmethod(lambda: 8)

    monkeypatch.setitem(sys.modules, "torch.distributed", Group)  # type: ignore[arg-type]
    assert (header_of("spans")["rank"], header_of("spans")["world_size"]) == (6, 8)
    monkeypatch.setattr(Group, "get_rank", staticmethod(lambda: 1 / 0))
    assert "division" in header_of("spans")["problem"]


@pytest.mark.parametrize(
    "path", [*sorted(PROCESS.glob("*.py")), PROCESS.parents[1] / "spans.py"], ids=lambda path: path.stem
)
def test_what_runs_in_the_users_process_is_the_standard_library_of_an_older_python(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=OLDEST_PYTHON)
    known = {*sys.stdlib_module_names, "wattune"}
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        assert {name.partition(".")[0] for name in names} <= known
    assert any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in ast.walk(tree)) or (
        path.stem == "__init__"
    )
