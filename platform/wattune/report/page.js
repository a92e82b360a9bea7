// Beside plotly: a click on a point finds its row, long tables get a filter, charts fit narrow windows and paper.
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
