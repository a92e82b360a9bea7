import json
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import model
from wattune.objective import parse_constraint, parse_objective
from wattune.plan.axes import Plan
from wattune.ranking import Ranking, rank
from wattune.report.charts import MAX_TRACE_PARTS, Trace, envelope, power, temperatures, trade_off
from wattune.report.markup import Html, fill, table
from wattune.report.page import MAX_ROWS, render_report
from wattune.trial import TrialResult, TrialSpec, TrialStatus, Workload

POWER = "node_device_power_peak_1s_w"
DOCUMENT = {
    "study": "moe",
    "space": {"tp": [1, 2]},
    "measure": {"min_steps": 20},
    "limits": {"node_device_power_w": 2900},
}
HOSTILE = "</script></title><script>alert(1)</script><img src=http://x.example/ onerror='x()'>\"&"


class Page(HTMLParser):
    """What a browser would see: the elements with their attributes, and the text outside scripts and styles."""

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


def figure_of(chart: Html | None) -> tuple[list, dict]:
    """The data and the layout a chart hands to plotly."""
    assert chart is not None
    decoder = json.JSONDecoder()
    data, end = decoder.raw_decode(chart, chart.index("[", chart.index("Plotly.newPlot(")))
    layout, _ = decoder.raw_decode(chart, chart.index("{", end))
    return data, layout


def trial(
    number: int,
    tokens_per_s: float,
    power_w: float | None = 2000.0,
    *,
    repeat: int = 0,
    status: TrialStatus = TrialStatus.COMPLETED,
    reason: str = "",
    simulated: bool = False,
    tags: Mapping[str, str] | None = None,
) -> tuple[TrialSpec, TrialResult]:
    spec = TrialSpec(
        model=model("llama3_8b"),
        cluster=ClusterSpec(device="h200_sxm", devices_per_node=4),
        engine="torch",
        workload=Workload(seq_len=4096, global_batch_size=16),
        plan=Plan(micro_batch_size=number),
    )
    metrics = {"tokens_per_s": tokens_per_s, "sensor_period_s": 0.02} | ({} if power_w is None else {POWER: power_w})
    return spec, TrialResult(
        trial_id=spec.trial_id,
        repeat=repeat,
        status=status,
        reason=reason,
        metrics=metrics if status is TrialStatus.COMPLETED else {},
        quality="indicative",
        quality_reasons=("simulated",) if simulated else (),
        tags={"simulated": str(simulated).lower(), "version.torch": "2.13.0", **(tags or {})},
        start_wall_ns=1_790_000_000_000_000_000,
        end_wall_ns=1_790_000_060_000_000_000,
    )


def ranked(pairs: Sequence[tuple[TrialSpec, TrialResult]], bound: str = f"{POWER} <= 2750") -> Ranking:
    return rank(pairs, parse_objective("maximize tokens_per_s"), [parse_constraint(bound)] if bound else [])


def whole(simulated: bool = False, text: str = "rank 3 at 140 GiB") -> tuple[Ranking, list[dict[str, str]], dict]:
    """A study with one trial of every kind, and every free text in it set to `text`."""
    ranking = ranked(
        [
            trial(1, 40_000.0, 2640.0, simulated=simulated),
            trial(1, 41_000.0, 2690.0, repeat=1, simulated=simulated, tags={"version.torch": text}),
            trial(2, 44_000.0, 2788.0, simulated=simulated),
            trial(4, 43_000.0, None, simulated=simulated),
            trial(8, 0.0, status=TrialStatus.OUT_OF_MEMORY, reason=text),
        ]
    )
    candidates = [
        {"status": "kept", "rule": "", "reason": ""},
        *({"status": "rejected", "rule": "kv_heads", "reason": f"{text} {n}"} for n in range(3)),
        {"status": "rejected", "rule": "layers", "reason": text},
        {"status": "folded", "rule": "", "reason": text},
    ]
    trace = Trace(time_s=np.arange(0.0, 20.0, 0.02), node_power_w=np.full(1000, 2650.0))
    shown = (ranking.feasible[0], ranking.infeasible[0])
    return ranking, candidates, {row.trial_id: trace for row in shown}


def render(simulated: bool = False, text: str = "rank 3 at 140 GiB") -> str:
    ranking, candidates, traces = whole(simulated, text)
    return render_report(text, {**DOCUMENT, "study": text}, ranking, candidates, traces, {text: 74.5, "gpu1": 69.0})


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(render())


def test_the_headline_is_the_best_feasible_trial_with_its_slack_and_its_price(page):
    head = page.text[: page.text.index("What the first bound leaves")]
    for shown in (
        "Best feasible configuration\ndp4 mbs1\n",
        "40 k/s to 41 k/s",
        "2 repeats",
        "2.69 kW, slack +60 W (+2.2 %)",
    ):
        assert shown in head
    assert f"dp4 mbs2 is 10.0 % better, with 44 k/s, but fails {POWER} <= 2750 by 38 W." in head


def test_every_trial_is_in_the_table_of_its_verdict(page):
    feasible, infeasible, unknown, failed, _ = page.tables
    assert [row[0] for row in feasible[1:]] == ["1"]
    assert "✕ 2.788 kW" in infeasible[1][2]
    assert "−38 W (−1.4 %)" in infeasible[1][2]
    assert unknown[1] == ["dp4 mbs4", "43 k/s", POWER]
    assert failed[1] == ["out of memory", "1", "dp4 mbs8", "rank 3 at 140 GiB"]


def test_rejected_combinations_are_counted_by_rule_with_the_first_reason(page):
    assert page.tables[-1][1:] == [
        ["kv_heads", "3", "rank 3 at 140 GiB 0"],
        ["layers", "1", "rank 3 at 140 GiB"],
    ]
    assert "1 more do the same work" in page.text


def test_figures_come_with_their_method(page):
    method = page.text[page.text.index("Method and quality") :]
    for shown in ("min_steps 20", "4 of 3 trials; largest spread of the objective 2.5 %", "period up to 20.0 ms"):
        assert shown in method
    assert "torch 2.13.0 / rank 3 at 140 GiB" in method
    assert "2026-09-21 14:13 UTC to 2026-09-21 14:14 UTC" in method


def test_the_page_asks_nobody_for_anything(page):
    assert {name for _, names in page.elements for name in names}.isdisjoint({"src", "href", "action", "srcset"})
    assert not {"link", "iframe", "img", "object", "base"} & {tag for tag, _ in page.elements}
    assert "default-src 'none'" in render()


def test_text_from_users_stays_text():
    page = Page(render(text=HOSTILE))
    assert page.elements == Page(render()).elements
    assert page.text.count(HOSTILE) >= 6  # title, heading, failure, two rejections, versions


def test_plotly_draws_text_from_users_as_text():
    ranking, _, _ = whole()
    chart = temperatures(ranking, {"<b>&": 70.0})
    data, _ = figure_of(chart)
    assert data[0]["x"] == ["&lt;b&gt;&amp;"]


def test_simulated_figures_say_so_everywhere():
    ranking, _, traces = whole(simulated=True)
    page = Page(render(simulated=True))
    assert "SIMULATED TELEMETRY" in page.text[:200]
    assert page.text.count("SIMULATED TELEMETRY. ") == 3  # the three tables that show figures
    for chart in (trade_off(ranking), power(ranking, traces, {}), temperatures(ranking, {"gpu0": 70.0})):
        assert "SIMULATED" in [note.get("text") for note in figure_of(chart)[1]["annotations"]]


def test_measured_figures_do_not():
    ranking, _, traces = whole()
    assert "SIMULATED" not in Page(render()).text
    for chart in (trade_off(ranking), power(ranking, traces, {}), temperatures(ranking, {"gpu0": 70.0})):
        assert "SIMULATED" not in str(figure_of(chart)[1])


def test_the_trade_off_shows_verdicts_by_symbol_intervals_by_bars_and_the_bound():
    data, layout = figure_of(trade_off(whole()[0]))
    assert [(trace["name"], trace["marker"]["symbol"]) for trace in data] == [
        ("infeasible", "x"),
        ("feasible", "circle"),
    ]
    feasible = data[1]
    assert (feasible["x"], feasible["y"]) == ([2690.0], [40_000.0])  # the worst repeat of each
    assert (feasible["error_x"]["arrayminus"], feasible["error_y"]["array"]) == ([50.0], [1000.0])
    assert [shape["x0"] for shape in layout["shapes"]] == [2750.0]


def test_a_bound_that_differs_by_trial_has_no_line():
    pairs = [trial(n, 1000.0 * n, 2000.0) for n in (1, 2)]
    for number, (_, result) in enumerate(pairs):
        result.metrics["device_power_limit_w"] = 600.0 + number
    assert "shapes" not in figure_of(trade_off(ranked(pairs, f"{POWER} <= 4 * device_power_limit_w")))[1]


def test_power_over_time_shows_the_bound_and_the_hard_limit_on_every_trace():
    ranking, _, traces = whole()
    data, layout = figure_of(power(ranking, traces, {"node_device_power_w": 2900.0}))
    assert len(data) == 2
    assert sorted(shape["y0"] for shape in layout["shapes"]) == [2750.0, 2750.0, 2900.0, 2900.0]


def test_nothing_feasible_says_what_came_closest():
    page = Page(render_report("s", DOCUMENT, ranked([trial(2, 44_000.0, 2788.0)]), [], {}))
    assert "None: no trial is known to keep every bound." in page.text
    assert f"dp4 mbs2, reaches 44 k/s and fails {POWER} <= 2750 by 38 W" in page.text


@pytest.mark.parametrize("bound", ["", f"{POWER} <= 2750"])
def test_an_empty_study_is_a_small_page(bound):
    html = render_report("s", DOCUMENT, ranked([], bound), [], {})
    assert len(html) < 20_000  # no chart, no plotly.js
    assert "None: no trial" in html


def test_a_long_table_says_that_it_was_cut():
    page = Page(render_report("s", DOCUMENT, ranked([trial(n, 100.0 + n) for n in range(1, 121)]), [], {}))
    assert len(page.tables[0]) == 1 + MAX_ROWS
    assert f"The first {MAX_ROWS} of 120; ranking.parquet has all." in page.text


@given(st.text(), st.text())
def test_a_template_shows_any_text_as_it_is(first, second):
    parser = HTMLParser(convert_charrefs=True)
    seen: list[str] = []
    parser.handle_data = seen.append  # type: ignore[method-assign]
    parser.handle_starttag = lambda tag, attrs: seen.append(dict(attrs).get("title", ""))  # type: ignore[method-assign]
    parser.feed(fill('<p title="{}">{}</p>', first, second))
    parser.close()
    assert seen[0] == first
    assert "".join(seen[1:]) == second


def test_markup_is_not_escaped_twice():
    assert fill("<p>{}</p>", fill("<b>{}</b>", "&")) == "<p><b>&amp;</b></p>"


def test_a_row_of_another_length_is_refused():
    with pytest.raises(ValueError, match="argument 2 is"):
        table("", ["a", "b"], [["1", "2", "3"]])


@given(st.integers(0, 5 * MAX_TRACE_PARTS), st.integers(0, 2**32 - 1))
def test_a_shortened_trace_keeps_its_peaks(length, seed):
    time_s = np.arange(length) * 0.02
    power_w = np.random.default_rng(seed).normal(2000.0, 300.0, length)
    kept_s, kept_w = envelope(Trace(time_s=time_s, node_power_w=power_w))
    assert len(kept_s) == len(kept_w) <= 2 * MAX_TRACE_PARTS
    assert (np.diff(kept_s) > 0).all()
    if length:
        assert (kept_w.min(), kept_w.max()) == (power_w.min(), power_w.max())
        assert np.isin(kept_s, time_s).all()
