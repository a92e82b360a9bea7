"""Every table and live view at 80 and at 200 columns: no line overflows, and no figure is broken over two lines."""

import io
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from made_trials import asked, trial
from rich.cells import cell_len
from rich.console import Console

from wattune.cost.defaults import default_coefficients
from wattune.doctor import Finding
from wattune.objective import Question, parse_constraint, parse_objective
from wattune.orchestrate.events import TrialEvent, TrialProgress
from wattune.plans.axes import Plan
from wattune.ranking.comparison import Side, compare
from wattune.ranking.difference import Counted
from wattune.ranking.evidence import recorded_side
from wattune.ranking.order import Ranking, pareto_front, rank
from wattune.ranking.sources import Asked, Source, rank_sources
from wattune.ranking.spreads import Spreads
from wattune.recording.recording import load, run_of
from wattune.run import Recorded, Run, RunStatus
from wattune.search.forecast import forecast
from wattune.search.prune import prune
from wattune.search.space import parse_space
from wattune.storage.measured import MeasuredFolder
from wattune.terminal import recording as live
from wattune.terminal.progress import StudyProgress
from wattune.terminal.recording import LiveView, print_recording
from wattune.view.comparison import comparison_view
from wattune.view.console import show
from wattune.view.machine import catalog_view, findings_table, metrics_table
from wattune.view.plans import candidates_view, forecast_view
from wattune.view.ranking import front_table, ranking_view

DP4 = Path(__file__).parents[2] / "golden" / "h200x4" / "dp4"
SPEED = parse_objective("maximize tokens_per_s")
BOUNDS = [
    parse_constraint(text)
    for text in ("node_device_power_peak_1s_w <= 2750", "throttle_thermal_frac <= 0.01", "device_temp_max_c <= 85")
]
LONG = Plan(tp=2, pp=2, etp=2, micro_batch_size=4, sharding="zero3", recompute="selective", overlap="grad_param")


def metrics(tokens_per_s: float, power_w: float) -> dict[str, float]:
    return {
        "tokens_per_s": tokens_per_s,
        "energy_per_token_j": power_w / tokens_per_s,
        "node_device_power_peak_1s_w": power_w,
        "throttle_thermal_frac": 0.004,
        "device_temp_max_c": 71.0,
    }


def ranking() -> Ranking:
    pairs = [trial(1, metrics(131_200.0, 2400.0)), trial(2, metrics(165_400.0, 3100.0)), trial(3, metrics(9e4, 2700.0))]
    pairs = [(replace(spec, plan=replace(LONG, micro_batch_size=n)), one) for n, (spec, one) in enumerate(pairs, 1)]
    pairs.append(trial(4, status=RunStatus.OUT_OF_MEMORY, reason="rank 3 at 140.2 GiB of 139.7 GiB, in the backward"))
    pairs = [(spec, replace(one, trial_id=spec.trial_id)) for spec, one in pairs]
    return rank(pairs, asked(SPEED, *BOUNDS))


def recorded(name: str, command: Sequence[str], joules: float) -> Run:
    found = {"total_energy_j": joules, "window_s": 12.0, "device_temp_max_c": 61.0}
    machine = {"node": "node0", "devices": "4 x NVIDIA H200", "driver": "580.159.04"}
    of = Recorded(command=tuple(command), exit_code=0, machine=machine)
    return Run(trial_id=name, repeat=0, status=RunStatus.COMPLETED, metrics=found, quality="indicative", recorded=of)


RECORDED = (
    recorded("20261121-065500-torchrun", ["torchrun", "--nproc-per-node", "4", "train.py", "--config", "a.yaml"], 33e3),
    recorded("20261121-071200-torchrun", ["torchrun", "--nproc-per-node", "4", "train.py", "--config", "b.yaml"], 31e3),
)


def _ranking(console: Console) -> None:
    show(console, *ranking_view(ranking()))


def _front(console: Console) -> None:
    show(console, front_table(pareto_front(ranking().trials, *AXES), AXES, of="all trials"))


AXES = ["tokens_per_s", "energy_per_token_j"]


def _recordings(console: Console) -> None:
    asked: Asked = {"objective": "minimize total_energy_j", "constraints": ["total_energy_j <= 32000"]}
    show(console, *ranking_view(rank_sources([Source.of_recordings(RECORDED)], **asked)))


def _compare_recordings(console: Console) -> None:
    show(console, *comparison_view(compare(*map(recorded_side, RECORDED))))


def _compare(console: Console) -> None:
    pairs = [trial(1, metrics(131_200.0, 2400.0)), trial(2, metrics(165_400.0, 3100.0))]
    spreads = Spreads(pairs)
    sides = [
        Side(
            name=f"moe_ep_h200x4:{result.trial_id}-0",
            spec=spec,
            result=result,
            breakdown=None,
            counted=Counted((result,), spreads),
            simulated=False,
        )
        for spec, result in pairs
    ]
    show(console, *comparison_view(compare(*sides)))


def _catalog(console: Console) -> None:
    show(console, *catalog_view())


def _doctor(console: Console) -> None:
    show(
        console,
        findings_table(
            [
                Finding(topic="python", ok=True, have="3.11.7", follows=""),
                Finding(
                    topic="transformer-engine",
                    ok=False,
                    have="not installed",
                    follows="without it the megatron engine runs its local layers, which are slower on these devices",
                ),
            ]
        ),
    )


def _analyze(console: Console) -> None:
    show(console, metrics_table("moe:0517fb8c0ffe", metrics(131_200.0, 2400.0)))


SPACE = {
    "study": "x",
    "model": {"name": "gpt3_175b"},
    "cluster": {"device": "h200_sxm", "num_nodes": 4, "devices_per_node": 8},
    "engine": "megatron",
    "workload": {"seq_len": 2048, "global_batch_size": 128},
    "space": {"tp": [1, 4, 8], "pp": [4], "sharding": ["zero1"], "recompute": ["selective"]},
    "objective": "maximize tokens_per_s",
}


def _plan(console: Console) -> None:
    show(console, *candidates_view(prune(parse_space(SPACE))))


def _estimate(console: Console) -> None:
    space = parse_space(SPACE)
    bounds = [parse_constraint("node_device_power_peak_1s_w <= 1000")]
    show(console, *forecast_view(forecast(prune(space), space.objective, bounds, default_coefficients)))


def _record(console: Console) -> None:
    print_recording(console, _recording())


@cache
def _recording() -> Run:
    return run_of(DP4)


VIEWS: dict[str, Callable[[Console], None]] = {
    "rank": _ranking,
    "pareto": _front,
    "rank of recordings": _recordings,
    "compare": _compare,
    "compare of recordings": _compare_recordings,
    "catalog": _catalog,
    "doctor": _doctor,
    "analyze": _analyze,
    "plan": _plan,
    "estimate": _estimate,
    "record": _record,
}


def rendered(view: Callable[[Console], None], width: int) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, markup=False)
    view(console)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())


def cells(text: str) -> set[str]:
    """Returns the cells of tables with up to five words: names and figures, no sentences."""
    lines = text.splitlines()
    headings = {number for number in range(len(lines) - 1) if lines[number + 1].strip(" ─") == "" != lines[number + 1]}
    rows = [line for number, line in enumerate(lines) if number not in headings]
    found = {cell for line in rows for cell in re.split(r"\s{2,}", line.strip())}
    return {cell for cell in found if cell not in ("", "-") and len(cell.split()) <= 5 and cell.strip("─ ")}


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("name", VIEWS)
def test_no_line_overflows_and_no_figure_is_broken(name: str, width: int) -> None:
    text, whole = rendered(VIEWS[name], width), rendered(VIEWS[name], 1000)
    long = [line for line in text.splitlines() if cell_len(line.rstrip()) > width]
    assert not long
    plain = re.sub(r" +", " ", text)
    broken = sorted(cell for cell in cells(whole) if re.sub(r" +", " ", cell) not in plain)
    assert not broken


def test_a_bound_is_a_line_of_its_own_where_it_is_narrow_and_a_column_where_there_is_room() -> None:
    narrow, wide = rendered(_ranking, 80).splitlines(), rendered(_ranking, 300).splitlines()
    lines = [line for line in narrow if "node_device_power_peak_1s_w <= 2750: " in line]
    assert len(lines) == 3 and all(line.endswith(("holds)", "breaks)", "undecided)")) for line in lines)
    (heading,) = [line for line in wide if all(str(bound) in line for bound in BOUNDS)]
    assert heading.split()[:2] == ["P(best)", "rank"]


@pytest.mark.parametrize("width", [80, 200])
def test_a_study_while_it_runs_fits(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    view = StudyProgress(console, Question(objective=SPEED, constraints=tuple(BOUNDS)), clock_s=lambda: 0.0)
    for row in ranking().trials[:2]:
        view(TrialEvent(kind="finished", spec=row.spec, repeat=0, result=row.repeats[0]))
    spec = trial(9)[0]
    running = replace(spec, plan=replace(LONG, micro_batch_size=8))
    progress = TrialProgress(part="measure", done=117, total=320)
    nodes = ("gpu-node-017.cluster.example", "gpu-node-018.cluster.example")
    event = TrialEvent(kind="started", spec=running, repeat=0, nodes=nodes, progress=lambda: progress)
    view(event)
    view._progress[spec_key(event)] = progress
    console.print(view.view())
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
    assert all(cell_len(line.rstrip()) <= width for line in text.splitlines())
    assert "1 s node peak 2.4 kW  took 0.0 ms" in text
    for whole in (running.label, "measure 117/320", "Closest bound: throttle_thermal_frac <= 0.01: +0.6 points"):
        assert whole in text


def spec_key(event: TrialEvent) -> tuple[str, int]:
    return event.spec.trial_id, event.repeat


@pytest.mark.parametrize("width", [80, 200])
def test_a_recording_while_it_runs_fits(width: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loaded = replace(load(DP4), tables=MeasuredFolder(DP4).telemetry())
    start_ns = loaded.tables["fast"]["wall_ns"][0].as_py() + 20_000_000_000
    tables = {
        tier: table.filter([start_ns <= ns < start_ns + 3_000_000_000 for ns in table["wall_ns"].to_pylist()])
        for tier, table in loaded.tables.items()
    }
    taken = replace(loaded, tables=tables, window=(start_ns, start_ns + 2_000_000_000), facts={"command": []})
    monkeypatch.setattr(live, "look", lambda *_: taken)
    (tmp_path / "command.log").write_text("x" * 500)
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    with LiveView(console) as view:
        view(tmp_path / "telemetry" / "n0", time.monotonic_ns() - 21_000_000_000)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
    assert all(cell_len(line.rstrip()) <= width for line in text.replace("\r", "\n").splitlines())
    assert "node0/gpu3" in text and "SM clock" in text and re.search(r"power -?\d+ %|power -", text)
