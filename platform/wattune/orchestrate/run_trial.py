"""One trial: telemetry on, a lane's workers train, telemetry off, analyse, result into the study folder."""

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa

from wattune.errors import EngineError, TelemetryError
from wattune.orchestrate.assignment import Answer, Assignment, GroupKey
from wattune.orchestrate.cluster import Cluster
from wattune.orchestrate.judge import judge
from wattune.orchestrate.lane_keeper import cause
from wattune.orchestrate.lanes import Lanes
from wattune.orchestrate.telemetry_actor import NodeTelemetry
from wattune.orchestrate.trial_telemetry import TrialTelemetry, forget, sampling
from wattune.storage import with_calibrations
from wattune.study import TrialFolder
from wattune.telemetry.simulated import simulate
from wattune.trial import Measure, TrialResult, TrialSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRequest:
    """Everything a trial needs to run."""

    spec: TrialSpec
    repeat: int
    measure: Measure
    seed: int
    folder: Path
    """The trial's folder in the study, on the node that runs the trial's driver."""
    limits: Mapping[str, float]
    """Hard limits of the study."""
    tags: Mapping[str, str]
    """Facts of the study's environment to keep with the result."""
    isolation: str = "warm"
    """`warm`: on workers that ran other trials before; `fresh`: on new ones, which end with it."""

    @property
    def storage(self) -> Path:
        """The folder the study is kept in: `<storage>/<study>/trials/<trial>`."""
        return self.folder.parents[2]

    @property
    def key(self) -> str:
        """A name for this attempt that no other study on the machine shares."""
        place = zlib.crc32(str(self.folder.parent.parent).encode())
        return f"{self.folder.parent.parent.name}-{place:08x}-{self.folder.name}"


def run_trial(request: TrialRequest, cluster: Cluster, lanes: Lanes | None = None) -> TrialResult:
    """Runs one repeat of one trial and leaves its result in the study folder.

    Whatever goes wrong with the trial is its status; only errors of this program are raised.

    Args:
        request: The trial.
        cluster: Where; the first of its nodes that have what the trial wants are used.
        lanes: The study's warm workers; without, the trial has workers of its own.
    """
    start_wall_ns = time.time_ns()
    folder, spec = TrialFolder(request.folder), request.spec
    folder.write_spec(spec)
    tags = dict(request.tags) | {"isolation": request.isolation if lanes is not None else "fresh"}
    with ExitStack() as held:
        workers = lanes if lanes is not None else held.enter_context(Lanes())
        recorded: Sequence[NodeTelemetry] = ()
        used, assignment = cluster, None
        try:
            resources = cluster.resources_per_rank(spec.cluster)
            used = cluster.only(cluster.fitting(spec.cluster)[: spec.cluster.num_nodes])
            with sampling(request.key, spec, used, workers) as telemetry:
                assignment = _assignment(request, used, resources, telemetry)
                answer = workers.run(assignment, _over_limit(request, telemetry))
                telemetry.places = answer.places
            recorded = telemetry.recorded
            if telemetry.lost:
                answer = replace(answer, failure="; ".join(filter(None, (answer.failure, *telemetry.lost))))
        except (EngineError, TelemetryError) as error:
            answer = Answer(failure=cause(error))
        marks = _write_measurements(request, folder, answer, recorded)
        tags |= _lane_tags(used, answer)
        result = judge(
            spec,
            request.repeat,
            folder,
            answer,
            marks,
            limits=request.limits,
            tags=tags,
            start_wall_ns=start_wall_ns,
        )
        if assignment is not None and (lost := workers.settle(assignment)):
            result = replace(result, tags={**result.tags, "group_lost": lost})
        folder.write_result(replace(result, end_wall_ns=time.time_ns()))
        if recorded:
            forget(request.key, spec, used, workers)
    return result


def _assignment(
    request: TrialRequest, cluster: Cluster, resources: Mapping[str, float], telemetry: TrialTelemetry
) -> Assignment:
    return Assignment(
        name=request.folder.name,
        spec=request.spec,
        measure=request.measure,
        seed=request.seed,
        key=GroupKey.of(request.spec, resources),
        node_names={node.node_id: node.name for node in cluster.nodes},
        device_names={node: sensed.device_names for node, sensed in telemetry.sensed.items()},
        sampler_cpus={node: sensed.cpus for node, sensed in telemetry.sensed.items()},
        fresh=request.isolation == "fresh",
    )


def _over_limit(request: TrialRequest, telemetry: TrialTelemetry) -> Callable[[], str | None]:
    """Looks whether a hard limit is broken at this moment; simulated sensors show nothing before the trial is over."""
    limit_w = request.limits.get("node_device_power_w")

    def look() -> str | None:
        if limit_w is None or request.spec.cluster.simulate_sensors_of:
            return None
        for node, power_w in telemetry.node_power_w().items():
            if power_w > limit_w:
                return (
                    f"stopped while running: power of node {node} was {power_w:.0f} W over 1 s, the hard limit is "
                    f"{limit_w:.0f} W"
                )
        return None

    return look


def _lane_tags(cluster: Cluster, answer: Answer) -> dict[str, str]:
    tags = {"lane": ",".join(node.name for node in cluster.nodes)}
    if answer.number:
        tags |= {"lane_trial": str(answer.number), "group_start_s": f"{answer.group_start_s:.3f}"}
    if answer.restart_s is not None:
        tags["group_restart_s"] = f"{answer.restart_s:.3f}"
    return tags


def _write_measurements(
    request: TrialRequest, folder: TrialFolder, answer: Answer, recorded: Sequence[NodeTelemetry]
) -> pa.Table | None:
    """Brings marks and telemetry into the study folder; simulated sensors are computed here, from the marks."""
    spec = request.spec
    tables = [outcome.marks for outcome in answer.outcomes if outcome.marks is not None and outcome.marks.num_rows]
    marks = pa.concat_tables(tables).unify_dictionaries() if tables else None
    telemetry = {part.node: (dict(part.tables), dict(part.manifest), part.losses) for part in recorded}
    if answer.places:
        folder.write_ranks([place.to_json() for place in answer.places])
    folder.write_stacks(answer.stacks)
    kernels = [outcome.kernels for outcome in answer.outcomes if outcome.kernels is not None]
    if kernels:
        folder.write_kernels(pa.concat_tables(kernels).unify_dictionaries())
    if marks is not None:
        folder.write_marks(marks)
        if spec.cluster.simulate_sensors_of:
            for node, (simulated, manifest) in simulate(spec, marks, seed=request.seed).items():
                tiers, own, losses = telemetry.get(node, ({}, {}, ()))
                both = {key: {**own.get(key, {}), **manifest[key]} for key in ("devices", "tiers")}
                telemetry[node] = ({**tiers, **simulated}, {**manifest, **own, **both, "simulated": True}, losses)
    for node, (tiers, manifest, losses) in telemetry.items():
        known = with_calibrations(request.storage, manifest)
        folder.write_telemetry(node, tiers, {**known, "losses": list(losses)})
    return marks
