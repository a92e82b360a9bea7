"""The environment of workers: kernels outlive a container, the allocator's segments grow, and the user's value wins."""

import os
from pathlib import Path
from typing import Any

import pytest

from wattune.workers import environment
from wattune.workers.environment import ALLOCATOR, kernels_folder, prepare_environment

NCCL = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
NAMES = (*ALLOCATOR, "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", NCCL)


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without any of these variables, and with temporary files of its own; returns their folder."""
    for name in NAMES:
        monkeypatch.setenv(name, "")  # restored at the end, whatever is set meanwhile
        monkeypatch.delenv(name)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(environment, "version", lambda _: "2.13.0")
    return tmp_path / "tmp" / f"wattune-{os.getuid()}"


def found() -> dict[str, Any]:
    return {name: os.environ[name] for name in NAMES if name in os.environ}


def test_kernels_are_kept_in_the_storage_by_device_and_torch(tmp_path: Path) -> None:
    prepare_environment("h100_sxm", tmp_path)
    kept = tmp_path / f"kernels-{os.getuid()}" / "h100_sxm-torch2.13.0"
    assert found() == {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "TORCHINDUCTOR_CACHE_DIR": str(kept),
        "TRITON_CACHE_DIR": str(kept / "triton"),
        NCCL: "0",
    }
    assert kept.is_dir() and kept.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ALLOCATOR)
def test_the_users_values_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "backend:cudaMallocAsync")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    prepare_environment("h100_sxm", tmp_path)
    assert found() == {name: "backend:cudaMallocAsync", "TORCHINDUCTOR_CACHE_DIR": "/mine", NCCL: "0"}
    assert not list(tmp_path.glob("kernels-*"))


def test_a_users_program_keeps_its_allocator_and_amd_and_processors_theirs(tmp_path: Path) -> None:
    prepare_environment("cpu", tmp_path)
    assert found() == {}
    prepare_environment("mi250_gcd", tmp_path)
    assert ALLOCATOR[0] not in found() and "TORCHINDUCTOR_CACHE_DIR" in found()
    del os.environ[NCCL]
    prepare_environment("h100_sxm", tmp_path, runs_program=True)
    assert ALLOCATOR[0] not in found() and NCCL not in found()


def test_without_the_storage_kernels_are_temporary_and_those_of_others_are_not_loaded(
    tmp_path: Path, own: Path, caplog: pytest.LogCaptureFixture
) -> None:
    temporary = own / "kernels" / "h100_sxm-torch2.13.0"
    assert kernels_folder("h100_sxm", None) == kernels_folder("h100_sxm", tmp_path / "not there") == temporary
    assert not caplog.text
    open_to_all = tmp_path / f"kernels-{os.getuid()}"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    assert kernels_folder("h100_sxm", tmp_path) == temporary
    assert "must be a folder that only user" in caplog.text
