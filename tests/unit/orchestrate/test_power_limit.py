"""Hard limits of a running trial: the power of its last seconds, and the moment it is stopped."""

from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from runs import run_data
from specs import trial_spec

from wattune.analysis.summary import summarize
from wattune.catalog.models import model
from wattune.clock import ClockAnchor
from wattune.orchestrate.power_limit import PowerLimit, node_power_peak_w, simulated_power_w
from wattune.run import NO_NUMBERS
from wattune.simulation.sensors import simulate
from wattune.workers.phases import Span, spans_table

S = 1_000_000_000
ANCHOR = ClockAnchor(mono_ns=50 * S, wall_ns=1_700_000_000 * S)
SPEC = trial_spec(replace(model("llama3_8b"), num_layers=8), on="1x2 cpu", simulate_sensors_of="h200_sxm")


def spans(rank: int, *, first: int = 0, steps: int = 80, step_s: float = 0.1, node: str = "n0") -> pa.Table:
    """Spans of a rank that runs forward and backward without a pause, made as its worker makes them."""
    step_ns = int(step_s * S)
    listed = []
    for step in range(first, first + steps):
        start_ns = ANCHOR.mono_ns + step * step_ns
        half_ns, end_ns = start_ns + step_ns // 3, start_ns + step_ns
        parts = (Span("step", start_ns, end_ns), Span("forward", start_ns, half_ns), Span("backward", half_ns, end_ns))
        listed.append((step, parts))
    return spans_table(listed, node=node, device=f"cpu{rank % 2}", rank=rank, anchor=ANCHOR)


def test_a_part_of_a_trial_draws_what_the_whole_does() -> None:
    whole = {rank: spans(rank) for rank in range(2)}
    found = simulate(SPEC, pa.concat_tables(whole.values()), seed=0)
    tables, manifest = found["n0"]
    window = (ANCHOR.wall_ns, ANCHOR.wall_ns + 8 * S)
    whole_w = summarize(run_data(None, None, tables, {"n0": manifest}, window=window)).metrics[
        "node_device_power_peak_1s_w"
    ]
    part_w = simulated_power_w(SPEC, {rank: spans(rank, first=40, steps=30) for rank in range(2)}, seed=0)
    assert part_w == {"n0": pytest.approx(whole_w, rel=0.01)}
    assert 1000 < whole_w < 1400, "two H200s that compute without a pause"


def test_the_peak_is_the_metric_of_the_whole_trial_and_needs_the_power_of_every_device() -> None:
    tables, manifest = simulate(SPEC, pa.concat_tables(spans(rank) for rank in range(2)), seed=0)["n0"]
    start_ns = ANCHOR.wall_ns
    window = (start_ns, start_ns + 6 * S)
    metrics = summarize(run_data(None, None, tables, {"n0": manifest}, window=window)).metrics
    assert node_power_peak_w(tables, "n0", manifest, window) == metrics["node_device_power_peak_1s_w"]
    assert node_power_peak_w(tables, "n0", manifest, (start_ns, start_ns + S // 2)) is None, "shorter than a second"
    assert node_power_peak_w(tables, "n0", manifest, (start_ns, start_ns)) is None
    one = {tier: table.filter(pc.equal(table["device"].cast("string"), "cpu0")) for tier, table in tables.items()}
    assert all(table.num_rows for tier, table in one.items() if tier in ("fast", "ring"))
    assert node_power_peak_w(one, "n0", manifest, window) is None, "half of a node's power is not the node's"


def test_power_is_known_only_when_every_rank_has_sent_the_same_second() -> None:
    assert simulated_power_w(SPEC, {}, seed=0) == {}
    assert simulated_power_w(SPEC, {0: spans(0)}, seed=0) == {}, "the other one's power would count as none"
    apart = {0: spans(0, steps=20), 1: spans(1, first=30, steps=20)}
    assert simulated_power_w(SPEC, apart, seed=0) == {}
    short = {rank: spans(rank, steps=5) for rank in range(2)}
    assert simulated_power_w(SPEC, short, seed=0) == {}, "half a second has no mean over one"


def test_every_node_has_its_power() -> None:
    spec = replace(SPEC, cluster=replace(SPEC.cluster, num_nodes=2))
    shown = {rank: spans(rank, node=f"n{rank // 2}") for rank in range(4)}
    power_w = simulated_power_w(spec, shown, seed=0)
    assert power_w.keys() == {"n0", "n1"} and min(power_w.values()) > 1000
    assert all(pc.count(table["rank"]).as_py() for table in shown.values())


def test_a_limit_stops_at_what_is_above_it_and_says_how_much() -> None:
    power_w: dict[str, float] = {}
    limit = PowerLimit(2900.0, 2, lambda: power_w)
    assert limit() is None
    assert limit.numbers.known == {"limit_looks": 1, "limit_looks_seeing": 0}
    power_w |= {"n0": 2899.0, "n1": 2900.0}
    assert limit() is None
    node_1_w = power_w.pop("n1")
    assert limit() is None
    watched = {"limit_looks": 2, "limit_looks_seeing": 1}
    assert limit.numbers.known == watched, "a look that saw nothing is counted, not hidden; the start is not"
    power_w["n1"] = node_1_w + 50.4
    reason = limit()
    assert reason is not None and "node n1 was 2950.4 W over 1 s, the hard limit is 2900 W" in reason
    assert limit.numbers.known == {"limit_looks": 3, "limit_looks_seeing": 2}


def test_without_a_limit_nobody_looks() -> None:
    def never() -> dict[str, float]:
        raise AssertionError

    limit = PowerLimit(None, 1, never)
    assert limit() is None and limit.numbers == NO_NUMBERS
