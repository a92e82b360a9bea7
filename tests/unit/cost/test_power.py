"""Power over a step: bounds that hold for every step, and steps worked by hand."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from specs import trial_spec

from wattune.catalog.hardware import DEVICES
from wattune.cost.batch import Batch, batches
from wattune.cost.clock import clock_frac, dynamic_w
from wattune.cost.coefficients import PowerCoefficients
from wattune.cost.power import H200, H200_PRIOR, ROOM_FRAC, SECOND_FRAC, power_coefficients
from wattune.cost.power import predict as predict_power
from wattune.cost.step_time.matmul import matmul_s
from wattune.cost.tables import Activity, StepTime

ROUND = PowerCoefficients(
    idle_w=100,
    active_w=100,
    matrix_w=500,
    memory_w=200,
    link_w=50,
    exponent=2,
    wait_w=20,
    matrix_memory_frac=0.5,
    memory_frac=1.0,
    origin="datasheet",
    error_frac=0.1,
    peak_error_frac=0.2,
)
KINDS = ("matrix_s", "memory_s", "collective_s", "idle_s")


def batch_of(*pps: int, cluster: str = "1x4 h200_sxm") -> Batch:
    specs = [trial_spec("llama3_70b", on=cluster, seq_len=1000, pp=pp) for pp in pps]
    ((_, batch),) = batches(specs)
    return batch


def step_of(seconds: np.ndarray, clock: float = 1.0, straggler_s: float = 0.0, fine: bool = False) -> StepTime:
    """Seconds of each of `KINDS` by candidate and stage, [kinds, candidates, stages]."""
    collective_s = seconds[2].mean(axis=1)
    exposed = {"exposed_comm_tp_s" if fine else "exposed_comm_dp_s": collective_s}
    straggler = {"straggler_s": np.full_like(collective_s, straggler_s)}
    rest = seconds.sum(axis=0).mean(axis=1) - collective_s - straggler_s
    return StepTime(
        parts_s={**exposed, **straggler, "compute_s": rest},
        activity=Activity(
            held_frac=np.ones_like(seconds[0]),
            **dict(zip(KINDS, seconds, strict=True)),
            overlapped_s=np.zeros_like(seconds[0]),
            matrix_frac=np.full_like(seconds[0], 0.8),
            clock_frac=np.full_like(seconds[0], clock),
        ),
        error_frac=np.zeros(seconds.shape[1]),
        longer_frac=np.zeros(seconds.shape[1]),
    )


def one_stage(*seconds: float) -> np.ndarray:
    return np.array(seconds, np.float64).reshape(4, 1, 1)


SECONDS = st.lists(st.floats(0, 3), min_size=16, max_size=16).filter(lambda each: sum(each) > 0.1)


@st.composite
def steps(draw: st.DrawFn) -> np.ndarray:
    """Seconds of one candidate with four stages, which share the step's length."""
    seconds = np.array(draw(SECONDS)).reshape(4, 1, 4)
    seconds[3] += seconds.sum(axis=0).max() - seconds.sum(axis=0)
    return seconds


def columns(power: SimpleNamespace) -> dict[str, np.ndarray]:
    return vars(power)


def predict(batch: Batch, step: StepTime, coefficients: PowerCoefficients, *, limit_w: float) -> SimpleNamespace:
    """Values by metric, and how far the low ends of mean and peak are below them."""
    found = predict_power(replace(batch, limit_w=np.full(len(batch), float(limit_w))), step, coefficients)
    mean, peak = (1 - one.low / one.value for one in (found["device_power_mean_w"], found["device_power_peak_1s_w"]))
    return SimpleNamespace(**{name: one.value for name, one in found.items()}, error_frac=mean, peak_error_frac=peak)


@given(steps(), st.floats(0.4, 1), st.floats(150, 1200))
def test_power_lies_between_idle_and_the_limit(seconds: np.ndarray, clock: float, limit_w: float) -> None:
    power = predict(batch_of(4), step_of(seconds, clock), ROUND, limit_w=limit_w)
    for name in ("device_power_mean_w", "device_power_mean_max_w", "device_power_peak_1s_w"):
        value = getattr(power, name)[0]
        assert ROUND.idle_w * (1 - 1e-9) <= value <= limit_w * (1 + 1e-9)
    assert power.device_power_mean_w <= power.device_power_mean_max_w + 1e-9
    assert power.node_device_power_mean_w <= power.node_device_power_peak_1s_w + 1e-9


@given(steps(), st.floats(0.4, 1), st.floats(150, 1200))
def test_a_shorter_window_has_no_lower_peak_and_only_short_ones_pass_the_limit(
    seconds: np.ndarray, clock: float, limit_w: float
) -> None:
    power = predict(batch_of(4), step_of(seconds, clock), ROUND, limit_w=limit_w)
    second, tenth, short = (getattr(power, f"device_power_peak_{name}_w")[0] for name in ("1s", "100ms", "20ms"))
    assert second <= min(tenth, short, limit_w) * (1 + 1e-9) and tenth <= short * (1 + 1e-9)
    assert power.node_device_power_peak_1s_w <= power.node_device_power_peak_100ms_w + 1e-9


def test_plans_at_the_limit_differ_in_their_short_peaks() -> None:
    """Both are slowed to 690 W of 700; one would draw more without the limit, and does until the limit acts."""
    hot, hotter = (
        predict(batch_of(1), step_of(one_stage(matrix_s, 1 - matrix_s, 0, 0), 0.6), ROUND, limit_w=700)
        for matrix_s in (0.8, 1.0)
    )
    assert hot.device_power_peak_1s_w == pytest.approx(hotter.device_power_peak_1s_w, rel=0.35)
    assert hotter.device_power_peak_20ms_w > 1.02 * hot.device_power_peak_20ms_w
    assert hotter.device_power_peak_100ms_w > 1.02 * hot.device_power_peak_100ms_w


def test_waits_for_the_host_lie_in_a_short_window_and_waits_for_a_collective_do_not() -> None:
    """Gaps between kernels are shorter than 20 ms, a reduction of all gradients is longer."""
    step = step_of(one_stage(0.5, 0, 0, 0.5))
    gaps = replace(step, parts_s={"compute_s": np.array([0.5]), "other_s": np.array([0.5])})
    bubble = replace(step, parts_s={"compute_s": np.array([0.5]), "bubble_s": np.array([0.5])})
    peaks = [predict(batch_of(1), one, ROUND, limit_w=np.inf).device_power_peak_20ms_w[0] for one in (gaps, bubble)]
    assert peaks[0] < 0.8 * peaks[1]


def test_a_stage_waits_for_one_with_more_work_in_each_micro_batch_and_not_in_one_pause() -> None:
    """Of steps of 2 s a stage works half; so would both with a bubble, whose pause leaves a second of work."""
    uneven, bubble = np.zeros((4, 1, 2)), np.zeros((4, 1, 2))
    uneven[0], uneven[3], bubble[0], bubble[3] = [[2, 1]], [[0, 1]], 1.5, 0.5
    waits, pauses = (predict(batch_of(2), step_of(one), ROUND, limit_w=np.inf) for one in (uneven, bubble))
    assert waits.node_device_power_mean_w == pytest.approx(pauses.node_device_power_mean_w)
    assert waits.node_device_power_peak_1s_w == pytest.approx(SECOND_FRAC * waits.node_device_power_mean_w)
    assert pauses.node_device_power_peak_1s_w == pytest.approx(SECOND_FRAC * 4 * 700)


def test_a_peak_is_as_unsure_as_it_leaves_room_below_the_limit() -> None:
    apart = replace(ROUND, full_peak_error_frac=0.1)
    errors = []
    for limit_w in (700, 700 * SECOND_FRAC / (1 - ROOM_FRAC), 1400 * SECOND_FRAC, np.inf):
        found = predict(batch_of(1), step_of(one_stage(4, 0, 0, 0)), apart, limit_w=limit_w)
        errors.append(found.peak_error_frac[0])
    assert errors == pytest.approx([0.1, 0.2, 0.6, 0.6])


def test_peaks_move_with_the_step_only_where_it_fills_the_window() -> None:
    wrong = {"error_frac": np.full(1, 0.3), "longer_frac": np.full(1, 0.9)}
    alone, short = (replace(step_of(one_stage(work_s, 0, 40, 0)), **wrong) for work_s in (4.0, 0.1))
    found, brief = (predict(batch_of(1), one, ROUND, limit_w=700) for one in (alone, short))
    assert found.peak_error_frac == pytest.approx(ROUND.peak_error_frac)
    assert brief.peak_error_frac > ROUND.peak_error_frac and found.error_frac > 0.2
    sharded = replace(batch_of(1), sharding=np.full(1, 3))
    gathers = predict(sharded, alone, ROUND, limit_w=700)
    all_of_it = SECOND_FRAC * gathers.device_power_mean_w
    assert gathers.device_power_peak_1s_w == pytest.approx(all_of_it), "gathers between all layers"
    for one in (found, brief, gathers):
        assert (1 - one.error_frac) * one.device_power_mean_w >= 99.9, "the idle power"


@given(steps())
def test_a_limit_at_infinity_is_the_power_without_one(seconds: np.ndarray) -> None:
    free = predict(batch_of(4), step_of(seconds), ROUND, limit_w=np.inf)
    far = predict(batch_of(4), step_of(seconds), ROUND, limit_w=1e6)
    for name, values in columns(free).items():
        assert values == pytest.approx(columns(far)[name])


@given(steps(), st.permutations(range(4)))
def test_identical_devices_may_change_places(seconds: np.ndarray, order: list[int]) -> None:
    ordered = columns(predict(batch_of(4), step_of(seconds), ROUND, limit_w=700))
    permuted = columns(predict(batch_of(4), step_of(seconds[:, :, order]), ROUND, limit_w=700))
    for name, values in ordered.items():
        assert values == pytest.approx(permuted[name])


@given(steps())
def test_a_node_is_the_sum_of_its_devices(seconds: np.ndarray) -> None:
    power = predict(batch_of(4), step_of(seconds), ROUND, limit_w=700)
    assert power.node_device_power_mean_w == pytest.approx(4 * power.device_power_mean_w)
    alone = [predict(batch_of(1), step_of(seconds[:, :, stage : stage + 1]), ROUND, limit_w=700) for stage in range(4)]
    assert power.node_device_power_mean_w[0] == pytest.approx(sum(each.device_power_mean_w[0] for each in alone))


def test_worked_by_hand() -> None:
    # Products: 100 + 500 * 0.8 + 200 * 0.5 = 600 W, memory-bound: 300 W, a collective 150 W, waiting 20 W, idle 100 W.
    power = predict(batch_of(1), step_of(one_stage(1, 1, 1, 1)), ROUND, limit_w=np.inf)
    assert power.device_power_mean_w == pytest.approx(100 + (600 + 300 + 150 + 20) / 4)
    # Compute alternates within a second.
    assert power.device_power_peak_1s_w == pytest.approx(SECOND_FRAC * (100 + (600 + 300) / 2))
    assert power.node_device_power_mean_w == pytest.approx(4 * 367.5)
    assert power.energy_per_token_j == pytest.approx(4 * 367.5 * 4 / 16_000)
    half = predict(batch_of(1), step_of(one_stage(1, 1, 1, 1), clock=0.5), ROUND, limit_w=np.inf)
    assert half.device_power_mean_w == pytest.approx(100 + (150 + 75 + 150 + 20) / 4)
    assert half.clock_deficit_frac == pytest.approx(0.25)


def test_a_short_step_peaks_near_its_mean() -> None:
    # Steps of 0.4 s: two whole ones and 0.2 s, all of it products, at 700 W; the rest of a step draws 120 W.
    power = predict(batch_of(1), step_of(one_stage(0.2, 0, 0, 0.2)), ROUND, limit_w=np.inf)
    assert power.device_power_mean_w == pytest.approx(410)
    assert power.device_power_peak_1s_w == pytest.approx(SECOND_FRAC * (0.8 * 410 + 0.2 * 700))


def test_communication_inside_layers_lowers_the_peak() -> None:
    seconds = one_stage(2, 0, 2, 0)
    apart = predict(batch_of(1), step_of(seconds), ROUND, limit_w=np.inf)
    inside = predict(batch_of(1), step_of(seconds, fine=True), ROUND, limit_w=np.inf)
    assert apart.device_power_mean_w == pytest.approx(inside.device_power_mean_w)
    peaks = [each.device_power_peak_1s_w[0] / SECOND_FRAC for each in (apart, inside)]
    assert peaks == pytest.approx([700, 475])


def test_a_rank_that_waits_for_a_slower_one_spins_in_the_collective() -> None:
    seconds = one_stage(1, 0, 0, 1)
    waiting = predict(batch_of(1), step_of(seconds), ROUND, limit_w=np.inf)
    spinning = predict(batch_of(1), step_of(seconds, straggler_s=1), ROUND, limit_w=np.inf)
    assert waiting.device_power_mean_w == pytest.approx((700 + 120) / 2)
    assert spinning.device_power_mean_w == pytest.approx((700 + 250) / 2)


def test_the_limit_acts_on_compute_and_communication_together() -> None:
    power = predict(batch_of(1), step_of(one_stage(0.1, 0, 0.1, 0)), ROUND, limit_w=450)
    assert power.device_power_mean_w == pytest.approx(450)  # 475 W at the highest clock: 700 and 250 in turn


def test_the_worst_node_is_the_one_of_the_busiest_stages() -> None:
    # Two nodes of four devices, four stages of two devices: stages 0 and 1 are one node, 2 and 3 the other.
    busy_s = np.array([1.0, 0.0, 0.5, 1.0])
    seconds = np.stack([busy_s, 0 * busy_s, 0 * busy_s, 1 - busy_s])[:, None, :]
    power = predict(batch_of(4, cluster="2x4 h200_sxm"), step_of(seconds), ROUND, limit_w=np.inf)
    assert power.node_device_power_mean_w == pytest.approx(2 * (410 + 700))
    # Eight nodes for two stages: each fills four, and the worst is all of the second.
    seconds = seconds[:, :, :2][:, :, ::-1]
    power = predict(batch_of(2, cluster="8x4 h200_sxm"), step_of(seconds), ROUND, limit_w=np.inf)
    assert power.node_device_power_mean_w == pytest.approx(4 * 700)


def test_stages_that_a_candidate_lacks_count_for_nothing() -> None:
    seconds = np.zeros((4, 2, 2))
    seconds[0] = [[1, 0], [1, 1]]
    step = step_of(seconds)
    power = predict(batch_of(1, 2), replace(step, parts_s={"compute_s": np.ones(2)}), ROUND, limit_w=np.inf)
    assert power.device_power_mean_w.tolist() == pytest.approx([700, 700])
    assert power.node_device_power_mean_w.tolist() == pytest.approx([2800, 2800])


@pytest.mark.parametrize("name", ["h100_sxm", "b200_sxm", "mi300x", "mi250_gcd"])
def test_other_devices_idle_at_the_same_share_of_their_limit(name: str) -> None:
    device = DEVICES[name]
    found = power_coefficients(device)
    assert found is not None and device.power_limit_w is not None
    assert found.origin == "datasheet" and found.error_frac > H200.error_frac
    assert found.idle_w / device.power_limit_w == pytest.approx(H200_PRIOR.idle_w / 700)
    assert found.exponent == H200_PRIOR.exponent


def test_an_operation_takes_the_same_energy_on_devices_of_one_process() -> None:
    def joules(name: str) -> float:
        device = DEVICES[name]
        found = power_coefficients(device)
        assert found is not None and device.peak_bf16_flop_per_s is not None
        return found.matrix_w / device.peak_bf16_flop_per_s

    assert joules("h100_pcie") == pytest.approx(joules("h100_sxm")) == pytest.approx(joules("b200_sxm"))
    assert joules("a100_sxm_80gb") == pytest.approx(joules("h100_sxm") / 0.7)


B200_PRODUCTS = (  # m, k, n, achieved over 2,250 TFLOP/s: SimuMax e691807, configs/system/b200_bf16_ceperm.json
    (4096, 8192, 28672, 0.494),
    (4096, 28672, 8192, 0.485),
    (4096, 16384, 53248, 0.489),
    (4096, 53248, 16384, 0.512),
    (8192, 8192, 28672, 0.480),
    (8192, 28672, 8192, 0.505),
    (16384, 5120, 24576, 0.501),
    (16384, 12288, 5120, 0.500),
    (65536, 5120, 12288, 0.495),
)


def test_products_on_a_b200_are_slowed_by_its_limit_as_published() -> None:
    """No figure of a B200 is in the coefficients: its peaks, its limit and an H200's energy an operation tell."""
    device = DEVICES["b200_sxm"]
    coefficients = power_coefficients(device)
    assert coefficients is not None and device.peak_bf16_flop_per_s and device.memory_bandwidth_bytes_per_s
    m, k, n, measured = np.array(B200_PRODUCTS).T
    full = matmul_s(m, n, k, flop_per_s=device.peak_bf16_flop_per_s, bytes_per_s=device.memory_bandwidth_bytes_per_s)
    rate = 2 * m * n * k / full / device.peak_bf16_flop_per_s
    moved = 2 * (m * k + k * n + m * n) / full / device.memory_bandwidth_bytes_per_s
    clock = clock_frac(coefficients, dynamic_w(coefficients, rate, moved, np.zeros_like(m)), 1000.0)
    error = rate * clock / measured - 1
    assert np.median(np.abs(error)) < 0.15
    # With the energy of an operation scaled by the limits, as before, products would be predicted 1.4 times as fast.
    by_limit = replace(coefficients, matrix_w=coefficients.matrix_w * (1000 / 700) / (2250 / 989.4))
    clock = clock_frac(by_limit, dynamic_w(by_limit, rate, moved, np.zeros_like(m)), 1000.0)
    assert np.median(rate * clock / measured) > 1.35


def test_a_device_without_a_limit_has_no_coefficients() -> None:
    assert power_coefficients(DEVICES["cpu"]) is None
    assert power_coefficients(DEVICES["h200_sxm"]) == H200
