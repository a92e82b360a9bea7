"""Telemetry of one trial: a sampler on each of its nodes while it runs, and the tables they recorded."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from wattune.catalog.hardware import ClusterSpec
from wattune.errors import PlanError, TelemetryError
from wattune.orchestrate.cluster import Cluster, Node
from wattune.orchestrate.lanes.actor import KEEPER_ENDED, KEEPER_REMEDY, cause, ended_with_keeper, ray_words
from wattune.orchestrate.lanes.client import Lanes
from wattune.orchestrate.lanes.messages import Death, Place
from wattune.orchestrate.telemetry_actor import NO_OFFSET, NodeTelemetry, Sensed, clock_offset
from wattune.telemetry.devices import without_own_processes
from wattune.trial import TrialSpec

_log = logging.getLogger(__name__)

START_S: Final = 90.0
"""Longest a node may take to start its sampler, including the start of its actor."""
STOP_S: Final = 60.0
LOOK_S: Final = 5.0
"""Longest a reading of a running trial's power may take; a later one is left out."""

_BACKENDS_OF_VENDOR: Final = {"cpu": ("host",), "nvidia": ("host", "nvml"), "amd": ("host", "amd_smi")}
"""Backends that read a node's sensors, by the vendor of its devices."""

_RAYS_MEMORY_MONITOR: Final = ("NODE_OUT_OF_MEMORY", "running low on memory")
"""Words of Ray 2.60 about a worker that its memory monitor ended."""


@dataclass(slots=True)
class TrialTelemetry:
    """A trial's sensors while it runs, and their recordings once it is over."""

    key: str
    """The trial's name on its nodes."""
    sensed: Mapping[str, Sensed]
    """By node."""
    node_power_w: Callable[[], dict[str, float]]
    """Reads every node: the highest 1 s mean of its device power in the last seconds, if power is read."""
    actors: Mapping[Node, ActorHandle] = field(default_factory=dict)
    """The actors that sample the nodes."""
    places: Sequence[Place] = ()
    """Places of the ranks; set before the trial is over."""
    warm: bool = False
    """True where the ranks' processes were on their devices before the sensors were read; set with the places."""
    offsets: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Offsets of the clocks of other nodes from that of this one, by node."""
    recorded: list[NodeTelemetry] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """Nodes whose telemetry could not be fetched, and the reason."""

    def await_sensors(self) -> None:
        """Waits until the sensors of every node are open.

        Raises:
            TelemetryError: Those of a node are not, or they see other devices than those of the trial before.
        """
        opening = [(node, actor.ready.remote(self.key)) for node, actor in self.actors.items()]
        for node, pending in opening:
            if _answer(node, pending, START_S) != self.sensed[node.name].device_names:
                raise TelemetryError(f"the sensors of node {node.name} see other devices than before; try it again")

    def read(self) -> None:
        """Reads what the nodes recorded, once the sensors are off."""
        recorded, lost = _asked_all(self.actors, "recording", self.key, STOP_S)
        self.lost = list(dict.fromkeys([*self.lost, *lost]))
        for part in recorded.values():
            pids: dict[str, list[int]] = {}
            for place in self.places:
                if place.node == part.node:
                    pids.setdefault(place.device, []).extend((place.pid, *place.other_pids))
            known: dict[str, Any] = without_own_processes(part.manifest, pids, warm=self.warm)
            known |= self.offsets.get(part.node, NO_OFFSET)
            self.recorded.append(replace(part, manifest=known))

    def forget(self) -> None:
        """Removes the trial's files from its nodes once they are in the study folder."""
        asked = [actor.forget.remote(self.key) for actor in self.actors.values()]
        if asked:
            ray.wait(asked, num_returns=len(asked), timeout=STOP_S)

    def explained(self, deaths: Sequence[Death]) -> tuple[Death, ...]:
        """Adds to deaths of workers what their nodes know about them."""
        actors = {node.node_id: (node, actor) for node, actor in self.actors.items()}
        return tuple(
            _explained(death, *actors[death.node_id]) if death.node_id in actors else death for death in deaths
        )


def sensor_backends(spec: TrialSpec) -> list[str]:
    """Names of the backends that read a trial's nodes."""
    return list(_BACKENDS_OF_VENDOR[spec.cluster.rank_device.vendor])


@contextmanager
def sampling(key: str, spec: TrialSpec, cluster: Cluster, lanes: Lanes) -> Iterator[TrialTelemetry]:
    """Samples the trial's nodes while the body runs; `await_sensors` says from when on.

    Raises:
        TelemetryError: A sampler did not start.
    """
    actors = dict(zip(cluster.nodes, lanes.telemetry_actors(cluster.nodes, sensor_backends(spec)), strict=True))
    num_ranks = spec.cluster.devices_per_node
    sensed: dict[str, Sensed] = {}
    try:
        started = [(node, actor.start.remote(key, num_ranks, settings_of(spec))) for node, actor in actors.items()]
        for node, starting in started:
            sensed[node.name] = _answer(node, starting, START_S)
        # This node's clock is the reference. Measured against itself it would only show the noise of the round trip.
        others = {node: actor for node, actor in actors.items() if node.node_id != cluster.driver_node_id}
        offsets = {node.name: clock_offset(actor) for node, actor in others.items()}
    except Exception:  # also if a node has just died: the samplers of the others must not run on
        _stop(key, actors)
        raise
    telemetry = TrialTelemetry(
        key=key, sensed=sensed, node_power_w=lambda: _look(key, actors), actors=actors, offsets=offsets
    )
    try:
        yield telemetry
    finally:
        telemetry.lost = _stop(key, actors)


def own_devices(specs: Iterable[TrialSpec], cluster: Cluster, lanes: Lanes) -> None:
    """Takes the devices that trials would set, on every node that may run one, for the study's whole life.

    Raises:
        PlanError: A device cannot be set, or another study sets it. Nothing is changed then.
    """
    wanted: dict[ClusterSpec, dict[str, list[Any]]] = {}
    for spec in specs:
        for axis, value in settings_of(spec).items():
            wanted.setdefault(spec.cluster, {}).setdefault(axis, []).append(value)
    try:
        for on, values in wanted.items():
            nodes, each = cluster.fitting(on), {axis: list(dict.fromkeys(several)) for axis, several in values.items()}
            actors = lanes.telemetry_actors(nodes, _BACKENDS_OF_VENDOR[on.rank_device.vendor])
            owning = [actor.own.remote(on.devices_per_node, each) for actor in actors]
            for node, pending in zip(nodes, owning, strict=True):
                _answer(node, pending, START_S)
    except TelemetryError as error:
        raise PlanError(str(error)) from None


def settings_of(spec: TrialSpec) -> dict[str, Any]:
    """Returns what a trial sets on devices of its nodes; simulated ones obey without."""
    return {} if spec.cluster.simulate_sensors_of else spec.plan.settings


def _explained(death: Death, node: Node, actor: ActorHandle) -> Death:
    starved = any(sign in death.why for sign in _RAYS_MEMORY_MONITOR)
    try:
        words, num_oom_kills = _answer(node, actor.fate.remote(death.pid), LOOK_S)
    except TelemetryError:  # the node is gone, which the study's controller finds out
        return replace(death, out_of_memory=starved)
    return replace(death, words=words, out_of_memory=starved or num_oom_kills > 0)


def _answer(node: Node, pending: Any, timeout_s: float) -> Any:
    try:
        return ray.get(pending, timeout=timeout_s)
    except RayTaskError as error:  # raised by the actor itself
        raise TelemetryError(f"telemetry of node {node.name}: {cause(error)}") from error
    except GetTimeoutError as error:
        raise TelemetryError(
            f"telemetry of node {node.name} did not answer within {timeout_s:.0f} s; check that the node is alive"
        ) from error
    except RayError as error:  # the actor is gone, or out of reach
        if ended_with_keeper(error):
            raise TelemetryError(
                f"{KEEPER_ENDED}, and telemetry of node {node.name} with it; {KEEPER_REMEDY}"
            ) from error
        raise TelemetryError(
            f"telemetry of node {node.name} ended ({ray_words(error)}); check that the node is alive and has memory"
        ) from error


def _stop(key: str, actors: Mapping[Node, ActorHandle]) -> list[str]:
    """Ends the samplers; returns what kept some from it."""
    return _asked_all(actors, "stop", key, STOP_S)[1]


def _asked_all(
    actors: Mapping[Node, ActorHandle], method: str, key: str, timeout_s: float
) -> tuple[dict[Node, Any], list[str]]:
    """Asks every node's actor at once; returns the answers by node, and what kept the other nodes from theirs."""
    found, lost = {}, []
    for node, pending in [(node, getattr(actor, method).remote(key)) for node, actor in actors.items()]:
        try:
            found[node] = _answer(node, pending, timeout_s)
        except TelemetryError as error:  # the other nodes are asked all the same
            lost.append(" ".join(str(error).split()))
    return found, lost


def _look(key: str, actors: Mapping[Node, ActorHandle]) -> dict[str, float]:
    found, lost = _asked_all(actors, "node_power_w", key, LOOK_S)
    for reason in lost:  # the trial goes on; its result counts such looks
        _log.warning("the power of a running trial cannot be read: %s", reason)
    return {node.name: power_w for node, power_w in found.items() if power_w is not None}
