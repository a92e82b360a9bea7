"""What a trial is and what came of it: one frozen specification in, one frozen result out."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import ModelSpec
from wattune.errors import SpaceError
from wattune.plan.axes import Plan

TRIAL_ID_DIGITS: Final = 12

FIRST_REFERENCE_REPEAT: Final = 1000
"""Repeats from this number on are of an reference: the same trial measured again and again to see drift."""


def check_trial_id(text: str) -> str:
    """A text that has the form of a trial's id.

    Raises:
        SpaceError: It has another one.
    """
    if not re.fullmatch(rf"[0-9a-f]{{{TRIAL_ID_DIGITS}}}", text):
        raise SpaceError(
            f'"{text[:60]}" is no trial id: {TRIAL_ID_DIGITS} hexadecimal digits; `wattune plan` lists those of a space'
        )
    return text


LORA_TARGETS: Final = ("q", "k", "v", "o", "gate", "up", "down")
"""Linear layers of a decoder layer an adapter may stand beside: attention's four, and the feed-forward block's."""

TOKEN_DTYPES: Final = {"uint16": 2, "uint32": 4, "int32": 4, "int64": 8}
"""Types a token file may hold, in the machine's byte order, and the bytes of one token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """A file of token numbers and nothing else, memory-mapped by every rank."""

    path: str
    """On every node; a relative one starts in the workers' folder."""
    dtype: str = "uint16"
    """One of `TOKEN_DTYPES`."""

    def problem(self, seq_len: int) -> str | None:
        """Why no sequence can be taken from it, as far as its size tells; None where one can.

        Raises:
            OSError: It cannot be looked at from here.
        """
        size_bytes, item_bytes = Path(self.path).stat().st_size, TOKEN_DTYPES[self.dtype]
        if size_bytes % item_bytes:
            return (
                f"{self.path} has {size_bytes} bytes, no multiple of the {item_bytes} of {self.dtype}; "
                "name its data type"
            )
        if size_bytes // item_bytes <= seq_len:
            return (
                f"{self.path} has {size_bytes // item_bytes} tokens of {self.dtype}; a sequence of seq_len={seq_len} "
                f"needs {seq_len + 1}"
            )
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Low-rank adapters, trained beside frozen weights (Hu et al. 2021, arXiv 2106.09685)."""

    rank: int
    targets: tuple[str, ...] = ("q", "v")
    """Names of `LORA_TARGETS`; the paper adapts queries and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How tokens are sent to experts; `wattune.engines.model.routing` says what each engine then does."""

    by: str
    """One of `wattune.plan.engines.ROUTINGS`. `balanced`: every expert gets the same number of tokens; `skew`: shares
    by Zipf's law; `learned`: the router chooses, and an auxiliary loss balances it."""
    skew: float = 0.0
    """Exponent of Zipf's law where `by` is `skew`: the expert of rank r is sent tokens in proportion to r^-skew."""

    def __str__(self) -> str:
        """The routing in short, such as `skew 1.2`."""
        return f"skew {self.skew:g}" if self.by == "skew" else self.by


UNCONTROLLED: Final = "uncontrolled"
"""What the routing of a mixture of experts is called where the workload names none, as before there was a choice: the
router chooses and nothing balances it, so that the load moves while a trial runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is trained on: sequence length, batch, and the kind of work."""

    mode: str = "pretrain"
    """`pretrain`: all weights are trained; `lora`: adapters are; `prefill`: prompts run forward, nothing is trained."""
    seq_len: int
    global_batch_size: int
    tokens: TokenFile | None = None
    """Where tokens come from; None draws them from the seed."""
    lora: Lora | None = None
    """What is trained where `mode` is `lora`."""
    routing: Routing | None = None
    """How tokens are sent to experts; None for models without experts, and in studies from before there was a choice
    (`UNCONTROLLED`)."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens processed in one step over all ranks: sequences are whole, none is padded."""
        return self.seq_len * self.global_batch_size

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Workload":
        """The workload whose fields are given as plain data; lists become tuples again."""
        tokens, lora, routing = data.get("tokens"), data.get("lora"), data.get("routing")
        return cls(
            **{
                **data,
                "tokens": tokens and TokenFile(**tokens),
                "lora": lora and Lora(rank=lora["rank"], targets=tuple(lora["targets"])),
                "routing": routing and Routing(**routing),
            }
        )


_LATER: Final = ("tokens", "lora", "routing")
"""Fields of a workload that came after ids had been given; None is what was before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """How a trial is measured; not part of what it is."""

    warmup_steps: int = 5
    """Least steps before anything counts; warm-up goes on until step time is stable."""
    min_steps: int = 20
    min_seconds: float = 15.0
    repeats: int = 1
    soak_finalists: int = 0
    """Best trials to run once more at the end, long enough for temperatures to settle."""
    soak_seconds: float = 600.0
    """Least seconds of a finalist's last run; air-cooled nodes settle in 5 to 15 minutes."""
    timeout_s: float = 1800.0
    """Longest the workers of a trial may take, from the start of the engine's build."""
    profile_steps: int | None = None
    """Steps to run under a profiler after the measured ones, to see where their time goes; None is 2 on GPUs and none
    on CPUs, where a profiler slows down what it looks at."""
    stall_s: float = 60.0
    """Least seconds without a finished step after which a trial counts as hung; longer where its steps are long."""
    reference_every: int = 10
    """On every set of nodes, trials after which one of them is measured again to see drift; 0 is never."""
    cooldown_temp_c: float | None = None
    """A trial begins when no device of its nodes is warmer; None is at once."""
    cooldown_max_s: float = 600.0
    """Longest to wait for that; the trial then begins all the same, and its result says how warm it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSpec:
    """One configuration, complete and hashable: a model, a cluster, an engine, a workload and a plan."""

    model: ModelSpec
    cluster: ClusterSpec
    engine: str
    workload: Workload
    plan: Plan

    @property
    def trial_id(self) -> str:
        """First 12 hex digits of the SHA-256 of this specification's sorted JSON, sources left out.

        Called on an effective specification (equivalent, see `wattune.search.prune`), equal ids mean equal work.
        """
        content = asdict(self)
        del content["model"]["source"]
        # Ids of studies from before there was a choice stay what they were.
        content["workload"] = {
            name: value for name, value in content["workload"].items() if name not in _LATER or value is not None
        }
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:TRIAL_ID_DIGITS]

    @property
    def label(self) -> str:
        """The plan in short with the data parallel degree that follows, such as `dp2 tp2 mbs4 zero1`."""
        dp = self.plan.dp(self.cluster.world_size)
        return f"dp{dp} {self.plan.label}" if dp > 1 else self.plan.label

    def to_json(self) -> dict[str, Any]:
        """Plain data for `spec.json`, the trial's id beside its content."""
        return {"trial_id": self.trial_id, **asdict(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "TrialSpec":
        """The specification `to_json` wrote; sequences become tuples again."""
        plan = dict(data["plan"])
        plan["layout"] = tuple(plan["layout"])
        if not isinstance(plan["rank_order"], str):
            plan["rank_order"] = tuple(plan["rank_order"])
        return cls(
            model=_model(tuple(data["model"]), *data["model"].values()),
            cluster=_cluster(tuple(data["cluster"]), *data["cluster"].values()),
            engine=data["engine"],
            workload=Workload.from_json(data["workload"]),
            plan=Plan(**plan),
        )


@lru_cache(maxsize=64, typed=True)  # typed: 1, 1.0 and true are equal, and not the same in an id
def _model(names: tuple[str, ...], *values: Any) -> ModelSpec:
    """One object for all trials of a model: ten thousand are read while somebody waits."""
    return ModelSpec(**dict(zip(names, values, strict=True)))


@lru_cache(maxsize=64, typed=True)
def _cluster(names: tuple[str, ...], *values: Any) -> ClusterSpec:
    """One object for all trials of a cluster."""
    return ClusterSpec(**dict(zip(names, values, strict=True)))


QUALITIES: Final = ("invalid", "", "indicative", "publishable")
"""Qualities of a result from worst to best; empty is one that nobody judged."""


class TrialStatus(StrEnum):
    """How a trial ended."""

    COMPLETED = "completed"
    REJECTED = "rejected"
    """Never ran: a rule or a hard limit."""
    OUT_OF_MEMORY = "out_of_memory"
    TIMED_OUT = "timed_out"
    CRASHED = "crashed"
    """With the reason, such as `non_finite_loss`."""
    ABORTED = "aborted"
    """Stopped at a hard limit."""
    INTERRUPTED = "interrupted"
    INVALID = "invalid"
    """Ran, but the measurement fails quality."""

    @property
    def is_final(self) -> bool:
        """Whether a resumed study leaves this trial alone."""
        return self is not TrialStatus.INTERRUPTED


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """What a trial gave. A metric that was not measured is not in `metrics`."""

    trial_id: str
    repeat: int
    status: TrialStatus
    reason: str = ""
    """Why, for every status but `completed`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Values by the names of `wattune.schema.METRICS`."""
    quality: str = ""
    """One of `QUALITIES`."""
    quality_reasons: tuple[str, ...] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    """Facts that are not numbers: engine, device, versions, commit, whether telemetry is simulated."""
    start_wall_ns: int = 0
    end_wall_ns: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain data for `result.json`."""
        return asdict(self) | {"quality_reasons": list(self.quality_reasons)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "TrialResult":
        """The result `to_json` wrote."""
        return cls(
            **{
                **data,
                "status": TrialStatus(data["status"]),
                "quality_reasons": tuple(data.get("quality_reasons", ())),
            }
        )
