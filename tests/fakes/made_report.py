"""A report of made-up trials, and a parser that reads pages as a browser does."""

import base64
import json
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser

import numpy as np
import pyarrow as pa
from specs import trial_spec

from wattune.analysis.detail import EXCURSION_COLUMNS, SLOT_COLUMNS, TEMPERATURE_COLUMNS, THROTTLE_COLUMNS, Detail
from wattune.analysis.metrics.phases import PHASE_COLUMNS
from wattune.analysis.metrics.saturation import Saturation
from wattune.analysis.metrics.waterfall import Breakdown
from wattune.objective import Question, parse_constraint, parse_objective
from wattune.ranking.comparison import Comparison, Side, compare
from wattune.ranking.difference import Counted
from wattune.ranking.order import Ranking, rank
from wattune.report.figure import Chart
from wattune.report.page import draw, render_report
from wattune.run import Run, RunStatus
from wattune.trial import TrialSpec

POWER = "node_device_power_peak_1s_w"


DOCUMENT = {
    "study": "moe",
    "space": {"tp": [1, 2]},
    "measure": {"min_steps": 20},
    "limits": {"node_device_power_w": 2900},
}


HOSTILE = "</script></title><script>alert(1)</script><img src=http://x.example/ onerror='x()'>\"&"


class Page(HTMLParser):
    """A page as a browser would see it: the elements with their attributes, and the text outside scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, tuple[str, ...]]] = []
        self.tables: list[list[list[str]]] = []
        self.text = ""
        self._hidden = False
        self._in_cell = False
        self.feed(html)
        self.tables = [[[cell.strip() for cell in row] for row in rows] for rows in self.tables]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, tuple(name for name, _ in attrs)))
        self._hidden = tag in ("script", "style")
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag: str) -> None:
        self._hidden = False
        if tag in ("p", "li", "h1", "h2", "caption", "td", "th", "small", "strong", "span", "dd", "dt"):
            self.handle_data("\n")
        if tag in ("td", "th"):
            self._in_cell = False

    def handle_data(self, data: str) -> None:
        if self._hidden:
            return
        self.text += data
        if self._in_cell:
            self.tables[-1][-1][-1] += data.replace("\n", " ")


def figure_of(chart: Chart | None) -> tuple[list, dict]:
    """The data and the layout a chart hands to plotly."""
    assert chart is not None
    drawn = chart.html()
    decoder = json.JSONDecoder()
    data, end = decoder.raw_decode(drawn, drawn.index("[", drawn.index("Plotly.newPlot(")))
    layout, _ = decoder.raw_decode(drawn, drawn.index("{", end))
    return data, layout


def values(found) -> list[float]:
    """Numbers of a trace, which plotly packs where they came as an array."""
    if isinstance(found, dict):
        return np.frombuffer(base64.b64decode(found["bdata"]), found["dtype"]).tolist()
    return list(found)


def evidence_of(text: str = "vm", slow: float = 1.0) -> Detail:
    """Twenty seconds of forty steps, one excursion, two slots."""
    excursion = {"node": text, "device": text, "start_s": 3.0, "end_s": 3.4, "energy_j": 8.0, "peak_w": 745.0}
    slot = dict.fromkeys(SLOT_COLUMNS.names, 0.1) | {"node": text, "power_mean_w": 650.0}
    slots = [slot | {"slot": n, "device": f"gpu{n}", "temp_mean_c": 74.5 - 5 * n} for n in range(2)]
    parts = {"compute": 0.3, "throttle": 0.05, "exposed_comm": 0.1 * slow, "bubble": 0.04, "other": 0.01}
    return Detail(
        power_w={text: (np.arange(0.0, 20.0, 0.1), np.full(200, 2650.0)), "quiet": (np.arange(2.0), np.ones(2))},
        steps=pa.table({"step": np.arange(5, 45), "start_s": np.arange(0.0, 20.0, 0.5), "time_s": np.full(40, 0.5)}),
        phases=PHASE_COLUMNS.empty_table(),
        temperatures=TEMPERATURE_COLUMNS.empty_table(),
        throttles=THROTTLE_COLUMNS.empty_table(),
        outliers=(),
        excursions=pa.Table.from_pylist([excursion | {"limit_w": 700.0}], schema=EXCURSION_COLUMNS),
        slots=pa.Table.from_pylist(slots, schema=SLOT_COLUMNS),
        breakdown=Breakdown(
            parts={name: (time_s, 2600 * time_s) for name, time_s in parts.items()},
            step_s=sum(parts.values()),
            step_energy_j=2600 * sum(parts.values()),
        ),
        saturation=(
            Saturation(
                what="nvlink",
                within="communication",
                achieved_frac=0.91,
                above_frac=0.7,
                threshold_frac=0.8,
                peak=450e9,
                peak_source=text,
                measured=False,
            ),
        ),
    )


def comparison_of(ranking: Ranking, evidence: Mapping[str, Detail]) -> Comparison:
    sides = [
        Side(
            name=f"moe:{row.trial_id}-0",
            spec=row.spec,
            result=row.counted[0],
            breakdown=evidence[row.trial_id].breakdown,
            counted=Counted(row.counted, row.spreads),
            simulated=row.simulated,
        )
        for row in (ranking.feasible[0], ranking.infeasible[0])
    ]
    return compare(*sides)


def trial(
    number: int,
    tokens_per_s: float,
    power_w: float | None = 2000.0,
    *,
    repeat: int = 0,
    status: RunStatus = RunStatus.COMPLETED,
    reason: str = "",
    simulated: bool = False,
    tags: Mapping[str, str] | None = None,
) -> tuple[TrialSpec, Run]:
    spec = trial_spec(micro_batch_size=number)
    metrics = {"tokens_per_s": tokens_per_s, "sensor_period_s": 0.02} | ({} if power_w is None else {POWER: power_w})
    return spec, Run(
        trial_id=spec.trial_id,
        repeat=repeat,
        status=status,
        reason=reason,
        metrics=metrics if status is RunStatus.COMPLETED else {},
        quality="indicative",
        quality_reasons=("simulated",) if simulated else (),
        tags={"simulated": str(simulated).lower(), "version.torch": "2.13.0", **(tags or {})},
        start_wall_ns=1_790_000_000_000_000_000,
        end_wall_ns=1_790_000_060_000_000_000,
    )


def ranked(pairs: Sequence[tuple[TrialSpec, Run]], bound: str = f"{POWER} <= 2750") -> Ranking:
    return rank(
        pairs,
        Question(
            objective=parse_objective("maximize tokens_per_s"),
            constraints=tuple([parse_constraint(bound)] if bound else []),
        ),
    )


def whole(simulated: bool = False, text: str = "rank 3 at 140 GiB") -> tuple[Ranking, list[dict[str, str]], dict]:
    """A study with one trial of every kind, and every free text in it set to `text`."""
    ranking = ranked(
        [
            trial(1, 40_400.0, 2340.0, simulated=simulated),
            trial(1, 40_600.0, 2390.0, repeat=1, simulated=simulated, tags={"version.torch": text}),
            trial(2, 44_000.0, 3188.0, simulated=simulated),
            trial(4, 43_000.0, None, simulated=simulated),
            trial(8, 0.0, status=RunStatus.OUT_OF_MEMORY, reason=text),
        ]
    )
    candidates = [
        *({"trial_id": row.trial_id, "status": "kept", "rule": "", "reason": ""} for row in ranking.trials),
        *({"status": "rejected", "rule": "kv_heads", "reason": f"{text} {n}"} for n in range(3)),
        {"status": "rejected", "rule": "layers", "reason": text},
        {"status": "equivalent", "rule": "", "reason": text},
    ]
    shown = (ranking.feasible[0], ranking.infeasible[0])
    place = "vm" if text.startswith("rank 3") else text
    return ranking, candidates, {row.trial_id: evidence_of(place, 1.0 + n) for n, row in enumerate(shown)}


def render(simulated: bool = False, text: str = "rank 3 at 140 GiB") -> str:
    ranking, candidates, evidence = whole(simulated, text)
    document, pairs = {**DOCUMENT, "study": text}, {"price": comparison_of(ranking, evidence)}
    return render_report(text, document, ranking, candidates, evidence, pairs, [text])


def all_charts(simulated: bool = False) -> list[Chart]:
    ranking, _, evidence = whole(simulated=simulated)
    return draw(ranking, evidence, {"price": comparison_of(ranking, evidence)}, {})
