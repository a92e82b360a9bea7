"""Plans whose graphs are compiled beside a trial: one for each graph, in order, none twice, and none at a risk."""

from dataclasses import replace
from typing import Any

import pytest
from specs import trial_spec

from wattune.orchestrate.attempt import Attempt
from wattune.orchestrate.scheduling.coming import AT_ONCE, ComingGraphs
from wattune.orchestrate.scheduling.waiting import Waiting
from wattune.trial import Measure, TrialSpec


def plan(**axes: Any) -> TrialSpec:
    return trial_spec(on="1x8 h100_sxm", batch=64, **axes)


def queued(spec: TrialSpec, repeat: int = 0) -> Attempt:
    return Attempt(spec=spec, repeat=repeat, measure=Measure())


class Run:
    """The settings of a study that are read here."""

    def __init__(self, **settings: Any) -> None:
        self.isolation, self.out_of_memory, self.candidates = "warm", None, ()
        self.__dict__ |= settings


PLANS = [
    plan(micro_batch_size=1),
    plan(micro_batch_size=1, sharding="zero1"),
    plan(micro_batch_size=2),
    plan(micro_batch_size=2, pp=2),
    plan(micro_batch_size=1, tp=2),
    plan(micro_batch_size=4),
]


@pytest.fixture
def waiting() -> Waiting:
    made = Waiting({}, ())
    made.add(map(queued, PLANS[1:]))
    return made


def test_one_plan_for_each_graph_that_waits_and_none_twice(waiting: Waiting) -> None:
    coming = ComingGraphs(Run(), waiting, learns=False)  # type: ignore[arg-type]
    assert coming.beside(queued(PLANS[0]), "n0") == (PLANS[2], PLANS[4], PLANS[5])
    assert coming.beside(queued(PLANS[1]), "n0") == ()
    assert coming.beside(queued(PLANS[0]), "n1") == (PLANS[2], PLANS[4], PLANS[5]), "other nodes have no such code"


def test_where_the_strategy_chooses_later_graphs_that_most_plans_share_come_first(waiting: Waiting) -> None:
    many = [plan(micro_batch_size=size, sharding=one) for size in (2, 8) for one in ("none", "zero1")]
    space = [PLANS[0], PLANS[4], *many, *(plan(micro_batch_size=1, tp=8, seq_len=1024 * n) for n in range(1, 9))]
    coming = ComingGraphs(Run(candidates=space), waiting, learns=True)  # type: ignore[arg-type]
    first = coming.beside(queued(PLANS[0]), "n0")
    assert first is not None and len(first) == AT_ONCE and first[:2] == (many[0], many[2])
    later = coming.beside(queued(PLANS[0]), "n0")
    assert later is not None and len(later) == 5 and not {*later} & {*first}


@pytest.mark.parametrize(
    ("spec", "settings", "expected"),
    [
        (PLANS[0], {"out_of_memory": lambda _spec: 0.06}, None),
        (PLANS[0], {"isolation": "fresh"}, None),
        (replace(PLANS[0], engine="megatron"), {}, ()),
        (plan(dtype="fp8"), {}, ()),
        (trial_spec(on="1x2 cpu"), {}, ()),
    ],
)
def test_no_graphs_beside_what_needs_its_device_whole_or_compiles_none(
    waiting: Waiting, spec: TrialSpec, settings: dict[str, Any], expected: object
) -> None:
    assert ComingGraphs(Run(**settings), waiting, learns=False).beside(queued(spec), "n0") == expected  # type: ignore[arg-type]
