"""Devices and clusters."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.catalog.hardware import DEVICES, ClusterSpec, device, parse_cluster_label
from wattune.errors import PlanError


@pytest.mark.parametrize("spec", DEVICES.values(), ids=DEVICES)
def test_every_device_has_a_source_and_possible_numbers(spec):
    assert spec.source and spec.vendor in {"nvidia", "amd", "cpu"}
    assert set(spec.dtypes) == {"bf16", "fp32"}
    for name in spec.__dataclass_fields__:
        value = getattr(spec, name)
        assert value is None or not isinstance(value, float) or value > 0, name
    if spec.vendor != "cpu":
        assert spec.peak_bf16_flop_per_s > spec.peak_fp32_flop_per_s
        assert spec.peak_flop_per_s("bf16") == spec.peak_bf16_flop_per_s
        assert 500e9 < spec.memory_bandwidth_bytes_per_s < 10e12
        assert 60e9 < spec.memory_bytes < 300e9


def test_a_cpu_claims_no_peak():
    assert device("cpu").peak_flop_per_s("fp32") is None and device("cpu").power_limit_w is None


def test_an_unknown_device_gets_the_closest():
    with pytest.raises(PlanError, match='unknown device "h200_sx"; did you mean "h200_sxm"'):
        device("h200_sx")


@given(nodes=st.integers(1, 999), devices=st.integers(1, 99), name=st.sampled_from(sorted(DEVICES)))
def test_a_label_is_the_cluster_it_names(nodes, devices, name):
    cluster = ClusterSpec(device=name, num_nodes=nodes, devices_per_node=devices)
    assert parse_cluster_label(cluster.label) == cluster
    assert cluster.world_size == nodes * devices


@given(
    st.text(max_size=20)
    | st.sampled_from(
        ["1x4", "x4 cpu", "0x4 cpu", "1x0 cpu", "1x4  ", "1x4 gpu", "-1x4 cpu", "²x4 cpu", "9" * 5000 + "x4 cpu"]
    )
)
def test_any_other_text_is_refused_in_words(text):
    try:
        assert parse_cluster_label(text).world_size >= 1
    except PlanError as error:
        assert "cluster" in str(error) or "device" in str(error)


def test_sensors_are_those_of_the_simulated_device():
    cluster = ClusterSpec(device="cpu", devices_per_node=4, simulate_sensors_of="h200_sxm")
    assert cluster.sensed_device is DEVICES["h200_sxm"]
    assert ClusterSpec(device="cpu", devices_per_node=4).sensed_device is DEVICES["cpu"]
