"""Findings about a machine, with interpreter, libraries, sensors and storage faked."""

import errno
import os
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import yaml

from wattune import doctor
from wattune.doctor import Finding, examine
from wattune.errors import TelemetryError
from wattune.search.cluster_entry import ClusterEntry

INSTALLED = {"torch": "2.12.1", "ray": "2.60.0", "mlflow": "3.17.2"}
SENSORS = [
    ("nvml", True, "4 devices, driver 580.1", ""),
    ("rapl", False, "no intel-rapl zone", "no CPU power"),
]


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of four processors, 16 GiB, three libraries and four GPUs; its storage can be written."""

    def version(name: str) -> str:
        if name not in INSTALLED:
            raise PackageNotFoundError(name)
        return INSTALLED[name]

    monkeypatch.setattr(doctor, "version", version)
    monkeypatch.setattr(doctor, "probe", lambda: SENSORS)
    monkeypatch.setattr(doctor, "nvidia_products", lambda: ["NVIDIA H100 80GB HBM3"] * 8)
    monkeypatch.setattr(doctor, "nvidia_heat", lambda: [(42.0, 71.0, 0.0)] * 7 + [(80.0, 71.0, 0.0)])
    monkeypatch.setattr(doctor, "network_ports", list)
    monkeypatch.setattr(doctor, "operation_s", lambda: doctor.REFERENCE_OPERATION_S / 0.9)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 5, 7})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=16 * 2**30))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=300 * 2**30))
    monkeypatch.setenv("WATTUNE_STORAGE", str(tmp_path / "studies"))
    return tmp_path / "studies"


def found(topic: str) -> Finding:
    """The one finding on a topic."""
    (finding,) = [each for each in examine() if each.topic == topic]
    return finding


def test_every_topic_has_one_finding_in_the_order_of_the_page(storage: Path) -> None:
    topics = [each.topic for each in examine()]
    libraries = ["torch", "ray", "mlflow", "megatron-core", "deepspeed", "torchao", "transformer-engine"]
    assert topics == ["python", "processors", "memory", *libraries, "nvml", "rapl", "storage", "cluster"]


@pytest.mark.parametrize(("release", "follows"), [((3, 11, 7), ""), ((3, 10, 14), "wattune needs 3.11")])
def test_an_interpreter_that_is_too_old_is_not_ok(storage: Path, monkeypatch, release, follows: str) -> None:
    version = ".".join(map(str, release))
    monkeypatch.setattr(doctor.platform, "python_version", lambda: version)
    monkeypatch.setattr(sys, "version_info", release)
    assert found("python") == Finding(topic="python", ok=not follows, have=version, follows=follows)


@pytest.mark.parametrize(
    ("topic", "ok", "have", "follows"),
    [
        ("processors", True, "4", "4 CPU ranks run side by side; more share processors, and their step times say so"),
        ("memory", True, "16.00 GiB", ""),
        *((name, True, version, "") for name, version in INSTALLED.items()),
        ("megatron-core", False, "not installed", "its engine needs it; install wattune[megatron]"),
        ("deepspeed", False, "not installed", "its engine needs it"),
        ("transformer-engine", False, "not installed", "without it the megatron engine runs its local layers"),
        ("nvml", True, "4 devices, driver 580.1", ""),
        ("rapl", False, "no intel-rapl zone", "no CPU power"),
    ],
)
def test_what_is_there_and_what_follows(storage: Path, topic: str, ok: bool, have: str, follows: str) -> None:
    assert found(topic) == Finding(topic=topic, ok=ok, have=have, follows=follows)


def test_without_a_core_library_the_finding_says_what_stops(storage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(INSTALLED, "ray")
    assert found("ray") == Finding(topic="ray", ok=False, have="not installed", follows="studies need it")


def test_a_storage_that_is_not_there_yet_is_ok_and_is_not_made(storage: Path) -> None:
    assert found("storage") == Finding(topic="storage", ok=True, have=f"{storage}, 300.00 GiB free")
    assert not storage.exists()


def test_free_space_is_that_of_the_nearest_folder(storage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def disk_usage(path: Path) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(free=2**20)

    monkeypatch.setattr(doctor.shutil, "disk_usage", disk_usage)
    assert found("storage").have == f"{storage}, 1.0 MiB free"
    assert asked == [storage.parent]


def test_a_file_in_the_place_of_the_storage_is_not_ok(storage: Path) -> None:
    storage.write_text("")
    assert not found("storage").ok
    assert found("storage").follows == "set WATTUNE_STORAGE or give --storage"


def test_a_folder_that_cannot_be_written_is_not_ok(storage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as for an ordinary user; root may write everywhere
    assert not found("storage").ok
    assert found("storage").follows == "set WATTUNE_STORAGE or give --storage"


def test_looking_writes_nothing(storage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "mkdir", refuse)
    monkeypatch.setattr(os, "replace", refuse)
    examine()
    assert list(tmp_path.iterdir()) == []


NDR = [(f"mlx5_{i}", "InfiniBand", 50e9) for i in range(8)]


@pytest.mark.parametrize(
    ("ports", "written"),
    [
        (NDR, "network: ndr, rails: 8, "),
        ([("mlx5_0", "Ethernet", 25e9)] * 4, "network: roce_200, rails: 4, "),
        ([("rdmap0", "efa", 12.5e9)] * 32, "network: efa_p5, rails: 32, "),
        ([("rdmap0", "efa", 12.5e9)] * 4, "network: efa_p4d, rails: 4, "),
        ([("cxi0", "cxi", 25e9)] * 4, "network: slingshot_11, rails: 4, "),
        (
            [("mlx5_0", "InfiniBand", 7e9)],
            "network: {name: infiniband_56, bandwidth_bytes_per_s: 7000000000.0}, rails: 1, ",
        ),
        ([], ""),
    ],
    ids=str,
)
def test_the_cluster_entry_can_be_pasted_into_a_space(storage: Path, monkeypatch, ports: list, written: str) -> None:
    monkeypatch.setattr(doctor, "network_ports", lambda: ports)
    one = found("cluster")
    assert one.have == f"{{device: h100_sxm, slots: 8, {written}host: {{speed: 0.9, inlet_c: 38.5}}}}"
    cluster = ClusterEntry.model_validate(yaml.safe_load(one.have)).resolve()
    assert (cluster.devices_per_node, cluster.host_speed, cluster.inlet_c) == (8, 0.9, 38.5)
    if ports:
        assert cluster.network is not None
        rate = cluster.network.bandwidth_bytes_per_s * cluster.network.ports_per_device
        assert rate == pytest.approx(len(ports) * ports[0][2] / 8)
    else:
        assert "no port to other nodes was found" in one.follows


def test_a_machine_without_gpus_is_two_ranks_on_its_processors(storage: Path, monkeypatch) -> None:
    def no_driver() -> list[str]:
        raise TelemetryError("no driver")

    monkeypatch.setattr(doctor, "nvidia_products", no_driver)
    assert found("cluster").have.startswith("{device: cpu, slots: 2, ")


def silent() -> list[tuple[float, float, float]]:
    raise TelemetryError("the driver does not answer: error 15")


@pytest.mark.parametrize(
    ("heat", "said"),
    [
        (
            lambda: [(60.0, 690.0, 0.99), (42.0, 71.0, 0.03), (50.0, 300.0, 0.04)],
            "device 0, 2 works, and the host must",
        ),
        (silent, "no inlet_c: the driver does not answer: error 15"),
    ],
)
def test_without_rest_there_is_no_inlet_and_the_entry_says_why(storage: Path, monkeypatch, heat, said: str) -> None:
    monkeypatch.setattr(doctor, "nvidia_heat", heat)
    one = found("cluster")
    assert "host: {speed: 0.9}" in one.have and said in one.follows


def test_the_speed_of_the_host_is_measured() -> None:
    assert 0.02e-6 < doctor.operation_s(tries=2, operations=2000) < 20e-6
