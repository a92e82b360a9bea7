"""The live view and the printed figures, on real H200 readings."""

import io
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from wattune.analysis.run_data import RunData
from wattune.recording.recording import load, run_of
from wattune.storage.measured import MeasuredFolder
from wattune.terminal import recording as live
from wattune.terminal.recording import LiveView, print_recording, throttle_causes

DP4 = Path(__file__).parents[2] / "golden" / "h200x4" / "dp4"


@pytest.fixture
def measured() -> RunData:
    """Ten seconds of the load, as a look at a living sampler would give them."""
    recorded = replace(load(DP4), tables=MeasuredFolder(DP4).telemetry())
    start_ns = recorded.tables["fast"]["wall_ns"][0].as_py() + 20_000_000_000
    tables = {
        tier: table.filter([ns < start_ns + 10_000_000_000 for ns in table["wall_ns"].to_pylist()])
        for tier, table in recorded.tables.items()
    }
    return RunData(
        tables=tables, manifests=recorded.manifests, window=(start_ns, start_ns + 9_000_000_000), facts={"command": []}
    )


def shown(measured: RunData, monkeypatch: pytest.MonkeyPatch, folder: Path, *, terminal: bool) -> str:
    monkeypatch.setattr(live, "look", lambda *_: measured)
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=160, color_system=None)
    with LiveView(console) as view:
        view(folder / "telemetry" / "n0", time.monotonic_ns() - 21_000_000_000)
    return out.getvalue()


def test_off_a_terminal_it_is_a_line_for_each_device(
    measured: RunData, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = shown(measured, monkeypatch, tmp_path, terminal=False)
    assert "\x1b" not in text
    first, *devices = text.splitlines()
    assert first.startswith("21 s") and "quality of the last 9 s" in first
    assert [line.split()[0] for line in devices] == [f"node0/gpu{n}" for n in range(4)]
    assert "throttled by power -" in devices[0] and "since start" in devices[0] and "GB/s" in devices[0]
    others = replace(measured, facts={"others": ["gpu4", "gpu5"]})
    assert "not counted: gpu4, gpu5   " in shown(others, monkeypatch, tmp_path, terminal=False)


def test_on_a_terminal_it_is_a_table_with_the_commands_last_lines(
    measured: RunData, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "command.log").write_text("\n".join(f"loss {n}" for n in range(900)) + "\nbar 1 %\rbar 2 %")
    text = shown(measured, monkeypatch, tmp_path, terminal=True)
    for expected in ("peak 100 ms", "node0/gpu3", "quality of the last 9 s", "loss 899", "bar 2 %"):
        assert expected in text
    assert "loss 800" not in text


def test_a_machine_without_devices_shows_its_processors(
    measured: RunData, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    host = measured.tables["fast"].select(["node", "device", "mono_ns", "wall_ns"]).slice(0, 3)
    host = host.set_column(1, "device", [["host"] * 3]).append_column("cpu_busy_frac", [[0.1, 0.2, 0.375]])
    alone = RunData(tables={"host": host}, manifests={"node0": {"devices": {"host": {}}}})
    text = shown(alone, monkeypatch, tmp_path, terminal=False)
    assert text == "21 s   CPU busy 37.5 %   quality not known yet\n"


def test_it_rests_between_looks(measured: RunData, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now = SimpleNamespace(s=0.0, looks=0)

    def look(*_: object) -> RunData:
        now.looks += 1
        now.s += 0.2
        return measured

    monkeypatch.setattr(live, "look", look)
    view = LiveView(Console(file=io.StringIO(), force_terminal=True, width=160), clock_s=lambda: now.s)
    for _ in range(40):
        now.s += 0.5
        view(tmp_path, 0)
    # A look that takes 0.2 s is taken at most every 2 s.
    assert 5 <= now.looks <= 11


@pytest.mark.parametrize(
    ("reasons", "clock_mhz", "shown_text"),
    [
        (0x4, 1485.0, "power -25 %"),
        (0x4 | 0x20, 990.0, "power+thermal -50 %"),
        (0x4, 1980.0, "no"),
        (0x1, 345.0, "no"),
        (None, 1485.0, "-"),
        (0x4, None, "-"),
    ],
)
def test_throttling_is_clock_lost_for_a_cause(reasons: float | None, clock_mhz: float | None, shown_text: str) -> None:
    assert throttle_causes(reasons, clock_mhz, 1980.0) == shown_text


def test_the_figures_of_a_recording_name_their_windows_and_their_trust() -> None:
    out = io.StringIO()
    print_recording(Console(file=out, width=160, color_system=None), run_of(DP4))
    text = out.getvalue()
    for expected in ("peak 20 ms", "931 W", "node0/gpu3", "1 s node peak 2.788 kW", "quality publishable", "analyze"):
        assert expected in text
    assert "exit code unknown" in text and "SIMULATED" not in text


@pytest.mark.parametrize(
    ("window_s", "begin"),
    [
        (60.0, "time 60 s   exit code unknown   energy 41.65 kJ"),
        (12.0, "command 60 s   exit code unknown   window 12 s   energy 41.65 kJ"),
    ],
)
def test_energy_stands_beside_the_time_that_it_is_of(window_s: float, begin: str) -> None:
    out, run = io.StringIO(), run_of(DP4)
    assert run.recorded is not None
    recorded = replace(run.recorded, window_s=window_s, command_s=60.0)
    print_recording(Console(file=out, width=200, color_system=None), replace(run, recorded=recorded))
    assert [line[: len(begin)] for line in out.getvalue().splitlines() if "exit code" in line] == [begin]
