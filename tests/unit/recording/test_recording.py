"""A recording read back: its window, its devices, and folders that hold none."""

import json
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from recorded import record

from wattune.analysis import run_data
from wattune.analysis.run_data import RunData
from wattune.analysis.signals.align import align
from wattune.analysis.summary import metrics_by_device, summarize
from wattune.clock import ClockAnchor
from wattune.recording.recording import LAG_S, load, measured_run, read_until_mono_ns, sampled
from wattune.schema import table_schema
from wattune.steps.files import Step
from wattune.steps.process.writer import StepWriter
from wattune.steps.table import spans_of
from wattune.telemetry.sampler.process import SamplerProcess
from wattune.units import NS_PER_S

GOLDEN = Path(__file__).parents[2] / "golden" / "h200x4" / "dp4"


def host_rows(start_ns: int, count: int) -> pa.Table:
    """One reading of the host a second."""
    rows = [
        {"node": "n0", "device": "host", "mono_ns": start_ns + second * NS_PER_S, "wall_ns": 10**18 + second * NS_PER_S}
        | {"cpu_busy_frac": second / 10}
        for second in range(count)
    ]
    return pa.Table.from_pylist(rows, schema=table_schema("host", backend="host", simulated=False))


def test_a_window_is_the_command_s_and_without_its_end_goes_up_to_the_last_reading() -> None:
    tables = {"host": host_rows(5 * NS_PER_S, 10)}
    window = {"start_mono_ns": 6 * NS_PER_S}
    facts = {"node": "n0", "window": window}
    data = RunData(tables=tables, manifests={"n0": {"node": "n0"}})
    assert data.of_recording(facts).window == (10**18 + NS_PER_S, 10**18 + 9 * NS_PER_S)
    whole = {**facts, "window": {**window, "end_mono_ns": 8 * NS_PER_S}}
    assert data.of_recording(whole).window == (10**18 + NS_PER_S, 10**18 + 3 * NS_PER_S)
    assert data.of_recording({"node": "n0"}).window is None
    assert data.of_recording({**facts, "node": "n1"}).window is None


def test_the_window_of_an_open_recording_ends_where_the_first_sensor_s_readings_do() -> None:
    early, late = host_rows(0, 10), host_rows(0, 10)
    late = late.set_column(1, "device", pa.array(["other"] * 10, late.schema.field("device").type))
    tables = {"host": pa.concat_tables([early.slice(0, 9), late])}
    assert read_until_mono_ns(tables) == 8 * NS_PER_S
    silent = {"host": pa.concat_tables([early.slice(0, 2), late])}
    assert read_until_mono_ns(silent) == 9 * NS_PER_S - round(LAG_S * NS_PER_S), "a device that is lost costs no more"
    facts = {"node": "n0", "window": {"start_mono_ns": 6 * NS_PER_S}}
    data = RunData(tables=tables, manifests={"n0": {"node": "n0"}})
    found = [data.of_recording(facts, read_until_ns=second * NS_PER_S).window for second in (8, 6, 5)]
    assert found == [(10**18 + 6 * NS_PER_S, 10**18 + 8 * NS_PER_S), None, None]
    told = {**facts, "window": {"start_mono_ns": 6 * NS_PER_S, "end_mono_ns": 9 * NS_PER_S}}
    assert data.of_recording(told, read_until_ns=8 * NS_PER_S).window == found[0]


def test_steps_of_an_open_recording_count_as_far_as_its_sensors_were_read(tmp_path: Path) -> None:
    """The recorder is gone and its sampler with it, and the command trains on."""
    begun = record(["true"], storage=tmp_path, backends=["host"], name="a")
    facts = json.loads((begun / "manifest.json").read_text())
    start_ns = facts["window"]["start_mono_ns"]
    sampler = SamplerProcess.start(tmp_path / "open", node=facts["node"])
    deadline_s = time.monotonic() + 30
    while read_until_mono_ns(sampled(tmp_path / "open", simulated_device=None)[0]) <= start_ns:
        assert time.monotonic() < deadline_s, "a sampler on a busy machine has read nothing"
        time.sleep(0.1)
    sampler.stop()
    for path in [*(begun / "telemetry").glob("*/*")]:
        path.unlink()
    for path in (tmp_path / "open").iterdir():
        path.rename(begun / "telemetry" / facts["node"] / path.name)
    until_ns = read_until_mono_ns(sampled(begun / "telemetry" / facts["node"], simulated_device=None)[0])
    kept = {name: facts[name] for name in ("kind", "node", "simulated_device", "command", "steps_asked", "format")}
    (begun / "manifest.json").write_text(json.dumps({**kept, "window": {"start_mono_ns": start_ns}, "closed": False}))
    (begun / "steps").mkdir()
    writer = StepWriter("spans", str(begun / "steps"))
    length_ns = (until_ns - start_ns) // 10
    for at in range(100):
        writer.step(start_ns + at * length_ns, start_ns + (at + 1) * length_ns)
    writer.flush()
    measured = load(begun)
    assert measured.spans is not None and measured.spans.num_rows == measured.facts["steps"]["num_steps"] == 10
    assert measured.facts["window"]["end_mono_ns"] <= until_ns


def test_means_of_the_host_are_those_of_the_window() -> None:
    tables = {"host": host_rows(0, 10)}
    measured = RunData(tables=tables, manifests={}, window=(10**18 + NS_PER_S, 10**18 + 4 * NS_PER_S))
    assert measured.window_s == 3.0
    means = measured.examined.host_means()
    assert means["cpu_busy_frac"] == pytest.approx((0.2 + 0.3 + 0.4) / 3) and "package_power_w" not in means
    rows = tables["host"].to_pylist()
    for row in rows[:3]:  # before the wall clock was set
        row["wall_ns"] -= 3600 * NS_PER_S
    stepped = {"host": pa.Table.from_pylist(rows, schema=tables["host"].schema)}
    assert RunData(tables=stepped, window=measured.window).examined.host_means() == means
    assert RunData(tables={"host": tables["host"].slice(0, 0)}, window=(0, 1)).examined.host_means() == {}


def test_figures_of_all_and_of_each_device_are_of_the_steps_that_were_chosen() -> None:
    lengths, steps, at_ns = [2] * 4 + [1] * 20, [], 0
    for index, length_s in enumerate(lengths):
        steps.append(Step(index, at_ns, at_ns := at_ns + length_s * NS_PER_S))
    spans = spans_of({0: steps}, node="n0", devices={0: "gpu0"}, anchor=ClockAnchor(mono_ns=0, wall_ns=10**18))
    facts = {"window_why": "steps 0 to 23 of 24: as asked for", "steps": {"tokens_per_step": 7.0}}
    manifests = {"n0": {"node": "n0", "devices": {"gpu0": {}}}}
    unchosen = RunData(tables={"host": host_rows(0, 30)}, spans=spans, manifests=manifests)
    measured = unchosen.of_recording(facts)
    for metrics in (summarize(measured).metrics, metrics_by_device(measured)["n0", "gpu0"]):
        assert metrics["step_time_p95_s"] == 2.0  # the slow ones were asked for
    assert summarize(measured).metrics["tokens_per_s"] == pytest.approx(24 * 7 / 28)
    assert "tokens_per_s" not in metrics_by_device(measured)["n0", "gpu0"]  # they are of all devices together
    assert summarize(unchosen).metrics["step_time_p95_s"] == 1.0


def test_a_device_alone_is_aligned_with_the_others_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*args: Any, **others: Any) -> Any:
        calls.append(args)
        return align(*args, **others)

    monkeypatch.setattr(run_data, "align", counted)
    run = measured_run(GOLDEN)
    assert run.recorded is not None and len(calls) == 1 and len(run.recorded.devices) == 4
    each = run.recorded.devices.values()
    steps = [metrics["energy_per_step_j"] for metrics in each]
    assert sum(steps) == pytest.approx(run.metrics["energy_per_step_j"], rel=1e-9)
    assert not any(name.startswith(("node_", "cluster_")) for metrics in each for name in metrics)
