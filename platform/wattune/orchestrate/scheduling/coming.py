"""Chooses the plans whose graphs are compiled beside a trial, for what runs later. No Ray here.

Generated code is kept by its content, so that a plan chosen in vain costs a processor some seconds and no more.
"""

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Final

from wattune.cost.out_of_memory import UNLIKELY
from wattune.orchestrate.attempt import Attempt
from wattune.orchestrate.scheduling.graphs import PLANS_KEPT, graphs_of
from wattune.orchestrate.scheduling.run_order import workers_of
from wattune.orchestrate.scheduling.study_run import StudyRun
from wattune.orchestrate.scheduling.waiting import Waiting
from wattune.trial import TrialSpec

AT_ONCE: Final = 6
"""Most graphs compiled beside one trial: each takes 7 s where four processes compile its kernels (two H100)."""


class ComingGraphs:
    """Graphs that each set of nodes was asked to compile ahead."""

    def __init__(self, run: StudyRun, waiting: Waiting, *, learns: bool) -> None:
        """Takes the plans from what waits or, where the strategy chooses them later, from the whole space."""
        self._run, self._waiting, self._learns = run, waiting, learns
        self._known: dict[str, set[Hashable]] = {}
        """Graphs by the names of nodes."""

    def beside(self, running: Attempt, nodes: str) -> tuple[TrialSpec, ...] | None:
        """Returns one plan for each graph, those that come first or that most plans share, and none twice.

        None where a trial needs its devices whole: it may run out of memory, or its workers end with it.
        """
        risk, known = self._run.out_of_memory, self._known.setdefault(nodes, set())
        if self._run.isolation == "fresh" or (risk is not None and risk(running.spec) > UNLIKELY):
            return None
        if not compiles_ahead(running.spec) or len(known) >= PLANS_KEPT:
            return ()
        known.add(graphs_of(running.spec))
        of_workers = [spec for spec in self._plans() if workers_of(spec) == workers_of(running.spec)]
        new = {graphs_of(spec): spec for spec in reversed(of_workers) if compiles_ahead(spec)}
        shared = Counter(map(graphs_of, of_workers)) if self._learns else Counter()
        first = sorted((one for one in reversed(new) if one not in known), key=lambda one: -shared[one])[:AT_ONCE]
        known.update(first)
        return tuple(new[one] for one in first)

    def _plans(self) -> Iterable[TrialSpec]:
        return self._run.candidates if self._learns else [one.spec for one in self._waiting.in_order()]


def compiles_ahead(spec: TrialSpec) -> bool:
    """Returns whether a plan's graphs are known before it runs: of the torch engine, where all weights train."""
    work, plan = spec.workload, spec.plan
    is_plain = work.mode == "pretrain" and work.lora is None and plan.dtype != "fp8" and plan.offload == "none"
    return spec.engine == "torch" and spec.cluster.device != "cpu" and is_plain
