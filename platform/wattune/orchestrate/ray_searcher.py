"""Any searcher of Ray Tune's as a strategy, named `package:Class`."""

import importlib
import inspect
import logging
import math

from ray import tune
from ray.tune.search import ConcurrencyLimiter, Searcher

from wattune.errors import SpaceError
from wattune.run import Run, RunStatus
from wattune.search.strategies.protocol import FAILED, TEACHES_NOTHING, Problem
from wattune.search.strategies.snapping import Axes
from wattune.trial import TrialSpec

_log = logging.getLogger(__name__)


class RaySearcher:
    """A searcher over the kept candidates. The nearest candidate that is left is run and told.

    A searcher of Ray's knows no constraints. A trial that breaks one, or fails, is told as the worst so far.
    """

    learns = True

    def __init__(self, name: str, problem: Problem) -> None:
        """Loads the class and gives it objective and space.

        Raises `SpaceError`: there is no such class, it is not a searcher of Ray's, or it refuses objective or space.
        """
        assert problem.question is not None, "a strategy that learns has a question"
        self.stopped_because: str | None = None
        self._name, self._seed, self._question = name, problem.seed, problem.question
        self._metric = self._question.objective.metric
        self._mode = "max" if self._question.objective.maximize else "min"
        self._axes = Axes(problem.specs, seed=problem.seed)
        self._searcher = self._made(_load(name))
        self._asked: dict[int, str] = {}
        self._told: set[int] = set()
        self._num_asked = 0
        self._worst: float | None = None

    def ask(self, n: int, expected_s: object = None) -> list[TrialSpec]:
        """Returns up to `n` candidates; none while the searcher waits for results, or has finished."""
        del expected_s
        asked: list[TrialSpec] = []
        while len(asked) < n and self._axes.num_free and self.stopped_because is None:
            self._num_asked += 1
            trial_id = str(self._num_asked)
            config = self._searcher.suggest(trial_id)
            if config == Searcher.FINISHED:
                self.stopped_because = f"{self._name} proposes nothing more"
            if config is None or config == Searcher.FINISHED:
                break
            row = self._axes.take_nearest(config)
            self._asked[row] = trial_id
            asked.append(self._axes.specs[row])
        return asked

    def tell(self, spec: TrialSpec, result: Run) -> None:
        """Passes a result on: the objective, or the worst so far where a bound is broken or the trial failed.

        A result whose bounds are not all known says nothing that the searcher could take in.
        """
        row = self._axes.take(spec)
        if row is None or row in self._told:
            return
        trial_id = self._asked.pop(row, None)
        value = None if result.status in TEACHES_NOTHING else self._value(result)
        if trial_id is not None:
            told = None if value is None else {self._metric: value}
            self._searcher.on_trial_complete(trial_id, result=told, error=value is None)
        elif value is not None:
            try:  # a result of an earlier call of the study
                self._searcher.add_evaluated_point(self._axes.params[row], value)
            except NotImplementedError:  # many searchers cannot take it in; the candidate is left out all the same
                _log.info("%s cannot take in the earlier result of trial %s", self._name, spec.trial_id)
        if value is not None:
            self._told.add(row)

    def _value(self, result: Run) -> float | None:
        """The objective as the searcher is told it; None where the result says nothing."""
        value = result.metrics.get(self._metric) if result.status is RunStatus.COMPLETED else None
        kept = self._question.kept(result.metrics)
        if value is not None and math.isfinite(value) and kept is not None:
            worse = min if self._mode == "max" else max
            self._worst = value if self._worst is None else worse(self._worst, value)
            return value if kept else self._worst
        return self._worst if result.status in FAILED else None

    def _made(self, kind: type[Searcher]) -> Searcher:
        """Makes the searcher with what its constructor takes, and gives it the space."""
        known = {"metric": self._metric, "mode": self._mode, "seed": self._seed}
        accepted = inspect.signature(kind.__init__).parameters
        space = {name: tune.choice(values) for name, values in self._axes.values.items()}
        try:
            searcher = kind(**{name: value for name, value in known.items() if name in accepted})
            taken = searcher.set_search_properties(self._metric, self._mode, space)
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise SpaceError(f"strategy {self._name} cannot be made ({reason}); install what it needs") from error
        if not taken:
            raise SpaceError(f"strategy {self._name} does not take this space; use another searcher")
        return searcher


def _load(name: str) -> type[Searcher]:
    """Loads the class that `package:Class` names."""
    module, _, attribute = name.partition(":")
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise SpaceError(f"strategy {name} cannot be loaded ({error}); write package:Class") from error
    if not (isinstance(kind, type) and issubclass(kind, Searcher)) or kind is ConcurrencyLimiter:
        raise SpaceError(
            f"strategy {name} is not a searcher of Ray Tune's; name a subclass of ray.tune.search.Searcher"
        )
    return kind
