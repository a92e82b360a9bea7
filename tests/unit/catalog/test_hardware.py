"""Devices and clusters."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.catalog.hardware import (
    DEVICES,
    ClusterSpec,
    DeviceSpec,
    device,
    device_of_accelerator,
    device_of_product,
    parse_cluster_label,
)
from wattune.errors import PlanError
from wattune.orchestrate.cluster import Cluster, Node
from wattune.orchestrate.trial_telemetry import sensor_backends
from wattune.plans.engines import CAPABILITIES
from wattune.search.prune import prune
from wattune.search.space import load_space
from wattune.simulation.device_model import device_model


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
        assert 30e9 < spec.memory_bytes < 300e9


WITHOUT_FP8 = {"a100_sxm_80gb", "a100_sxm_40gb", "a100_pcie_80gb", "mi250_gcd"}


@pytest.mark.parametrize("spec", [one for one in DEVICES.values() if one.vendor != "cpu"], ids=lambda one: one.name)
def test_fp8_has_twice_the_dense_peak_of_bf16_where_a_datasheet_has_it(spec):
    if spec.name in WITHOUT_FP8:
        assert spec.peak_flop_per_s("fp8") is None and spec.trains_in == ("bf16", "fp32")
        return
    # Datasheets round: 1,979 TFLOP/s beside 989.4.
    assert spec.peak_flop_per_s("fp8") == pytest.approx(2 * spec.peak_bf16_flop_per_s, rel=1e-4)
    assert spec.trains_in == ("bf16", "fp32", "fp8")


def test_a_cpu_emulates_fp8_and_a_device_without_bf16_has_none():
    assert device("cpu").trains_in == ("fp32", "bf16", "fp8")
    assert replace(device("h200_sxm"), dtypes=("fp32",)).trains_in == ("fp32",)


def test_a_cpu_claims_no_peak():
    assert device("cpu").peak_flop_per_s("fp32") is None and device("cpu").power_limit_w is None


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


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100_sxm"),
        ("NVIDIA-H100-80GB-HBM3", "h100_sxm"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("NVIDIA H100 NVL", "h100_nvl"),
        ("NVIDIA H100", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H200", "h200_sxm"),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("AMD Instinct MI250X / MI250", "mi250_gcd"),
        ("AMD INSTINCT MI250 (MCM) OAM AC MBA", "mi250_gcd"),
        ("AMD Instinct MI250X", None),
        ("AMD Instinct MI210", None),
        ("", None),
    ],
)
def test_a_product_is_the_device_of_its_whole_name(product, name):
    found = device_of_product(product)
    assert (found and found.name) == name


def test_every_accelerator_has_names_and_shares_none():
    names = [name for spec in DEVICES.values() for name in spec.product_names]
    assert [device_of_product(name).name for name in names] == [
        spec.name for spec in DEVICES.values() for _ in spec.product_names
    ]
    accelerators = [spec for spec in DEVICES.values() if spec.vendor != "cpu"]
    assert all(spec.product_names for spec in accelerators)
    # Ray labels boards of other form factors as it labels the SXM one: only their product tells them apart.
    assert [spec.name for spec in accelerators if not spec.ray_accelerator_types] == [
        "h100_pcie",
        "h100_nvl",
        "a100_sxm_80gb",
        "a100_sxm_40gb",
        "a100_pcie_80gb",
    ]
    assert device_of_product("cpu") is None and device_of_accelerator("") is None


@given(st.sampled_from(sorted(name for spec in DEVICES.values() for name in spec.product_names)), st.data())
def test_case_and_separators_of_a_product_do_not_matter(name, data):
    separator = data.draw(st.sampled_from([" ", "-", "_", " / ", "  "]))
    written = separator.join(name.replace("(", "").replace(")", "").replace("/", " ").split())
    assert device_of_product(written.swapcase()) is device_of_product(name)
    assert device_of_product(f"{name} NVL") is None and device_of_product(name[:-1]) is None


MADE_UP = {
    "nvidia": {"product_names": ("NVIDIA X900 SXM",), "ray_accelerator_types": ("X900",)},
    "amd": {"product_names": ("AMD Instinct MI9 OAM",), "ray_accelerator_types": ("AMD-Instinct-MI9-OAM",)},
}
SPACE = """
study: made_up
model: {name: llama3_8b, num_layers: 8}
cluster: {device: x900, devices_per_node: 2}
engine: torch
workload: {mode: pretrain, seq_len: 1024, global_batch_size: 8}
space: {tp: [1, 2]}
objective: maximize tokens_per_s
"""


@pytest.mark.parametrize("vendor", MADE_UP)
def test_a_new_device_is_one_constant(vendor, monkeypatch, tmp_path):
    """Search spaces, plans, nodes, sensors and their simulation know a device by its `DeviceSpec` alone."""
    made_up = DeviceSpec(
        name="x900",
        vendor=vendor,
        peak_bf16_flop_per_s=3e15,
        peak_fp32_flop_per_s=2e14,
        memory_bytes=250 * 10**9,
        memory_bandwidth_bytes_per_s=8e12,
        link_bandwidth_bytes_per_s=900e9,
        power_limit_w=1200.0,
        sm_clock_max_mhz=2100.0,
        temp_slowdown_c=90.0,
        source="made up",
        **MADE_UP[vendor],
    )
    (product,), (accelerator,) = made_up.product_names, made_up.ray_accelerator_types
    monkeypatch.setitem(DEVICES, "x900", made_up)
    assert device("x900") is device_of_product(product) is device_of_accelerator(accelerator) is made_up

    (tmp_path / "space.yaml").write_text(SPACE)
    candidates = prune(load_space(tmp_path / "space.yaml"))
    assert {one.spec.plan.tp for one in candidates.kept} == {1, 2}
    spec = candidates.specs[0]
    assert parse_cluster_label("1x2 x900") == spec.cluster and vendor in CAPABILITIES["torch"].vendors

    def node(**more):
        return Node(node_id="1", name="n0", num_cpus=8, num_gpus=2, **more)

    nodes = [
        node(labels={"ray.io/accelerator-type": accelerator}),
        node(products=(product,)),
        node(labels={"wattune.io/device": "x900"}),
    ]
    for one in nodes:
        assert Cluster(nodes=(one,), driver_node_id="1").resources_per_rank(spec.cluster)["GPU"] == 1
    other = Cluster(nodes=(node(products=("NVIDIA H200",)),), driver_node_id="1")
    assert other.fitting(spec.cluster) == [] and product in other.missing(spec.cluster)

    assert set(sensor_backends(spec)) == {"host", {"nvidia": "nvml", "amd": "amd_smi"}[vendor]}
    simulated = ClusterSpec(device="cpu", devices_per_node=2, simulate_sensors_of="x900").sensed_device
    assert simulated is made_up and device_model(simulated).limit_w == 1200


def test_boards_whose_link_is_that_of_pcie_say_so() -> None:
    assert {one.name for one in DEVICES.values() if one.is_linked_by_pcie} == {
        one.name for one in DEVICES.values() if (one.link_bandwidth_bytes_per_s or math.inf) <= 64e9
    }
    assert replace(device("h100_nvl"), name="mine", source="like h100_nvl").is_linked_by_pcie
