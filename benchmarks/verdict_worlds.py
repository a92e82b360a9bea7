"""Simulated studies whose truth is known: plans with true speed and power, and runs that see them through a world.

Each plan runs once, and then the race repeats what tells most until the answer is known or as many repeats are used, as
`wattune run --until-decided` does. The reference runs when it is due there. Then it is asked whether the named plan is
the truly best one that keeps the bound. `Knowing` is a judge that knows the law by which runs scatter, drift and
offsets, and lacks the plans' own figures alone: what it misses is not for want of a better model.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

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
Pairs = list[tuple[TrialSpec, Run]]


@dataclass(frozen=True, kw_only=True)
class World:
    """Distortion between the truth and a reading. Spreads, drifts and offsets are fractions.

    `spread` is the standard deviation of a run's power, speed scatters as much; every second plan scatters by `unlike`
    unless it is 0; `freedom` is that of Student's t, 0 the normal distribution; `slow_share` of runs are a tenth slower
    and draw a twentieth less; `drift` and `offset` (of a second node set) are of speed and power; a cold machine draws
    `warming` less, which decays within a tenth of the study; the reference runs on both node sets where they are
    `tied`; `host_share` of plans wait for their host, their speed scatters by 0.1 and power by 0.04; `gain` is the
    sensor's error in every reading; `apart` is the standard deviation of true speeds between plans.
    """

    name: str
    num_plans: int = 20
    spread: float = 0.003
    unlike: float = 0.0
    freedom: float = 0.0
    slow_share: float = 0.0
    drift: tuple[float, float] = (0.0, 0.0)
    warming: float = 0.0
    offset: tuple[float, float] = (0.0, 0.0)
    tied: bool = True
    host_share: float = 0.0
    gain: float = 0.0
    apart: float = 0.15


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


Score = defaultdict[str, list[float]]
FIGURES = (
    "answered", "broken", "believed", "true", "num_runs", "undecided", "open", "knowing", "knowing_broken",
    "knowing_open",
)  # fmt: skip
"""Of many studies of one world: whether a plan was named that is the best or within 2 % of it (or none where nothing
keeps the bound); probability that the next run of the named plan breaks the bound; P(best) of the plan most likely the
best, and whether it is; runs; shares of plans that end undecided, and that do with P(best) of at least `MAY_BE_BEST`.
`knowing` are of a judge that knows the law of the world and has a race of its own, of as many repeats."""


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
        row = None if standings.told_apart(UNTIL) else standings.next({}, UNTIL)
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
    score["answered"].append(is_answered(named, truth))
    if named is not None:
        score["broken"].append(float(truth.breaks[named]))
    if (leader := found.standings.leader) is not None:
        score["believed"].append(leader.best_probability or 0.0)
        score["true"].append(product.specs.index(leader.spec) == truth.best)
    score["num_runs"].append(num_runs)
    score["undecided"].append(len(undecided) / world.num_plans)
    could_be = sum((row.best_probability or 0.0) >= MAY_BE_BEST for row in undecided)
    score["open"].append(could_be / world.num_plans)
    return found.results


def knowing(world: World, seed: int, score: Score) -> None:
    """Adds what a judge that knows the world makes of the same plans."""
    truth = Truth(world, np.random.default_rng(seed))
    judge = Knowing(truth, np.random.default_rng(seed + 2))
    named, _ = named_by(judge, truth, seed)
    score["knowing_open"].append(judge.open_frac)
    score["knowing"].append(is_answered(named, truth))
    if named is not None:
        score["knowing_broken"].append(float(truth.breaks[named]))


def scores(num_studies: int, num_earlier: int = 0, only: str = "", first: int = 0) -> Iterator[tuple[World, Score]]:
    """Simulates studies of each world, in a storage with so many earlier ones; `Knowing` judges those from seed 0."""
    for number, world in enumerate(WORLDS):
        if only not in world.name:
            continue
        score, seeds = Score(list), [first + 1000 * number + 2 * each for each in range(num_studies)]
        before = [FIRST_EARLIER + 1000 * number + 2 * each for each in range(num_earlier)]
        known = learned_scatter(study(world, seed, NO_NUMBERS, Score(list)) for seed in before)
        for seed in seeds:
            study(world, seed, known, score)
            if not first:
                knowing(world, seed, score)
        yield world, score


def _spec(number: int) -> TrialSpec:
    return TrialSpec(
        model=model("llama3_8b"),
        cluster=ClusterSpec(device="h200_sxm", devices_per_node=4),
        engine="torch",
        workload=Workload(seq_len=4096, global_batch_size=16),
        plan=Plan(micro_batch_size=number + 1),
    )
