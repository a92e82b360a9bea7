"""Writes a study's report and its figures, and a comparison of two trials."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from wattune.analysis.detail import Detail
from wattune.errors import PlanError, WattuneError
from wattune.projection.projected import Projected
from wattune.ranking.answer import StudyAnswer, answer_of
from wattune.ranking.comparison import Comparison, compare
from wattune.ranking.evidence import gather_all, side_of_row
from wattune.ranking.frontier import Frontier
from wattune.ranking.order import Ranking
from wattune.storage.files import write_asked
from wattune.storage.study import StudyFolder

SHOWN_CLOSELY: Final = 4
"""Most feasible trials, and most infeasible ones, whose telemetry the report reads."""


@contextmanager
def _plotting(what: str, remedy: str) -> Iterator[None]:
    """Turns a missing package, plotly or one that it needs, into one message with the command that comes after."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "wattune"):
            raise
        raise WattuneError(
            f"{what} cannot be written: the package {package} is not installed; run `pip install {package}`, then "
            f"{remedy}"
        ) from None


def write_report(study: StudyFolder, ranking: Ranking, price: Frontier | None = None) -> Path:
    """Writes the study's `report.html` and returns its path.

    Raises `WattuneError` where the plotting library is not installed.
    """
    # Plotting takes longer to import than most commands take to run.
    with _plotting(f"the report of {study.name}", f"`wattune report {study.path}`"):
        from wattune.report.page import render_report

    evidence, problems = _closely(study, ranking, found := answer_of(ranking))
    try:
        spaces = study.spaces()
    except PlanError as error:  # the space that holds was read; one before it is damaged
        spaces = []
        problems = [*problems, str(error)]
    html = render_report(
        study.name,
        study.document(),
        ranking,
        study.candidates(),
        evidence,
        _comparisons(study, ranking, found, evidence),
        problems,
        price,
        spaces,
    )
    return study.write_report(html)


def write_figures(study: StudyFolder, ranking: Ranking, folder: Path, price: Frontier | None = None) -> list[Path]:
    """Writes every figure of the report as PNG, SVG and PDF, and returns their paths.

    Raises `WattuneError` where the plotting library, its exporter, or the browser it draws with is not installed.
    """
    with _plotting(f"the figures of {study.name}", "the same command"):
        from wattune.report.figure import write_images
        from wattune.report.page import draw

    evidence, _ = _closely(study, ranking, found := answer_of(ranking))
    pairs = _comparisons(study, ranking, found, evidence)
    charts = draw(ranking, evidence, pairs, study.document().get("limits"), price)
    return write_images(charts, folder)


def write_comparison(comparison: Comparison, path: Path) -> Path:
    """Writes two trials side by side as one HTML page.

    Raises `PlanError` where it cannot be written there. Raises `WattuneError` where the plotting library is not
    installed.
    """
    with _plotting("the page", "the same command"):
        from wattune.report.page import render_comparison

    write_asked(path, render_comparison(comparison))
    return path


def write_projections(found: Sequence[Projected], path: Path) -> None:
    """Writes projections as one HTML page; raises as `write_comparison` does."""
    with _plotting("the page", "the same command"):
        from wattune.report.scaling import render_projections

    write_asked(path, render_projections(found))


def _closely(study: StudyFolder, ranking: Ranking, found: StudyAnswer) -> tuple[dict[str, Detail], list[str]]:
    listed = (ranking.feasible, ranking.undecided, ranking.infeasible)
    rows = [row for rows in listed for row in rows[:SHOWN_CLOSELY]]
    return gather_all(study, [*rows, *(one for one in (found.reference,) if one is not None and one not in rows)])


def _comparisons(
    study: StudyFolder, ranking: Ranking, found: StudyAnswer, evidence: Mapping[str, Detail]
) -> dict[str, Comparison]:
    """Compares the next plan, the reference trial, and the best one that breaks a bound (A) with the answer's (B)."""
    if found.plan is None:
        return {}
    others = {"next": found.next_plan, "reference": found.reference, "price": ranking.price if ranking.best else None}
    own = side_of_row(study, found.plan, evidence.get(found.plan.trial_id))
    return {
        role: compare(side_of_row(study, row, evidence.get(row.trial_id)), own)
        for role, row in others.items()
        if row is not None
    }
