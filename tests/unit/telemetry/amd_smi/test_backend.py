"""Every AMD device of a node: names, slots, the owner of a package's power, and start and end."""

import pytest
from fake_amd_smi import MI250, MI300, FakeAmdSmi, die
from hypothesis import given
from hypothesis import strategies as st

from wattune.errors import TelemetryError
from wattune.telemetry.amd_smi.backend import AmdSmiBackend, Gpu, power_owners
from wattune.telemetry.backend import FactsProvider


def gpu(bdf: str, device_id: int, powered: bool) -> Gpu:
    return Gpu(handle=None, bdf=bdf, device_id=device_id, powered=powered)


def test_dies_of_a_package_follow_each_other_in_bus_order() -> None:
    gpus = [gpu(f"0000:{bus}:00.0", MI250, powered) for bus, powered in
            (("c6", False), ("c1", True), ("ce", False), ("c9", True))]  # fmt: skip
    assert power_owners(gpus) == [1, 1, 3, 3]


def test_a_die_whose_package_is_read_at_a_hidden_one_has_no_owner() -> None:
    seen = [gpu("0000:c6:00.0", MI250, False), gpu("0000:c9:00.0", MI250, True), gpu("0000:ce:00.0", MI250, False)]
    assert power_owners([*seen, gpu("0000:d6:00.0", MI250, False)]) == [None, 1, 1, None]


def test_partitions_share_their_package_and_other_devices_share_nothing() -> None:
    partitions = [gpu(f"0000:05:00.{function}", MI300, function == 0) for function in range(3)]
    without_counter = gpu("0000:26:00.0", MI300, False)
    assert power_owners([*partitions, without_counter]) == [0, 0, 0, None]


@given(st.permutations(range(8)), st.sets(st.integers(0, 7)))
def test_no_power_is_owned_twice_whatever_is_visible(order: list[int], hidden: set[int]) -> None:
    visible = [number for number in order if number not in hidden]
    owners = power_owners([gpu(f"0000:{number:02x}:00.0", MI250, number % 2 == 0) for number in visible])
    for number, owner in zip(visible, owners, strict=True):
        assert (owner is not None and visible[owner] == number) == (number % 2 == 0)
        assert owner is None or owners.count(owner) <= 2


MI250_NODE = [die("c6", 1, primary=False), die("c1", 0, primary=True), die("c9", 3, primary=True)]


def test_devices_carry_hips_numbers_and_the_packages_limit_once() -> None:
    backend = AmdSmiBackend(FakeAmdSmi(*MI250_NODE, die("ce", 2, primary=False)))
    infos = backend.devices()
    assert isinstance(backend, FactsProvider)
    assert [(info.device, info.slot) for info in infos] == [("gpu0", 0), ("gpu1", 1), ("gpu2", 3), ("gpu3", 2)]
    assert [info.power_domain for info in infos] == ["gpu0", "gpu0", "gpu3", "gpu3"]
    assert all(info.to_json()["power_from_energy_counter"] is True for info in infos)
    assert [info.power_limit_w for info in infos] == [560.0, None, None, 560.0]
    assert {(info.driver, info.sm_clock_max_mhz) for info in infos} == {(None, None)}


def test_hips_order_can_be_given() -> None:
    package = FakeAmdSmi(*MI250_NODE)
    order = ["0000:C9:00.0", "0000:c1:00.0", "0000:c6:00.0"]
    infos = AmdSmiBackend(package, hip_bdfs=lambda: order).devices()
    assert [(info.device, info.uuid) for info in infos] == [
        (f"gpu{index}", f"uuid-{bdf.lower()}") for index, bdf in enumerate(order)
    ]


def test_an_order_that_is_not_known_is_an_error_and_leaves_nothing_open() -> None:
    for hip_ids in ((0, "N/A"), (0, 0)):
        package = FakeAmdSmi(*(die(bus, hip, primary=True) for bus, hip in zip(("c1", "c9"), hip_ids, strict=True)))
        with pytest.raises(TelemetryError, match=r"0000:c9:00.0 the HIP index"):
            AmdSmiBackend(package)
        assert package.open == 0
    with pytest.raises(TelemetryError, match=r"HIP's devices are at 0000:01:00.0"):
        AmdSmiBackend(FakeAmdSmi(*MI250_NODE), hip_bdfs=lambda: ["0000:01:00.0"])
    with pytest.raises(TelemetryError, match="shows no device"):
        AmdSmiBackend(FakeAmdSmi())


def test_without_an_energy_counter_there_is_no_power() -> None:
    guest = die("c1", 0, primary=False, device_id=MI300)
    backend = AmdSmiBackend(FakeAmdSmi(guest))
    assert backend.capabilities("gpu0")["fast"]["power_instant_w"] == (
        "unavailable: no energy counter (virtual machines have none)"
    )
    assert backend.devices()[0].power_domain == "gpu0"


def test_close_may_be_called_twice() -> None:
    package = FakeAmdSmi(die("c1", 0, primary=True))
    backend = AmdSmiBackend(package)
    assert package.open == 1
    backend.close()
    backend.close()
    assert package.open == 0
