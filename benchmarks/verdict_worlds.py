"""Simulated studies whose truth is known: plans with true speed and power, and runs that see them through a world.

Each plan runs once, one of them again and again, and then the race repeats what tells most until the answer is known or
half as many runs are used. Then it is asked whether the named plan is the truly best one that keeps the bound.

Recorded studies of a device that waits for its host are redrawn too (`redrawn_losses`): its host takes another time in
each run. What a plan loses then is against a truth that is known, and not against runs that were lucky once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import model
from wattune.objective import Question
from wattune.plans.axes import Plan
from wattune.ranking.order import ranking_of
from wattune.ranking.posterior import Posterior
from wattune.ranking.spreads import learned_scatter
from wattune.run import NO_NUMBERS, Numbers, Run, RunStatus
from wattune.trial import TrialSpec
from wattune.units import NS_PER_S
from wattune.workload import Workload

POWER = "node_device_power_peak_1s_w"
BOUND_W = 2750.0
QUESTION = Question.of("maximize tokens_per_s", f"{POWER} <= {BOUND_W:g}")
UNTIL = 0.95
NEAR = 0.98
NUM_TRUTHS = 4000
FIRST_EARLIER = 77000
HOST_PACE = 0.15
"""Standard deviation of the time that a host takes, as recorded plans that wait for theirs have it."""
WAITING_POWER = 0.03
"""That of a peak over one less half of the wait, as these repeat."""
STEADY = 0.003
LEAST_WAIT = 0.03
PLAIN_RISK = QUESTION.risk / 5
"""Probability of breaking a bound up to which some runs can tell that a plan keeps it at the question's risk."""
BUDGETS = {"one run of each": 1.0, "until decided": 2.0}
"""Most runs of a redrawn study, over one of each plan. `wattune run --until-decided` repeats as often as it ran."""
Pairs = list[tuple[TrialSpec, Run]]


@dataclass(frozen=True, kw_only=True)
class World:
    """Distortion between the truth and a reading. Spreads, drifts and offsets are fractions."""

    name: str
    num_plans: int = 20
    spread: float = 0.003
    """Standard deviation of a run's power; speed scatters as much."""
    unlike: float = 0.0
    """Every second plan scatters by so much instead, unless it is 0."""
    freedom: float = 0.0
    """Degrees of freedom of Student's t for the scatter; 0 is the normal distribution."""
    slow_share: float = 0.0
    """Share of runs that are a tenth slower, and draw a twentieth less."""
    drift: tuple[float, float] = (0.0, 0.0)
    """Change of speed and power over the study."""
    warming: float = 0.0
    """Share that a cold machine draws less in its first run; it decays within a tenth of the study."""
    offset: tuple[float, float] = (0.0, 0.0)
    """Speed and power of a second node set."""
    tied: bool = True
    """The reference runs on both node sets."""
    host_share: float = 0.0
    """Share of plans that wait for their host: their speed scatters by 0.1, their power by 0.04."""
    gain: float = 0.0
    """Gain error of the sensor, in every reading."""
    apart: float = 0.15
    """Standard deviation of true speeds between plans."""


WORLDS = (
    World(name="plain"),
    World(name="drift of power by 3 %", drift=(-0.01, 0.03)),
    World(name="drift of speed by -5 %", drift=(-0.05, 0.0)),
    World(name="two node sets, tied", offset=(-0.04, 0.02)),
    World(name="two node sets, not tied", offset=(-0.04, 0.02), tied=False),
    World(name="heavy tails", spread=0.004, freedom=3.0),
    World(name="one run in twenty is slow", slow_share=0.05),
    World(name="a machine that warms", warming=0.03),
    World(name="a third waits for its host", host_share=0.33),
    World(name="all wait for their host", host_share=1.0),
    World(name="scatter of 2 %", spread=0.02),
    World(name="scatter of 0.05 %", spread=0.0005),
    World(name="a sensor that reads 5 % high", gain=0.05),
    World(name="plans that scatter unlike", spread=0.002, unlike=0.015),
    World(name="near ties", apart=0.005),
    World(name="four plans", num_plans=4),
)


@dataclass(kw_only=True)
class Score:
    """Outcomes of many studies of one world."""

    answered: list[bool] = field(default_factory=list)
    """A plan was named, and it is the best or within 2 % of it; nothing was where nothing keeps the bound."""
    broken: list[float] = field(default_factory=list)
    """Probability that the next run of the named plan breaks the bound."""
    believed: list[float] = field(default_factory=list)
    """P(best) of the plan that is most likely the best."""
    true: list[bool] = field(default_factory=list)
    """It is."""
    num_runs: list[int] = field(default_factory=list)
    undecided: list[float] = field(default_factory=list)
    """Share of plans that end undecided."""

    @property
    def columns(self) -> tuple[list[float] | list[bool] | list[int], ...]:
        """Figures of a row, each in the mean."""
        return self.answered, self.broken, self.believed, self.true, self.num_runs, self.undecided


class Truth:
    """One study of a world: the plans, and readings of them."""

    def __init__(self, world: World, rng: np.random.Generator) -> None:
        """Draws the plans: a faster one tends to draw more, and about half keep the bound."""
        self.world, self._rng, num = world, rng, world.num_plans
        self.speed = world.apart * rng.standard_normal(num)
        power = 0.3 * self.speed + 0.03 * rng.standard_normal(num)
        self.power = np.log(BOUND_W) + power - np.median(power) - 0.005
        self.waits = np.arange(num) < world.host_share * num
        rng.shuffle(self.waits)
        self.frac = np.where(self.waits, rng.uniform(0.15, 0.5, num), 0.0)
        self.until(1.0)

    def until(self, end: float) -> None:
        """Computes how often each plan's next run breaks the bound, at times from 0 to the end of the study.

        A race goes on after the time 1 and drifts on: what a verdict says is of a run at the study's times.
        """
        times = [end * self._rng.random(NUM_TRUTHS) for _ in self.speed]
        draws = [self.read(np.full(NUM_TRUTHS, plan), time) for plan, time in enumerate(times)]
        self.breaks = np.array([(power > np.log(BOUND_W)).mean() for _, power in draws])

    def read(self, plan: np.ndarray, time: np.ndarray, second: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
        """Returns the logarithms of speed and power that runs of plans read, at times from 0 on."""
        world, rng, num = self.world, self._rng, len(plan)
        second = rng.random(num) < 0.5 if second is None else second
        spread = np.where((plan % 2 == 1) & (world.unlike > 0), world.unlike, world.spread)
        slow = rng.random(num) < world.slow_share
        found = []
        for true, drift, offset, host, fall in (
            (self.speed, world.drift[0], world.offset[0], 0.1, 0.1),
            (self.power, world.drift[1], world.offset[1], 0.04, 0.05),
        ):
            noise = rng.standard_t(world.freedom, num) if world.freedom else rng.standard_normal(num)
            error = np.where(self.waits[plan], host, spread) * noise
            found.append(true[plan] + drift * (time - 0.5) + offset * second + error - fall * slow)
        return found[0], found[1] + np.log1p(world.gain) - world.warming * np.exp(-10.0 * time)

    @property
    def best(self) -> int | None:
        """The fastest plan whose next run keeps the bound at the risk; None without one."""
        able = np.flatnonzero(self.breaks <= QUESTION.risk)
        return int(able[self.speed[able].argmax()]) if len(able) else None


def study(world: World, seed: int, known: Numbers = NO_NUMBERS) -> tuple[Posterior, list[TrialSpec], Truth]:
    """Simulates one study, with what was known of scatter before; returns what it found, its plans, and the truth."""
    truth = Truth(world, np.random.default_rng(seed))
    order = np.random.default_rng(seed + 1).permutation(world.num_plans)
    reference, pairs, specs = int(order[0]), Pairs(), [_spec(number) for number in range(world.num_plans)]
    total = world.num_plans + world.num_plans // 5 + 2

    def measure(plan: int, second: bool) -> None:
        time = len(pairs) / total
        speed, power = truth.read(np.array([plan]), np.array([time]), np.array([second]))
        repeat = sum(run.trial_id == specs[plan].trial_id for _, run in pairs)
        metrics = {"tokens_per_s": 1e4 * float(np.exp(speed[0])), POWER: float(np.exp(power[0]))}
        metrics["step_time_s"] = 65_536.0 / metrics["tokens_per_s"]
        run = Run(
            trial_id=specs[plan].trial_id,
            repeat=repeat,
            status=RunStatus.COMPLETED,
            metrics=metrics | {"host_bound_frac": float(truth.frac[plan])},
            tags={"simulated": "false", "nodes": "b" if second else "a"},
            numbers=known,
            start_wall_ns=int((1000.0 + 60.0 * len(pairs)) * NS_PER_S),
        )
        pairs.append((specs[plan], run))

    several = world.offset != (0.0, 0.0)
    for place, plan in enumerate(order):
        measure(int(plan), several and place % 2 == 1)
        if place % 5 == 0:
            measure(reference, several and world.tied and place % 10 == 5)
    found = Posterior(pairs, QUESTION)
    while len(pairs) < 1.5 * total and not found.standings.told_apart(UNTIL):
        row = found.standings.next({})
        if row is None:
            break
        measure(specs.index(row.spec), several and len(pairs) % 2 == 1)
        found = Posterior(pairs, QUESTION)
    truth.until(len(pairs) / total)
    return found, specs, truth


def judge(found: Posterior, specs: list[TrialSpec], truth: Truth, score: Score) -> None:
    """Adds what came of a study."""
    ranking, best = ranking_of({"": found}), truth.best
    named = None if ranking.best is None else specs.index(ranking.best.spec)
    if named is None or best is None:
        score.answered.append(named is None and best is None)
    else:
        score.answered.append(bool(np.exp(truth.speed[named] - truth.speed[best]) >= NEAR))
    if named is not None:
        score.broken.append(float(truth.breaks[named]))
    leader = found.standings.leader
    if leader is not None:
        score.believed.append(leader.best_probability)
        score.true.append(specs.index(leader.row.spec) == best)
    score.num_runs.append(len(found.results))
    score.undecided.append(len(ranking.undecided) / len(specs))


def scores(num_studies: int, num_earlier: int = 0) -> Iterator[tuple[World, Score]]:
    """Simulates so many studies of each world, in a storage with so many earlier studies of it."""
    for number, world in enumerate(WORLDS):
        score = Score()
        earlier = [study(world, FIRST_EARLIER + 1000 * number + 2 * seed)[0].results for seed in range(num_earlier)]
        known = learned_scatter(earlier)
        for seed in range(num_studies):
            judge(*study(world, 1000 * number + 2 * seed, known), score)
        yield world, score


class Redrawn:
    """A recorded study whose devices may wait for their host: a step takes the longer time of the two."""

    def __init__(self, results: Pairs, bound_w: float, rng: np.random.Generator) -> None:
        """Takes the times and the peaks of the plans; the host of a plan that did not wait takes 0.8 of its step."""
        runs: dict[TrialSpec, list[dict[str, float]]] = {}
        for spec, run in results:
            if run.status is RunStatus.COMPLETED:
                runs.setdefault(spec, []).append(dict(run.metrics))
        self.specs, self._rng = [*runs], rng
        step, device, wait, peak, speed = (
            np.array([np.mean([each[name] for each in own]) for own in runs.values()])
            for name in ("step_time_s", "device_bound_step_time_s", "host_bound_frac", POWER, "tokens_per_s")
        )
        self._device_s, self._host_s = device, np.where(wait < LEAST_WAIT, 0.8 * device, step)
        self._peak_w, self._tokens = peak / (1.0 - wait / 2.0), speed * step
        draws = [self.read(np.full(NUM_TRUTHS, plan)) for plan in range(len(self.specs))]
        self.speed = np.array([each[0].mean() for each in draws])
        self.breaks = np.array([(each[1] > bound_w).mean() for each in draws])

    def read(self, plan: np.ndarray) -> tuple[np.ndarray, ...]:
        """Returns tokens per second, peaks and waits of runs."""
        noise = self._rng.standard_normal((3, len(plan)))
        step = np.maximum(self._device_s[plan], self._host_s[plan] * np.exp(HOST_PACE * noise[0]))
        wait = 1.0 - self._device_s[plan] / step
        spread = np.where(wait > LEAST_WAIT, WAITING_POWER, STEADY)
        peak = self._peak_w[plan] * (1.0 - wait / 2.0) * np.exp(spread * noise[1])
        return self._tokens[plan] / step * np.exp(STEADY * noise[2]), peak, wait

    def measure(self, plan: int, pairs: Pairs) -> None:
        """Runs a plan once more."""
        speed, peak, wait = (float(one[0]) for one in self.read(np.array([plan])))
        spec = self.specs[plan]
        run = Run(
            trial_id=spec.trial_id,
            repeat=sum(run.trial_id == spec.trial_id for _, run in pairs),
            status=RunStatus.COMPLETED,
            metrics={
                "tokens_per_s": speed,
                POWER: peak,
                "step_time_s": float(self._tokens[plan]) / speed,
                "host_bound_frac": wait,
            },
            tags={"simulated": "false", "nodes": "a"},
            start_wall_ns=int((1000.0 + 60.0 * len(pairs)) * NS_PER_S),
        )
        pairs.append((spec, run))

    def lost(self, named: TrialSpec | None, risk: float = QUESTION.risk) -> float | None:
        """Returns by how much a named plan is slower than the best that keeps the bound at a risk; None without any."""
        able = np.flatnonzero(self.breaks <= risk)
        if not len(able):
            return None
        return 1.0 if named is None else float(1.0 - self.speed[self.specs.index(named)] / self.speed[able].max())


def redrawn_losses(results: Pairs, question: Question, num_studies: int) -> Iterator[tuple[str, list[Sequence[float]]]]:
    """Yields what verdicts lose after one run of each plan, and after repeats until decided or twice as many.

    Of each study: share lost against the best plan at the risk, and against the best at a fifth of it, which some runs
    can tell; probability that the named plan breaks its bound; runs; share undecided.
    """
    at: dict[str, list[Sequence[float]]] = {name: [] for name in BUDGETS}
    for seed in range(num_studies):
        rng, pairs = np.random.default_rng(seed), Pairs()
        truth = Redrawn(results, question.constraints[0].factor, rng)
        num = len(truth.specs)
        for place, plan in enumerate(rng.permutation(num)):
            truth.measure(int(plan), pairs)
            if place % 12 == 0:
                truth.measure(0, pairs)
        first = len(pairs)
        for name, rows in at.items():
            found = Posterior(pairs, question)
            while len(pairs) < BUDGETS[name] * first and not found.standings.told_apart(UNTIL):
                if (row := found.standings.next({})) is None:
                    break
                truth.measure(truth.specs.index(row.spec), pairs)
                found = Posterior(pairs, question)
            ranking = ranking_of({"": found})
            named = None if ranking.best is None else ranking.best.spec
            if (lost := truth.lost(named)) is not None:
                broken = 0.0 if named is None else float(truth.breaks[truth.specs.index(named)])
                plain = truth.lost(named, PLAIN_RISK)
                rows.append(
                    (lost, np.nan if plain is None else plain, broken, len(pairs), len(ranking.undecided) / num)
                )
    yield from at.items()


def _spec(number: int) -> TrialSpec:
    return TrialSpec(
        model=model("llama3_8b"),
        cluster=ClusterSpec(device="h200_sxm", devices_per_node=4),
        engine="torch",
        workload=Workload(seq_len=4096, global_batch_size=16),
        plan=Plan(micro_batch_size=number + 1),
    )
