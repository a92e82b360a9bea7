"""The host backend on procfs and sysfs trees made by hand."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wattune.telemetry import host
from wattune.telemetry.backend import AVAILABLE, Row
from wattune.telemetry.host import HostBackend


class Machine:
    """A fake machine whose counters tests move."""

    def __init__(self, root: Path) -> None:
        self.procfs, self.sysfs, self.now_ns = root / "proc", root / "sys", 0
        self.cpu(0, 0)
        self.write(self.procfs / "meminfo", "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 600 kB\n")
        self.write(self.procfs / "cpuinfo", "processor : 0\nmodel name\t: AMD EPYC 9654\n")
        self.write(self.procfs / "sys/kernel/osrelease", "6.8.0\n")
        self.write(root / "machine-id", "0123456789abcdef\n")
        self.machine_id = root / "machine-id"

    @staticmethod
    def write(path: Path, content: object) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(content))

    def cpu(self, busy: int, idle: int, iowait: int = 0) -> None:
        self.write(self.procfs / "stat", f"cpu  {busy} 0 0 {idle} {iowait} 0 0 0 99 99\ncpu0 1 2 3 4\n")

    def zone(self, zone: str, kind: str, energy_uj: int, range_uj: int = 1_000_000_000) -> None:
        folder = self.sysfs / "class/powercap" / zone
        self.write(folder / "name", f"{kind}\n")
        self.write(folder / "energy_uj", energy_uj)
        self.write(folder / "max_energy_range_uj", range_uj)

    def interface(self, name: str, tx: int, rx: int, *, physical: bool = True, type_: int = 1) -> None:
        folder = self.sysfs / "class/net" / name
        self.write(folder / "statistics/tx_bytes", tx)
        self.write(folder / "statistics/rx_bytes", rx)
        self.write(folder / "type", f"{type_}\n")
        if physical:
            (folder / "device").mkdir(exist_ok=True)

    def port(self, adapter: str, tx_words: int, rx_words: int) -> None:
        folder = self.sysfs / f"class/infiniband/{adapter}/ports/1/counters"
        self.write(folder / "port_xmit_data", tx_words)
        self.write(folder / "port_rcv_data", rx_words)

    def chip(self, chip: str, name: str, **sensors: tuple[int, str]) -> None:
        """Its temperatures in millidegrees, with their labels."""
        folder = self.sysfs / "class/hwmon" / chip
        self.write(folder / "name", f"{name}\n")
        for sensor, (temperature_mc, label) in sensors.items():
            self.write(folder / f"{sensor}_input", f"{temperature_mc}\n")
            if label:
                self.write(folder / f"{sensor}_label", f"{label}\n")

    def stall(self, resource: str, total_us: int) -> None:
        content = f"some avg10=1.00 avg60=2.00 avg300=3.00 total={total_us}\nfull avg10=0 avg60=0 avg300=0 total=7\n"
        self.write(self.procfs / "pressure" / resource, content)

    def backend(self) -> HostBackend:
        return HostBackend(self.procfs, self.sysfs, self.machine_id, lambda: self.now_ns)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def read(backend: HostBackend) -> Row:
    (row,) = backend.read("host", "host")
    return row


def test_cpu_busy_is_unknown_where_no_time_passed(machine: Machine) -> None:
    backend = machine.backend()
    row = read(backend)
    assert row["cpu_busy_frac"] is None and "cpu_busy_frac_error" not in row


def test_iowait_that_runs_backwards_leaves_a_fraction(machine: Machine) -> None:
    machine.cpu(busy=100, idle=100, iowait=50)
    backend = machine.backend()
    machine.cpu(busy=110, idle=100, iowait=45)
    assert read(backend)["cpu_busy_frac"] == 1.0


def test_memory_used_is_what_programs_cannot_have(machine: Machine) -> None:
    assert read(machine.backend())["memory_used_bytes"] == 400 * 1024


def test_rapl_power_is_energy_over_time_summed_over_packages(machine: Machine) -> None:
    machine.zone("intel-rapl:0", "package-0", 0)
    machine.zone("intel-rapl:1", "package-1", 0)
    machine.zone("intel-rapl:0:0", "dram", 0)
    machine.zone("intel-rapl:0:1", "core", 0)
    machine.zone("intel-rapl:2", "psys", 0)
    machine.zone("intel-rapl-mmio:0", "package-0", 0)
    backend = machine.backend()
    machine.now_ns = 2_000_000_000
    machine.zone("intel-rapl:0", "package-0", 200_000_000)
    machine.zone("intel-rapl:1", "package-1", 300_000_000)
    machine.zone("intel-rapl:0:0", "dram", 40_000_000)
    machine.zone("intel-rapl:0:1", "core", 900_000_000)
    machine.zone("intel-rapl:2", "psys", 900_000_000)
    machine.zone("intel-rapl-mmio:0", "package-0", 200_000_000)
    row = read(backend)
    assert row["package_power_w"] == pytest.approx(250.0)
    assert row["dram_power_w"] == pytest.approx(20.0)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(start_uj=st.integers(0, 10**9 - 1), used_uj=st.integers(1, 10**9 - 1))
def test_rapl_power_survives_the_wrap(machine: Machine, start_uj: int, used_uj: int) -> None:
    machine.zone("intel-rapl:0", "package-0", start_uj, range_uj=10**9)
    machine.now_ns = 0
    backend = machine.backend()
    machine.zone("intel-rapl:0", "package-0", (start_uj + used_uj) % 10**9, range_uj=10**9)
    machine.now_ns = 1_000_000_000
    assert read(backend)["package_power_w"] == pytest.approx(used_uj / 1e6)


def test_a_rapl_counter_that_stands_still_measured_nothing(machine: Machine) -> None:
    machine.zone("intel-rapl:0", "package-0", 5)
    backend = machine.backend()
    machine.now_ns = 1_000_000_000
    assert read(backend)["package_power_w"] is None


def test_rapl_only_root_may_read_is_said_and_never_zero(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.zone("intel-rapl:0", "package-0", 5)

    def refuse(path: Path) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    # Tests may run as root, whom no file mode refuses.
    monkeypatch.setattr(host, "_read_int", refuse)
    backend = machine.backend()
    assert backend.capabilities("host")["host"]["package_power_w"] == "unavailable: permission"
    assert "package_power_w" not in read(backend)


def test_the_hottest_package_is_the_temperature(machine: Machine) -> None:
    machine.chip("hwmon0", "nvme", temp1=(99_000, "Composite"))
    machine.chip("hwmon1", "coretemp", temp1=(51_000, "Package id 0"), temp2=(88_000, "Core 0"))
    machine.chip("hwmon2", "coretemp", temp1=(62_500, "Package id 1"))
    assert read(machine.backend())["cpu_temp_max_c"] == 62.5


def test_control_values_are_no_temperatures_where_there_are_better_ones(machine: Machine) -> None:
    machine.chip("hwmon0", "k10temp", temp1=(90_000, "Tctl"), temp3=(61_000, "Tccd1"), temp4=(63_000, "Tccd2"))
    assert read(machine.backend())["cpu_temp_max_c"] == 63.0
    machine.chip("hwmon1", "k10temp", temp1=(70_000, ""))
    assert read(machine.backend())["cpu_temp_max_c"] == 70.0


def test_pressure_is_the_share_of_time_somebody_waited(machine: Machine) -> None:
    for resource in ("cpu", "memory", "io"):
        machine.stall(resource, 1_000_000)
    backend = machine.backend()
    assert read(backend)["psi_cpu_some_frac"] is None  # no time passed
    machine.now_ns = 2_000_000_000
    machine.stall("cpu", 1_500_000)
    machine.stall("io", 9_000_000)
    row = read(backend)
    assert row["psi_cpu_some_frac"] == pytest.approx(0.25)
    assert row["psi_memory_some_frac"] == 0.0
    assert row["psi_io_some_frac"] == 1.0  # two clocks: it may be more than the interval


def test_pressure_that_is_switched_off_is_said(machine: Machine) -> None:
    machine.write(machine.procfs / "pressure/cpu", "")
    capabilities = machine.backend().capabilities("host")["host"]
    assert capabilities["psi_cpu_some_frac"] == "unavailable: unparsable"
    assert capabilities["psi_io_some_frac"] == "unavailable: ENOENT"


def test_what_is_absent_is_said_and_left_out(machine: Machine) -> None:
    backend = machine.backend()
    capabilities = backend.capabilities("host")["host"]
    assert capabilities["cpu_busy_frac"] == capabilities["memory_used_bytes"] == AVAILABLE
    assert capabilities["package_power_w"] == "unavailable: no RAPL package zone"
    assert capabilities["nic_tx_bytes"] == "unavailable: no physical network port"
    assert capabilities["cpu_temp_max_c"] == "unavailable: no hwmon chip named coretemp or k10temp"
    assert set(read(backend)) == {"cpu_busy_frac", "memory_used_bytes"}


def test_network_bytes_are_those_of_physical_ports_and_rdma(machine: Machine) -> None:
    machine.interface("eth0", tx=100, rx=1)
    machine.interface("eth1", tx=200, rx=2)
    machine.interface("bond0", tx=300, rx=3, physical=False)
    machine.interface("lo", tx=7, rx=7, physical=False)
    machine.interface("ib0", tx=50, rx=50, type_=32)  # counted again, with RDMA, at the port
    machine.port("mlx5_0", tx_words=1000, rx_words=10)
    row = read(machine.backend())
    assert row["nic_tx_bytes"] == 100 + 200 + 4000
    assert row["nic_rx_bytes"] == 1 + 2 + 40


def test_links_carry_what_the_ports_that_are_up_were_agreed_at(machine: Machine) -> None:
    for name, speed_mbit, state in (("eth0", 400_000, "up"), ("eth1", -1, "down"), ("bond0", 800_000, "up")):
        machine.interface(name, tx=1, rx=1, physical=name != "bond0")
        machine.write(machine.sysfs / f"class/net/{name}/speed", speed_mbit)
        machine.write(machine.sysfs / f"class/net/{name}/operstate", state)
    for adapter, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN"), ("mlx5_2", "4: ACTIVE")):
        machine.port(adapter, tx_words=1, rx_words=1)
        machine.write(machine.sysfs / f"class/infiniband/{adapter}/ports/1/state", f"{state}\n")
        machine.write(machine.sysfs / f"class/infiniband/{adapter}/ports/1/rate", "400 Gb/sec (4X NDR)\n")
    # RoCE: the second adapter's port is the interface eth0.
    (machine.sysfs / "class/infiniband/mlx5_2/device").symlink_to(machine.sysfs / "class/net/eth0/device")
    (info,) = machine.backend().devices()
    assert info.nic_link_bytes_per_s == 2 * 50e9
    machine.write(machine.sysfs / "class/net/eth0/speed", -1)  # a virtual port that is up and says nothing
    (info,) = machine.backend().devices()
    assert info.nic_link_bytes_per_s is None


def test_a_port_that_vanishes_is_a_failed_read_not_a_smaller_sum(machine: Machine) -> None:
    machine.interface("eth0", tx=100, rx=1)
    machine.interface("eth1", tx=200, rx=2)
    backend = machine.backend()
    gone = machine.sysfs / "class/net/eth1/statistics/tx_bytes"
    gone.unlink()
    row = read(backend)
    assert row["nic_tx_bytes"] is None and row["nic_tx_bytes_error"] == "ENOENT"
    assert row["nic_rx_bytes"] == 3 and "nic_rx_bytes_error" not in row
    gone.write_text("201")
    assert read(backend)["nic_tx_bytes"] == 301


def test_power_after_a_failed_read_is_no_mean_over_the_gap(machine: Machine) -> None:
    machine.zone("intel-rapl:0", "package-0", 0)
    backend = machine.backend()
    counter = machine.sysfs / "class/powercap/intel-rapl:0/energy_uj"
    counter.unlink()
    machine.now_ns = 1_000_000_000
    assert read(backend)["package_power_w_error"] == "ENOENT"
    machine.now_ns = 2_000_000_000
    counter.write_text("900000000")
    assert read(backend)["package_power_w"] is None
    machine.now_ns = 3_000_000_000
    counter.write_text("950000000")
    assert read(backend)["package_power_w"] == pytest.approx(50.0)


def test_the_device_is_named_without_giving_the_machine_id_away(machine: Machine) -> None:
    (info,) = machine.backend().devices()
    assert (info.device, info.name, info.driver) == ("host", "AMD EPYC 9654", "6.8.0")
    assert info.uuid is not None and "0123456789abcdef" not in info.uuid.replace("-", "")
    machine.machine_id.unlink()
    assert machine.backend().devices()[0].uuid is None
