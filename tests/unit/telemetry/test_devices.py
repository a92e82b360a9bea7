"""Devices by position, UUID and the vendors' variables, as `nvidia-smi`, CUDA and ROCm read them."""

from typing import Any

import pytest

from wattune.errors import SensorChoiceError
from wattune.telemetry.devices import named, visible, without_own_processes
from wattune.telemetry.sampler.process import chosen

H200 = {
    f"gpu{slot}": {"name": "NVIDIA H200", "slot": slot, "uuid": f"GPU-{slot}a{slot}b11-0000", "backend": "nvml"}
    for slot in range(12)
}
TWINS = {name: {"name": "NVIDIA H200", "uuid": f"GPU-aaaa-{name}"} for name in ("gpu0", "gpu1")}
MIXED = {"gpu0": {"name": "NVIDIA L4", "slot": 0}, "gpu1": {"name": "NVIDIA H100", "slot": 1}}
MI300 = {f"gpu{slot}": {"name": "AMD Instinct MI300X", "slot": slot, "backend": "amd_smi"} for slot in range(4)}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("0", ["gpu0"]),
        ("11,2", ["gpu2", "gpu11"]),
        ("1, 1", ["gpu1"]),
        ("gpu3,10", ["gpu3", "gpu10"]),
        ("GPU-2a2b11-0000", ["gpu2"]),
        ("GPU-2a,3a3", ["gpu2", "gpu3"]),
        ("gpu-2A", ["gpu2"]),
        ("none", []),
        ("all", list(H200)),
    ],
)
def test_a_list_names_devices(text: str, names: list[str]) -> None:
    assert named(text, H200) == names


@pytest.mark.parametrize("text", ["", "12", "-1", "0,", "gpu12", "GPU-", "GPU-ff", "x", "0;1", "٣", "9" * 5000, ".*"])
def test_what_names_no_device_says_what_there_is(text: str) -> None:
    with pytest.raises(SensorChoiceError, match=r"--devices: .*allowed: 0 \(gpu0\), 1 \(gpu1\)"):
        named(text, H200)


def test_a_beginning_of_two_and_a_part_of_a_device_are_refused() -> None:
    with pytest.raises(SensorChoiceError, match="several devices"):
        named("GPU-aaaa", TWINS)
    with pytest.raises(SensorChoiceError, match="part of a device"):
        named("MIG-2a2b11", H200)
    with pytest.raises(SensorChoiceError, match="none on this machine"):
        named("0", {})


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("0,1", ["gpu0", "gpu1"]),
        ("1,0", ["gpu1", "gpu0"]),
        ("", []),
        ("-1", []),
        ("0,-1,1", ["gpu0"]),
        ("0,99,1", ["gpu0"]),
        ("NoDevFiles", []),
        ("GPU-2a", ["gpu2"]),
        ("GPU-2a,GPU-ff,0", ["gpu2"]),
        (" 3 , 4", ["gpu3", "gpu4"]),
    ],
)
def test_cuda_s_list_ends_before_what_names_no_device(text: str, names: list[str]) -> None:
    assert visible({"CUDA_VISIBLE_DEVICES": text}, H200) == (names, f"CUDA_VISIBLE_DEVICES={text}")


def test_without_a_variable_nothing_is_chosen() -> None:
    assert visible({"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "HIP_VISIBLE_DEVICES": "0"}, H200) is None


def test_positions_among_different_devices_need_an_order() -> None:
    with pytest.raises(SensorChoiceError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        visible({"CUDA_VISIBLE_DEVICES": "0"}, MIXED)
    found = visible({"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, MIXED)
    assert found is not None and found[0] == ["gpu0"]
    assert visible({"CUDA_VISIBLE_DEVICES": ""}, MIXED) == ([], "CUDA_VISIBLE_DEVICES=")
    with pytest.raises(SensorChoiceError, match="--devices none"):
        visible({"CUDA_VISIBLE_DEVICES": "MIG-1"}, H200)


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        ({"ROCR_VISIBLE_DEVICES": "2,3"}, ["gpu2", "gpu3"]),
        ({"HIP_VISIBLE_DEVICES": "1"}, ["gpu1"]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["gpu1"]),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}, ["gpu3"]),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "0"}, ["gpu2"]),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}, ["gpu1"]),
        ({"ROCR_VISIBLE_DEVICES": ""}, []),
    ],
)
def test_hip_counts_among_what_rocr_leaves(variables: dict[str, str], names: list[str]) -> None:
    found = visible(variables, MI300)
    assert found is not None and found[0] == names


def test_a_sampler_keeps_others_off_the_chosen_devices_alone() -> None:
    """Two recordings of one user, each of a device of its own, run side by side."""
    assert chosen({"asked": "1", "variables": {"CUDA_VISIBLE_DEVICES": "0"}}, H200) == ["gpu1"]
    assert chosen({"asked": None, "variables": {"CUDA_VISIBLE_DEVICES": "0"}}, H200) == ["gpu0"]
    assert chosen({"asked": None, "variables": {}}, H200) == list(H200)
    assert chosen({"asked": "99"}, H200) == []  # the owner refuses it


def manifest(at_start: list[dict[str, int]], at_end: list[dict[str, int]]) -> dict[str, Any]:
    facts = {"at_start": {"other_processes": at_start, "clock": 1}, "at_end": {"other_processes": at_end}}
    return {"node": "n0", "devices": {"gpu0": {"uuid": "GPU-0", **facts}, "gpu1": {"uuid": "GPU-1", **facts}}}


def test_a_trials_own_workers_are_no_strangers() -> None:
    both = [{"pid": 10, "memory_used_bytes": 5}, {"pid": 99, "memory_used_bytes": 9}]
    known = without_own_processes(manifest(both, both), {"gpu0": [10]}, warm=True)
    assert known["node"] == "n0" and known["devices"]["gpu0"]["own_processes"] == [10]
    assert known["devices"]["gpu0"]["at_start"] == {"other_processes": [both[1]], "clock": 1}
    assert known["devices"]["gpu0"]["at_end"] == {"other_processes": [both[1]]}
    assert known["devices"]["gpu1"] == manifest(both, both)["devices"]["gpu1"], "nobody trains there"


def test_where_ids_are_hidden_one_process_a_worker_is_its_own() -> None:
    hidden = [{"pid": 4711, "memory_used_bytes": 2}, {"pid": 4712, "memory_used_bytes": 8}]
    known = without_own_processes(manifest(hidden, hidden[:1]), {"gpu0": [10]}, warm=True)
    assert known["devices"]["gpu0"]["at_start"]["other_processes"] == hidden[:1]
    assert known["devices"]["gpu0"]["at_end"]["other_processes"] == []


@pytest.mark.parametrize("hidden", [False, True])
def test_processes_that_come_after_the_sampler_excuse_no_stranger(hidden: bool) -> None:
    """A command's, and those of a lane's first workers. The stranger is the larger one."""
    stranger = {"pid": 99, "memory_used_bytes": 9}
    later = {"pid": 4711 if hidden else 10, "memory_used_bytes": 5}
    known = without_own_processes(manifest([stranger], [stranger, later]), {"gpu0": [10, 11]}, warm=False)
    assert known["devices"]["gpu0"]["at_start"]["other_processes"] == [stranger]
    assert known["devices"]["gpu0"]["at_end"]["other_processes"] == [stranger]
