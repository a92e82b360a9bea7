"""The style of the report and the script beside its charts.

Colours are Okabe and Ito's (jfly.uni-koeln.de/color, 2008), which colour-blind readers can distinguish.
"""

from typing import Final

FEASIBLE_COLOR: Final = "#0072B2"
INFEASIBLE_COLOR: Final = "#D55E00"
INK: Final = "#1b2430"
LINE: Final = "#dfe4ea"
MONO: Final = 'ui-monospace, "SF Mono", Menlo, "Liberation Mono", monospace'
FONT: Final = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans", sans-serif'

POLICY: Final = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""Content security policy of the page: a browser makes no request, whatever the page contains."""

STYLE: Final = f"""
:root {{ color-scheme: light; --ink: {INK}; --soft: #566172; --line: {LINE};
  --good: {FEASIBLE_COLOR}; --bad: #b34700; }}
* {{ box-sizing: border-box; margin: 0; }}
html {{ overflow-y: scroll; }}
body {{ background: #f6f7f9; color: var(--ink); overflow-wrap: break-word; font: 15px/1.5 {FONT}; }}
main {{ max-width: 1320px; margin: 0 auto; padding: 20px 24px 80px; display: grid; gap: 20px; }}
main > * {{ min-width: 0; }}
section {{ background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 24px 28px; }}
h1 {{ font-size: 28px; line-height: 1.2; letter-spacing: -.01em; overflow-wrap: anywhere; }}
h2 {{ font-size: 18px; margin-bottom: 14px; }}
ul {{ list-style: none; padding: 0; }}
small, caption, figcaption, .note, .eyebrow, dt {{ color: var(--soft); }}
small, .eyebrow, .pill {{ font-size: 12.5px; }}
.banner {{ background: var(--bad); color: #fff; border-radius: 10px; padding: 12px 28px;
  display: flex; flex-wrap: wrap; gap: 0 24px; align-items: center; }}
.banner strong {{ font-size: 22px; letter-spacing: .06em; }}
.banner span {{ flex: 1 1 400px; }}
.study {{ display: flex; flex-wrap: wrap; justify-content: space-between; align-items: end; gap: 10px 32px; }}
.study .chips {{ margin: 0; }}
.chips {{ display: flex; flex-wrap: wrap; gap: 8px; margin-top: 14px; font-size: 13.5px; }}
.chips li {{ border: 1px solid var(--line); border-radius: 99px; padding: 3px 12px; background: #fff; }}
.chips .goal {{ background: var(--ink); border-color: var(--ink); color: #fff; }}
.headline {{ display: grid; gap: 16px 32px; border-top: 5px solid var(--good); }}
.headline > * {{ min-width: 0; }}
.headline.none {{ border-top-color: var(--bad); }}
.label {{ font-size: 24px; font-weight: 650; line-height: 1.3; margin: 2px 0 6px; }}
.figure {{ font-size: 34px; font-weight: 650; line-height: 1.2; }}
.figure small {{ font-size: 15px; font-weight: 400; }}
.about {{ color: var(--soft); margin: 4px 0 10px; }}
.answer li {{ margin-top: 7px; }}
.next {{ margin-top: 12px; padding: 10px 14px; border-left: 4px solid var(--good); background: #eef4f9; }}
.picture h2 {{ margin-bottom: 0; }}
code {{ display: inline-block; font: 13px/1.5 {MONO}; background: #fff; padding: 2px 6px; border-radius: 4px;
  overflow-wrap: anywhere; }}
@media (width >= 1240px) {{
  .pictured {{ grid-template: auto 1fr / minmax(0, 20fr) minmax(0, 23fr); }}
  .pictured .answer {{ grid-row: 1 / span 2; }}
}}
.note {{ margin-top: 10px; max-width: 70ch; }}
.meters {{ display: grid; gap: 8px; align-content: start; border-top: 1px solid var(--line); padding-top: 14px; }}
.meters li {{ display: grid; grid-template: auto 1fr / 80px 1fr; gap: 0 16px; font-size: 14px; }}
.meters p {{ grid-area: 1 / 2 / 3; }}
.meters .meter {{ margin-top: 6px; }}
.meters li > * {{ min-width: 0; overflow-wrap: anywhere; }}
.meter {{ display: block; height: 10px; border-radius: 5px; background: #e6e9ee; overflow: hidden; }}
.meter b {{ display: block; height: 100%; background: var(--good); }}
.counts {{ display: flex; flex-wrap: wrap; gap: 4px 28px; }}
.counts strong {{ font-size: 20px; }}
.coverage {{ padding: 16px 28px; }}
.coverage .meter {{ display: flex; margin-top: 8px; }}
.coverage .note {{ max-width: none; margin-top: 8px; }}
.meter .lost {{ background: var(--bad); }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; font-size: 14px; }}
caption {{ caption-side: bottom; text-align: left; padding-top: 12px; font-size: 13px; }}
th, td {{ text-align: left; vertical-align: top; padding: 8px 14px 8px 0; border-bottom: 1px solid var(--line); }}
th {{ color: var(--soft); font-weight: 600; font-size: 13px; }}
td {{ overflow-wrap: anywhere; }}
td strong {{ overflow-wrap: normal; }}
td small {{ display: block; }}
td .detail {{ display: none; }}
.verdict {{ cursor: help; }}
.number {{ text-align: right; font-variant-numeric: tabular-nums; }}
td.number {{ white-space: nowrap; overflow-wrap: normal; }}
td.number small {{ white-space: normal; }}
.fails {{ color: var(--bad); font-weight: 650; }}
tr.found td {{ background: #fff6dd; }}
input[type=search] {{ font: inherit; font-size: 14px; padding: 6px 12px; margin-bottom: 10px; width: 280px;
  max-width: 100%;  border: 1px solid var(--line); border-radius: 8px; }}
.warnings {{ background: #fff9ec; border: 1px solid #f0d9a8; border-radius: 10px;
  padding: 16px 28px; font-size: 14px; }}
.warnings ul {{ list-style: disc; padding-left: 20px; margin-top: 4px; }}
.pill {{ display: inline-block; border: 1px solid currentColor; border-radius: 99px; padding: 0 9px; color: var(--soft);
  margin-right: 4px; white-space: nowrap; }}
.publishable {{ color: var(--good); }}
.invalid, .simulated {{ color: var(--bad); }}
figcaption {{ font-size: 13px; max-width: 90ch; margin-top: 8px; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: 8px 24px; }}
dd {{ overflow-wrap: anywhere; }}
pre {{ font: 12.5px/1.5 {MONO}; white-space: pre-wrap; }}
@media (max-width: 720px) {{
  dl {{ grid-template-columns: 1fr; }}
  main {{ padding: 20px 12px 40px; gap: 14px; }}
  section, .coverage, .warnings, .banner {{ padding: 16px; }}
  h1 {{ font-size: 24px; }}
  .figure {{ font-size: 28px; }}
  /* A row becomes a card: each cell on a line of its own, with the name of its column. */
  thead {{ position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }}
  table, tbody, caption {{ display: block; }}
  tbody tr {{ display: block; border-bottom: 2px solid var(--line); padding: 8px 0; }}
  tbody tr[hidden] {{ display: none; }}
  td, td.number {{ display: grid; grid-template-columns: 38% 1fr; gap: 0 12px; border: 0; padding: 2px 0;
    text-align: left; white-space: normal; }}
  td > * {{ grid-column: 2; min-width: 0; }}
  td::before {{ content: attr(data-column); grid-column: 1; grid-row: 1 / span 9; color: var(--soft);
    font-size: 13px; overflow-wrap: anywhere; }}
  td .pill {{ justify-self: start; }}
  td .detail {{ display: block; }}
  .scroll {{ overflow: visible; }}
}}
@media print {{
  body {{ background: #fff; font-size: 11pt; }}
  main {{ max-width: none; padding: 0; display: block; }}
  main > * {{ margin-bottom: 14px; }}
  .headline {{ display: block; }}
  figure, .banner, .counts, tr {{ break-inside: avoid; }}
  h2 {{ break-after: avoid; }}
  .scroll {{ overflow: visible; }}
  .modebar, input[type=search] {{ display: none; }}
  .banner, .meter, .meter b, .goal {{ print-color-adjust: exact; -webkit-print-color-adjust: exact; }}
}}
"""

SCRIPT: Final = """
for (const chart of document.querySelectorAll(".plotly-graph-div")) {
  chart.on("plotly_click", event => {
    const row = document.getElementById("trial-" + event.points[0].customdata);
    if (!row) return;
    document.querySelectorAll("tr.found").forEach(other => other.classList.remove("found"));
    row.classList.add("found");
    row.scrollIntoView({ behavior: "smooth", block: "center" });
  });
}
for (const block of document.querySelectorAll(".scroll")) {
  const rows = block.querySelectorAll("tbody tr");
  if (rows.length < 8) continue;
  const field = document.createElement("input");
  field.type = "search";
  field.placeholder = "Show only rows with ...";
  field.setAttribute("aria-label", "Show only rows with this text");
  field.addEventListener("input", () => rows.forEach(row => {
    row.hidden = !row.textContent.toLowerCase().includes(field.value.toLowerCase());
  }));
  block.before(field);
}
const broken = text => text.length > 40 ? text.replace(/(.{18,34}) /g, "$1<br>") : text;
// Narrow pages have no room for texts inside charts; pointing tells them.
const shorten = narrow => document.querySelectorAll(".plotly-graph-div").forEach(chart => {
  if ((chart.dataset.narrow ?? "false") === String(narrow)) return;
  chart.dataset.narrow = narrow;
  chart.data.forEach((trace, number) => {
    const own = trace.meta ?? {};
    if (own.mode) Plotly.restyle(chart, { mode: narrow ? "markers" : own.mode }, [number]);
    if (own.textposition) Plotly.restyle(chart, { textposition: narrow ? "none" : own.textposition }, [number]);
  });
  const names = chart.data.map(trace => trace.meta?.name ?? trace.name ?? "");
  names.forEach((name, number) => {
    if (name.length <= 40) return;
    const meta = { ...chart.data[number].meta, name };
    Plotly.restyle(chart, { name: narrow ? broken(name) : name, meta: [meta] }, [number]);
  });
  const fonts = {};
  const own = chart.layout.meta;
  own.texts ??= (chart.layout.annotations ?? []).map(note => note.text);
  own.texts.forEach((text, number) => {
    const size = own.annotation_sizes[number];
    fonts[`annotations[${number}].font.size`] = narrow ? size * (size > 40 ? 0.5 : 0.75) : size;
    fonts[`annotations[${number}].text`] = narrow ? text.replace(/(.{14,22}[ _])(?=....)/g, "$1<br>") : text;
  });
  for (const axis of Object.keys(chart.layout).filter(name => /^[xy]axis/.test(name)))
    if (chart.layout[axis].title?.text) fonts[axis + ".title.font.size"] = narrow ? 12 : own.title_size;
  Plotly.relayout(chart, { ...fonts, "margin.l": narrow ? 40 : own.left });
});
const fit = () => shorten(innerWidth < 1000);
addEventListener("load", fit);
addEventListener("resize", fit);
// A chart keeps the width it was drawn with: paper is narrower than most screens.
const resize = width => document.querySelectorAll(".plotly-graph-div").forEach(chart =>
  Plotly.relayout(chart, width ? { width, autosize: false } : { width: null, autosize: true }));
addEventListener("beforeprint", () => { shorten(true); resize(680); });
addEventListener("afterprint", () => { resize(0); fit(); });
"""
"""Script of the page beside plotly: a click on a point finds its row, long tables get a filter, charts fit narrow
windows and paper."""
