"""Invariants of a step, of a large trial against a small one, and the distance between the two in percent of a step.

The sensitivity of a step's time t to an invariant is its part's share of the step, d ln t / d ln pi = part / t. It is
integrated from the large value to the small one: |ln(1 + (part' - part) / t)|, with the parts of the small step scaled
to the layers and micro-batches of the large one. Close to each other that is |d ln t / d ln pi| |ln(pi' / pi)|.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from wattune.cost.batch import batches
from wattune.cost.estimate import Estimates, Find, Reals, estimate, predict
from wattune.plans.parallel import num_micro_batches
from wattune.trial import TrialSpec

_COMPUTE: Final = ("compute", "straggler")
"""Parts of a step that are work; one stage has more of it than the others, by its end of the model."""

NAMES: Final = {
    "bubble": "pipeline bubble to compute",
    "exposed_comm_tp": "tp communication to compute",
    "exposed_comm_pp": "pp communication to compute",
    "exposed_comm_cp": "cp communication to compute",
    "exposed_comm_dp": "dp communication to compute",
    "exposed_comm_ep": "ep communication to compute",
    "other": "wait for the host to compute",
    "work": "work of a layer and micro-batch, with head and optimizer",
}
"""Invariants by the part of a step that tells their weight."""

NETWORK, NODE = "network", "node"
_LEAST: Final = 1e-3


class Invariant(NamedTuple):
    """One invariant of both trials."""

    name: str
    large: float
    small: float
    quantity: str
    """Metric or quantity of `wattune.view.table` that says its unit."""
    fabric: str = ""
    """Fabric that the large trial's group uses."""
    percent: float | None = None
    """Its part in the distance, in percent of a step; None where a part of the step tells it already."""
    is_predicted: bool = False
    """True where the small cluster lacks the fabric: the term is predicted, and counts in the interval alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """A small trial beside the large one it stands for."""

    small: TrialSpec
    parts: tuple[Invariant, ...]
    """Parts of the step as invariants."""
    memory_frac: float
    """Estimated peak of the small trial's memory over what its device has."""
    predicted_frac: float
    """Share of the large step that the small cluster cannot show: its network."""
    predicted_log_std: float
    """Standard deviation of log(measured / predicted) of an estimated step, and so of that part."""
    estimated: Mapping[str, tuple[float, float]]
    """Estimates of the small and of the large trial, by metric."""

    @property
    def large(self) -> TrialSpec:
        """The trial that it stands for."""
        assert self.small.stands_for is not None, "cuts stand for a large trial"
        return self.small.stands_for

    @property
    def percent(self) -> float:
        """The distance D, in percent of a step."""
        return sum(one.percent or 0.0 for one in self.parts)

    @property
    def worst(self) -> Invariant:
        """The invariant that is kept least."""
        return max(self.parts, key=lambda one: one.percent or 0.0)

    @property
    def label(self) -> str:
        """The words that every table and plot of it has."""
        share = f"; compute measured, network predicted ({100 * self.predicted_frac:.0f} % of a step)"
        return f"{self.percent:.1f} % of a step away{share if self.predicted_frac else ''}"

    @property
    def text(self) -> str:
        """The small trial in words, and how far it is."""
        small, large = self.small.model, self.large.model
        experts = f", {small.num_experts} of {large.num_experts} experts" if small.num_experts else ""
        return (
            f"{self.small.cluster.label}, {replace(self.small, stands_for=None).label}, {small.num_layers} of "
            f"{large.num_layers} layers{experts}, vocabulary {small.vocab_size:,}, batch "
            f"{self.small.workload.global_batch_size}; {self.label}"
        )


def fabrics(spec: TrialSpec) -> dict[str, str]:
    """Returns the fabric of each group of ranks that a trial has, by the part of a step that its messages take."""
    plan, world, domain = spec.plan, spec.cluster.world_size, spec.cluster.domain
    dp = plan.dp(world)
    spans = {
        "tp": (plan.tp, 1),
        "cp": (plan.cp, plan.tp),
        "dp": (dp, plan.tp * plan.cp),
        "ep": (plan.ep, plan.etp),
        "pp": (plan.pp, world // plan.pp),
    }
    return {
        f"exposed_comm_{kind}": NETWORK if size * stride > domain else NODE
        for kind, (size, stride) in spans.items()
        if size > 1
    }


def compare(smalls: Sequence[TrialSpec], find: Find) -> list[Scaled]:
    """Compares small trials with the large ones they stand for, by estimates of both.

    Raises:
        PlanError: A device cannot be predicted.
    """
    larges = list(dict.fromkeys(one.stands_for for one in smalls if one.stands_for is not None))
    of_large, of_small = estimate(larges, find), estimate(smalls, find)
    place = {spec: number for number, spec in enumerate(larges)}
    own = [place[one.stands_for] for one in smalls if one.stands_for is not None]
    return [
        _compared(one, of_large, at, of_small, number) for number, (one, at) in enumerate(zip(smalls, own, strict=True))
    ]


def kept_facts(one: Scaled, find: Find) -> list[Invariant]:
    """Returns the invariants that no part of the step tells alone: shapes, depth, and how the time is used.

    The intensity is that of a layer's widest product, 2 M N K / (2 (M K + K N + M N)) in FLOP per byte of bf16.
    """
    rows: list[list[tuple[str, float, str]]] = []
    for spec in (one.large, one.small):
        plan, model = spec.plan, spec.model
        ((_, batch),) = batches([spec])
        found = predict(batch, find(batch.device).on(batch.cluster))
        tokens = plan.micro_batch_size * spec.workload.seq_len / plan.cp
        per_expert = tokens / plan.tp * plan.ep * plan.etp * model.num_experts_per_token / max(model.num_experts, 1)
        m = per_expert if model.is_moe else tokens
        n, k = model.ffn_hidden_size / (plan.etp if model.is_moe else plan.tp), model.hidden_size
        layers = model.num_layers / plan.pp
        body = model.num_active_parameters - model.embedding_parameters
        head = model.vocab_size * model.hidden_size
        peak = float(found.memory.peak_bytes[0]) / (batch.device.memory_bytes or math.inf)
        activity, step_s = found.step.activity, float(found.step.step_time_s[0])
        spent = {
            "in matrix products": activity.matrix_s,
            "bound by memory": activity.memory_s,
            "in collectives": activity.collective_s,
            "idle": activity.idle_s,
        }
        rows.append(
            [
                ("arithmetic intensity", m * n * k / (m * k + k * n + m * n), " FLOP/byte"),
                ("layers a stage", layers, "count"),
                *([("tokens an expert", per_expert, "count")] if model.is_moe else []),
                ("head to a stage's layers", head / (layers * body / model.num_layers), "percent"),
                ("share of the memory", peak, "percent"),
                *(
                    (f"time {name}", float(value[0, : plan.pp].mean()) / step_s, "percent")
                    for name, value in spent.items()
                ),
            ]
        )
    return [
        Invariant(name, large, small, quantity) for (name, large, quantity), (_, small, _) in zip(*rows, strict=True)
    ]


def _compared(small: TrialSpec, of_large: Estimates, at: int, of_small: Estimates, number: int) -> Scaled:
    large = small.stands_for
    assert large is not None
    before, after = _parts(of_large.step_parts_s, at), _parts(of_small.step_parts_s, number)
    size = _work_units(large) / _work_units(small)
    step_s, used, lacking = sum(before.values()), fabrics(large), 0.0
    had = fabrics(small)
    rows = []
    for part, name in NAMES.items():
        here, there = before.get(part, 0.0), size * after.get(part, 0.0)
        if not here and not there:
            continue
        is_predicted = used.get(part) == NETWORK and had.get(part) != NETWORK
        lacking += here if is_predicted else 0.0
        change = abs(math.log(max(1.0 + (there - here) / step_s, _LEAST)))
        work = (before["work"], size * after["work"])
        whole = part == "work"
        rows.append(
            Invariant(
                name,
                here / _work_units(large) if whole else here / work[0],
                there / _work_units(large) if whole else there / work[1],
                "step_time_s" if whole else "percent",
                used.get(part, ""),
                0.0 if is_predicted else 100.0 * change,
                is_predicted,
            )
        )
    return Scaled(
        small=small,
        parts=tuple(rows),
        memory_frac=memory_frac(small, of_small, number),
        predicted_frac=lacking / step_s,
        predicted_log_std=float(of_large.columns["step_time_s"].log_std[at]),
        estimated={
            name: (float(column.value[number]), float(of_large.columns[name].value[at]))
            for name, column in of_small.columns.items()
        },
    )


def memory_frac(spec: TrialSpec, found: Estimates, place: int, end: str = "value") -> float:
    """Returns the estimated peak of memory, or an end of its interval, over what the device has."""
    peaks = getattr(found.columns["memory_peak_bytes"], end)
    return float(peaks[place]) / (spec.cluster.sensed_device.memory_bytes or math.inf)


def _parts(parts_s: Mapping[str, Reals], place: int) -> dict[str, float]:
    """Returns the parts of one step, with all work as one."""
    found = {name: float(seconds[place]) for name, seconds in parts_s.items() if name not in _COMPUTE}
    return found | {"work": sum(float(parts_s[name][place]) for name in _COMPUTE)}


def _work_units(spec: TrialSpec) -> float:
    """Returns the layers of a stage times its micro-batches."""
    micro_batches = num_micro_batches(spec.plan, spec.cluster.world_size, spec.workload.global_batch_size)
    return spec.model.num_layers / spec.plan.pp * micro_batches
