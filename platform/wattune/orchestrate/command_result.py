"""Outcomes of a command's nodes, made into what every trial has: spans of all ranks, window, telemetry."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa

from wattune.analysis.run_data import WINDOW_NODE
from wattune.clock import ClockAnchor
from wattune.orchestrate.lanes.messages import Place
from wattune.plans.program import is_command
from wattune.run import Numbers
from wattune.steps.files import Step
from wattune.trial import TrialSpec
from wattune.workers.command.program_run import ProgramOutcome, StepsByRank
from wattune.workers.outcome import RankOutcome


def num_answers(spec: TrialSpec) -> int:
    """Returns how many outcomes a trial has: one a rank, or one a node where a command runs."""
    return spec.cluster.num_nodes if is_command(spec) else spec.cluster.world_size


def leading(outcomes: Sequence[RankOutcome]) -> ProgramOutcome | None:
    """Returns what came of a command on its leading node; None for other trials, and where it told nothing."""
    return next((one.command for one in outcomes if one.rank == 0), None)


def command_spans(
    outcomes: Sequence[RankOutcome], places: Sequence[Place], clock_offsets_ns: Mapping[str, int]
) -> pa.Table | None:
    """Makes the spans of a command's trial: warm-up negative, measured steps from 0, every rank of every node.

    A rank that told no steps has those of the first rank: the ranks of a training step wait for each other. On another
    node they are put on its clock by wall time: `clock_offsets_ns` has how far each node's is ahead; one without is the
    reference. There is an outcome of each node. None where no measured step is known.
    """
    lead = leading(outcomes)
    if lead is None or not lead.end_index:
        return None
    model = next(each for _, each in sorted(lead.steps.items()) if each)
    wall_ns = {place.node: clock_offsets_ns.get(place.node, 0) for place in places}
    first_node = next(place.node for place in places if place.rank == 0)

    def of_node(node: str, own: ProgramOutcome) -> StepsByRank:
        if any(own.steps.values()):
            return own.steps
        ahead_ns = wall_ns[node] - wall_ns[first_node] + lead.wall_minus_mono_ns - own.wall_minus_mono_ns
        shift = [
            replace(step, start_mono_ns=step.start_mono_ns + ahead_ns, end_mono_ns=step.end_mono_ns + ahead_ns)
            for step in model
        ]
        return {0: shift}

    return _spans(outcomes, places, of_node, lead)


def run_spans(outcomes: Sequence[RankOutcome], places: Sequence[Place]) -> pa.Table | None:
    """Returns the run of a command without steps as one span of each rank, from which sensors are simulated."""

    def of_node(_: str, own: ProgramOutcome) -> StepsByRank:
        ran = own.end_mono_ns > own.start_mono_ns
        return {0: [Step(0, own.start_mono_ns, own.end_mono_ns)]} if ran else {}

    spans = _spans(outcomes, places, of_node, ProgramOutcome())
    return spans if spans is not None and spans.num_rows else None


def _spans(
    outcomes: Sequence[RankOutcome],
    places: Sequence[Place],
    steps_of: Callable[[str, ProgramOutcome], StepsByRank],
    lead: ProgramOutcome,
) -> pa.Table | None:
    """Makes the spans of every node's ranks, numbered as the leading node's. Nodes have equally many, in order."""
    each = max(len(places) // max(len({place.node for place in places}), 1), 1)
    found = []
    for one in outcomes:
        own = [place for place in places if place.rank // each == one.rank]
        if one.command is None or not own:
            continue
        anchor = ClockAnchor(mono_ns=0, wall_ns=one.command.wall_minus_mono_ns)
        devices, node = {place.rank: place.device for place in own}, own[0].node
        numbered = replace(lead, steps=steps_of(node, one.command))
        found.append(numbered.spans(node=node, devices=devices, anchor=anchor))
    return pa.concat_tables(found).unify_dictionaries() if found else None


def command_told(
    outcomes: Sequence[RankOutcome], places: Sequence[Place], numbers: Numbers, *, has_steps: bool
) -> tuple[dict[str, str], Numbers]:
    """Returns tags and numbers that the analysis needs: tokens that the program told, or the window without steps."""
    lead = leading(outcomes)
    if lead is None:
        return {}, numbers
    import_s, run_s = lead.import_s, round(lead.run_s, 3) if lead.run_s > 0 else None
    numbers = replace(numbers, command_run_s=run_s, import_time_s=None if import_s is None else round(import_s, 3))
    if has_steps:
        tokens = sum(one.command.tokens_per_step for one in outcomes if one.command is not None)
        tokens = lead.tokens_per_step * len(places) if lead.per_device else tokens
        return {}, replace(numbers, told_tokens_per_step=float(tokens) or None)
    node = next((place.node for place in places if place.rank == 0), "")
    if not node:
        return {}, numbers
    window = replace(numbers, window_start_mono_ns=lead.start_mono_ns, window_end_mono_ns=lead.end_mono_ns)
    return {WINDOW_NODE: node}, window
