"""One trial on fresh Ray Train workers: telemetry on, train, telemetry off, analyse, result into the study folder."""

import faulthandler
import os
import shutil
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import ray
from ray.actor import ActorHandle
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchConfig, TorchTrainer

from wattune.analysis.summary import summarize
from wattune.catalog.hardware import device
from wattune.errors import EngineError, TelemetryError, WattuneError
from wattune.orchestrate.cluster import Cluster
from wattune.orchestrate.telemetry_actor import ClockOffset, NodeTelemetry, clock_offset, telemetry_actor
from wattune.plan.placement import place
from wattune.study import TrialFolder, with_calibrations
from wattune.telemetry.simulated import simulate
from wattune.trial import Measure, TrialResult, TrialSpec, TrialStatus
from wattune.workers.engine import Ranks, load_engine
from wattune.workers.loop import RankOutcome, is_out_of_memory, measure_trial
from wattune.workers.torch_device import device_uuid

COLLECTIVE_TIMEOUT_S: Final = 180
"""Longest a collective may wait for a rank; the default of half an hour is longer than most trials."""

_BACKENDS_OF_VENDOR: Final = {"cpu": ("host",), "nvidia": ("host", "nvml"), "amd": ("host", "amd_smi")}
"""What reads a node's sensors, by the vendor of the devices it trains on."""

_DeviceNames = Mapping[str, Mapping[str, str]]

_REFERENCE: Final = ClockOffset(clock_offset_ns=0, clock_offset_uncertainty_ns=0)

FIRST_FAILURE_WAIT_S: Final = 5.0
"""How long a failing rank leaves the others to say that they failed too."""


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

    @property
    def storage(self) -> Path:
        """The folder the study is kept in: `<storage>/<study>/trials/<trial>`."""
        return self.folder.parents[2]

    @property
    def key(self) -> str:
        """A name for this attempt that no other study on the machine shares."""
        place = zlib.crc32(str(self.folder.parent.parent).encode())
        return f"{self.folder.parent.parent.name}-{place:08x}-{self.folder.name}"


class Mailbox:
    """An actor that keeps what each rank brought home; it survives the workers."""

    def __init__(self) -> None:
        """Starts empty."""
        self._outcomes: dict[int, RankOutcome] = {}

    def deliver(self, outcome: RankOutcome) -> None:
        """Keeps the first outcome of a rank; a rank that failed has nothing better to say later."""
        self._outcomes.setdefault(outcome.rank, outcome)

    def collect(self) -> list[RankOutcome]:
        """The outcomes so far, by rank."""
        return [self._outcomes[rank] for rank in sorted(self._outcomes)]


def run_trial(request: TrialRequest, cluster: Cluster) -> TrialResult:
    """Runs one repeat of one trial and leaves its result in the study folder.

    Whatever goes wrong with the trial is its status; only errors of this program are raised.
    """
    start_wall_ns = time.time_ns()
    folder = TrialFolder(request.folder)
    folder.write_spec(request.spec)
    failure = ""
    try:
        with _telemetry(request, cluster) as (names, recorded):
            outcomes, failure = _train(request, cluster, names)
    except (EngineError, TelemetryError) as error:
        outcomes, recorded, failure = [], [], _cause(error)
    marks = _write_measurements(request, folder, outcomes, recorded)
    result = _judge(request, folder, outcomes, marks, failure, start_wall_ns)
    folder.write_result(result)
    _forget(request, cluster, recorded)
    return result


def sensor_backends(spec: TrialSpec) -> list[str]:
    """What the nodes of a trial are read with."""
    return list(_BACKENDS_OF_VENDOR[device(spec.cluster.device).vendor])


@contextmanager
def _telemetry(request: TrialRequest, cluster: Cluster) -> Iterator[tuple[_DeviceNames, list[NodeTelemetry]]]:
    """Samples every node of the cluster while the body runs; the list is filled when it ends.

    Yields:
        What telemetry calls each device, by node and uuid, and the list.
    """
    actors = [telemetry_actor(node, sensor_backends(request.spec)) for node in cluster.nodes]
    started: list[dict[str, str]] = ray.get([actor.start.remote(request.key) for actor in actors])
    names = {node.name: found for node, found in zip(cluster.nodes, started, strict=True)}
    # This node's clock is the reference; measured against itself it would only show the round trip's noise.
    others = [node.name if node != cluster.driver_node else "" for node in cluster.nodes]
    offsets = {name: clock_offset(actor) for name, actor in zip(others, actors, strict=True) if name}
    recorded: list[NodeTelemetry] = []
    try:
        yield names, recorded
    finally:
        parts: list[NodeTelemetry] = ray.get([actor.stop.remote(request.key) for actor in actors])
        for part in parts:
            offset = offsets.get(part.node, _REFERENCE)
            recorded.append(replace(part, manifest={**part.manifest, **asdict(offset)}))


def _forget(request: TrialRequest, cluster: Cluster, recorded: Sequence[NodeTelemetry]) -> None:
    names = {part.node for part in recorded}
    backends = sensor_backends(request.spec)
    actors = [telemetry_actor(node, backends) for node in cluster.nodes if node.name in names]
    ray.get([actor.forget.remote(request.key) for actor in actors])


def _train(request: TrialRequest, cluster: Cluster, names: _DeviceNames) -> tuple[list[RankOutcome], str]:
    """Runs the workers.

    Returns:
        What the ranks brought home, and why the group failed where it did.
    """
    spec = request.spec
    gpus = spec.cluster.device != "cpu"
    resources = cluster.resources_per_rank(spec.cluster)
    mailbox = ray.remote(Mailbox).options(num_cpus=0).remote()
    scratch = tempfile.mkdtemp(prefix="wattune-train-")
    trainer = TorchTrainer(
        _worker,
        train_loop_config={
            "request": request,
            "mailbox": mailbox,
            "node_names": {node.node_id: node.name for node in cluster.nodes},
            "device_names": names,
        },
        scaling_config=ScalingConfig(
            num_workers=spec.cluster.world_size,
            use_gpu=gpus,
            resources_per_worker=resources,
            placement_strategy="STRICT_PACK" if spec.cluster.num_nodes == 1 else "PACK",
        ),
        torch_config=TorchConfig(backend="nccl" if gpus else "gloo", timeout_s=COLLECTIVE_TIMEOUT_S),
        run_config=RunConfig(
            name=request.key,
            storage_path=scratch,
            # One group, once: by default Train would wait for workers for ever and restart them without end.
            failure_config=FailureConfig(max_failures=0, controller_failure_limit=1),
        ),
    )
    failure = ""
    try:
        trainer.fit()
    except Exception as error:  # Train has no common class for a group that failed; all of them are the trial's
        failure = _cause(error)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    outcomes = ray.get(mailbox.collect.remote())
    ray.kill(mailbox)
    return outcomes, failure


def _worker(config: dict[str, Any]) -> None:
    """What every Ray Train worker runs."""
    request: TrialRequest = config["request"]
    mailbox: ActorHandle = config["mailbox"]
    context = get_context()
    spec, rank = request.spec, context.get_world_rank()
    slot = place(spec.plan, spec.cluster)[rank]
    ranks = Ranks(
        rank=rank,
        world_size=context.get_world_size(),
        local_rank=context.get_local_rank(),
        device="cpu" if spec.cluster.device == "cpu" else f"cuda:{slot.device}",
    )
    node = config["node_names"][ray.get_runtime_context().get_node_id()]
    _arm_watchdog(request.measure.timeout_s, rank, mailbox)
    try:
        if context.get_node_rank() != slot.node:
            raise EngineError(
                f"rank {rank} runs on node {context.get_node_rank()} of the group, its plan wants {slot.node}; "
                "start nodes with equal numbers of devices"
            )
        outcome = measure_trial(
            load_engine(spec.engine),
            spec,
            request.measure,
            ranks,
            node=node,
            device=sensed_name(spec, slot.device, device_uuid(ranks.device), config["device_names"][node]),
            seed=request.seed,
        )
    except Exception as error:
        _deliver(mailbox, failed(rank, error))
        time.sleep(FIRST_FAILURE_WAIT_S)
        raise
    _deliver(mailbox, outcome)
    if outcome.status is TrialStatus.OUT_OF_MEMORY:
        # The other ranks wait in a collective for this one: ending the group frees them.
        time.sleep(FIRST_FAILURE_WAIT_S)
        raise EngineError(outcome.reason)


def device_name(spec: TrialSpec, slot: int) -> str:
    """The name telemetry and marks give the device in a slot of a node, such as `gpu0`."""
    return f"{'cpu' if device(spec.cluster.device).vendor == 'cpu' else 'gpu'}{slot}"


def sensed_name(spec: TrialSpec, slot: int, uuid: str | None, names: Mapping[str, str]) -> str:
    """The name telemetry gives the device that a rank really drives, whatever `CUDA_VISIBLE_DEVICES` made of the slot.

    Args:
        spec: The trial's specification.
        slot: The device's number in the plan.
        uuid: The identity of the device, as its worker sees it.
        names: What telemetry calls the devices of the node, by uuid.

    Returns:
        The name. Only NVIDIA's tools agree about identities (checked on H200); elsewhere it is the slot's.

    Raises:
        EngineError: Telemetry does not see the device: its readings would be another one's.
    """
    if device(spec.cluster.device).vendor != "nvidia":
        return device_name(spec, slot)
    if uuid is None or uuid not in names:
        seen = ", ".join(f"{name} {known}" for known, name in sorted(names.items(), key=lambda item: item[1])) or "none"
        raise EngineError(
            f"device {uuid}, which this rank drives, is none that telemetry sees ({seen}); let the sampler's container "
            "see all devices of its node, and use no MIG slices"
        )
    return names[uuid]


def failed(rank: int, error: BaseException) -> RankOutcome:
    """The outcome of a rank whose engine raised."""
    status = TrialStatus.OUT_OF_MEMORY if is_out_of_memory(error) else TrialStatus.CRASHED
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    reason = f"rank {rank}: {type(error).__name__}: {text}"
    return RankOutcome(rank=rank, status=status, reason=reason, end_mono_ns=time.monotonic_ns())


def _deliver(mailbox: ActorHandle, outcome: RankOutcome) -> None:
    """Returns once the mailbox has the outcome."""
    ray.get(mailbox.deliver.remote(outcome))


def _arm_watchdog(timeout_s: float, rank: int, mailbox: ActorHandle) -> None:
    """Ends this worker when the trial's time is over, also where it hangs in a collective that never returns."""

    def end() -> None:
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            stacks = file.read()
        reason = f"longer than measure.timeout_s = {timeout_s:g}"
        outcome = RankOutcome(rank=rank, status=TrialStatus.TIMED_OUT, reason=reason, end_mono_ns=time.monotonic_ns())
        print(stacks, flush=True)  # noqa: T201 - into the worker's log, where Ray keeps it
        _deliver(mailbox, outcome)
        os._exit(1)

    timer = threading.Timer(timeout_s, end)
    timer.daemon = True
    timer.start()


def _cause(error: BaseException) -> str:
    """The one line of a Train error that says what happened: the innermost cause's."""
    workers = getattr(error, "worker_failures", None)
    if workers:
        rank, first = min(workers.items())
        return f"rank {rank}: {_cause(first)}"
    # What an actor raised arrives wrapped, its own error in `cause`.
    while (inner := getattr(error, "cause", None) or error.__cause__) is not None:
        error = inner
    text = " ".join(str(error).split()) or "no message"
    return text if isinstance(error, WattuneError) else f"{type(error).__name__}: {text}"


def _write_measurements(
    request: TrialRequest, folder: TrialFolder, outcomes: Sequence[RankOutcome], recorded: Sequence[NodeTelemetry]
) -> pa.Table | None:
    """Brings marks and telemetry into the study folder; simulated sensors are computed here, from the marks."""
    spec = request.spec
    tables = [outcome.marks for outcome in outcomes if outcome.marks is not None and outcome.marks.num_rows]
    marks = pa.concat_tables(tables).unify_dictionaries() if tables else None
    telemetry = {part.node: (dict(part.tables), dict(part.manifest), part.losses) for part in recorded}
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


def _judge(
    request: TrialRequest,
    folder: TrialFolder,
    outcomes: Sequence[RankOutcome],
    marks: pa.Table | None,
    failure: str,
    start_wall_ns: int,
) -> TrialResult:
    """Status, metrics and quality from what the ranks brought home."""
    spec = request.spec
    status, reason = TrialStatus.COMPLETED, ""
    bad = sorted((one for one in outcomes if one.status is not TrialStatus.COMPLETED), key=lambda one: one.end_mono_ns)
    silent = sorted(set(range(spec.cluster.world_size)) - {one.rank for one in outcomes})
    lost = f"rank {', '.join(map(str, silent))} ended without a word" if silent and outcomes else ""
    if bad:
        status, reason = bad[0].status, "; ".join(filter(None, (lost, bad[0].reason)))
    elif failure or silent:
        status, reason = TrialStatus.CRASHED, "; ".join(filter(None, (lost, failure)))
    metrics: Mapping[str, float] = {}
    quality, tags = "", dict(request.tags)
    quality_reasons: tuple[str, ...] = ()
    if status is TrialStatus.COMPLETED:
        summary = summarize(
            spec,
            marks,
            folder.telemetry(),
            folder.manifests(),
            memory_peak_bytes=[outcome.memory_peak_bytes for outcome in outcomes],
        )
        metrics, quality, quality_reasons = summary.metrics, summary.quality, summary.quality_reasons
        tags |= summary.tags
        status, reason = _against_limits(metrics, request.limits, quality, quality_reasons)
    tags |= {
        "engine": spec.engine,
        "device": spec.cluster.device,
        "simulated": str(spec.cluster.simulate_sensors_of is not None).lower(),
    }
    if outcomes:
        tags["warmup_steps"] = str(outcomes[0].num_warmup_steps)
        tags["steady"] = str(all(outcome.steady for outcome in outcomes)).lower()
        tags["build_time_s"] = f"{max(outcome.build_time_s for outcome in outcomes):.3f}"
    return TrialResult(
        trial_id=spec.trial_id,
        repeat=request.repeat,
        status=status,
        reason=reason,
        metrics=metrics,
        quality=quality,
        quality_reasons=quality_reasons,
        tags=tags,
        start_wall_ns=start_wall_ns,
        end_wall_ns=time.time_ns(),
    )


def _against_limits(
    metrics: Mapping[str, float], limits: Mapping[str, float], quality: str, reasons: Sequence[str]
) -> tuple[TrialStatus, str]:
    limit_w, peak_w = limits.get("node_device_power_w"), metrics.get("node_device_power_peak_1s_w")
    if limit_w is not None and peak_w is not None and peak_w > limit_w:
        return TrialStatus.ABORTED, f"node power reached {peak_w:.0f} W over 1 s, the hard limit is {limit_w:.0f} W"
    if quality == "invalid":
        return TrialStatus.INVALID, f"measurement quality: {', '.join(reasons)}"
    return TrialStatus.COMPLETED, ""
