"""The work behind a figure: a speed or an energy of a token compares only between trials that do the same work."""

from functools import cache
from typing import Final

from wattune.catalog.models import ModelSpec
from wattune.masking import masked_arguments
from wattune.metrics import METRICS, PER_STEP_METRICS
from wattune.trial import TrialSpec
from wattune.units import format_quantity


def depends_on_work(metric: str) -> bool:
    """Tells whether a metric compares only between trials of the same work: speeds and energies, but no shares."""
    return METRICS[metric].group in ("speed", "energy") and metric != "mfu_frac"


def compares(one: TrialSpec, other: TrialSpec, metric: str) -> bool:
    """Tells whether a metric of two trials compares: it does not depend on the work, or both do the same."""
    return not depends_on_work(metric) or work_of(one, metric) == work_of(other, metric)


def work_of(spec: TrialSpec, metric: str) -> str:
    """Describes the work behind a token, and behind a step where the metric is one of steps."""
    model = _model_size(spec.model) if spec.model.is_known else f"{spec.model.name}: {_program(spec)}"
    if not spec.workload.is_known:
        return model
    work = f"{model}, {spec.workload.mode} at {spec.workload.seq_len} tokens"
    return f"{work}, {spec.workload.tokens_per_step:,} of them a step" if metric in PER_STEP_METRICS else work


def _program(spec: TrialSpec) -> str:
    """Returns the command of a trial before anything is filled in, shortened."""
    text = "" if spec.program is None else " ".join(masked_arguments(spec.program.command))
    return text if len(text) <= _LONGEST_COMMAND else f"{text[:_LONGEST_COMMAND]}..."


_LONGEST_COMMAND: Final = 60


@cache
def _model_size(model: ModelSpec) -> str:
    total, active = model.num_parameters, model.num_active_parameters
    of = "" if total == active else f" of {format_quantity('parameters', total)}"
    return f"{model.name} ({model.num_layers} layers, {format_quantity('parameters', active)}{of} parameters)"
