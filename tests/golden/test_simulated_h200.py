"""The simulated H200 against three recordings, with the figures `benchmarks/simulated_sensors.py` prints.

Bounds are the worst error seen, rounded up. The promise to users is 15 % on what is asserted here; tp2pp2 was never
looked at by the fit.
"""

import numpy as np
import pytest
import simulated_sensors as fit

from wattune.simulation.device_model import device_model

# Largest relative error of: mean power of a device, 1 s peak of the node, rise of a slot's core temperature. A rise is
# compared as shown, in whole degrees averaged over a second: 0.5 of 15 degrees, 3 %, is the sensor's own.
BOUNDS = {"dp4": (0.02, 0.02, 0.10), "square_inphase": (0.08, 0.08, 0.15), "tp2pp2": (0.05, 0.05, 0.10)}


@pytest.fixture(scope="module", params=sorted(BOUNDS))
def compared(request):
    recording = fit.load(request.param)
    simulated = fit.simulated_tables(recording)
    return request.param, fit.figures(recording, recording.tables), fit.figures(recording, simulated), simulated


def relative_errors(recorded, simulated, figure):
    keys = [key for key in recorded if key.split()[0] == figure]
    assert keys
    return {key: simulated[key] / recorded[key] - 1 for key in keys}


@pytest.mark.parametrize(("index", "figure"), [(0, "mean_w"), (1, "peak_1s_w"), (2, "rise_c")])
def test_simulated_figure_is_within_its_bound_of_the_recorded_one(compared, index, figure):
    name, recorded, simulated, _ = compared
    errors = relative_errors(recorded, simulated, figure)
    assert max(map(abs, errors.values())) <= BOUNDS[name][index] <= 0.15, errors


def test_clock_lost_to_the_cap_is_the_recorded_one_within_5_percent_of_the_clock(compared):
    _, recorded, simulated, _ = compared
    errors = relative_errors(recorded, simulated, "clock_mhz")
    assert max(map(abs, errors.values())) <= 0.05, errors


def test_last_stage_works_harder_than_the_first_as_recorded():
    recording = fit.load("tp2pp2")
    simulated = fit.figures(recording, fit.simulated_tables(recording))
    first, last = (np.mean([simulated[f"mean_w gpu{slot}"] for slot in slots]) for slots in ((0, 1), (2, 3)))
    first_mhz, last_mhz = (np.mean([simulated[f"clock_mhz gpu{slot}"] for slot in slots]) for slots in ((0, 1), (2, 3)))
    assert last - first > 10  # 39 W recorded
    assert first_mhz - last_mhz > 50  # 113 MHz recorded


def test_outer_slots_are_hotter_than_inner_ones_as_recorded(compared):
    _, recorded, simulated, _ = compared
    for figures in (recorded, simulated):
        rises = [figures[f"rise_c gpu{slot}"] for slot in range(4)]
        assert min(rises[0], rises[3]) > max(rises[1], rises[2])


def test_products_in_phase_pass_the_limit_in_a_node_100_ms_mean_as_recorded():
    recording = fit.load("square_inphase")
    for tables in (recording.tables, fit.simulated_tables(recording)):
        figures = fit.figures(recording, tables)
        assert figures["peak_100ms_w node"] > 1.05 * 4 * 700
        assert max(figures[f"max_w {name}"] for name in recording.devices) > 900


def test_power_cap_is_reported_through_any_busy_load_as_recorded(compared):
    _, _, _, simulated = compared
    recording = fit.load(compared[0])
    load_s = (recording.end_ns - recording.start_ns) / 1e9
    for tables in (recording.tables, simulated):
        for name in recording.devices:
            at_s, reasons = recording.column(tables, "fast", "event_reasons", name)
            inside = (at_s > 0.3) & (at_s < load_s)
            assert np.mean(reasons[inside] == 0x4) > 0.9
            at_s, counter_ns = recording.column(tables, "slow", "throttle_power_ns", name)
            inside = (at_s > 0.3) & (at_s < load_s)
            ran = np.ptp(counter_ns[inside]) / 1e9 / np.ptp(at_s[inside])
            assert 0.9 < ran < 1.05


def test_ring_spacing_is_the_recorded_one(compared):
    name, _, _, simulated = compared
    recording = fit.load(name)
    for tables in (recording.tables, simulated):
        at_s, _ = recording.column(tables, "ring", "power_w", "gpu0")
        inside = (at_s > 0) & (at_s < (recording.end_ns - recording.start_ns) / 1e9)
        steps_s = np.diff(at_s[inside])
        assert np.median(steps_s) == pytest.approx(0.02, abs=2e-4)
        assert steps_s.min() > 0.004
        assert 0.03 < steps_s.max() < 0.06


def test_rest_is_what_the_recordings_show_before_and_after_their_loads():
    power = device_model(fit.device("h200_sxm"))
    recording = fit.load("dp4")
    at_s, power_w = recording.column(recording.tables, "ring", "power_w", "gpu1")
    assert power.idle_power_w == pytest.approx(np.median(power_w[at_s < -10]), abs=2)
    assert power.ready_power_w == pytest.approx(np.median(power_w[(at_s > -7) & (at_s < -4)]), abs=4)
