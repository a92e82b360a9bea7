"""wattune finds the fastest, or cheapest in energy, training configuration a power and cooling budget allows.

The names in `__all__` are the whole public interface. Each is loaded at its first use, so `import wattune` is light.
"""

from typing import TYPE_CHECKING, Final

from wattune.lazy_names import lazy_names
from wattune.version import __version__

if TYPE_CHECKING:
    from wattune.api import Study as Study
    from wattune.api import StudyOutcome as StudyOutcome
    from wattune.api import StudyPlan as StudyPlan
    from wattune.api import Trial as Trial
    from wattune.api import compare as compare
    from wattune.api import estimate as estimate
    from wattune.api import frontier as frontier
    from wattune.api import load_study as load_study
    from wattune.api import plan as plan
    from wattune.api import rank as rank
    from wattune.api import record as record
    from wattune.api import run_study as run_study
    from wattune.api import suggest as suggest
    from wattune.errors import WattuneError as WattuneError
    from wattune.ranking.assessment import RankedTrial as RankedTrial
    from wattune.ranking.comparison import Comparison as Comparison
    from wattune.ranking.frontier import Frontier as Frontier
    from wattune.ranking.order import Ranking as Ranking
    from wattune.ranking.suggestions import Suggestions as Suggestions
    from wattune.run import Run as Run
    from wattune.search.forecast import Estimate as Estimate
    from wattune.trial import TrialSpec as TrialSpec

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
