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
from wattune.cost.defaults import default_coefficients
from wattune.cost.estimate import Estimates, Find, estimate, predict
from wattune.plans.parallel import num_micro_batches
from wattune.trial import TrialSpec

NAMES: Final = {
    "bubble": "pipeline bubble to compute",
    **{f"exposed_comm_{kind}": f"{kind} communication to compute" for kind in ("tp", "pp", "cp", "dp", "ep")},
    "other": "wait for the host to compute",
    "work": "work of a layer and micro-batch, with head and optimizer",
}
"""Invariants by the part of a step that tells their weight."""

NETWORK, LACKING = "network", "network, predicted"
_LEAST: Final = 1e-3


class Invariant(NamedTuple):
    """One invariant of both trials."""

    name: str
    quantity: str
    """Metric, or quantity of `wattune.view.table`, that says its unit."""
    large: float
    small: float
    fabric: str = ""
    """Fabric of the large trial's group; `LACKING` where the small cluster has none, so that its part is predicted."""
    percent: float | None = None
    """Its part in the distance, in percent of a step; None where it has none of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """A small trial beside the large one it stands for."""

    small: TrialSpec
    large: TrialSpec
    parts: tuple[Invariant, ...]
    """Parts of the step as invariants."""
    predicted_frac: float
    """Share of the large step that the small cluster cannot show: its network."""
    predicted_log_std: float
    """Standard deviation of log(measured / predicted) of an estimated step, and so of that part."""
    estimated: Mapping[str, tuple[float, float]]
    """Estimates of the small and of the large trial, by metric."""

    @property
    def percent(self) -> float:
        """The distance D, in percent of a step."""
        return sum(one.percent or 0.0 for one in self.parts)

    @property
    def fits(self) -> bool:
        """True where the small trial is estimated to fit its devices."""
        return self.estimated["memory_headroom_frac"][0] >= 0.0

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
        """The small trial in words."""
        model, full, batch = self.small.model, self.large.model, self.small.workload.global_batch_size
        experts = f", {model.num_experts} of {full.num_experts} experts" if model.num_experts else ""
        plan = replace(self.small, stands_for=None).label
        layers = f"{model.num_layers} of {full.num_layers} layers"
        return f"{self.small.cluster.label}, {plan}, {layers}{experts}, vocabulary {model.vocab_size:,}, batch {batch}"


def fabrics(spec: TrialSpec) -> dict[str, str]:
    """Returns the fabric of each group of ranks that a trial has, by the part of a step that its messages take."""
    plan, world = spec.plan, spec.cluster.world_size
    groups = {"tp": (plan.tp, 1), "cp": (plan.cp, plan.tp), "dp": (plan.dp(world), plan.tp * plan.cp)}
    groups |= {"ep": (plan.ep, plan.etp), "pp": (plan.pp, world // plan.pp)}
    return {
        f"exposed_comm_{kind}": NETWORK if size * stride > spec.cluster.domain else "node"
        for kind, (size, stride) in groups.items()
        if size > 1
    }


def compare(smalls: Sequence[TrialSpec], find: Find) -> list[Scaled]:
    """Compares small trials with those they stand for, by estimates; `PlanError` where a device cannot be predicted."""
    place = {large: number for number, large in enumerate(dict.fromkeys(one.read_as for one in smalls))}
    of_large, of_small = estimate(list(place), find), estimate(smalls, find)
    return [_compared(one, of_small, row, one.read_as, of_large, place[one.read_as]) for row, one in enumerate(smalls)]


def _compared(
    small: TrialSpec, of_small: Estimates, row: int, large: TrialSpec, of_large: Estimates, at: int
) -> Scaled:
    size, used, had = _size(large) / _size(small), fabrics(large), fabrics(small)
    before, after = _parts(of_large, at, 1.0), _parts(of_small, row, size)
    step_s, rows, lacking_s = sum(before.values()), [], 0.0
    for part, name in NAMES.items():
        here, there, fabric = before[part], after[part], used.get(part, "")
        percent: float | None = 100.0 * abs(math.log(max(1.0 + (there - here) / step_s, _LEAST)))
        if fabric == NETWORK != had.get(part):
            fabric, percent, lacking_s = LACKING, None, lacking_s + here
        unit = (_size(large), _size(large)) if part == "work" else (before["work"], after["work"])
        if here or there:
            quantity = "step_time_s" if part == "work" else "percent"
            rows.append(Invariant(name, quantity, here / unit[0], there / unit[1], fabric, percent))
    columns = of_large.columns
    return Scaled(
        small=small,
        large=large,
        parts=tuple(rows),
        predicted_frac=lacking_s / step_s,
        predicted_log_std=float(columns["step_time_s"].log_std[at]),
        estimated={n: (float(c.value[row]), float(columns[n].value[at])) for n, c in of_small.columns.items()},
    )


def _parts(found: Estimates, place: int, size: float) -> dict[str, float]:
    """Returns the parts of one step, scaled. All work is one: a stage with an end of the model has more than others."""
    each = {name: size * float(seconds[place]) for name, seconds in found.step_parts_s.items()}
    work = each.pop("compute") + each.pop("straggler")
    return dict.fromkeys(NAMES, 0.0) | each | {"work": work}


def _size(spec: TrialSpec) -> float:
    """Returns the layers of a stage times its micro-batches."""
    micro_batches = num_micro_batches(spec.plan, spec.cluster.world_size, spec.workload.global_batch_size)
    return spec.model.num_layers / spec.plan.pp * micro_batches


def invariants(one: Scaled) -> list[Invariant]:
    """Returns all invariants: parts of the step, then shapes, depth, memory and how the time is used.

    The intensity is that of a layer's widest product, 2 M N K / (2 (M K + K N + M N)) in FLOP per byte of bf16.
    """
    sides = [_facts(spec) for spec in (one.large, one.small)]
    own = [Invariant(name, kind, value, sides[1][name][1]) for name, (kind, value) in sides[0].items()]
    return [*one.parts, *own]


def _facts(spec: TrialSpec) -> dict[str, tuple[str, float]]:
    plan, model = spec.plan, spec.model
    ((_, batch),) = batches([spec])
    found = predict(batch, default_coefficients(batch.device).on(batch.cluster))
    tokens = plan.micro_batch_size * spec.workload.seq_len / plan.cp
    routed = tokens / plan.tp * plan.ep * plan.etp * model.num_experts_per_token / max(model.num_experts, 1)
    m, n = (routed, model.ffn_hidden_size / plan.etp) if model.is_moe else (tokens, model.ffn_hidden_size / plan.tp)
    k, layers = model.hidden_size, model.num_layers / plan.pp
    stage = layers * (model.num_active_parameters - model.embedding_parameters) / model.num_layers
    activity, room = found.step.activity, batch.device.memory_bytes or math.inf
    spent = {
        "matrix products": "matrix_s",
        "memory traffic": "memory_s",
        "collectives": "collective_s",
        "idle": "idle_s",
    }
    return {
        "arithmetic intensity in FLOP/byte": ("count", round(m * n * k / (m * k + k * n + m * n))),
        "layers a stage": ("count", round(layers)),
        **({"tokens an expert": ("count", round(routed))} if model.is_moe else {}),
        "head to the layers of a stage": ("percent", model.vocab_size * k / stage),
        "share of the memory": ("percent", float(found.memory.peak_bytes[0]) / room),
        **{
            f"time in {name}": ("percent", float(getattr(activity, of)[0].sum() / plan.pp / found.step.step_time_s[0]))
            for name, of in spent.items()
        },
    }
