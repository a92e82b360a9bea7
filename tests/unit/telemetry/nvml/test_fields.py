"""NVML's field values: decoding, counters that only rise, and numbers by driver."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.errors import TelemetryError
from wattune.telemetry.nvml.fields import (
    NEW_THROTTLE_FIELDS,
    OLD_THROTTLE_FIELDS,
    Counter,
    counter_bits,
    decode,
    throttle_fields,
)


@pytest.mark.parametrize(
    ("value_type", "member"), [*enumerate(("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal"))]
)
def test_values_are_decoded_by_their_type(value_type: int, member: str) -> None:
    import pynvml

    value = pynvml.c_nvmlValue_t()
    setattr(value, member, -7 if member in ("dVal", "sllVal", "siVal") else 7)
    assert decode(value_type, value) == getattr(value, member)


def test_an_unknown_value_type_is_an_error_and_no_number() -> None:
    with pytest.raises(TelemetryError, match="VALUE_TYPE_9"):
        decode(9, None)
    with pytest.raises(TelemetryError, match="VALUE_TYPE_0"):
        counter_bits(0)


@given(rises=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), start=st.integers(0, 2**32 - 1))
def test_a_narrow_counter_is_unwrapped(rises: Sequence[int], start: int) -> None:
    counter, total = Counter(), start
    counter.advance(start, 32, 0.0)
    for rise in rises:
        total += rise
        assert counter.advance(total % 2**32, 32, 1.0) == total


@given(rises=st.lists(st.integers(0, 40 * 2**32), min_size=1, max_size=20), error=st.floats(-0.04, 0.04))
def test_another_sensor_tells_how_often_a_counter_wrapped(rises: Sequence[int], error: float) -> None:
    counter, total = Counter(), 0
    counter.advance(0, 32, 0.0)
    for time_s, rise in enumerate(rises, 1):
        total += rise
        about = rise + error * min(rise, 10 * 2**32)  # right when the other sensor errs by less than half a wrap
        assert counter.advance(total % 2**32, 32, time_s, about_per_s=about) == total


def test_a_wide_counter_that_falls_was_reset_and_goes_on() -> None:
    counter = Counter()
    counter.advance(1000, 64, 0.0)
    with pytest.raises(TelemetryError, match="COUNTER_RESET"):
        counter.advance(10, 64, 1.0)
    assert counter.advance(25, 64, 2.0) == 1015


def test_a_wide_counter_of_all_ones_is_no_count() -> None:
    counter = Counter()
    for time_s in (0.0, 2.0):
        with pytest.raises(TelemetryError, match="ALL_BITS_SET"):
            counter.advance(2**64 - 1, 64, time_s)
        assert counter.advance(1000, 64, time_s + 1) == 1000


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("535.183.01", None),
        ("570.86.15", None),
        ("575.51.03", OLD_THROTTLE_FIELDS),
        ("580.65.06", OLD_THROTTLE_FIELDS),
        ("580.126.09", NEW_THROTTLE_FIELDS),
        ("580.159.04", NEW_THROTTLE_FIELDS),
        ("615.12", NEW_THROTTLE_FIELDS),
    ],
)
def test_throttle_fields_go_by_the_driver(version: str, expected: object) -> None:
    assert throttle_fields(version) == expected
