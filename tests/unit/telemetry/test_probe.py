"""The look for sensor sources and products: found, or the reason they are not."""

from pathlib import Path

import pynvml
import pytest
from tests.fakes.fake_nvml import GPU_IS_LOST, FakeNvml

from wattune.errors import TelemetryError
from wattune.telemetry import probe as probe_module
from wattune.telemetry.probe import network_ports, nvidia_heat, nvidia_products, probe


def test_products_are_named_as_the_driver_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeNvml(count=2).install(monkeypatch)
    driver.gpus[1].name = "NVIDIA H100 PCIe"
    assert nvidia_products() == ["NVIDIA H200", "NVIDIA H100 PCIe"] and driver.started == 0


def test_heat_is_read_in_degrees_watts_and_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeNvml(count=2).install(monkeypatch)
    driver.gpus[1].busy_frac = 0.02
    assert nvidia_heat() == [(38.0, 78.5, 0.5), (38.0, 78.5, 0.02)] and driver.started == 0


@pytest.mark.parametrize(
    "failing", ["nvmlDeviceGetTemperature", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetUtilizationRates"]
)
def test_a_driver_that_does_not_answer_is_said_and_closed(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    driver = FakeNvml(count=2).install(monkeypatch)
    driver.gpus[1].faults[failing] = GPU_IS_LOST
    with pytest.raises(TelemetryError, match="GPU is lost"):
        nvidia_heat()
    driver.gpus[1].lost = True
    with pytest.raises(TelemetryError, match="GPU is lost"):
        nvidia_products()
    assert driver.started == 0


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_LoadNvmlLibrary", refused)
    with pytest.raises(TelemetryError, match="NVML: NVML Shared Library Not Found"):
        nvidia_products()


def refused() -> None:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)


def test_the_probe_says_of_every_source_whether_it_is_there_or_why_not(tmp_path: Path) -> None:
    (tmp_path / "class/powercap/intel-rapl:0").mkdir(parents=True)
    (tmp_path / "class/powercap/intel-rapl:0/energy_uj").write_text("1\n")
    (tmp_path / "class/infiniband/mlx5_0").mkdir(parents=True)
    (tmp_path / "pressure").mkdir()
    (tmp_path / "pressure/cpu").write_text("some\n")
    sources = {name: source for name, *source in probe(procfs=tmp_path, sysfs=tmp_path)}
    assert list(sources) == ["nvml", "amd_smi", "rapl", "hwmon", "infiniband", "psi"]
    assert sources["rapl"][0] and sources["rapl"][1] == "1 zones"
    assert sources["infiniband"][0] and sources["infiniband"][1] == "mlx5_0"
    assert sources["psi"][0]
    assert not sources["hwmon"][0] and "class/hwmon" in sources["hwmon"][1]
    assert all(detail and (available or follows) for available, detail, follows in sources.values())


def test_the_probe_names_what_keeps_a_source_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> str:
        raise PermissionError(13, "Permission denied", "energy_uj")

    monkeypatch.setattr(probe_module, "_find_rapl", refuse)
    sources = {name: source for name, *source in probe(procfs=tmp_path, sysfs=tmp_path)}
    assert not sources["rapl"][0] and "Permission denied" in sources["rapl"][1]


def test_board_sensors_are_named_by_their_chips(tmp_path: Path) -> None:
    for number, name in enumerate(["nvme", "coretemp"]):
        (tmp_path / f"class/hwmon/hwmon{number}").mkdir(parents=True)
        (tmp_path / f"class/hwmon/hwmon{number}/name").write_text(f"{name}\n")
    sources = {name: source for name, *source in probe(procfs=tmp_path, sysfs=tmp_path)}
    assert sources["hwmon"][0] and sources["hwmon"][1] == "coretemp, nvme"


def adapter(
    sysfs: Path, name: str, *, rate: str, kind: str = "InfiniBand", state: str = "4: ACTIVE", driver: str = ""
) -> None:
    port = sysfs / "class/infiniband" / name / "ports/1"
    port.mkdir(parents=True)
    for file, text in (("rate", rate), ("link_layer", kind), ("state", state)):
        (port / file).write_text(text + "\n")
    if driver:
        (sysfs / driver).mkdir(exist_ok=True)
        (port.parent.parent / "device").mkdir()
        (port.parent.parent / "device/driver").symlink_to(sysfs / driver)


def test_active_ports_of_the_highest_rate_reach_other_nodes(tmp_path: Path) -> None:
    for i in range(4):
        adapter(tmp_path, f"mlx5_{i}", rate="400 Gb/sec (4X NDR)")
    adapter(tmp_path, "mlx5_4", rate="400 Gb/sec (4X NDR)", state="1: DOWN")
    adapter(tmp_path, "mlx5_5", rate="100 Gb/sec (4X EDR)", kind="Ethernet")
    ports = network_ports(tmp_path, {"NCCL_TOPO_FILE": str(tmp_path / "none")}, "no-ibstat")
    assert ports == [(f"mlx5_{i}", "InfiniBand", 50e9) for i in range(4)]
    assert [name for name, _, _ in network_ports(tmp_path, {"NCCL_IB_HCA": "mlx5_1,mlx5_3,"})] == ["mlx5_1", "mlx5_3"]
    assert len(network_ports(tmp_path, {"NCCL_IB_HCA": "^=mlx5_1"})) == 3
    assert network_ports(tmp_path, {"NCCL_IB_HCA": "=mlx5_5:1"}) == [("mlx5_5", "Ethernet", 12.5e9)]


def test_nccls_topology_says_which_adapters_it_uses(tmp_path: Path) -> None:
    for i in range(3):
        adapter(tmp_path, f"mlx5_{i}", rate="200 Gb/sec (4X HDR)")
    topology = tmp_path / "topology.xml"
    topology.write_text('<system><nic><net name="mlx5_2" dev="0" speed="200000" gdr="1"/></nic></system>')
    assert [one[0] for one in network_ports(tmp_path, {"NCCL_TOPO_FILE": str(topology)})] == ["mlx5_2"]


def test_adapters_of_amazon_and_hpe_are_told_by_their_drivers(tmp_path: Path) -> None:
    adapter(tmp_path, "rdmap79s0", rate="100 Gb/sec (4X EDR)", kind="Unspecified", driver="efa")
    assert network_ports(tmp_path, {}) == [("rdmap79s0", "efa", 12.5e9)]
    cards = tmp_path / "frontier"
    for i in range(4):
        (cards / f"class/cxi/cxi{i}").mkdir(parents=True)
    assert network_ports(cards, {}, "no-ibstat") == [(f"cxi{i}", "cxi", 25e9) for i in range(4)]


IBSTAT = """CA 'mlx5_0'
\tCA type: MT4129
\tNumber of ports: 1
\tPort 1:
\t\tState: Active
\t\tPhysical state: LinkUp
\t\tRate: 400
\t\tLink layer: InfiniBand
CA 'mlx5_1'
\tPort 1:
\t\tState: Down
\t\tRate: 10
"""


def test_ibstat_is_asked_where_the_kernel_shows_nothing(tmp_path: Path) -> None:
    tool = tmp_path / "ibstat"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{IBSTAT}END\n")
    tool.chmod(0o755)
    assert network_ports(tmp_path / "sys", {}, str(tool)) == [("mlx5_0", "InfiniBand", 50e9)]
    assert network_ports(tmp_path / "sys", {}, str(tmp_path / "missing")) == []
