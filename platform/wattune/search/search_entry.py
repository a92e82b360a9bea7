"""`search` of a search space: the strategy that proposes trials, and how much of each is measured.

The classes are the grammar and the settings that a study runs by.
"""

from typing import Annotated, Final

from pydantic import Field

from wattune.fidelity import DECIDED_BY_STEP_TIME, LEAST_BURST_STEPS
from wattune.field_types import LARGEST_COUNT, Count, CountOrZero
from wattune.search.fields import Entry, named_by, one_of
from wattune.search.problems import Path
from wattune.search.strategy import STRATEGIES, check_strategy
from wattune.trial import TRIAL_ID_DIGITS, check_trial_id

ORDERS: Final = ("shuffled", "listed")
"""In which order trials run: drawn by the seed, or as the strategy lists them."""


class Finalists(Entry):
    """The race that tells the best trials apart after the search."""

    until: Annotated[float, Field(gt=0.5, lt=1, examples=[0.95])]
    """P(best feasible trial, or within 2 % of it) at which the race ends. A plan with a bound runs twice first."""
    max_share: Annotated[float, Field(gt=0, le=1, examples=[0.3])]
    """Most repeats of the race, as a share of the search's completed runs."""


class Burst(Entry):
    """Least length of a burst."""

    min_steps: Annotated[int, Field(ge=LEAST_BURST_STEPS, le=LARGEST_COUNT)] = 3
    """Least measured steps of a burst."""
    min_seconds: Annotated[float, Field(ge=0)] = 1.5
    """Least seconds of a burst's measured steps."""


class LadderSettings(Entry):
    """A burst of each trial, and a full measurement of the best share of them."""

    burst: Burst = Burst()
    promote: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """Share of the bursts that is measured in full."""


class Search(Entry):
    """The strategy that proposes trials, their number and order, and how much of each is measured."""

    strategy: Annotated[
        str,
        named_by(check_strategy, names=tuple(STRATEGIES), pattern=r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*$"),
    ] = "grid"
    """Proposes trials (docs/search.md); `package:Class` is a searcher of Ray Tune's."""
    num_trials: Annotated[Count, Field(examples=[40])] | None = None
    """Most trials to run. None is every kept combination."""
    seed: CountOrZero = 0
    """Seed of proposals and of the order."""
    order: Annotated[str, one_of(ORDERS)] = "shuffled"
    """Order in which trials run: drawn by the seed, or as the strategy lists them."""
    reference: (
        Annotated[
            str,
            named_by(check_trial_id, pattern=f"^[0-9a-f]{{{TRIAL_ID_DIGITS}}}$", examples=["0123456789ab"]),
        ]
        | None
    ) = None
    """Id of the trial that is measured again and again (`wattune plan`). None is an ordinary one."""
    finalists: Finalists | None = None
    """Race after the search. None repeats nothing."""
    ladder: LadderSettings | None = None
    """A burst of each trial first. None measures every trial in full. `num_trials` then counts bursts."""
    early_stop: bool = False
    """True ends the measurement of a trial whose steps prove that it loses."""


def ladder_problems(search: Search, min_steps: int, min_seconds: float) -> list[tuple[Path, str]]:
    """Finds a burst that is as long as a full measurement, with its path in the file."""
    if search.ladder is None:
        return []
    burst = search.ladder.burst
    if burst.min_steps < min_steps or burst.min_seconds < min_seconds:
        return []
    text = (
        f"as long as a full measurement (measure.min_steps={min_steps}, measure.min_seconds={min_seconds:g}); use "
        "less, or leave search.ladder out"
    )
    return [(("search", "ladder", "burst"), text)]


def early_stop_problems(search: Search, metric: str) -> list[tuple[Path, str]]:
    """Finds an objective that ranks cannot judge while they measure, with its path in the file."""
    if not search.early_stop or metric in DECIDED_BY_STEP_TIME:
        return []
    text = f"ranks know step times alone, which do not decide {metric}; leave it out, or use one of "
    return [(("search", "early_stop"), text + ", ".join(DECIDED_BY_STEP_TIME))]
