"""Networks, fabrics and hosts of the catalog."""

import pytest

from wattune.catalog.networks import (
    DEFAULT_NETWORK,
    FABRICS,
    HOST_CLOCKS_GHZ,
    NETWORKS,
    REFERENCE_HOST,
    NetworkSpec,
    host_speed,
    network,
)
from wattune.cost.coefficients import PUBLISHED_STEP_TIME
from wattune.field_types import require_kinds


@pytest.mark.parametrize(  # Gb/s of a node of eight devices: Quantum and ConnectX datasheets, AWS, OLCF
    ("name", "gigabits"),
    [("xdr", 6400), ("ndr", 3200), ("hdr", 1600), ("roce_400", 3200), ("efa_p5", 3200), ("efa_p4d", 400),
     ("slingshot_11", 800)],
)  # fmt: skip
def test_a_node_of_eight_has_the_published_rate(name: str, gigabits: float) -> None:
    one = network(name)
    assert 8 * one.bandwidth_bytes_per_s * one.ports_per_device == pytest.approx(gigabits * 1e9 / 8)


def test_every_entry_has_its_source() -> None:
    assert all(one.source for one in NETWORKS.values()) and all(source for _, _, source in FABRICS.values())
    assert {size for size, _, _ in FABRICS.values()} == {8, 32, 72}


def test_the_default_network_changes_no_estimate() -> None:
    link = PUBLISHED_STEP_TIME.link
    assert link.over(None) is link
    assert link.over(DEFAULT_NETWORK) == link
    assert link.over(NETWORKS["hdr"]).network_bytes_per_s == link.network_bytes_per_s / 2


def test_a_host_is_as_fast_as_its_clock_says() -> None:
    assert host_speed(REFERENCE_HOST) == 1 < host_speed("epyc_9575f") == HOST_CLOCKS_GHZ["epyc_9575f"] / 3.8


@pytest.mark.parametrize("figures", [{"bandwidth_bytes_per_s": 0.0}, {"bandwidth_bytes_per_s": 1e9, "latency_s": True}])
def test_a_network_is_made_of_positive_numbers(figures: dict[str, float]) -> None:
    with pytest.raises((TypeError, ValueError), match=r"bandwidth_bytes_per_s: got 0|latency_s: got True"):
        require_kinds(NetworkSpec(name="ours", **figures))  # type: ignore[arg-type]
