"""Provenance of a rank, as its process finds it, and the value a trial keeps of it."""

from pathlib import Path

import pytest
import torch

from wattune.workers.provenance import _versions, agreed, driver_version, provenance


def test_a_rank_says_its_own_versions_settings_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    monkeypatch.setenv("SECRET_NCCL_TOKEN", "x")
    found = provenance("cpu")
    assert found["version.torch"] == torch.__version__ and "version.ray" in found and "version.wattune" in found
    assert (found["env.NCCL_ALGO"], found["env.TORCH_NCCL_BLOCKING_WAIT"]) == ("Ring", "1")
    assert not any("SECRET" in name for name in found)
    assert found["kernels.matmul_precision"] == torch.get_float32_matmul_precision()
    assert not {"version.cuda", "version.nccl", "version.driver"} & found.keys(), "a processor uses none of them"


def test_a_cudnn_that_torch_refuses_costs_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = (
        "cuDNN version incompatibility: PyTorch was compiled against (9, 19, 0) but found (9, 14, 0). PyTorch has one."
    )

    def version() -> int:
        raise RuntimeError(refused)

    monkeypatch.setattr(torch.backends.cudnn, "version", version)
    _versions.cache_clear()
    assert provenance("cuda:0")["version.cudnn"] == refused.partition(". ")[0]
    _versions.cache_clear()


def test_values_of_ranks_are_one_where_they_agree() -> None:
    same = {rank: {"version.torch": "2.13.0"} for rank in range(8)}
    assert agreed(same) == {"version.torch": "2.13.0"} and agreed({}) == {}
    other = same | {0: {"version.torch": "a"}, 5: {"version.torch": "a"}, 7: {}}
    assert agreed(other) == {"version.torch": "rank0,5: a; rank1-4,6: 2.13.0; rank7: absent"}


def test_the_driver_is_the_kernels(tmp_path: Path) -> None:
    assert driver_version(tmp_path) == ""
    path = tmp_path / "sys" / "module" / "nvidia" / "version"
    path.parent.mkdir(parents=True)
    path.write_text("570.124.06\n")
    assert driver_version(tmp_path) == "570.124.06"
