"""Sources of steps: how a program's steps are found, as a space or a command line names them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from wattune.errors import SpaceError, closest
from wattune.steps.lines import NUMBER
from wattune.units import NS_PER_S

HOOKS: Final = ("spans", "transformers", "lightning", "optimizer")
"""Sources that write files, best first."""

KINDS: Final = ("auto", *HOOKS, "pattern", "none")

UNITS_NS: Final[Mapping[str, float]] = MappingProxyType({"s": NS_PER_S, "ms": 1e6, "us": 1e3})
"""Units of a time that a program prints."""


GROUPS: Final = ("step", "time", "tokens", "tokens_per_s", "tokens_per_s_per_device")
"""Names of groups of an own pattern; `wattune.steps.pattern.PatternSteps` says what they are."""


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


BAR_PRESETS: Final = ("tqdm", "huggingface", "llamafactory", "lightning_bar")
"""Presets of programs that show progress bars."""

_BAR_LINE: Final = rf"(?P<step>{NUMBER})/(?:{NUMBER}|\?) \[\d[\d:]*<"

_STEP: Final = rf"(?P<step>{NUMBER})"
_TIME: Final = rf"(?P<time>{NUMBER})"


EVALUATION: Final = r"(?:\b|_)(?:val|valid\w*|eval\w*|test\w*|dev)(?:\b|_)"
"""A word of an evaluation, as a part of a regular expression that ignores case."""

TRAINING_LOSS: Final = "".join(rf"(?<!{word}[ _/])" for word in ("val", "eval", "test", "valid", "validation")) + "loss"
"""The name of a loss that is of no evaluation, in the same way."""

_TRAINS: Final = (
    rf"(?!.*?{EVALUATION}\W*(?:step|iter|epoch|batch|set|loss|result|metric)(?!.*train\w*[ _/]?loss))"
    r"(?=.*?\b(?:\w+[ _/])?(?:loss(?:es|_\w+)?|ppl|perplexity|train_time|grad_?norm|mfu)\b"
    r"\W*(?:[a-z]\w*\W+)?[0-9])"
)
"""A line that has a loss or the like, and is of no evaluation."""

_WORD_STEP: Final = (
    rf"\b(?:global|train\w*|optim\w*|num)?[ _-]?(?:step|update)s?\b['\"\])]*\s*[:=#\[(]*\s*(?P<step>{NUMBER})"
)
_WORD_ITERATION: Final = (
    rf"\b(?:iter|iteration|it|batch|mini-?batch)s?\b(?:\(train\))?['\"\])]*\s*[:=#\[(]*\s*(?P<iteration>{NUMBER})"
)
_EPOCH_OF: Final = (
    r"(?:\b(?:epoch|train)\b[^\[\w]{0,4}(?:\[\d+\]|\(train\)\s*\[\d+\]|\d+)|\[\d+/\d+\])\s*\[\s*"
    rf"(?P<batch>{NUMBER})/"
)
"""The number of a step, by the words that programs use, the surest first."""

PRESETS: Final[Mapping[str, StepSource]] = MappingProxyType(
    dict(
        (
            # NVIDIA/Megatron-LM, megatron/training/training.py, training_log: " iteration       10/     100 | consumed
            # samples: 640 | elapsed time per iteration (ms): 1234.5 | ...", the mean since the line before. Megatron-
            # DeepSpeed and GPT-NeoX (megatron/training.py) print the same and "tokens per gpu per second (tgs): 537.8".
            _preset(
                "megatron",
                rf"iteration\s+{_STEP}\s*/\s*{NUMBER}\s*\|.*?elapsed time per iteration \(ms\):\s*{_TIME}",
                "ms",
            ),
            # pytorch/torchtitan, torchtitan/components/metrics.py, MetricsProcessor.log: "step: 10  loss:  7.9921
            # grad_norm:  1.4011  memory: 3.21GiB(4.02%)  tps: 12,345  tflops: 1.02". `tps`, once `wps`, are a device's.
            _preset(
                "torchtitan",
                rf"(?<!validate )step:\s*{_STEP}\s+loss:(?:.*?\b[tw]ps:\s*(?P<tokens_per_s_per_device>{NUMBER}))?",
            ),
            # NVIDIA/NeMo 2, nemo/lightning/pytorch/callbacks/progress_printer.py: "Training epoch 0, iteration 1/249 |
            # ... | global_step: 1 | reduced_train_loss: 1.653 | train_step_timing in s: 2.505"; NeMo 1 a progress bar
            # with "global_step=99.00, ..., train_step_timing in s=3.130", its numbers by tqdm's `format_num`.
            _preset("nemo", rf"global_step[:=]\s*{_STEP}.*?train_step_timing in s[:=]\s*{_TIME}"),
            # deepspeedai/DeepSpeed, deepspeed/runtime/engine.py, _report_progress: "[Rank 0] step=10, skipped=0, ...";
            # utils/timer.py, ThroughputTimer.stop: "epoch=0/micro_step=40/global_step=10, RunningAvgSamplesPerSec=...";
            # runtime/pipe/engine.py, train_batch: "steps: 10 loss: 3.2 iter time (s): 0.123 samples/sec: 130.1".
            _preset(
                "deepspeed",
                rf"(?:\[Rank \d+\] step=|/global_step=|steps: (?=\d+ loss: )){_STEP}"
                rf"(?:, (?:skipped|RunningAvg)| loss: .*?iter time \(s\): {_TIME})",
            ),
            # AI-Hypercomputer/maxtext, metric_logger.py, write_metrics_for_training_step: "completed step: 1, seconds:
            # 2.5, TFLOP/s/device: 451.2, Tokens/s/device: 8123.4, total_weights: 393216, loss: 6.765".
            _preset("maxtext", rf"completed step: {_STEP}, seconds: {_TIME}"),
            # karpathy/nanoGPT, train.py: "iter 100: loss 3.1234, time 250.11ms, mfu 30.12%", the time of that
            # iteration alone, an evaluation before it included.
            _preset("nanogpt", rf"\biter {_STEP}: loss \S+, time (?P<time>[0-9.]+)ms", "ms"),
            # Lines of any program that have the number of a step and a loss; see `_TRAINS`.
            _preset("lines", rf"(?i)^{_TRAINS}(?:.*?{_WORD_STEP}|.*?{_WORD_ITERATION}|.*?{_EPOCH_OF})"),
            # tqdm/std.py, format_meter: " 12%|#2        | 12/100 [00:14<01:48,  1.20s/it, loss=2.1]". Hugging Face's
            # Trainer (transformers/trainer_callback.py, ProgressCallback) and LLaMA-Factory, which uses it, show a bar
            # without words; Lightning (pytorch/callbacks/progress/tqdm_progress.py) shows "Epoch 0: ...".
            # `wattune.steps.bars` tells bars apart.
            *(_preset(name, _BAR_LINE) for name in BAR_PRESETS),
        )
    )
)
"""Patterns by the name of the program that prints such lines."""

AUTOMATIC_PRESETS: Final = tuple(name for name in PRESETS if name not in BAR_PRESETS)
"""Presets that `auto` looks for beside progress bars, the surest first."""


_PATTERN: Final = re.compile(r"pattern(?:/(\w+))?:(.*)", re.DOTALL)


def parse_source(value: Any) -> StepSource:
    """Reads a source as a space or a command line gives it.

    It is a kind, the name of a preset, `pattern:REGULAR_EXPRESSION` or `pattern/ms:...`, `{pattern: ..., unit: ...}`,
    or a `StepSource`; None is `auto`. Raises `SpaceError`: it is none of these, or its pattern cannot be used.
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
    if unknown := sorted(groups - set(GROUPS)):
        raise SpaceError(f"steps.pattern: group {unknown[0]!r} means nothing; use the groups {', '.join(GROUPS)}")
    return StepSource(kind="pattern", pattern=pattern, unit=unit)
