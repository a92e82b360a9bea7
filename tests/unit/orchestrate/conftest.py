"""A study's controller over made-up nodes, and trials that end as a test wants. Ray is not started."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from specs import trial_spec

from wattune.catalog.hardware import ClusterSpec
from wattune.objective import Question
from wattune.orchestrate.attempt import Attempt
from wattune.orchestrate.cluster import Cluster, Node
from wattune.orchestrate.events import Event, TrialEvent
from wattune.orchestrate.scheduling.controller import StudyController
from wattune.orchestrate.scheduling.study_run import StudyRun
from wattune.run import NO_NUMBERS, Numbers, Run, RunStatus
from wattune.search.search_entry import Finalists, LadderSettings, Search
from wattune.search.strategy import Problem, Strategy, make_strategy
from wattune.storage.study import StudyFolder
from wattune.trial import Measure, TrialSpec

ONE = ClusterSpec(device="cpu", devices_per_node=1)


def make_spec(size: int, cluster: ClusterSpec = ONE) -> TrialSpec:
    return trial_spec(on=cluster, seq_len=8, batch=8, micro_batch_size=size)


def make_node(name: str, **labels: str) -> Node:
    gpus = 0 if labels.get("wattune.io/device", "cpu") == "cpu" else 8
    return Node(node_id=name, name=name, num_cpus=2, num_gpus=gpus, labels=labels)


@dataclass
class World:
    """One study and the nodes it may run on."""

    study: StudyFolder
    nodes: list[Node] = field(default_factory=lambda: [make_node("n0")])
    unanswering: list[Node] = field(default_factory=list)
    """Dead nodes among `nodes`, which Ray has not noticed yet."""
    others: dict[str, dict[str, float]] = field(default_factory=dict)
    """Processors and GPUs that other jobs hold, by the id of the node."""
    wanted: list[ClusterSpec | None] = field(default_factory=list)
    may_come: bool = False
    heard: list[Event] = field(default_factory=list)
    clock_ns: int = 10**18
    measured: Callable[[TrialSpec, int], dict[str, float]] = lambda _spec, _repeat: {}
    """Metrics of a run that completes, by its trial and repeat."""

    def controller(
        self,
        specs: Sequence[TrialSpec],
        *,
        measure: Measure | None = None,
        num_trials: int | None = None,
        strategy: Strategy | None = None,
        listener: Callable[[Event], None] | None = None,
        finalists: Sequence[TrialSpec] = (),
        order: str = "listed",
        race: Finalists | None = None,
        ladder: LadderSettings | None = None,
        early_stop: bool = False,
        question: Question = Question.of("maximize tokens_per_s"),  # noqa: B008 - it is frozen
        **more: Any,
    ) -> StudyController:
        run = StudyRun(
            measure=measure or Measure(),
            num_trials=len(specs) if num_trials is None else num_trials,
            search=Search(seed=more.pop("seed", 0), order=order, finalists=race, ladder=ladder, early_stop=early_stop),
            question=question,
            limits=more.pop("limits", {}),
            tags={"version.wattune": "x"},
            finalists=lambda: finalists,
            clusters=tuple(dict.fromkeys(spec.cluster for spec in specs)),
            **more,
        )
        chosen = strategy or make_strategy("grid", Problem(specs=specs, seed=0))
        controller = StudyController(self.study, chosen, run, listener or self.heard.append)
        controller.begin()
        cluster = Cluster(nodes=tuple(self.nodes), driver_node_id=self.nodes[0].node_id)
        controller.open(cluster, self)
        return controller

    def alive(self) -> list[Node]:
        return self.nodes

    def left(self, nodes: Sequence[Node]) -> list[Node]:
        return [node for node in nodes if node in self.unanswering]

    def used_by_others(self) -> dict[str, dict[str, float]]:
        return dict(self.others)

    def want(self, spec: ClusterSpec | None) -> bool:
        if self.wanted[-1:] != [spec]:
            self.wanted.append(spec)
        return spec is not None and self.may_come

    def write(
        self,
        spec: TrialSpec,
        repeat: int = 0,
        status: RunStatus = RunStatus.COMPLETED,
        *,
        tags: dict[str, str] | None = None,
        numbers: Numbers = NO_NUMBERS,
        took_s: float = 10,
    ) -> None:
        """Writes a result as `run_trial` does."""
        folder = self.study.trial(spec.trial_id, repeat)
        folder.write_spec(spec)
        start_ns, self.clock_ns = self.clock_ns, self.clock_ns + int(took_s * 1e9)
        folder.write_result(
            Run(
                trial_id=spec.trial_id,
                repeat=repeat,
                status=status,
                reason="" if status is RunStatus.COMPLETED else "made up",
                metrics=self.measured(spec, repeat) if status is RunStatus.COMPLETED else {},
                tags=tags or {},
                numbers=numbers,
                start_wall_ns=start_ns,
                end_wall_ns=self.clock_ns,
            )
        )

    def run(
        self, controller: StudyController, running: Attempt, tune_id: str, status: RunStatus = RunStatus.COMPLETED
    ) -> None:
        """Ends a trial with a status."""
        self.write(running.spec, running.repeat, status, tags=dict(running.tags), numbers=running.numbers)
        controller.finish(tune_id, error=False)

    def drain(self, controller: StudyController) -> list[Attempt]:
        """Runs all trials, one after another."""
        trials: list[Attempt] = []
        while (running := controller.next(f"t{len(trials)}")) is not None:
            trials.append(running)
            self.run(controller, running, f"t{len(trials) - 1}")
        return trials

    def result(self, spec: TrialSpec, repeat: int = 0) -> Run:
        found = self.study.trial(spec.trial_id, repeat).result()
        assert found is not None
        return found

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.heard if isinstance(event, TrialEvent)]


class Learner:
    """Proposes in order, and only what it was not told of; remembers what it was told before each proposal."""

    learns = True

    def __init__(self, specs, *, seed: int = 0) -> None:
        self.waiting, self.told, self.knew = list(specs), [], []

    def ask(self, n: int, expected_s=None) -> list[TrialSpec]:
        known = {spec for spec, _ in self.told}
        self.waiting = [spec for spec in self.waiting if spec not in known]
        asked, self.waiting = self.waiting[:n], self.waiting[n:]
        self.knew.append(len(self.told))
        return asked

    def tell(self, spec: TrialSpec, result: Run) -> None:
        self.told.append((spec, result.status))


@pytest.fixture
def learner() -> type[Learner]:
    return Learner


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(StudyFolder.create(tmp_path, "tested", {"study": "tested"}))


@pytest.fixture
def specs() -> list[TrialSpec]:
    return [make_spec(size) for size in (1, 2, 4)]


@pytest.fixture
def make_specs() -> Callable[..., list[TrialSpec]]:
    def make(count: int, cluster: ClusterSpec = ONE) -> list[TrialSpec]:
        return [make_spec(size, cluster) for size in range(1, count + 1)]

    return make


@pytest.fixture
def new_node() -> Callable[..., Node]:
    return make_node
