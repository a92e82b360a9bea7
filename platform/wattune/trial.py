"""A trial: one frozen specification, and the id that is a hash of it."""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from functools import lru_cache
from operator import attrgetter
from typing import Annotated, Any, Final

from wattune.catalog.hardware import UNCOUNTED, ClusterSpec, DeviceSpec
from wattune.catalog.models import OWN_MODEL, ModelSpec
from wattune.catalog.networks import NetworkSpec
from wattune.errors import SpaceError
from wattune.field_types import Bounds, Count, CountOrZero, NotNegative, Positive, default_of, require_kinds
from wattune.plans.axes import AXES, Plan
from wattune.plans.program import FlagValue, Program
from wattune.run import Recorded
from wattune.workload import UNKNOWN_WORKLOAD, Lora, TokenFile, Workload

TRIAL_ID_DIGITS: Final = 12


def check_trial_id(text: str) -> str:
    """Returns a text that has the form of a trial's id. Raises `SpaceError`: it has another form."""
    if not re.fullmatch(rf"[0-9a-f]{{{TRIAL_ID_DIGITS}}}", text):
        raise SpaceError(
            f'"{text[:60]}" is no trial id: {TRIAL_ID_DIGITS} hexadecimal digits; `wattune plan` lists those of a space'
        )
    return text


MOST_REPEATS: Final = 998
"""Most runs of a trial. Numbers from 1000 have other roles (`wattune.fidelity`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Settings of measuring. They are not a part of a trial's identity."""

    warmup_steps: CountOrZero = 2
    """Least steps before anything counts. Warm-up goes on until step time is stable: then the next steps count."""
    min_steps: Count = 20
    """Least measured steps."""
    min_seconds: NotNegative = 15.0
    """Least seconds of measured steps."""
    profile_steps: CountOrZero | None = None
    """Steps under a profiler after the measured ones, to find where time goes. None is 0 on CPUs, where it slows steps
    down, and 1 on GPUs, 2 where a step takes less than 0.2 s: in the first run of each plan, and in all runs of one
    that waits for its host."""
    repeats: Annotated[int, Bounds(ge=1, le=MOST_REPEATS)] = 1
    """Runs of every trial."""
    soak_finalists: CountOrZero = 0
    """Best trials that run once more at the end, until temperatures settle."""
    soak_seconds: Positive = 600.0
    """Least seconds of a finalist's last run. Air-cooled nodes settle in 5 to 15 minutes."""
    timeout_s: Positive = 1800.0
    """Most seconds of a trial, from the start of the engine's build."""
    stall_s: Positive = 60.0
    """Least seconds without a finished step until a trial counts as hung. Longer where its steps are long."""
    start_stall_s: Positive = 300.0
    """Most seconds without any sign of life before the first step of a command: no output, work or new memory."""
    reference_every: CountOrZero = 10
    """Trials on a set of nodes until the reference trial is measured again, to see drift; 0 is never."""
    cooldown_temp_c: Annotated[float, Bounds(ge=15, le=150)] | None = None
    """A trial begins when no device is warmer, in degrees Celsius. None is at once."""
    cooldown_max_s: Positive = 600.0
    """Longest wait for that. Then the trial begins all the same, and its result says how warm it was."""

    def missing_steps(self, num_measured: int, measured_s: float, step_time_s: float) -> int:
        """Returns the steps still to measure, for the least steps and the least seconds; not above 0 if none are."""
        missing_s = max(self.min_seconds - measured_s, 0.0)
        return max(self.min_steps - num_measured, math.ceil(missing_s / step_time_s))


class _Known:
    """An id that was computed once: it is no field of its specification."""

    __slots__ = ("id_text",)

    id_text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSpec(_Known):
    """One configuration, complete and hashable: a model, a cluster, an engine, a workload and a plan."""

    model: ModelSpec
    cluster: ClusterSpec
    engine: str
    workload: Workload
    plan: Plan
    program: Program | None = None
    """The user's command with its environment and flags; None where an engine runs as it is."""
    stands_for: "TrialSpec | None" = None
    """The large trial that this small one is a cut of (`wattune.scale_down`); None of a trial that is itself."""

    def __hash__(self) -> int:
        """Leaves out most of what the trials of a study share: it is asked for tens of thousands of times."""
        return hash((self.plan, self.workload, self.program, self.engine, self.model.name))

    @property
    def trial_id(self) -> str:
        """First 12 hex digits of the SHA-256 of this specification's sorted JSON.

        Sources are left out, and so is every field that came after the first ids and is neutral (`_FIRST_FIELDS`): a
        new axis or field changes the id of no stored trial. Called on an effective specification (see
        `wattune.search.prune`), equal ids mean equal work.
        """
        try:
            return self.id_text
        except AttributeError:
            later = (name for name in ("program", "stands_for") if getattr(self, name) is not None)
            names = sorted((*_PARTS, *later))
            parts = ",".join(f'"{name}":{_identity_text(getattr(self, name))}' for name in names)
            return self.known_as(hashlib.sha256(f"{{{parts}}}".encode()).hexdigest()[:TRIAL_ID_DIGITS]).id_text

    def known_as(self, trial_id: str) -> "TrialSpec":
        """Takes the id that was computed of the same content, and returns itself."""
        object.__setattr__(self, "id_text", trial_id)
        return self

    @property
    def read_as(self) -> "TrialSpec":
        """The trial that its results are read as."""
        return self.stands_for or self

    @property
    def label(self) -> str:
        """The plan in short, with the data parallel degree that follows and flags, such as `dp2 tp2 mbs4 zero1`.

        Of a recording its command, of a small trial that of the large one it stands for.
        """
        if self.stands_for is not None:
            return f"{self.stands_for.label} scaled"
        if self.program is not None and self.engine == RECORDED:
            return Recorded(command=self.program.command).text
        dp = self.plan.dp(self.cluster.world_size)
        label = f"dp{dp} {self.plan.label}" if dp > 1 else self.plan.label
        return label if self.program is None else self.program.labelled(label)

    @property
    def flags(self) -> tuple[tuple[str, FlagValue], ...]:
        """Names and values of its flags; empty without a program."""
        return () if self.program is None else self.program.flags

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens of one step over all ranks; None where nobody described the data."""
        return self.workload.tokens_per_step if self.workload.is_known else None

    def to_json(self) -> dict[str, Any]:
        """Returns plain data for `spec.json`: the specification and its id."""
        data = asdict(self)
        for name in ("program", "stands_for"):  # files of other trials have none
            if data[name] is None:
                del data[name]
        return {"trial_id": self.trial_id, **data}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "TrialSpec":
        """Reads a specification that `to_json` wrote. Sequences become tuples again.

        Raises `KeyError`, `TypeError`, `ValueError`: it is none: a field is missing, unknown, or holds what it cannot.
        """
        cluster = dict(data["cluster"])
        if cluster.get("own_device") is not None:
            cluster["own_device"] = DeviceSpec.from_json(cluster["own_device"])
        if cluster.get("network") is not None:
            cluster["network"] = NetworkSpec(**cluster["network"])
            require_kinds(cluster["network"])
        spec = cls(
            model=_model(tuple(data["model"]), *data["model"].values()),
            cluster=_cluster(_origins(cluster), tuple(cluster), *cluster.values()),
            engine=data["engine"],
            workload=Workload.from_json(data["workload"]),
            plan=plan_of(data["plan"]),
            program=Program.from_json(data["program"]) if data.get("program") else None,
            stands_for=cls.from_json(data["stands_for"]) if data.get("stands_for") else None,
        )
        for part in (spec.workload, spec.workload.tokens, spec.workload.lora, spec.workload.routing, spec.plan):
            if part is not None:
                require_kinds(part)
        for name, choices in _CHOICES.items():
            if getattr(spec.plan, name) not in choices:
                raise ValueError(f'plan.{name}: got "{getattr(spec.plan, name)[:60]}", allowed: {", ".join(choices)}')
        if type(spec.engine) is not str or not spec.engine:
            raise TypeError(f"engine: got {str(spec.engine)[:60]}, allowed: a name")
        return spec


def ids_of(specs: Sequence[TrialSpec]) -> str:
    """Returns the ids of specifications as one text, which tells them and their order from any others."""
    return "".join(spec.trial_id for spec in specs)


def packed(specs: Sequence[TrialSpec]) -> bytes:
    """Returns specifications as JSON: the plans, the rest, and of each specification its places in both and its id."""
    plans, others, each = dict[Plan, int](), dict[TrialSpec, int](), []
    for spec in specs:
        other = replace(spec, plan=Plan())
        each.append((plans.setdefault(spec.plan, len(plans)), others.setdefault(other, len(others)), spec.trial_id))
    return json.dumps([[*map(asdict, plans)], [one.to_json() for one in others], each]).encode()


def unpacked(content: bytes) -> list[TrialSpec]:
    """Returns the specifications that `packed` wrote. Raises what `TrialSpec.from_json` raises: it did not."""
    of_plans, of_others, each = json.loads(content)
    plans, others = [*map(plan_of, of_plans)], [*map(TrialSpec.from_json, of_others)]
    return [replace(others[other], plan=plans[plan]).known_as(trial_id) for plan, other, trial_id in each]


def plan_of(data: Mapping[str, Any]) -> Plan:
    """Makes the plan of a specification that was read; its sequences become tuples again."""
    order = data["rank_order"]
    return Plan(**{**data, "layout": tuple(data["layout"]), "rank_order": order if type(order) is str else (*order,)})


RECORDED: Final = "recorded"
"""Engine of a command that was recorded: nobody planned it."""


def recorded_spec(recorded: Recorded) -> TrialSpec:
    """Returns the specification of a recorded command, of which all but command and machine is unknown."""
    count, _, device = recorded.machine.get("devices", "").partition(" x ")
    one_kind = count.isdecimal() and "," not in device
    return TrialSpec(
        model=OWN_MODEL,
        cluster=ClusterSpec(
            device=device if one_kind else recorded.machine.get("devices", "none"),
            devices_per_node=int(count) if one_kind else 1,
        ),
        engine=RECORDED,
        workload=UNKNOWN_WORKLOAD,
        plan=Plan(),
        program=Program(command=recorded.command),
    )


_CHOICES: Final = {axis.name: axis.choices for axis in AXES.values() if axis.kind == "choice"}
"""The names that an axis of a plan can have, where it has names alone."""

_FIRST_FIELDS: Final[dict[type, frozenset[str]]] = {
    kind: frozenset(names.split())
    for kind, names in (
        (TrialSpec, "model cluster engine workload plan"),
        (
            ModelSpec,
            (
                "name num_layers hidden_size ffn_hidden_size num_heads num_kv_heads vocab_size num_experts "
                "num_experts_per_token expert_capacity_factor norm activation positions rope_base max_positions bias "
                "tied_embeddings"
            ),
        ),
        (
            ClusterSpec,
            "device num_nodes devices_per_node simulate_sensors_of transformer_engine nvlink_domain_size",
        ),
        (Workload, "mode seq_len global_batch_size"),
        (TokenFile, "path dtype"),
        (Lora, "rank targets"),
        (Plan, "tp pp cp ep etp vpp micro_batch_size sharding recompute overlap dtype layout rank_order"),
    )
}
"""Fields that were there when the first ids were given: they count in an id even where they are neutral. Add nothing
here: a field that is not listed counts only where it differs from its default."""


_PARTS: Final = tuple(sorted(_FIRST_FIELDS[TrialSpec]))
"""Parts that count in every id. A program counts where there is one."""


def _identity_text(value: Any) -> str:
    """Returns the part of a specification that its id is a hash of, as JSON.

    Thousands of trials have one model and one cluster, so their texts are kept.
    """
    if type(value) in _VALUES_OF:
        return _kept_text(type(value), *_VALUES_OF[type(value)](value))  # type: ignore[arg-type]  # a class is hashable
    return _as_json(_identity(value))


_as_json: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


@lru_cache(maxsize=64, typed=True)  # typed: 1, 1.0 and true are equal, and not the same in an id
def _kept_text(kind: type[Any], *values: Any) -> str:
    names = (each.name for each in fields(kind))
    return _as_json(_identity(kind(**dict(zip(names, values, strict=True)))))


_VALUES_OF: Final = {kind: attrgetter(*(each.name for each in fields(kind))) for kind in (ModelSpec, ClusterSpec)}


_LEAVES: Final = frozenset({int, float, str, bool, tuple, type(None)})


def _identity(value: Any) -> Any:
    """Returns the part of a specification that its id is a hash of, as plain data."""
    if type(value) in _LEAVES or not is_dataclass(value) or isinstance(value, type):
        return value
    return {
        name: own if type(own) in _LEAVES else _identity(own)
        for name, default in _counted(type(value))
        if (own := getattr(value, name)) != default  # nothing is equal to MISSING
    }


@lru_cache(maxsize=64)
def _counted(kind: type[Any]) -> list[tuple[str, Any]]:
    """Lists the fields of a dataclass that count in an id, each with the value that leaves it out."""
    first = next((_FIRST_FIELDS[one] for one in kind.__mro__ if one in _FIRST_FIELDS), frozenset[str]())
    named = (each for each in fields(kind) if each.name not in UNCOUNTED)
    return [(each.name, MISSING if each.name in first else default_of(each)) for each in named]


@lru_cache(maxsize=64, typed=True)  # typed: 1, 1.0 and true are equal, and not the same in an id
def _model(names: tuple[str, ...], *values: Any) -> ModelSpec:
    """Makes one object for all trials of a model: ten thousand trials are read while a user waits."""
    model = ModelSpec(**dict(zip(names, values, strict=True)))
    require_kinds(model)
    return model


def _origins(cluster: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(one.source for one in (cluster.get("own_device"), cluster.get("network")) if one is not None)


@lru_cache(maxsize=64, typed=True)
def _cluster(origins: tuple[str, ...], names: tuple[str, ...], *values: Any) -> ClusterSpec:
    """Makes one object for all trials of a cluster; another origin makes another, although it would be an equal key."""
    del origins
    cluster = ClusterSpec(**dict(zip(names, values, strict=True)))
    require_kinds(cluster)
    return cluster


def limit_of(spec: TrialSpec) -> float:
    """Returns the watts that each device of a trial may draw; infinite where that is not known."""
    return float(spec.plan.power_limit_w or spec.cluster.sensed_device.power_limit_w or math.inf)
