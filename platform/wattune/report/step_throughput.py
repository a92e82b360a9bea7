"""The chart of throughput against the step, for the leaders."""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from wattune.analysis.detail import Detail
from wattune.ranking.assessment import RankedTrial
from wattune.ranking.common_steps import COMPARED
from wattune.ranking.order import Ranking
from wattune.report.charts import row_labels
from wattune.report.figure import Chart, blank
from wattune.units import with_unit

TITLE: Final = "Throughput by step"

MOST_LEADERS: Final = 4
"""Most trials that are drawn."""

_LOOKS: Final = (("#0072B2", "solid"), ("#E69F00", "dash"), ("#009E73", "dot"), ("#CC79A7", "dashdot"))
"""Colour (Okabe and Ito) and dash of each line."""


def step_throughput(ranking: Ranking, evidence: Mapping[str, Detail]) -> Chart | None:
    """Draws the throughput of each step against its index in the stream of data, for the leaders by P(best).

    None without a leader of at least two steps whose tokens are known.
    """
    stepped = _stepped(ranking, evidence)
    known = [(row, tokens) for row in stepped if (tokens := _tokens(row)) is not None][:MOST_LEADERS]
    if not known:
        return None
    rows = [row for row, _ in known]
    figure = blank()
    for (row, tokens), label, (color, dash) in zip(known, row_labels(rows), _LOOKS, strict=False):
        found = evidence[row.trial_id]
        # From one step's start to the next one's, as throughput over the window counts; the last has no next.
        tokens_per_s = tokens / np.diff(found.steps["start_s"].to_numpy())
        figure.add_scatter(
            x=found.steps["step"].to_numpy()[:-1],
            y=tokens_per_s,
            mode="lines",
            name=label,
            line={"color": color, "width": 1.4, "dash": dash},
            hovertemplate="step %{x}: %{y:.4s} tokens/s<extra></extra>",
        )
    compared = {run.tags[COMPARED] for row in rows for run in row.counted if COMPARED in run.tags}
    for steps in compared:
        first, last = map(int, steps.split("-"))
        figure.add_vrect(x0=first - 0.5, x1=last + 0.5, fillcolor="#8a94a3", opacity=0.15, line_width=0)
    figure.update_xaxes(title="step, in the order of the data")
    figure.update_yaxes(title=with_unit("tokens_per_s"), automargin=True)
    shaded = " Speed and energy are compared over the shaded steps." if compared else ""
    caption = (
        "Every measured step of the trials most likely to be the best. One index is the same batch of data for all; "
        "warm-up has the first ones. "
        f"A line that rises or falls is a trend: its mean depends on the window.{shaded}"
    )
    return Chart(title=TITLE, caption=caption, figure=figure, stamp=ranking.stamp)


def not_drawn(ranking: Ranking, evidence: Mapping[str, Detail]) -> str:
    """Says why there is no such chart although steps were measured; empty where there is one, or no steps."""
    stepped = _stepped(ranking, evidence)
    if not stepped or any(_tokens(row) is not None for row in stepped):
        return ""
    return (
        "Not drawn: nobody said how many tokens a step has. Add workload: {seq_len: ..., global_batch_size: ...} to "
        "the space, or let the program tell its tokens."
    )


def _stepped(ranking: Ranking, evidence: Mapping[str, Detail]) -> list[RankedTrial]:
    """Returns the leaders of at least two measured steps, most likely best first."""
    return [row for row in leaders(ranking) if row.trial_id in evidence and evidence[row.trial_id].steps.num_rows > 1]


def _tokens(row: RankedTrial) -> float | None:
    """Returns the tokens of a step; None where neither the space nor the program says them."""
    told = (run.numbers.told_tokens_per_step for run in row.counted)
    return row.spec.tokens_per_step or next((one for one in told if one is not None), None)


def leaders(ranking: Ranking) -> Sequence[RankedTrial]:
    """Returns feasible trials by their probability to be the best, then the undecided ones."""
    likely = sorted(ranking.feasible, key=lambda row: -(row.best_probability or 0.0))
    return [*likely, *ranking.undecided]
