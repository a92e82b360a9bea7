"""Energy on the common grid: windows, sums, ramps and swing."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wattune.analysis.signals.energy_grid import GRID_S, EnergySum, GridEnergy, pieces, steps_of
from wattune.analysis.signals.series import Series


@settings(deadline=None)
@given(st.lists(st.floats(0, 1000), min_size=1, max_size=60), st.integers(201, 450))
def test_peaks_decrease_with_their_window(cells_w, length):
    grid = GridEnergy(np.concatenate([[0.0], np.cumsum(np.resize(cells_w, length) * GRID_S)]), 0.001, ())
    peaks = [grid.peak_w(window_s) for window_s in (0.02, 0.1, 0.5, 1.0)]
    assert all(shorter >= longer - 1e-6 for shorter, longer in pairwise(peaks))
    assert peaks[0] <= max(cells_w) + 1e-6


def constant(watts: float, start_s: float, end_s: float) -> Series:
    return Series(np.array([start_s, end_s]), np.array([watts, watts]))


@pytest.mark.parametrize("block", [3, 2**15])
@pytest.mark.parametrize("window_s", [0.1, 1.0])
def test_pieces_hold_the_energy_of_every_window_once(monkeypatch, block, window_s):
    monkeypatch.setattr("wattune.analysis.signals.series._BLOCK", block)
    time_s = np.arange(0.0, 6.0, 0.37)
    signal = Series(time_s, 100.0 + 50.0 * np.sin(time_s))
    width = steps_of(window_s)
    windows = [piece.rises_j(width) for piece in pieces(signal)]
    starts = [first + number for first, energies_j in windows for number in range(len(energies_j))]
    assert starts == list(range(len(starts))), "every window once and in order"
    found_j = np.concatenate([energies_j for _, energies_j in windows])
    edge_s = np.arange(len(found_j)) * GRID_S
    assert found_j == pytest.approx(signal.cumulative(edge_s + window_s) - signal.cumulative(edge_s), rel=1e-9)
    assert max(piece.most_j(width) for piece in pieces(signal)) == found_j.max()


def test_a_series_between_two_points_of_the_grid_has_no_piece():
    assert list(pieces(constant(100.0, 0.4 * GRID_S, 1.4 * GRID_S))) == []


def summed(*signals: Series, window_s: float = 10.0) -> EnergySum:
    found = EnergySum(window_s)
    for signal in signals:
        for _ in found.add(pieces(signal), 0.02, (0.02,)):
            pass
    return found


def test_a_sum_is_of_the_time_that_every_sensor_covers():
    found = summed(constant(100.0, 0.0, 8.0), constant(30.0, 2.0, 10.0)).energy
    assert (found.first, len(found.energy_j)) == (steps_of(2.0), steps_of(6.0) + 1)
    middle_s, watts = found.means_w(1.0)
    assert middle_s == pytest.approx([2.5, 3.5, 4.5, 5.5, 6.5, 7.5])
    assert watts == pytest.approx([130.0] * 6)
    assert found.peak_w(1.0) == pytest.approx(130.0)
    assert summed(constant(100.0, 0.0, 3.0), constant(1.0, 5.0, 9.0)).energy.peak_w(1.0) is None, "never together"


@pytest.mark.parametrize(("frequency_hz", "smoothed_s"), [(0.5, ()), (2.0, ()), (2.0, (0.1,)), (8.0, (0.05, 0.05))])
def test_swing_puts_back_what_known_moving_means_take_away(frequency_hz, smoothed_s):
    # 600 W +- 100 W: RMS 100 / sqrt(2). A moving mean of length T leaves sinc(f T) of it.
    left = np.prod([np.sinc(frequency_hz * each_s) for each_s in smoothed_s])
    edge_s = np.arange(0.0, 60.0 + GRID_S / 2, GRID_S)
    turn = 2 * np.pi * frequency_hz
    energy_j = 600.0 * edge_s - 100.0 * left * np.cos(turn * edge_s) / turn
    # A sensor averages over one of its periods at most, and the band ends at its Nyquist frequency.
    found = GridEnergy(energy_j, max(smoothed_s, default=0.01), smoothed_s)
    assert found.swing_rms_w() == pytest.approx(100.0 / np.sqrt(2), rel=0.02)


def test_swing_needs_a_period_of_the_bands_lower_end_and_a_sensor_that_resolves_it():
    edges = np.arange(steps_of(60.0) + 1) * 1.0
    assert GridEnergy(edges[: steps_of(9.9)], 0.01, ()).swing_rms_w() is None
    assert GridEnergy(edges, 6.0, ()).swing_rms_w() is None, "Nyquist frequency below 0.1 Hz"
    assert GridEnergy(edges, 0.01, ()).swing_rms_w() == pytest.approx(0.0, abs=1e-6)
