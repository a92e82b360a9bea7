"""Coefficients from a sweep: a made table of known rates is found again, and later predictions follow it."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from wattune.catalog.hardware import DEVICES, ClusterSpec
from wattune.catalog.networks import NETWORKS
from wattune.cost.coefficients import PUBLISHED_STEP_TIME
from wattune.cost.defaults import MEASURED_STEP_TIME
from wattune.cost.step_time.links import Links
from wattune.cost.step_time.matmul import matmul_s
from wattune.cost.sweep import COLUMNS, SIZES_BYTES, bus_factor
from wattune.errors import PlanError
from wattune.fitting.links import fit_sweep

H100 = DEVICES["h100_sxm"]
COMMON = {"device": "h100_sxm", "device_uuid": "GPU-1", "date": "2026-11-22T21:00:00+00:00", "in_graph": False}
LATENCY_S, RATE = 20e-6, 200e9


def collective(kind: str, size: int, **more: object) -> dict[str, object]:
    time_s = LATENCY_S + size * bus_factor(kind, 4) / RATE
    row = {"kind": kind, "size_bytes": size, "group_size": 4, "num_nodes": 1, "time_s": time_s, **COMMON, **more}
    return {**row, "bus_bytes_per_s": size * bus_factor(kind, 4) / time_s}


def table(*rows: dict[str, object]) -> pa.Table:
    return pa.Table.from_pylist([{name: row.get(name) for name in COLUMNS.names} for row in rows], schema=COLUMNS)


SWEPT = [collective(kind, size) for kind in ("all_reduce", "all_gather", "send_recv") for size in SIZES_BYTES]


def links(found_prior: object, size: int = 4) -> Links:
    four_nodes = ClusterSpec(device="h100_sxm", num_nodes=4, devices_per_node=8)
    return Links.of(four_nodes, found_prior.link)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather"])
def test_a_measured_collective_is_predicted_as_it_was_measured(kind: str) -> None:
    found = fit_sweep(table(*SWEPT), H100, PUBLISHED_STEP_TIME)
    fitted = found.applied(PUBLISHED_STEP_TIME)
    swept = links(fitted)
    alone = Links.of(ClusterSpec(device="h100_sxm", devices_per_node=8), PUBLISHED_STEP_TIME.link)
    sizes = np.array([4096.0, 2.0**20, 2.0**30])
    group = swept.group(np.full(3, 4.0), np.ones(3))
    measured = LATENCY_S + sizes * bus_factor(kind, 4) / RATE
    # Inside a step its bandwidth is `in_step_frac` of that alone.
    predicted = swept.collective_s(kind, group, sizes)
    assert predicted[0] == pytest.approx(measured[0], rel=0.01)
    assert predicted[2] == pytest.approx(measured[2] / PUBLISHED_STEP_TIME.link.in_step_frac, rel=0.01)
    assert not np.allclose(alone.collective_s(kind, group, sizes), predicted, rtol=0.2)


def test_what_was_not_measured_stays() -> None:
    fitted = links(fit_sweep(table(*SWEPT), H100, PUBLISHED_STEP_TIME).applied(PUBLISHED_STEP_TIME))
    before = links(PUBLISHED_STEP_TIME)
    size = np.array([2.0**26])
    inside = before.group(np.array([4.0]), np.ones(1))
    assert fitted.collective_s("all_to_all", inside, size) == before.collective_s("all_to_all", inside, size)
    across = before.group(np.array([4.0]), np.array([8.0]))  # one rank of each of four nodes
    assert fitted.collective_s("all_reduce", across, size) == before.collective_s("all_reduce", across, size)


def far(network: str | None, nodes: int, factor: float) -> list[dict[str, object]]:
    place = {"group_size": 8 * nodes, "num_nodes": nodes, "network": network}
    return [collective("all_reduce", s, **place, time_s=factor * (50e-6 + s / 200e9)) for s in SIZES_BYTES]


def test_sweeps_of_other_fabrics_and_numbers_of_nodes_add_up() -> None:
    fitted = PUBLISHED_STEP_TIME
    for rows in (SWEPT, far("hdr", 2, 1.0), far("hdr", 8, 3.0), far("roce_400", 2, 9.0), far("hdr", 2, 2.0)):
        fitted = fit_sweep(table(*rows), H100, fitted).applied(fitted)
    assert len({one.place for one in fitted.link.measured}) == len(fitted.link.measured) == 3 + 3

    def taken(network: str, nodes: int) -> float:
        machines = ClusterSpec(device="h100_sxm", num_nodes=nodes, devices_per_node=8, network=NETWORKS[network])
        swept = Links.of(machines, replace(fitted.link, in_step_frac=1.0))
        group = swept.group(np.array([8.0 * nodes]), np.ones(1))
        return float(swept.collective_s("all_reduce", group, np.array([2.0**30]))[0])

    one = 50e-6 + 2**30 / 200e9
    assert [taken("hdr", 2), taken("hdr", 8), taken("roce_400", 2)] == pytest.approx([2 * one, 3 * one, 9 * one])
    assert taken("hdr", 7) == pytest.approx(taken("hdr", 8), rel=0.1)  # the nearest ratio, of eight nodes
    unmeasured = {name: fitted.unmeasured(2, NETWORKS[name]) for name in ("hdr", "roce_400", "ndr")}
    assert unmeasured == {"hdr": "", "roce_400": "", "ndr": "over 2 nodes of ndr"}


def test_a_graphs_latency_counts_and_not_the_hosts() -> None:
    graphs = [collective("all_reduce", size, in_graph=True, time_s=5e-6) for size in SIZES_BYTES[:6]]
    (found,) = fit_sweep(table(*SWEPT[: len(SIZES_BYTES)], *graphs), H100, PUBLISHED_STEP_TIME).collectives
    assert found.latency_s == 5e-6


def test_the_error_is_that_of_sizes_left_out() -> None:
    smooth = fit_sweep(table(*SWEPT), H100, PUBLISHED_STEP_TIME).hold_out["collective_time_s"]
    rough = [collective("all_reduce", s, time_s=1e-3 * (3 if place % 2 else 1)) for place, s in enumerate(SIZES_BYTES)]
    jumps = fit_sweep(table(*rough), H100, PUBLISHED_STEP_TIME).hold_out["collective_time_s"]
    assert smooth.p95_frac < 0.3
    assert jumps.p95_frac > 1


def product(m: int, n: int, k: int, model: str, frac: float) -> dict[str, object]:
    assert H100.peak_bf16_flop_per_s is not None
    assert H100.memory_bandwidth_bytes_per_s is not None
    peaks = {"flop_per_s": H100.peak_bf16_flop_per_s, "bytes_per_s": H100.memory_bandwidth_bytes_per_s}
    time_s = float(matmul_s(*(np.array(float(one)) for one in (m, n, k)), **peaks)) / frac
    row = {"kind": "matmul", "dtype": "bfloat16", "m": m, "n": n, "k": k, "model": model, "time_s": time_s}
    return {**row, "flop_per_s": 2.0 * m * n * k / time_s, **COMMON}


def test_products_give_their_rate_and_its_error_on_other_models() -> None:
    rows = [product(4096, n, 4096, model, frac) for n in (4096, 8192) for model, frac in (("a", 1.1), ("b", 1.21))]
    found = fit_sweep(table(*rows), H100, PUBLISHED_STEP_TIME)
    assert found.kernels["matmul_frac"] == pytest.approx(1.155)
    assert found.hold_out["product_time_s"].p95_frac == pytest.approx(0.1, rel=0.02)
    assert found.applied(PUBLISHED_STEP_TIME).kernel.matmul_frac == pytest.approx(1.155)
    # Kernels that were measured inside steps say more of steps.
    assert found.applied(MEASURED_STEP_TIME).kernel == MEASURED_STEP_TIME.kernel


def test_another_table_is_one_clear_error() -> None:
    with pytest.raises(PlanError, match="lacks the columns kind"):
        fit_sweep(pa.table({"a": [1]}), H100, PUBLISHED_STEP_TIME)
    with pytest.raises(PlanError, match="no row"):
        fit_sweep(COLUMNS.empty_table(), H100, PUBLISHED_STEP_TIME)
