"""Simulated studies whose truth is known: plans with true speed and power, and runs that see them through a world.

Each plan runs once, and then the race repeats what tells most until the answer is known or as many repeats are used, as
`wattune run --until-decided` does. The reference runs when it is due there. Then it is asked whether the named plan is
the truly best one that keeps the bound. `Knowing` is a judge that knows the law by which runs scatter, drift and
offsets, and lacks the plans' own figures alone: what it misses is not for want of a better model.

Recorded studies of a device that waits for its host are redrawn too (`redrawn_losses`): its host takes another time in
each run. What a plan loses then is against a truth that is known, and not against runs that were lucky once.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import model
from wattune.objective import Question
from wattune.orchestrate.scheduling.references import OPENING_RUNS
from wattune.plans.axes import Plan
from wattune.ranking.best import MAY_BE_BEST
from wattune.ranking.order import ranking_of
from wattune.ranking.posterior import Posterior
from wattune.ranking.spreads import learned_scatter
from wattune.run import NO_NUMBERS, Numbers, Run, RunStatus
from wattune.trial import Measure, TrialSpec
from wattune.units import NS_PER_S
from wattune.workload import Workload

POWER = "node_device_power_peak_1s_w"
BOUND_W = 2750.0
QUESTION = Question.of("maximize tokens_per_s", f"{POWER} <= {BOUND_W:g}")
EVERY = Measure().reference_every
UNTIL = 0.95
NEAR = 0.98
NUM_TRUTHS = 4000
NUM_KNOWING = 2000
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
    open: list[float] = field(default_factory=list)
    """Share of plans that do, and are the best with a probability of at least `MAY_BE_BEST`."""
    knowing: list[bool] = field(default_factory=list)
    """As `answered`, of a judge that knows the law of the world and has a race of its own, of as many repeats."""
    knowing_broken: list[float] = field(default_factory=list)
    knowing_open: list[float] = field(default_factory=list)

    @property
    def columns(self) -> tuple[list[float] | list[bool] | list[int], ...]:
        """Figures of a row, each in the mean."""
        own = self.answered, self.broken, self.believed, self.true, self.num_runs, self.undecided, self.open
        return *own, self.knowing, self.knowing_broken, self.knowing_open


SLOWER = 0.1, 0.05
"""By how much a slow run reads less speed and power."""


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
        slow = rng.random(num) < world.slow_share
        found = []
        for true, spread, away, fall in zip(
            (self.speed, self.power), self.spreads(plan), self.effects(time, second), SLOWER, strict=True
        ):
            noise = rng.standard_t(world.freedom, num) if world.freedom else rng.standard_normal(num)
            found.append(true[plan] + away + spread * noise - fall * slow)
        return found[0], found[1]

    def spreads(self, plan: np.ndarray) -> tuple[np.ndarray, ...]:
        """Returns the scales by which speed and power of plans scatter."""
        own = np.where((plan % 2 == 1) & (self.world.unlike > 0), self.world.unlike, self.world.spread)
        return np.where(self.waits[plan], 0.1, own), np.where(self.waits[plan], 0.04, own)

    def effects(self, time: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, ...]:
        """Returns what all plans share in speed and power: drift, node set, gain, and how cold the machine is."""
        world = self.world
        speed, power = (drift * (time - 0.5) + at * second for drift, at in zip(world.drift, world.offset, strict=True))
        return speed, power + np.log1p(world.gain) - world.warming * np.exp(-10.0 * time)

    @property
    def best(self) -> int | None:
        """The fastest plan whose next run keeps the bound at the risk; None without one."""
        able = np.flatnonzero(self.breaks <= QUESTION.risk)
        return int(able[self.speed[able].argmax()]) if len(able) else None


class Knowing:
    """A judge that knows a world's law, and its effects exactly: plans' figures alone are to be learned."""

    def __init__(self, truth: Truth, rng: np.random.Generator) -> None:
        """Begins without a run."""
        self._truth, self._rng, num = truth, rng, truth.world.num_plans
        self._runs: list[list[np.ndarray]] = [[] for _ in range(num)]
        self._figures = np.zeros((2, NUM_KNOWING, num))
        self._end, self._new = 1.0, set(range(num))
        self.open_frac = 1.0
        """Share of plans that are undecided and the best with a probability of at least `MAY_BE_BEST`."""

    def tell(self, plan: int, read: np.ndarray, time: float, second: bool) -> None:
        """Takes in what a run read: logarithms of speed and power."""
        away = self._truth.effects(np.array(time), np.array(second))
        self._runs[plan].append(read - np.array(away))
        self._end, self._new = max(time, 1.0), self._new | {plan}

    def _learn(self, plan: int) -> None:
        """Draws a plan's speed and power from their posterior, on a grid."""
        world, runs = self._truth.world, np.array(self._runs[plan])
        scales = [float(one[0]) for one in self._truth.spreads(np.array([plan]))]
        grids = []
        for values, scale, fall in zip(runs.T, scales, SLOWER, strict=True):
            reach, step = (12.0 if world.freedom else 6.0) * scale, 0.3 * scale / np.sqrt(len(values))
            high = values.max() + (fall if world.slow_share else 0.0)
            grids.append(np.arange(values.min() - reach, high + reach, step))
        log = -0.5 * (grids[0] / world.apart)[:, None] ** 2
        log = log - 0.5 * ((grids[1] - np.log(BOUND_W) + 0.005 - 0.3 * grids[0][:, None]) / 0.03) ** 2
        for run in runs:
            log = log + np.logaddexp(
                np.log(1.0 - world.slow_share) + self._log_density(run, grids, scales, 0.0),
                np.log(max(world.slow_share, 1e-300)) + self._log_density(run, grids, scales, 1.0),
            )
        share = np.cumsum(np.exp(log - log.max()))
        at = np.searchsorted(share / share[-1], self._rng.random(NUM_KNOWING))
        self._figures[:, :, plan] = grids[0][at // len(grids[1])], grids[1][at % len(grids[1])]

    def _log_density(self, run: np.ndarray, grids: list[np.ndarray], scales: list[float], slow: float) -> np.ndarray:
        freedom, found = self._truth.world.freedom, []
        for value, grid, scale, fall in zip(run, grids, scales, SLOWER, strict=True):
            squares = ((value + slow * fall - grid) / scale) ** 2
            found.append(-0.5 * (freedom + 1.0) * np.log1p(squares / freedom) if freedom else -0.5 * squares)
        return np.asarray(found[0][:, None] + found[1])

    def look(self) -> tuple[int | None, int | None]:
        """Returns the plan that it names, and the one to run next: none once it knows the answer."""
        truth, num, rng = self._truth, self._truth.world.num_plans, self._rng
        for plan in self._new:
            self._learn(plan)
        self._new = set()
        speed, power = self._figures
        time, second = self._end * rng.random(NUM_TRUTHS), rng.random(NUM_TRUTHS) < 0.5
        noise = rng.standard_t(truth.world.freedom, NUM_TRUTHS) if truth.world.freedom else rng.normal(size=NUM_TRUTHS)
        shared = truth.effects(time, second)[1] - SLOWER[1] * (rng.random(NUM_TRUTHS) < truth.world.slow_share)
        scales = truth.spreads(np.arange(num))[1]
        away = {scale: np.sort(shared + scale * noise) for scale in set(scales.tolist())}
        breaks = np.stack(
            [
                1.0 - np.searchsorted(away[scale], np.log(BOUND_W) - power[:, plan]) / NUM_TRUTHS
                for plan, scale in enumerate(scales.tolist())
            ],
            axis=1,
        )
        kept = breaks <= QUESTION.risk
        first = np.where(kept.any(axis=1), np.where(kept, speed, -np.inf).argmax(axis=1), num)
        likely = np.bincount(first, minlength=num + 1) / NUM_KNOWING
        expected = breaks.mean(axis=0)
        undecided = (expected > QUESTION.risk) & (expected <= 1.0 - QUESTION.risk)
        self.open_frac = float((undecided & (likely[:num] >= MAY_BE_BEST)).mean())
        able = np.flatnonzero(expected <= QUESTION.risk)
        named = int(able[speed.mean(axis=0)[able].argmax()]) if len(able) else None
        pair = np.argsort(-likely[:num])[:2].tolist()
        if likely[num] >= UNTIL or (likely[pair[0]] >= UNTIL and pair[0] == named):
            return named, None
        worth = [kept[:, one].var() + speed[:, one].var() / (1.0 - NEAR) ** 2 for one in pair]
        return named, max(pair, key=lambda one: worth[pair.index(one)] / (len(self._runs[one]) + 1))


class Product:
    """The judge that is tried: the posterior of wattune, and its race."""

    def __init__(self, truth: Truth, known: Numbers) -> None:
        """Begins without a run, with what was known of scatter before."""
        self._truth, self._known, self._pairs = truth, known, Pairs()
        self.specs = [_spec(number) for number in range(truth.world.num_plans)]
        self.found = Posterior((), QUESTION)

    def tell(self, plan: int, read: np.ndarray, time: float, second: bool) -> None:
        """Takes in what a run read: logarithms of speed and power."""
        del time
        spec, num = self.specs[plan], len(self._pairs)
        metrics = {"tokens_per_s": 1e4 * float(np.exp(read[0])), POWER: float(np.exp(read[1]))}
        metrics["step_time_s"] = 65_536.0 / metrics["tokens_per_s"]
        run = Run(
            trial_id=spec.trial_id,
            repeat=sum(run.trial_id == spec.trial_id for _, run in self._pairs),
            status=RunStatus.COMPLETED,
            metrics=metrics | {"host_bound_frac": float(self._truth.frac[plan])},
            tags={"simulated": "false", "nodes": "b" if second else "a"},
            numbers=self._known,
            start_wall_ns=int((1000.0 + 60.0 * num) * NS_PER_S),
        )
        self._pairs.append((spec, run))

    def look(self) -> tuple[int | None, int | None]:
        """Returns the plan that it names, and the one to run next: none once it knows the answer."""
        self.found = Posterior(self._pairs, QUESTION)
        best, standings = ranking_of({"": self.found}).best, self.found.standings
        row = None if standings.told_apart(UNTIL) else standings.next({})
        named, plan = (None if one is None else self.specs.index(one.spec) for one in (best, row))
        return named, plan


def named_by(judge: Product | Knowing, truth: Truth, seed: int) -> tuple[int | None, int]:
    """Simulates a study and a judge's race; returns the plan that it names, and the runs."""
    world, num_runs, since = truth.world, 0, Counter[bool]()
    order = np.random.default_rng(seed + 1).permutation(world.num_plans).tolist()
    total = world.num_plans + OPENING_RUNS + world.num_plans // EVERY

    def measure(plan: int, second: bool) -> None:
        nonlocal num_runs
        time = num_runs / total
        read = truth.read(np.array([plan]), np.array([time]), np.array([second]))
        judge.tell(plan, np.concatenate(read), time, second)
        num_runs += 1

    def run(plan: int, place: int) -> None:
        """Measures a plan on the next node set, and the reference before it where that is due."""
        second = world.offset != (0.0, 0.0) and place % 2 == 1
        if since[second] >= EVERY and (world.tied or not second):
            since[second] = 0
            measure(order[0], second)
        since[second] += 1
        measure(plan, second)

    for _ in range(OPENING_RUNS if world.num_plans >= EVERY else 0):
        measure(order[0], False)
    for place, plan in enumerate(order):
        run(plan, place)
    named, plan = judge.look()
    for place in range(world.num_plans):
        if plan is None:
            break
        run(plan, place)
        named, plan = judge.look()
    truth.until(num_runs / total)
    return named, num_runs


def is_answered(named: int | None, truth: Truth) -> bool:
    """Tells whether the named plan is the best or near it; none is right where nothing keeps the bound."""
    best = truth.best
    if named is None or best is None:
        return named is None and best is None
    return bool(np.exp(truth.speed[named] - truth.speed[best]) >= NEAR)


def study(world: World, seed: int, known: Numbers, score: Score) -> Pairs:
    """Adds what came of one study, and returns its results."""
    truth = Truth(world, np.random.default_rng(seed))
    product = Product(truth, known)
    named, num_runs = named_by(product, truth, seed)
    found, undecided = product.found, ranking_of({"": product.found}).undecided
    score.answered.append(is_answered(named, truth))
    if named is not None:
        score.broken.append(float(truth.breaks[named]))
    if (leader := found.standings.leader) is not None:
        score.believed.append(leader.best_probability or 0.0)
        score.true.append(product.specs.index(leader.spec) == truth.best)
    score.num_runs.append(num_runs)
    score.undecided.append(len(undecided) / world.num_plans)
    could_be = sum((row.best_probability or 0.0) >= MAY_BE_BEST for row in undecided)
    score.open.append(could_be / world.num_plans)
    return found.results


def knowing(world: World, seed: int, score: Score) -> None:
    """Adds what a judge that knows the world makes of the same plans."""
    truth = Truth(world, np.random.default_rng(seed))
    judge = Knowing(truth, np.random.default_rng(seed + 2))
    named, _ = named_by(judge, truth, seed)
    score.knowing_open.append(judge.open_frac)
    score.knowing.append(is_answered(named, truth))
    if named is not None:
        score.knowing_broken.append(float(truth.breaks[named]))


def scores(num_studies: int, num_earlier: int = 0, only: str = "") -> Iterator[tuple[World, Score]]:
    """Simulates so many studies of each world, in a storage with so many earlier studies of it."""
    for number, world in enumerate(WORLDS):
        if only not in world.name:
            continue
        score, seeds = Score(), [1000 * number + 2 * each for each in range(num_studies)]
        before = [FIRST_EARLIER + 1000 * number + 2 * each for each in range(num_earlier)]
        known = learned_scatter(study(world, seed, NO_NUMBERS, Score()) for seed in before)
        for seed in seeds:
            study(world, seed, known, score)
            knowing(world, seed, score)
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

    def lucky(self, pairs: Pairs, bound_w: float) -> tuple[float, float] | None:
        """Returns what the truly best plan loses against the fastest one whose every run so far kept the bound.

        That is how `lost_frac` of verdicts.py counts. Who knows the truth names this plan. The other figure is of any
        rule that loses 2 % at most: how often the plan breaks the bound that breaks it least among those within 2 %.
        """
        able = np.flatnonzero(self.breaks <= QUESTION.risk)
        runs: dict[TrialSpec, list[Run]] = {}
        for spec, run in pairs:
            runs.setdefault(spec, []).append(run)
        read = {spec: float(np.mean([run.metrics["tokens_per_s"] for run in own])) for spec, own in runs.items()}
        kept = [read[spec] for spec, own in runs.items() if all(run.metrics[POWER] <= bound_w for run in own)]
        if not kept:
            return None
        best = read[self.specs[able[self.speed[able].argmax()]]] if len(able) else 0.0
        near = [self.specs.index(spec) for spec in read if read[spec] >= NEAR * max(kept)]
        return 1.0 - best / max(kept), float(self.breaks[near].min())

    def lost(self, named: TrialSpec | None, risk: float = QUESTION.risk) -> float | None:
        """Returns by how much a named plan is slower than the best that keeps the bound at a risk; None without any."""
        able = np.flatnonzero(self.breaks <= risk)
        if not len(able):
            return None
        return 1.0 if named is None else float(1.0 - self.speed[self.specs.index(named)] / self.speed[able].max())


def lucky_losses(results: Pairs, question: Question, num_studies: int) -> list[tuple[float, float]]:
    """Computes in redraws what the truth itself, and any rule, pays against plans that were lucky in one run each."""
    found = []
    for seed in range(num_studies):
        rng, pairs, bound_w = np.random.default_rng(seed), Pairs(), question.constraints[0].factor
        truth = Redrawn(results, bound_w, rng)
        for plan in rng.permutation(len(truth.specs)):
            truth.measure(int(plan), pairs)
        if (lost := truth.lucky(pairs, bound_w)) is not None:
            found.append(lost)
    return found


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
