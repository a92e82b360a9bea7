"""Values that cannot be meant: each is refused with its reason, and every sensible bound near it is not."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.catalog.hardware import DEVICES, ClusterSpec
from wattune.metrics import METRICS
from wattune.objective import Constraint, Objective, parse_constraint, parse_objective
from wattune.search.plausible import LEAST_POWER_FRAC, OF_HOST, implausible, never_measured

NODE = ClusterSpec(device="h200_sxm", devices_per_node=4)
FASTEST = parse_objective("maximize tokens_per_s")


def problems(*bounds: str, power_w: float | None = None, cluster: ClusterSpec = NODE) -> list[str]:
    found = implausible(FASTEST, [parse_constraint(bound) for bound in bounds], power_w, [cluster])
    return [f"{'.'.join(map(str, path))}: {text}" for path, text in found]


@pytest.mark.parametrize(
    "bound",
    [
        "node_device_power_peak_1s_w <= 2600",
        "node_device_power_peak_1s_w <= 2781.5",
        "device_power_mean_w <= 300",
        "device_power_mean_w <= 0.8 * device_power_limit_w",
        "device_power_peak_20ms_w <= 969",
        "device_temp_max_c <= 85",
        "device_temp_spread_c <= 5",
        "thermal_margin_min_c >= -3",
        "throttle_frac <= 0",
        "throttle_thermal_frac <= 0.01",
        "memory_peak_bytes <= 140000000000",
        "memory_headroom_frac >= 0.05",
        "power_swing_rms_w <= 40",
        "node_power_mean_w <= 8000",
        "tokens_per_s >= 10000",
        "excursion_count <= 0",
    ],
)
def test_bounds_that_people_mean_are_taken(bound: str) -> None:
    assert problems(bound) == []


@pytest.mark.parametrize(
    ("bound", "words"),
    [
        ("cluster_device_power_peak_1s_w <= 2800000", "beyond anything they draw; for 2.8e+06 mW write 2800"),
        ("tokens_per_s < 0", "is never below 0"),
        ("throttle_frac <= -0.1", "is never below 0"),
        ("device_temp_max_c >= 300", "no device gets there, so nothing holds it"),
        ("device_temp_max_c <= 8.5", "no room is that cold, so nothing holds it"),
        ("device_power_mean_w <= 1 * device_power_mean_w", "compares device_power_mean_w with itself"),
    ],
)
def test_bounds_that_cannot_be_meant_are_one_line(bound: str, words: str) -> None:
    (found,) = problems(bound)
    assert found.startswith("constraints.0: ") and words in found


def test_bounds_exclude_each_other_where_no_value_holds_both() -> None:
    every = [
        Constraint(metric="tokens_per_s", operator=op, factor=value)
        for op in ("<", "<=", ">", ">=")
        for value in (1, 2, 3)
    ]
    for one, other in itertools.product(every, every):
        held = any(all(bound.holds({"tokens_per_s": value / 2}) for bound in (one, other)) for value in range(1, 9))
        found = implausible(FASTEST, [one, other], None, [NODE])
        assert bool(found) == (not held or one == other), (one, other)
    assert problems("tokens_per_s >= 5", "tokens_per_j <= 4") == []


@pytest.mark.parametrize("name", METRICS)
def test_the_worst_is_never_asked_for(name: str) -> None:
    better = METRICS[name].better
    for maximize in (True, False):
        found = implausible(Objective(metric=name, maximize=maximize), [], None, [NODE])
        wrong = better == ("lower" if maximize else "higher")
        assert bool(found) == wrong
        if wrong:
            assert f'write "{"minimize" if maximize else "maximize"} {name}"' in found[0][1]


@given(st.floats(1e-3, 1e7), st.sampled_from([n for n, d in DEVICES.items() if d.power_limit_w]), st.integers(1, 16))
def test_a_bound_on_power_is_taken_from_idle_to_ten_times_the_limits(watts: float, name: str, devices: int) -> None:
    cluster = ClusterSpec(device=name, devices_per_node=devices)
    limit = (cluster.sensed_device.power_limit_w or 0) * devices
    taken = not problems(f"node_device_power_mean_w <= {watts!r}", cluster=cluster)
    assert taken == (LEAST_POWER_FRAC * limit <= watts <= 10 * limit)


def test_a_hard_limit_is_a_bound_too() -> None:
    assert problems(power_w=2900) == []
    (found,) = problems(power_w=2.9)
    assert found.startswith("limits.node_device_power_w: ") and "for 2.9 kW write 2900" in found


def test_a_bound_fits_if_it_fits_one_of_the_clusters() -> None:
    small, large = NODE, ClusterSpec(device="mi300x", num_nodes=64, devices_per_node=8)
    bound = parse_constraint("cluster_device_power_peak_1s_w <= 300000")
    assert implausible(FASTEST, [bound], None, [small]) and not implausible(FASTEST, [bound], None, [small, large])


def test_the_limits_that_are_named_are_those_of_their_cluster() -> None:
    clusters = [ClusterSpec(device="cpu", devices_per_node=2), NODE]
    found = implausible(FASTEST, [parse_constraint("node_device_power_peak_1s_w <= 2.6")], None, clusters)
    assert "the power limits of 1x4 h200_sxm are 2,800 W" in found[0][1]


def test_nothing_is_said_of_devices_without_a_known_limit() -> None:
    assert problems("device_power_mean_w <= 5", cluster=ClusterSpec(device="cpu", devices_per_node=2)) == []


CPU = ClusterSpec(device="cpu", devices_per_node=2, simulate_sensors_of="h200_sxm")


@pytest.mark.parametrize(
    ("engines", "clusters", "profile_steps", "words"),
    [
        (["torch"], [CPU], None, "ranks on processors have no kernels"),
        (["command"], [NODE], None, "kernels of a command are not profiled"),
        (["torch"], [NODE], 0, "measure.profile_steps is 0"),
        (["torch"], [NODE, CPU], None, ""),
        (["torch", "command"], [NODE], 2, ""),
    ],
)
def test_what_no_trial_will_have_is_not_asked_for(engines, clusters, profile_steps, words) -> None:
    bounds = [parse_constraint(f"{name} <= 0.2") for name in ("tensor_active_frac", *OF_HOST)]
    for objective in (FASTEST, parse_objective("minimize device_bound_step_time_s")):
        found = never_measured(objective, bounds, engines=engines, clusters=clusters, profile_steps=profile_steps)
        paths = [("constraints", 1), ("constraints", 2)]
        paths = [("objective",), *paths] if objective is not FASTEST else paths
        assert [path for path, _ in found] == (paths if words else [])
        assert all(words in text and "use step_time_s" in text for _, text in found)
