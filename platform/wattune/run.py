"""One run: how it ended, and what was measured of it."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

from wattune.masking import printable, without_secrets
from wattune.units import NS_PER_S

PUBLISHABLE: Final = "publishable"
INDICATIVE: Final = "indicative"
INVALID: Final = "invalid"

QUALITIES: Final = (INVALID, "", INDICATIVE, PUBLISHABLE)
"""Qualities of a result from worst to best. Empty means that it was not assessed."""


LARGEST_METRIC: Final = 1e30
"""Largest number of a metric. No metric of a machine comes near it, and its square is a float."""

_RESULT_KINDS: Final = (
    ("trial_id", str),
    ("repeat", int),
    ("reason", str),
    ("metrics", dict),
    ("quality", str),
    ("tags", dict),
    ("start_wall_ns", int),
    ("end_wall_ns", int),
)
_NUMBERS: Final = frozenset({int, float})
_TEXTS: Final = frozenset({str})


class RunStatus(StrEnum):
    """The ending of a run."""

    COMPLETED = "completed"
    REJECTED = "rejected"
    """It never ran, by a rule or a hard limit."""
    OUT_OF_MEMORY = "out_of_memory"
    TIMED_OUT = "timed_out"
    CRASHED = "crashed"
    """It failed. The result has the reason, such as `non_finite_loss`."""
    ABORTED = "aborted"
    """It was stopped at a hard limit."""
    INTERRUPTED = "interrupted"
    INFRA_FAILED = "infra_failed"
    """The cluster, or what surrounds every plan, failed it and not its configuration: see `Cause`."""
    INVALID = "invalid"
    """It ran, but its measurement fails the quality checks."""

    @property
    def is_final(self) -> bool:
        """True where a resumed study does not run this trial again."""
        return self not in (RunStatus.INTERRUPTED, RunStatus.INFRA_FAILED)


class Cause(StrEnum):
    """The part of the cluster that failed a trial."""

    PLACEMENT = "placement"
    """Its workers did not start in time, or not where they were wanted."""
    NODE_LOST = "node_lost"
    WORKER_KILLED = "worker_killed"
    """A signal from outside ended a rank's process."""
    WORKERS_LOST = "workers_lost"
    """Its workers, or the process that holds them, ended for another reason."""
    NODE_UNFIT = "node_unfit"
    """A library is missing on a node, a disk there is full, or its sensors do not see a device."""
    TELEMETRY = "telemetry"
    """A node's sensors did not start, or what they recorded was lost."""
    HEAD = "head"
    """The trial's driver process ended, or could not write or allocate."""
    DEVICE = "device"
    """A device of a command is broken or gone."""
    NETWORK = "network"
    """Ranks of a command did not find each other, or lost each other, and none of them said why."""
    SURROUNDINGS = "surroundings"
    """A command lacks what every plan of it needs: rights, files, space, libraries, versions."""


_LONGEST_COMMAND: Final = 100
"""Most characters of a command that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A command that was recorded without a plan, or the machine alone."""

    place: str = ""
    """Folder it was read from. No file names it: a storage may be moved."""
    command: tuple[str, ...] = ()
    """Empty where the machine was recorded."""
    exit_code: int | None = None
    """As a shell gives it; None where nobody knows it."""
    ended: bool = True
    """False where the command's end was not seen."""
    machine: Mapping[str, str] = field(default_factory=dict)
    """Node, devices, driver and sensors, in words."""
    command_s: float | None = None
    """Length of the whole command."""
    window_s: float | None = None
    window_why: str = ""
    """The choice of the window in words; empty where there was none."""
    energy_j: float | None = None
    """Of all devices together, over the window."""
    steps: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the command's steps: `source`, `num_steps`, `tokens_per_step` and more."""
    devices: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Metrics of each device that counts, such as `node0/gpu0`, as if it had been recorded alone."""
    devices_why: str = ""
    """The reason that these count."""
    others: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The same of devices that do not count, such as those of other people's work. They are in no other figure."""
    host: Mapping[str, float] = field(default_factory=dict)
    """Means of the host's gauges."""

    @property
    def failure(self) -> str:
        """The reason that it may not have done its work; empty where it ended well."""
        if not self.ended:
            return "the end of its command was not seen"
        return f"its command ended with exit code {self.exit_code}" if self.exit_code else ""

    @property
    def text(self) -> str:
        """The command in one line, shortened."""
        text = printable(" ".join(" ".join(self.command).split()))
        return (text if len(text) <= _LONGEST_COMMAND else f"{text[: _LONGEST_COMMAND - 3]}...") or "the machine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Numbers of a run that are no metrics: what it measured, and how it came there. None is unknown."""

    window_s: float | None = None
    """Length of what the metrics describe."""
    first_step: int | None = None
    last_step: int | None = None
    """First and last step of the window, by the order of the data."""
    steady_from_step: int | None = None
    """Measured steps that were left out before the steady state; None where none was."""
    thermally_settled_from_s: float | None = None
    """From here on, in the window, the last device was at rest."""
    told_tokens_per_step: float | None = None
    """Tokens of a step over all ranks, as a user's program told them."""
    window_start_mono_ns: int | None = None
    window_end_mono_ns: int | None = None
    """The run of a command without steps, on the monotonic clock of the node in the tag `window_node`."""
    warmup_steps: int | None = None
    node_wait_s: float | None = None
    """The trial was first of its kind, and its nodes did not live or other jobs used them."""
    wait_time_s: float | None = None
    """Its nodes had nothing to do before it began: the study's start, the choice of a trial, the wait for cool
    devices."""
    start_time_s: float | None = None
    """Start of sensors and workers, until its ranks have met; of a command also the start of its program."""
    build_time_s: float | None = None
    """Of the slowest rank, of which the parts below are too; of a command the time from its start to its first step."""
    import_time_s: float | None = None
    """The part of `build_time_s` until a command's program had loaded the library that trains."""
    first_step_time_s: float | None = None
    """The first step of warm-up, with the compiler's work."""
    warmup_time_s: float | None = None
    """The other steps of warm-up."""
    measure_time_s: float | None = None
    """The measured steps."""
    profile_time_s: float | None = None
    """The steps under the profiler."""
    close_time_s: float | None = None
    """From its last step until its nodes were free."""
    ahead_cpu_s: float | None = None
    """Processor time that compiled coming plans beside it, of all ranks. It is in none of the times above."""
    ahead_failed: int | None = None
    """Coming plans that were not compiled for an error, of all ranks; the workers' logs have it."""
    memory_peak_rank: int | None = None
    """The rank that used most memory."""
    memory_asked_bytes: int | None = None
    """Bytes that a rank had when it ran out of memory, with those it asked for."""
    memory_reserved_peak_bytes: int | None = None
    """Most that the allocator of any rank held."""
    space: int | None = None
    """Number of the study's space that held when it ran (`wattune.storage.spaces`)."""
    attempt: int | None = None
    """From 2 on, the number of this attempt to run it; None is the first."""
    race_until_probability: float | None = None
    """P(best) at which the race ends that it is a repeat of; None of any other run."""
    cooldown_s: float | None = None
    """Its wait for cool devices; the run's own times begin after it."""
    start_temp_max_c: float | None = None
    """The warmest device when that wait ended, in degrees Celsius."""
    lane_trial: int | None = None
    """Number of the trial among those of its warm workers, from 1."""
    group_start_s: float | None = None
    """Its wait for workers; 0 where they were there."""
    group_restart_s: float | None = None
    """Until its workers were replaced after it."""
    limit_looks: int | None = None
    """Looks at the power of its nodes since the first that read all of them, or all looks where none did; None without
    a hard limit."""
    limit_looks_seeing: int | None = None
    """Those of `limit_looks` that read the power of every node."""
    command_run_s: float | None = None
    """Length of the whole command."""
    power_spread_frac: float | None = None
    speed_spread_frac: float | None = None
    energy_spread_frac: float | None = None
    """Standard deviation from run to run that the storage's other studies led to expect when it ran."""
    power_similar_degrees: float | None = None
    speed_similar_degrees: float | None = None
    energy_similar_degrees: float | None = None
    """Degrees of freedom of a chi-square by which the variances of their trials differ."""

    def __or__(self, later: "Numbers") -> "Numbers":
        """Joins two records; where both know a number, the later one counts."""
        return replace(self, **later.known)  # type: ignore[arg-type]  # each of its own kind

    @property
    def known(self) -> dict[str, float]:
        """The numbers that are known, by name."""
        return {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}

    @property
    def steps(self) -> tuple[int, int] | None:
        """First and last step; None where the window has no steps."""
        return None if self.first_step is None or self.last_step is None else (self.first_step, self.last_step)


TIME_PARTS: Final = {
    "wait": "wait_time_s",
    "start": "start_time_s",
    "import": "import_time_s",
    "build": "build_time_s",
    "first step": "first_step_time_s",
    "warm-up": "warmup_time_s",
    "window": "measure_time_s",
    "profile": "profile_time_s",
    "close": "close_time_s",
}
"""Parts of a run's time in their order, and the numbers that hold them. The first step is where graphs are compiled."""

NO_NUMBERS: Final = Numbers()
"""Of a run that measured nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The prediction of one trial's objective and feasibility, made before it ran."""

    metric: str
    value: float
    low: float
    high: float
    """Ends of the 95 % interval of one measurement."""
    feasible_probability: float
    """Probability that it runs and holds every bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run, of a trial or of a recorded command, and what was measured of it.

    A metric that was not measured is not in `metrics`.
    """

    trial_id: str
    """The trial's id; of a recording its name."""
    repeat: int
    status: RunStatus
    reason: str = ""
    """Reason of every status but `completed`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Values by the names of `wattune.metrics.METRICS`."""
    quality: str = ""
    """One of `QUALITIES`."""
    quality_reasons: tuple[str, ...] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    """Facts that are not numbers: engine, device, versions, commit, whether telemetry is simulated."""
    numbers: Numbers = NO_NUMBERS
    prediction: Prediction | None = None
    """The strategy's expectation of the trial's first run; None where it had none."""
    start_wall_ns: int = 0
    end_wall_ns: int = 0
    recorded: Recorded | None = None
    """The recorded command; None for a trial."""
    reading_errors: Mapping[str, float] = field(default_factory=dict)
    """Of a small trial that is read as a large one: standard deviation of each metric, in its unit. No
    repeat shows it, and no file has it."""

    def __post_init__(self) -> None:
        """Takes secrets and control characters out of the reason: it may quote what a program wrote."""
        if isinstance(self.reason, str) and self.reason:
            object.__setattr__(self, "reason", printable(without_secrets(self.reason)))

    @property
    def took_s(self) -> float:
        """Seconds from its start to its end; what it waited before, as for cool devices, is no part."""
        return (self.end_wall_ns - self.start_wall_ns) / NS_PER_S

    @property
    def times_s(self) -> dict[str, float]:
        """Seconds by part, as `TIME_PARTS` names them, and `other`: what nobody told of its length.

        `wait` lies before its start; the rest sums to its length. What it waited for nodes (`node_wait_s`) is no part.
        """
        told = self.numbers.known
        parts_s = {part: float(told[name]) for part, name in TIME_PARTS.items() if name in told}
        if "import" in parts_s and "build" in parts_s:  # the number has both
            parts_s["build"] = max(parts_s["build"] - parts_s["import"], 0.0)
        return parts_s | {"other": max(self.took_s - (sum(parts_s.values()) - parts_s.get("wait", 0.0)), 0.0)}

    def to_json(self) -> dict[str, Any]:
        """Returns plain data for `run.json`."""
        data = asdict(self) | {"quality_reasons": list(self.quality_reasons), "numbers": self.numbers.known}
        del data["reading_errors"]
        if self.prediction is None:
            del data["prediction"]
        if self.recorded is None:
            del data["recorded"]
        else:
            del data["recorded"]["place"]
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any], *, is_sound: bool = False) -> "Run":
        """Reads a result that `to_json` wrote; one that `is_sound` was read and checked before.

        Raises `KeyError`, `TypeError`, `ValueError`: it is none.
        """
        recorded, predicted = data.get("recorded"), data.get("prediction")
        result = cls(
            **{
                **data,
                "numbers": Numbers(**numbers) if (numbers := data.get("numbers")) else NO_NUMBERS,
                "prediction": predicted and Prediction(**predicted),
                "recorded": recorded and Recorded(**{**recorded, "command": tuple(recorded["command"])}),
                "status": RunStatus(data["status"]),
                "quality_reasons": tuple(data.get("quality_reasons", ())),
            }
        )
        if not is_sound:
            result.require_sound()
        return result

    def require_sound(self) -> None:
        """Makes sure that every field holds what it says. Ten thousand results are read while a user waits.

        Raises `TypeError`: a field holds another type, `ValueError`: a number is larger than any real one, or the
        quality is none of `QUALITIES`.
        """
        for name, kind in _RESULT_KINDS:
            if type(getattr(self, name)) is not kind:
                raise TypeError(f"{name}: got {str(getattr(self, name))[:60]}, allowed: {kind.__name__}")
        predicted = {} if self.prediction is None else asdict(self.prediction)
        for name, own, kinds in (
            ("prediction", [value for name, value in predicted.items() if name != "metric"], _NUMBERS),
            ("prediction.metric", [predicted.get("metric", "")], _TEXTS),
            ("metrics", self.metrics.values(), _NUMBERS),
            ("numbers", (numbers := self.numbers.known).values(), _NUMBERS),
            ("tags", self.tags.values(), _TEXTS),
            ("quality_reasons", self.quality_reasons, _TEXTS),
        ):
            if not kinds.issuperset(map(type, own)):
                wrong = next(value for value in own if type(value) not in kinds)
                raise TypeError(f"{name}: got {str(wrong)[:60]}, allowed: {' or '.join(k.__name__ for k in kinds)}")
        # A number of 400 digits is an integer to JSON, and no float. Infinity counts as not measured.
        if not max(map(abs, (*self.metrics.values(), *numbers.values())), default=0.0) <= LARGEST_METRIC:
            each = {**self.metrics, **numbers}
            large = [name for name, value in each.items() if LARGEST_METRIC < abs(value) != math.inf]
            if large:
                raise ValueError(f"{large[0]}: more than {LARGEST_METRIC:.0e}")
        for value in (self.repeat, self.start_wall_ns, self.end_wall_ns):
            if not 0 <= value < 2**63:
                raise ValueError(f"repeat, start_wall_ns and end_wall_ns: got {str(value)[:60]}, allowed: 0 to 2^63")
        if self.quality not in QUALITIES:
            raise ValueError(f'quality: got "{self.quality[:60]}"')
