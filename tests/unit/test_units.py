"""Conversions at the edges, units by suffix, and values as people read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.units import (
    SUFFIX_UNITS,
    format_change,
    format_probability,
    format_quantity,
    kib_to_bytes,
    mc_to_c,
    mj_to_j,
    mw_to_w,
    ns_to_s,
    s_to_ns,
    uj_to_j,
    unit_of,
    us_to_s,
)


def test_vendor_units_become_si():
    assert mw_to_w(700_000) == 700.0
    assert mj_to_j(1_500) == 1.5
    assert uj_to_j(2_000_000) == 2.0
    assert kib_to_bytes(3) == 3072
    assert mc_to_c(42_500) == 42.5
    assert us_to_s(250_000) == 0.25
    assert ns_to_s(1_500_000_000) == 1.5


@given(st.integers(0, 10**15))
def test_nanoseconds_survive_the_way_there_and_back(duration_ns):
    assert abs(s_to_ns(ns_to_s(duration_ns)) - duration_ns) <= 1


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("device_power_mean_w", "W"),
        ("power_ramp_max_w_per_s", "W/s"),
        ("nvlink_tx_bytes", "B"),
        ("nvlink_bytes_per_s", "B/s"),
        ("tokens_per_s", "1/s"),
        ("tokens_per_s_per_device", "1/s"),
        ("tokens_per_j", "1/J"),
        ("energy_per_token_j", "J"),
        ("energy_delay_product_js", "J*s"),
        ("mfu_frac", "1"),
        ("excursion_count", "1"),
        ("sm_clock_mhz", "MHz"),
        ("gpu_temp_c", "degC"),
        ("mono_ns", "ns"),
        ("peak_bf16_flop_per_s", "FLOP/s"),
        ("event_reasons", None),
        ("name", None),
    ],
)
def test_a_suffix_declares_the_unit(name, unit):
    assert unit_of(name) == unit


def test_no_suffix_hides_a_longer_one():
    suffixes = list(SUFFIX_UNITS)
    for index, suffix in enumerate(suffixes):
        hidden = [later for later in suffixes[index + 1 :] if later.endswith(suffix)]
        assert all(SUFFIX_UNITS[later] == SUFFIX_UNITS[suffix] for later in hidden), (suffix, hidden)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("node_device_power_peak_1s_w", 2790.0, "2.79 kW"),
        ("mfu_frac", 0.413, "41.3 %"),
        ("step_time_s", 0.0182, "18.2 ms"),
        ("step_time_s", 1.25, "1.25 s"),
        ("memory_peak_bytes", 11.3 * 2**30, "11.30 GiB"),
        ("memory_peak_bytes", 3 * 2**20, "3.0 MiB"),
        ("device_temp_max_c", 64.0, "64.0 °C"),
        ("sm_clock_mhz", 1980.0, "1980.0 MHz"),
        ("energy_per_token_j", 0.0123, "12.3 mJ"),
        ("energy_per_step_j", 1234.0, "1.234 kJ"),
        ("tokens_per_s", 131_013.0, "131 k/s"),
        ("tokens_per_j", 12.0, "12 /J"),
        ("excursion_count", 3.0, "3"),
        ("power_ramp_max_w_per_s", 950.0, "950 W/s"),
        ("node_device_power_mean_w", 999.7, "999.7 W"),
        ("energy_per_step_j", 0.99996, "1000 mJ"),
        ("device_power_mean_w", -999.9, "-999.9 W"),
    ],
)
def test_values_as_people_read_them(name, value, text):
    assert format_quantity(name, value) == text


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("device_temp_max_c", 14.04, "14.0 K"),
        ("throttle_frac", 0.061, "6.1 points"),
        ("throttle_frac", 5.6e-16, "0 points"),
        ("device_power_mean_w", -48.0, "-48 W"),
        ("total_energy_j", 37.8, "37.8 J"),
    ],
)
def test_a_difference_of_temperatures_is_in_kelvin_and_of_fractions_in_points(
    name: str, change: float, text: str
) -> None:
    assert format_change(name, change) == text


def test_a_probability_has_two_digits_and_is_zero_only_where_it_is() -> None:
    assert [format_probability(value) for value in (0.0, 1e-9, 0.007, 0.01, 0.954, 1.0)] == [
        "0.00",
        "<0.01",
        "<0.01",
        "0.01",
        "0.95",
        "1.00",
    ]
