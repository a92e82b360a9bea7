"""Outcomes of a command's nodes, made into what every trial has: spans of all ranks, window, telemetry."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from wattune.analysis.signals.readings import HOST
from wattune.analysis.summary import TOLD_TOKENS, WINDOW_TAGS
from wattune.orchestrate.lanes.messages import Place
from wattune.orchestrate.telemetry_actor import NodeTelemetry
from wattune.plans.program import is_command
from wattune.schema import SPANS
from wattune.trial import TrialSpec
from wattune.workers.outcome import CommandFacts, RankOutcome


def num_answers(spec: TrialSpec) -> int:
    """Returns how many outcomes a trial has: one a rank, or one a node where a command runs."""
    return spec.cluster.num_nodes if is_command(spec) else spec.cluster.world_size


def leading(outcomes: Sequence[RankOutcome]) -> CommandFacts | None:
    """Returns what the leading node of a command told; None for other trials, and where it told nothing."""
    return next((one.command for one in outcomes if one.rank == 0), None)


def command_spans(
    outcomes: Sequence[RankOutcome], places: Sequence[Place], clock_offsets_ns: Mapping[str, int]
) -> pa.Table | None:
    """Makes the spans of a command's trial: warm-up negative, measured steps from 0, every rank of every node.

    A rank that told no steps has those of the first rank: the ranks of a training step wait for each other. On another
    node they are put on its clock by wall time.

    Args:
        outcomes: One of each node.
        places: The place of every rank.
        clock_offsets_ns: How far each node's wall clock is ahead, by node; one without is the reference.

    Returns:
        None where no measured step is known.
    """
    lead = leading(outcomes)
    if lead is None or not lead.told_steps or not lead.end_index:
        return None
    tables = {one.rank: one for one in outcomes if one.spans is not None and one.command is not None}
    first = tables[0].spans
    assert first is not None, "the leading node told steps"
    model = first.filter(pc.equal(first["rank"], pc.min(first["rank"])))
    found = []
    for outcome in tables.values():
        assert outcome.command is not None
        spans = outcome.spans
        if not outcome.command.told_steps or spans is None or not spans.num_rows:
            spans = _copied(model, _on_node(outcome.rank, places), outcome.command.wall_minus_mono_ns, clock_offsets_ns)
        found.append(spans)
    whole = pa.concat_tables([table.cast(SPANS) for table in found]).unify_dictionaries()
    whole = whole.filter(pc.less(whole["step"], lead.end_index))
    shifted = pc.subtract(whole["step"], lead.first_index).cast(SPANS.field("step").type)
    return whole.set_column(whole.schema.get_field_index("step"), SPANS.field("step"), shifted)


def _on_node(number: int, places: Sequence[Place]) -> list[Place]:
    """Returns the places of a node's ranks: nodes have equally many, in order."""
    each = max(len(places) // max(len({place.node for place in places}), 1), 1)
    return [place for place in places if place.rank // each == number]


def _copied(
    model: pa.Table, places: Sequence[Place], wall_minus_mono_ns: int, clock_offsets_ns: Mapping[str, int]
) -> pa.Table:
    """Returns a rank's spans as those of other ranks, on their node's clocks."""
    copies = []
    for place in places:
        for row in model.to_pylist():
            ahead_ns = clock_offsets_ns.get(place.node, 0) - clock_offsets_ns.get(row["node"], 0)
            start_ns, end_ns = row["start_wall_ns"] + ahead_ns, row["end_wall_ns"] + ahead_ns
            own = {"node": place.node, "device": place.device, "rank": place.rank}
            own |= {"start_wall_ns": start_ns, "start_mono_ns": start_ns - wall_minus_mono_ns}
            own |= {"end_wall_ns": end_ns, "end_mono_ns": end_ns - wall_minus_mono_ns}
            copies.append({**row, **own})
    return pa.Table.from_pylist(copies, schema=SPANS)


def run_spans(outcomes: Sequence[RankOutcome], places: Sequence[Place]) -> pa.Table | None:
    """Returns the run of a command without steps as one span of each rank, from which sensors are simulated."""
    by_node = {one.rank: one.command for one in outcomes if one.command is not None}
    rows = []
    for number, facts in by_node.items():
        for place in _on_node(number, places) if facts.end_mono_ns > facts.start_mono_ns else ():
            times = {"start": facts.start_mono_ns, "end": facts.end_mono_ns}
            clocks = {f"{name}_mono_ns": at for name, at in times.items()}
            clocks |= {f"{name}_wall_ns": at + facts.wall_minus_mono_ns for name, at in times.items()}
            own = {"node": place.node, "device": place.device, "rank": place.rank, "step": 0, "phase": "step"}
            rows.append({**own, "micro_batch": None, "chunk": None, **clocks})
    return pa.Table.from_pylist(rows, schema=SPANS) if rows else None


def command_tags(outcomes: Sequence[RankOutcome], places: Sequence[Place], *, has_steps: bool) -> dict[str, str]:
    """Returns the tags that the analysis needs: tokens that the program told, and the window where it has no steps."""
    lead = leading(outcomes)
    if lead is None:
        return {}
    tokens = sum(one.command.tokens_per_step for one in outcomes if one.command is not None)
    tags = {TOLD_TOKENS: f"{tokens:.17g}"} if tokens and has_steps else {}
    node = next((place.node for place in places if place.rank == 0), "")
    if not has_steps and node:
        values = (node, str(lead.start_mono_ns), str(lead.end_mono_ns))
        tags |= dict(zip(WINDOW_TAGS, values, strict=True))
    return tags


def of_devices(part: NodeTelemetry, places: Sequence[Place]) -> NodeTelemetry:
    """Returns a node's telemetry without devices that a trial did not use, and its host.

    Where there are no spans, every device that is recorded counts.
    """
    used = {place.device for place in places if place.node == part.node} | {HOST}
    tables = {
        tier: table.filter(pc.is_in(table["device"].cast(pa.string()), pa.array(sorted(used))))
        for tier, table in part.tables.items()
    }
    known: dict[str, Any] = dict(part.manifest)
    if isinstance(known.get("devices"), Mapping):
        known["devices"] = {name: facts for name, facts in known["devices"].items() if name in used}
    return replace(part, tables=tables, manifest=known)
