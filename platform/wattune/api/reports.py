"""The study's report and its figures."""

from contextlib import suppress
from pathlib import Path

from wattune.api.beforehand import Beforehand
from wattune.api.decisions import measured, over_all_plans, price
from wattune.api.results import folder_of
from wattune.api.studies import Study
from wattune.errors import WattuneError
from wattune.metrics import METRICS
from wattune.ranking.frontier import Frontier
from wattune.ranking.limits import every_50_w
from wattune.ranking.order import Ranking
from wattune.ranking.sources import Source, collector_paused, rank_sources
from wattune.report.write import write_figures, write_report
from wattune.storage.files import named_path
from wattune.storage.study import StudyFolder
from wattune.view.files import ranking_table

Known = tuple[Beforehand, Source]
"""Knowledge of a study's plans before they ran, and its results."""


@collector_paused()
def report(study: Study | StudyFolder, ranking: Ranking | None = None, known: Known | None = None) -> Path:
    """Writes the study's `report.html`, and `ranking.parquet` which it names, and returns the report's path.

    Args:
        study: The study.
        ranking: Its ranking, if it was computed and written just now.
        known: Its plans and results, if they are at hand.
    """
    folder, source = folder_of(study), None
    if ranking is None:
        source = Source.of_folder(folder)
        ranking = rank_sources([source])
    known = known or _known(folder, source)
    if source is not None:
        ranking = over_all_plans(ranking, *known) if known else ranking
        folder.write_ranking(ranking_table(ranking))
    return write_report(folder, ranking, _price(folder, ranking, known))


@collector_paused()
def figures(study: Study | StudyFolder, folder: str | Path) -> list[Path]:
    """Writes every figure of the study's report as PNG and SVG, and returns their paths.

    Raises `WattuneError`: the plotting library's exporter, or the browser it draws with, is not installed.
    """
    own = folder_of(study)
    source = Source.of_folder(own)
    ranking = rank_sources([source])
    return write_figures(own, ranking, named_path(folder), _price(own, ranking, _known(own, source)))


def _known(folder: StudyFolder, source: Source | None) -> Known | None:
    """Returns what is known of a study's plans; None where its space is of another version, or nothing ended."""
    with suppress(WattuneError):  # a report is written whatever state its study is in
        return measured(folder, source)
    return None


def _price(folder: StudyFolder, ranking: Ranking, known: Known | None) -> Frontier | None:
    """Computes what limits of power buy, else what the bound on power costs; None without both, or if nothing is known.

    `wattune frontier` says why there is no price.
    """
    if known is None:
        return None
    limits = every_50_w(known[0].planned.candidates.specs)
    varied = limits if len(limits.values) > 1 else None
    with suppress(WattuneError):
        if varied or any(METRICS[one.metric].group == "power" for one in ranking.constraints):
            return price(folder, *known, varied, ranking)
    return None
