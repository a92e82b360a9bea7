"""Matrix products: bounded by the roofline, and near what was measured on an H100."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.cost.coefficients import PUBLISHED_STEP_TIME
from wattune.cost.step_time.matmul import matmul_s, ratio, weights

H100 = {"flop_per_s": 989.4e12, "bytes_per_s": 3.35e12}
"""Peaks of the device whose products were measured (H100 SXM, NVIDIA's datasheet, dense)."""
SIZES = st.integers(1, 60_000).map(float)


def seconds(m, n, k):
    return float(matmul_s(np.array([m]), np.array([n]), np.array([k]), **H100)[0])


@given(SIZES, SIZES, SIZES)
def test_nothing_is_faster_than_the_roofline(m, n, k):
    least_s = max(2 * m * n * k / H100["flop_per_s"], 2 * (m * k + k * n + m * n) / H100["bytes_per_s"])
    assert seconds(m, n, k) >= least_s * (1 - 1e-9)
    assert np.isfinite(seconds(m, n, k))


@pytest.mark.parametrize(
    ("m", "n", "k", "measured_tflop_per_s", "clock_frac"),
    [  # AIConfigurator 095f58a, H100 SXM, bf16; the first two ran as long products do under the limit
        (8192, 8192, 8192, 713, 0.753),
        (4096, 12288, 12288, 710, 0.753),
        (16384, 12288, 12288, 860, 1.0),
        (2048, 4096, 4096, 793, 1.0),
        (16384, 1024, 8192, 841, 1.0),
    ],
)
def test_products_of_training_take_what_was_measured_at_the_highest_clock(m, n, k, measured_tflop_per_s, clock_frac):
    rate = PUBLISHED_STEP_TIME.kernel.matmul_frac * 2 * m * n * k / seconds(m, n, k) / 1e12
    assert rate == pytest.approx(measured_tflop_per_s / clock_frac, rel=0.15)


@given(st.integers(10, 14), st.integers(10, 14), st.integers(10, 14))
def test_more_rows_are_no_slower_at_the_highest_clock(m, n, k):
    few, many = (2.0 ** (m + more) for more in (0, 1))
    assert float(ratio(np.array([many]), *np.array([[2.0**n], [2.0**k]]))[0]) <= float(
        ratio(np.array([few]), *np.array([[2.0**n], [2.0**k]]))[0]
    )


def test_a_faster_device_is_faster():
    shape = np.array([4096.0]), np.array([4096.0]), np.array([4096.0])
    assert matmul_s(*shape, flop_per_s=2 * H100["flop_per_s"], bytes_per_s=1e13)[0] < matmul_s(*shape, **H100)[0]


def test_between_knots_the_ratio_is_between_theirs():
    low, middle, high = (
        float(ratio(np.array([m]), np.array([4096.0]), np.array([4096.0]))[0]) for m in (4096, 6000, 8192)
    )
    assert min(low, high) <= middle <= max(low, high)


def test_weights_never_leave_the_grid():
    below, above = weights(np.array([0.0, 1.0, 3.0]), np.array([-5.0, 0.5, 2.0, 9.0]))
    assert below.tolist() == [0, 0, 1, 1]
    assert above.tolist() == [0.0, 0.5, 0.5, 1.0]
