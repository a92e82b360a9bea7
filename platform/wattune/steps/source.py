"""Sources of steps: how a program's steps are found, as a space or a command line names them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from wattune.errors import SpaceError, closest
from wattune.units import NS_PER_S

HOOKS: Final = ("spans", "transformers", "lightning", "optimizer")
"""Sources that write files, best first."""

KINDS: Final = ("auto", *HOOKS, "pattern", "none")

UNITS_NS: Final[Mapping[str, float]] = MappingProxyType({"s": NS_PER_S, "ms": 1e6, "us": 1e3})
"""Units of a time that a program prints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSource:
    """One source of steps."""

    kind: str = "auto"
    """One of `KINDS`. `auto` takes the best that is there."""
    pattern: str = ""
    """Regular expression over a line of output, for `pattern`; see `wattune.steps.pattern`."""
    unit: str = "s"
    """Unit of the time it captures."""
    preset: str = ""
    """Name in `PRESETS` that it comes from."""

    @property
    def text(self) -> str:
        """The source as one text, which `parse_source` reads back."""
        if self.kind != "pattern":
            return self.kind
        return self.preset or f"pattern/{self.unit}:{self.pattern}"

    def __str__(self) -> str:
        if self.kind != "pattern":
            return self.kind
        return f"pattern {self.preset}" if self.preset else f"pattern {self.pattern!r}"


AUTO: Final = StepSource()
NONE: Final = StepSource(kind="none")


def _preset(name: str, pattern: str, unit: str = "s") -> tuple[str, StepSource]:
    return name, StepSource(kind="pattern", pattern=pattern, unit=unit, preset=name)


PRESETS: Final[Mapping[str, StepSource]] = MappingProxyType(
    dict(
        (
            # megatron/training/training.py, training_log: " iteration       10/     100 | consumed samples: 640 |
            # elapsed time per iteration (ms): 1234.5 | ...", the mean of the iterations since the line before.
            _preset(
                "megatron",
                r"iteration\s+(?P<step>\d+)/\s*\d+ \|.*?elapsed time per iteration \(ms\):\s*(?P<time>[0-9.]+)",
                "ms",
            ),
            # torchtitan/components/metrics.py, MetricsProcessor.log: "step: 10  loss:  7.9921  grad_norm: ...".
            _preset("torchtitan", r"(?<!validate )step:\s*(?P<step>\d+)\s+loss:"),
            # NeMo 2 prints "Training epoch 0, iteration 1/249 | ... | global_step: 1 | reduced_train_loss: 1.653 |
            # train_step_timing in s: 2.505", NeMo 1 a progress bar with "global_step=99.00, ..., train_step_timing in
            # s=3.130".
            _preset("nemo", r"global_step[:=]\s*(?P<step>[0-9.]+).*?train_step_timing in s[:=]\s*(?P<time>[0-9.]+)"),
            # The bar of tqdm, as Hugging Face Trainer and Lightning show it: " 12%|█  | 12/100 [00:14<01:48, 1.2s/it]".
            _preset("tqdm", r"(?P<step>\d+)/\d+ \[\d[\d:]*<"),
        )
    )
)
"""Patterns by the name of the program that prints such lines."""

AUTOMATIC_PRESETS: Final = ("megatron", "torchtitan", "nemo")
"""Presets that `auto` looks for. Any program may show progress bars, also of what is no training."""


_PATTERN: Final = re.compile(r"pattern(?:/(\w+))?:(.*)", re.DOTALL)


def parse_source(value: Any) -> StepSource:
    """Reads a source as a space or a command line gives it.

    It is a kind, the name of a preset, `pattern:REGULAR_EXPRESSION` or `pattern/ms:...`, `{pattern: ..., unit: ...}`,
    or a `StepSource`; None is `auto`.

    Raises:
        SpaceError: It is none of these, or its pattern cannot be used.
    """
    if isinstance(value, StepSource):
        return value
    if value is None:
        return AUTO
    if isinstance(value, str) and (found := _PATTERN.fullmatch(value)):
        value = {"pattern": found[2], "unit": found[1] or "s"}
    if isinstance(value, str):
        if value in PRESETS:
            return PRESETS[value]
        if value in KINDS and value != "pattern":
            return StepSource(kind=value)
        words = [kind for kind in KINDS if kind != "pattern"] + list(PRESETS)
        raise SpaceError(
            f'steps: got "{value}"; {closest(value, words)}, or give {{pattern: REGULAR_EXPRESSION, unit: ms}}'
        )
    if not isinstance(value, Mapping) or "pattern" not in value or not value.keys() <= {"pattern", "unit"}:
        raise SpaceError(
            f"steps: got {value!r}; give a source such as auto, a preset such as megatron, "
            "or {pattern: REGULAR_EXPRESSION, unit: ms}"
        )
    pattern, unit = value["pattern"], value.get("unit", "s")
    if unit not in UNITS_NS:
        raise SpaceError(f"steps.unit: got {unit!r}; use one of {', '.join(UNITS_NS)}")
    if not isinstance(pattern, str) or not pattern:
        raise SpaceError(f"steps.pattern: got {pattern!r}; give a regular expression such as 'step time: ([0-9.]+) ms'")
    try:
        groups = re.compile(pattern).groupindex.keys()
    except re.error as error:
        raise SpaceError(f"steps.pattern: {pattern!r} is not a regular expression: {error}; correct it") from error
    if unknown := sorted(groups - {"step", "time", "tokens"}):
        raise SpaceError(f"steps.pattern: group {unknown[0]!r} means nothing; use the groups step, time and tokens")
    return StepSource(kind="pattern", pattern=pattern, unit=unit)
