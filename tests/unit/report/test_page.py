import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wattune.analysis.detail import EXCURSION_COLUMNS, SLOT_COLUMNS
from wattune.analysis.metrics.breakdown import Breakdown, Part
from wattune.analysis.metrics.saturation import Saturation
from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import model
from wattune.errors import WattuneError
from wattune.objective import parse_constraint, parse_objective
from wattune.plan.axes import Plan
from wattune.ranking.assessment import RankedTrial
from wattune.ranking.comparison import Comparison, Side, compare
from wattune.ranking.evidence import Evidence
from wattune.ranking.order import Ranking, rank
from wattune.report.charts import slot_temperatures, step_parts, waterfall
from wattune.report.figure import Chart, write_images
from wattune.report.markup import fill, table
from wattune.report.page import draw, render_comparison, render_report
from wattune.report.sections import MAX_ROWS
from wattune.report.traces import MAX_TRACE_PARTS, envelope, power
from wattune.report.trade_off import trade_off
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


def evidence_of(row: RankedTrial, text: str = "vm", slow: float = 1.0) -> Evidence:
    """Twenty seconds of forty steps, one excursion, two slots."""
    excursion = {"node": text, "device": text, "start_s": 3.0, "end_s": 3.4, "energy_j": 8.0, "peak_w": 745.0}
    slot = dict.fromkeys(SLOT_COLUMNS.names, 0.1) | {"node": text, "power_mean_w": 650.0}
    slots = [slot | {"slot": n, "device": f"gpu{n}", "temp_mean_c": 74.5 - 5 * n} for n in range(2)]
    parts = {"compute": 0.3, "throttle": 0.05, "exposed_comm": 0.1 * slow, "bubble": 0.04, "other": 0.01}
    return Evidence(
        trial_id=row.trial_id,
        repeat=0,
        power_w={text: (np.arange(0.0, 20.0, 0.1), np.full(200, 2650.0)), "quiet": (np.arange(2.0), np.ones(2))},
        steps=(np.arange(0.0, 20.0, 0.5), np.full(40, 0.5)),
        excursions=pa.Table.from_pylist([excursion | {"limit_w": 700.0}], schema=EXCURSION_COLUMNS),
        slots=pa.Table.from_pylist(slots, schema=SLOT_COLUMNS),
        breakdown=Breakdown(
            parts=tuple(Part(name=name, time_s=time_s, energy_j=2600 * time_s) for name, time_s in parts.items()),
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


def comparison_of(ranking: Ranking, evidence: Mapping[str, Evidence]) -> Comparison:
    sides = [
        Side(
            name=f"moe:{row.trial_id}-0",
            spec=row.spec,
            result=row.counted[0],
            breakdown=evidence[row.trial_id].breakdown,
            tokens_per_s=row.objective,
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
        {"status": "equivalent", "rule": "", "reason": text},
    ]
    shown = (ranking.feasible[0], ranking.infeasible[0])
    place = "vm" if text.startswith("rank 3") else text
    return ranking, candidates, {row.trial_id: evidence_of(row, place, 1.0 + n) for n, row in enumerate(shown)}


def render(simulated: bool = False, text: str = "rank 3 at 140 GiB") -> str:
    ranking, candidates, evidence = whole(simulated, text)
    document, pair = {**DOCUMENT, "study": text}, comparison_of(ranking, evidence)
    return render_report(text, document, ranking, candidates, evidence, pair, [text])


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(render())


def test_the_headline_is_the_best_feasible_trial_with_its_slack_and_its_price(page):
    head = page.text[: page.text.index("Throughput against power")]
    for shown in (
        "Best feasible configuration\ndp4 mbs1\n",
        "40.5 k/s ±16 %",
        "2 repeats, interval by its repeats",
        "2.69 kW, slack +60 W (+2.2 %), holds with probability 0.91",
    ):
        assert shown in head
    assert f"dp4 mbs2 is 8.6 % better, with 44 k/s, but fails {POWER} <= 2750 by 38 W." in head


def test_every_trial_is_in_the_table_of_its_verdict(page):
    feasible, infeasible, unknown, failed, _, _ = page.tables
    assert [row[0] for row in feasible[1:]] == ["1"]
    assert "✕ 2.788 kW" in infeasible[1][2]
    assert "−38 W (−1.4 %)" in infeasible[1][2]
    assert unknown[1] == ["dp4 mbs4", "43 k/s", POWER]
    assert failed[1] == ["out of memory", "1", "dp4 mbs8", "rank 3 at 140 GiB"]


def test_what_the_same_command_runs_again_is_not_listed_as_failed():
    stopped = trial(4, 0.0, status=TrialStatus.INTERRUPTED, reason="stopped by the user")
    broken = trial(8, 0.0, status=TrialStatus.CRASHED, reason="died")
    page = Page(render_report("moe", DOCUMENT, ranked([stopped, broken]), [], {}, None, []))
    interrupted, failed = page.tables
    assert interrupted[1:] == [["dp4 mbs4", "interrupted: stopped by the user"]]
    assert failed[1:] == [["crashed", "1", "dp4 mbs8", "died"]]
    assert "Run again by the same command" in page.text and "1\ninterrupted\ntrials" in page.text


def test_rejected_combinations_are_counted_by_rule_with_the_first_reason(page):
    assert page.tables[-1][1:] == [
        ["kv_heads", "3", "rank 3 at 140 GiB 0"],
        ["layers", "1", "rank 3 at 140 GiB"],
    ]
    assert "1 more do the same work" in page.text


def test_figures_come_with_their_method(page):
    method = page.text[page.text.index("Method and quality") :]
    for shown in (
        "min_steps 20",
        "4 of 3 trials",
        "to ±16 % or better, by its repeats (1); of 2 trials",
        "period up to 20.0 ms",
    ):
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
    ranking, _, evidence = whole(text="<b>&")
    data, _ = figure_of(slot_temperatures(ranking, evidence))
    assert data[0]["y"] == ["&lt;b&gt;&amp; slot 0", "&lt;b&gt;&amp; slot 1"]
    _, layout = figure_of(power(ranking, [*ranking.feasible], evidence, {}))
    assert "<b>" not in str(layout["annotations"])


def all_charts(simulated: bool = False) -> list[Chart]:
    ranking, _, evidence = whole(simulated=simulated)
    return draw(ranking, evidence, comparison_of(ranking, evidence), {})


def test_simulated_figures_say_so_everywhere():
    page = Page(render(simulated=True))
    assert "SIMULATED TELEMETRY" in page.text[:200]
    assert page.text.count("SIMULATED TELEMETRY. ") == 4  # the tables that show figures
    charts = all_charts(simulated=True)
    assert len(charts) == 5
    for chart in charts:
        assert "SIMULATED" in [note.get("text") for note in figure_of(chart)[1]["annotations"]]


def test_measured_figures_do_not():
    assert "SIMULATED" not in Page(render()).text
    for chart in all_charts():
        assert "SIMULATED" not in str(figure_of(chart)[1])


def test_warnings_and_what_could_not_be_read_stand_before_the_figures(page):
    before = page.text[: page.text.index("Throughput against power")]
    assert "Before you compare" in before
    assert (
        "Run-to-run variation is unknown: 2 of 3 trials have no repeats. Treat small differences as ties.\n" in before
    )
    assert "rank 3 at 140 GiB." in before


def test_the_word_saturated_is_printed_only_where_it_holds(page):
    (rows,) = [rows for rows in page.tables if rows[0][1] == "what"]
    assert [row[6] for row in rows[1:]] == ["saturated", "saturated"]
    ranking, _, evidence = whole()
    below = {
        trial_id: replace(one, saturation=(replace(one.saturation[0], above_frac=0.4),))
        for trial_id, one in evidence.items()
    }
    (rows,) = [t for t in Page(render_report("s", DOCUMENT, ranking, [], below)).tables if t[0][1] == "what"]
    assert [row[6] for row in rows[1:]] == ["no", "no"]


def test_the_trade_off_shows_verdicts_by_symbol_intervals_by_bars_and_the_bound():
    data, layout = figure_of(trade_off(whole()[0]))
    front, infeasible, feasible = data
    assert (infeasible["name"], infeasible["marker"]["symbol"]) == ("infeasible", "x")
    assert (feasible["name"], feasible["marker"]["symbol"]) == ("feasible", "circle")
    assert (feasible["x"], feasible["y"]) == ([2665.0], [40_500.0])  # the middle of two repeats, with their interval
    assert feasible["error_y"]["array"] == pytest.approx([12.7062 * 500], rel=1e-4)
    assert feasible["customdata"] == [whole()[0].feasible[0].trial_id]
    assert (front["name"], front["x"]) == ("Pareto front", [2665.0, 2788.0])
    assert [shape["x0"] for shape in layout["shapes"]] == [2750.0]


def test_a_bound_that_differs_by_trial_has_no_line():
    pairs = [trial(n, 1000.0 * n, 2000.0) for n in (1, 2)]
    for number, (_, result) in enumerate(pairs):
        result.metrics["device_power_limit_w"] = 600.0 + number
    assert "shapes" not in figure_of(trade_off(ranked(pairs, f"{POWER} <= 4 * device_power_limit_w")))[1]


def test_power_over_time_shows_bounds_limits_steps_and_excursions_of_the_highest_node():
    ranking, _, evidence = whole()
    rows = [*ranking.feasible, *ranking.infeasible]
    data, layout = figure_of(power(ranking, rows, evidence, {"node_device_power_w": 2900.0}))
    assert len(data) == 2 * 3  # power, steps and excursions of each
    assert max(values(data[0]["y"])) == 2650.0
    lines = [shape["y0"] for shape in layout["shapes"] if shape["y0"] == shape["y1"]]
    assert sorted(lines) == [2750.0, 2750.0, 2900.0, 2900.0]
    shaded = [(shape["x0"], shape["x1"]) for shape in layout["shapes"] if shape["x0"] == 3.0]
    assert shaded == [(3.0, 3.4)] * 2
    assert len(values(data[1]["x"])) == 40
    assert values(data[2]["base"]) == [3.0]
    assert "up to 745 W over a limit of 700 W" in str(data[2]["hovertext"])


def test_the_parts_of_a_step_add_up_and_trials_of_one_plan_stay_apart():
    ranking, _, evidence = whole()
    data, _ = figure_of(step_parts(ranking, evidence))
    sums_ms = np.sum([values(trace["x"]) for trace in data], axis=0)
    assert sums_ms == pytest.approx([500.0, 600.0])
    assert len({pattern for trace in data if (pattern := trace["marker"]["pattern"]["shape"])}) == 3
    # The same plan on another model is another bar, not one on top.
    spec, result = trial(1, 1.0)
    other = replace(spec, model=model("mixtral_8x7b"))
    both = ranked([(spec, result), (other, replace(result, trial_id=other.trial_id))], "")
    data, _ = figure_of(step_parts(both, {row.trial_id: evidence_of(row) for row in both.trials}))
    assert len(set(data[0]["y"])) == 2


def test_the_waterfall_starts_at_a_and_ends_at_b():
    ranking, _, evidence = whole()
    data, _ = figure_of(waterfall(comparison_of(ranking, evidence)))
    time, energy = data
    heights = values(time["y"])
    assert (heights[0], heights[-1]) == pytest.approx((500.0, 600.0))
    assert sum(heights[1:-1]) == pytest.approx(heights[-1] - heights[0])
    assert values(energy["y"])[0] == pytest.approx(1300.0)


def test_two_trials_side_by_side_are_a_page():
    ranking, _, evidence = whole()
    page = Page(render_comparison(comparison_of(ranking, evidence)))
    assert "dp4 mbs1 on 1x4 h200_sxm against dp4 mbs2 on 1x4 h200_sxm" in page.text
    assert ["plan.micro_batch_size", "1", "2"] in page.tables[0]
    assert ["tokens_per_s", "40 k/s", "44 k/s", "+10.0 %"] in page.tables[1]


@pytest.mark.parametrize(
    ("said", "means"),
    [
        (
            "\n\nKaleido requires Google Chrome to be installed.\n\nEither download ...",
            "no Chrome or Chromium is installed",
        ),
        ("Image export requires the Kaleido package,\nwhich can be ...", r"install wattune\[figures\]"),
        ("something\nelse", "something else"),
    ],
)
def test_an_image_that_cannot_be_drawn_says_in_one_line_what_is_missing(tmp_path, monkeypatch, said, means):
    def cannot(*_args, **_settings):
        raise RuntimeError(said)

    monkeypatch.setattr("plotly.io.write_images", cannot)
    with pytest.raises(WattuneError, match=means) as caught:
        write_images(all_charts(), tmp_path)
    assert "\n" not in str(caught.value)


def test_an_image_that_was_not_written_is_not_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr("plotly.io.write_images", lambda *_args, **_settings: None)
    with pytest.raises(WattuneError, match=r"did not write throughput-against-power\.png"):
        write_images(all_charts(), tmp_path)
    assert write_images([], tmp_path) == []


def test_nothing_feasible_says_what_came_closest():
    page = Page(render_report("s", DOCUMENT, ranked([trial(2, 44_000.0, 2788.0)]), []))
    assert "None: no trial is known to keep every bound." in page.text
    assert f"dp4 mbs2, reaches 44 k/s and fails {POWER} <= 2750 by 38 W" in page.text


@pytest.mark.parametrize("bound", ["", f"{POWER} <= 2750"])
def test_an_empty_study_is_a_small_page(bound):
    html = render_report("s", DOCUMENT, ranked([], bound), [])
    assert len(html) < 20_000  # no chart, no plotly.js
    assert "None: no trial" in html


def test_a_long_table_says_that_it_was_cut():
    page = Page(render_report("s", DOCUMENT, ranked([trial(n, 100.0 + n) for n in range(1, 121)]), []))
    assert len(page.tables[0]) == 1 + MAX_ROWS
    assert f"The first {MAX_ROWS} of 120; ranking.parquet has all." in page.text


@settings(deadline=None)
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


@settings(deadline=None)
@given(st.integers(0, 5 * MAX_TRACE_PARTS), st.integers(0, 2**32 - 1))
def test_a_shortened_trace_keeps_its_peaks(length, seed):
    time_s = np.arange(length) * 0.02
    power_w = np.random.default_rng(seed).normal(2000.0, 300.0, length)
    kept_s, kept_w = envelope(time_s, power_w)
    assert len(kept_s) == len(kept_w) <= 2 * MAX_TRACE_PARTS
    assert (np.diff(kept_s) > 0).all()
    if length:
        assert (kept_w.min(), kept_w.max()) == (power_w.min(), power_w.max())
        assert np.isin(kept_s, time_s).all()
