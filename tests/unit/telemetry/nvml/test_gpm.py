"""GPM: means between two samples, their age, and values that are none."""

import pytest
from fake_nvml import FakeNvml, opened, row

from wattune.telemetry.nvml.gpm import SM_UTIL, Gpm


def test_gpm_needs_100_ms_and_then_covers_all_of_the_time_since(driver: FakeNvml) -> None:
    backend = opened(driver)
    driver.sleep(0.05)
    soon = row(backend, "counter")
    assert soon["sm_active_frac"] is None and "sm_active_frac_error" not in soon
    driver.sleep(0.05)
    assert row(backend, "counter")["sm_active_frac"] == 0.5


@pytest.mark.parametrize(("value", "read", "code"), [(100.3, 1.0, None), (float("nan"), None, "NOT_FINITE")])
def test_a_gpm_value_that_is_no_share_is_none(driver: FakeNvml, value: float, read: object, code: object) -> None:
    backend = opened(driver)
    driver.sleep(0.2)
    driver.gpm_values[5] = value
    counter = row(backend, "counter")
    assert counter["tensor_active_frac"] == read and counter.get("tensor_active_frac_error") == code
    assert counter["sm_active_frac"] == 0.5


def test_the_sample_buffers_take_turns_and_are_freed(driver: FakeNvml) -> None:
    import pynvml

    pynvml.nvmlInit()
    gpm = Gpm(pynvml, pynvml.nvmlDeviceGetHandleByIndex(0), (SM_UTIL,), driver.clock_ns)
    assert driver.gpm_allocated == 2 and gpm.value(SM_UTIL) is None
    for _ in range(3):
        gpm.advance()
        driver.sleep(0.2)
    assert gpm.frac(SM_UTIL) == 0.5 and gpm.value(SM_UTIL) == 50.0
    gpm.close()
    assert driver.gpm_allocated == 0
