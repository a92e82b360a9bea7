"""wattune finds the fastest, or cheapest in energy, training configuration a power and cooling budget allows.

The names in `__all__` are the whole public interface. Each is loaded at its first use, so `import wattune` is light.
"""

from typing import TYPE_CHECKING, Final

from wattune.lazy_names import lazy_names
from wattune.version import __version__

if TYPE_CHECKING:
    from wattune.api import (
        Study,
        StudyOutcome,
        StudyPlan,
        Trial,
        compare,
        estimate,
        frontier,
        load_study,
        plan,
        rank,
        record,
        run_study,
        suggest,
    )
    from wattune.errors import WattuneError
    from wattune.ranking.assessment import RankedTrial
    from wattune.ranking.comparison import Comparison
    from wattune.ranking.frontier import Frontier
    from wattune.ranking.order import Ranking
    from wattune.ranking.suggestions import Suggestions
    from wattune.run import Run
    from wattune.search.forecast import Estimate
    from wattune.trial import TrialSpec

_HOMES: Final = {
    "wattune.api": (
        "compare estimate frontier load_study plan rank record run_study suggest Study StudyOutcome StudyPlan Trial"
    ),
    "wattune.errors": "WattuneError",
    "wattune.ranking.assessment": "RankedTrial",
    "wattune.ranking.comparison": "Comparison",
    "wattune.ranking.frontier": "Frontier",
    "wattune.ranking.order": "Ranking",
    "wattune.ranking.suggestions": "Suggestions",
    "wattune.run": "Run",
    "wattune.search.forecast": "Estimate",
    "wattune.trial": "TrialSpec",
}

__all__ = [
    "Comparison",
    "Estimate",
    "Frontier",
    "RankedTrial",
    "Ranking",
    "Run",
    "Study",
    "StudyOutcome",
    "StudyPlan",
    "Suggestions",
    "Trial",
    "TrialSpec",
    "WattuneError",
    "__version__",
    "compare",
    "estimate",
    "frontier",
    "load_study",
    "plan",
    "rank",
    "record",
    "run_study",
    "suggest",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
