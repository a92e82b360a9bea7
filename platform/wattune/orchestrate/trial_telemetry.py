"""Telemetry of one trial: a sampler on each of its nodes while it runs, and the tables they recorded."""

import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar
from uuid import uuid4

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from wattune.catalog.hardware import ClusterSpec
from wattune.errors import PlanError, TelemetryError
from wattune.orchestrate.ask import ask_all, on_node
from wattune.orchestrate.cluster import Cluster, Node
from wattune.orchestrate.lanes.actor import NICENESS, LaneKeeper
from wattune.orchestrate.lanes.client import Lanes
from wattune.orchestrate.lanes.messages import Death, Place
from wattune.orchestrate.lanes.post import ASKED_FRAC
from wattune.orchestrate.lanes.ray_errors import KEEPER_ENDED, KEEPER_REMEDY, cause, ended_with_keeper, ray_words
from wattune.orchestrate.telemetry_actor import (
    EXCHANGE_S,
    NO_OFFSET,
    NodeClocks,
    NodeTelemetry,
    Sensed,
    actor_name,
    place_of,
)
from wattune.storage.files import write_whole
from wattune.storage.measured import MeasuredFolder
from wattune.storage.remote import RemoteStorage
from wattune.telemetry.devices import without_own_processes
from wattune.trial import TrialSpec

_log = logging.getLogger(__name__)

START_S: Final = 90.0
"""Longest a node may take to start its sampler, including the start of its actor."""
STOP_S: Final = 60.0
LOOK_S: Final = 5.0
"""Longest a reading of a running trial's power may take; a later one is left out."""

FEW_NODES: Final = 8
"""Nodes up to which a trial's analysis takes a head less than a second of a processor."""
WORK_S: Final = 600.0
"""Longest that work on a trial's files may take on a node."""

_T = TypeVar("_T")
Top = tuple[ActorHandle, Mapping[Node, tuple[str, str]]] | None
"""The post that asks the actors of many nodes, and names of each node's post and actor."""

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
    top: Top = None
    url: str = ""
    """Storage that nodes may send recordings to; see `Cluster`."""
    places: Sequence[Place] = ()
    """Places of the ranks; set before the trial is over."""
    warm: bool = False
    """True where the ranks' processes were on their devices before the sensors were read; set with the places."""
    offsets: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Offsets of the clocks of other nodes from that of this one, by node."""
    recorded: list[NodeTelemetry] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """Reasons that telemetry of nodes is missing, a line each; silent nodes share one."""
    passed_on: str = ""
    """Amount that came through this node, and why; empty if nothing did."""
    silent: Set[Node] = frozenset()
    """Nodes that did not answer at the trial's end, and are asked no more."""

    @property
    def died(self) -> dict[str, str]:
        """Last words of samplers that ended before they were to, by node."""
        told = {part.node: part.manifest.get("died") for part in self.recorded}
        return {node: " ".join(words.split()) for node, words in told.items() if words}

    def await_sensors(self) -> None:
        """Waits until the sensors of every node are open.

        Raises `TelemetryError`: those of a node are not, or they see other devices than those of the trial before.
        """
        found, failed = self._ask(START_S, "ready")
        _require(failed, START_S)
        for node, names in found.items():
            if names != self.sensed[node.name].device_names:
                raise TelemetryError(f"the sensors of node {node.name} see other devices than before; try it again")

    def keep(self, folder: Path, *, used_alone: bool = False) -> dict[str, str]:
        """Has the nodes' recordings in the trial's folder, once the sensors are off; returns digests of their files.

        Each node writes its own where it sees the folder. `used_alone` leaves out devices that no rank has.
        """
        used: dict[str, set[str]] = {}
        for place in self.places if used_alone else ():
            used.setdefault(place.node, set()).add(place.device)
        within_s = 3 * STOP_S if self.url else STOP_S  # a store that hangs costs a node a minute, and no telemetry
        mark = folder / f".seen-{uuid4().hex}"
        write_whole(mark, b"")
        try:
            recorded, failed = self._ask(within_s, "recording", mark, used if used_alone else None, self.url)
        finally:
            mark.unlink(missing_ok=True)
        self._lose(failed, within_s)
        digests: dict[str, str] = {}
        for part in recorded.values():
            pids: dict[str, list[int]] = {}
            for place in self.places:
                if place.node == part.node:
                    pids.setdefault(place.device, []).extend((place.pid, *place.other_pids))
            known: dict[str, Any] = without_own_processes(part.manifest, pids, warm=self.warm)
            known |= self.offsets.get(part.node, NO_OFFSET)
            self.recorded.append(replace(part, manifest=known, files={}))
            digests |= {**part.digests, **MeasuredFolder(folder).write_files(part.node, part.files)}
        if here := [part for part in recorded.values() if part.files]:
            size_mb = sum(len(content) for part in here for content in part.files.values()) / 1e6
            why = here[0].unsent or f"they do not see {folder.parents[2]}; give --storage a folder they see, or a URL"
            self.passed_on = (
                f"{size_mb:.3g} MB of telemetry of {len(here)} node(s) came through the study's node: {why}"
            )
        return digests

    def beside(self, on: Callable[[Path], _T], folder: Path) -> _T:
        """Does work on the trial's files: on one of its nodes where it has sent some, or where it has many; else here.

        So a head that drives many trials is not busy with each. Where the node fails at it, it is done here.
        """
        sent = {name: size for part in self.recorded for name, size in part.sent.items()}
        seen = [node for node in self.actors if any(part.node == node.name and part.digests for part in self.recorded)]
        work = partial(on, folder)
        if sent:  # not a node's memory alone: the study's has none of these rows
            whole = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.*")}
            work = partial(_fetched, on, self.url, place_of(folder), whole, sent)
        elif len(self.actors) <= FEW_NODES or not seen:
            return work()
        task = on_node(niced, seen[-1].node_id, max_retries=0)
        try:
            done: _T = ray.get(task.remote(work), timeout=WORK_S)
        except RayError as error:
            why = cause(error) if isinstance(error, RayTaskError) else ray_words(error)
            _log.warning("what node %s was to do is done here: %s", seen[-1].name, why)
            return work()
        return done

    def forget(self) -> None:
        """Removes the trial's files from its nodes once they are in the study folder."""
        self._ask(STOP_S, "forget")

    def stop(self) -> None:
        """Ends the samplers, and notes what kept some from it."""
        self._lose(self._ask(STOP_S, "stop")[1], STOP_S)

    def know_clocks(self, clocks: NodeClocks, reference: str) -> None:
        """Estimates offsets of other nodes' clocks: once the steps are over, so that no trial starts later for it."""
        for node, actor in self.actors.items():  # one after another: beside others a round trip takes longer
            if node.node_id != reference and node not in self.silent:
                try:
                    found = clocks.offset(node.node_id, actor, self.sensed[node.name].clock)
                    self.offsets = {**self.offsets, node.name: found}
                except RayError as error:
                    self._lose({node: error}, EXCHANGE_S)

    def _ask(self, within_s: float, method: str, *given: Any) -> tuple[dict[Node, Any], dict[Node, RayError]]:
        actors = {node: actor for node, actor in self.actors.items() if node not in self.silent}
        return _ask(actors, self.top, within_s, method, self.key, *given)

    def _lose(self, failed: Mapping[Node, RayError], within_s: float) -> None:
        self.silent = {*self.silent, *_silent(failed)}
        self.lost = list(dict.fromkeys([*self.lost, *_told(failed, within_s)]))

    def explained(self, deaths: Sequence[Death]) -> tuple[Death, ...]:
        """Adds to deaths of workers what their nodes know about them."""
        actors = {node.node_id: actor for node, actor in self.actors.items()}
        asked = {death: actors[death.node_id].fate.remote(death.pid) for death in deaths if death.node_id in actors}
        fates, _ = ask_all(asked, LOOK_S)  # a node that is gone is found by the study's controller
        told = ((death, *fates.get(death, ("", 0))) for death in deaths)
        starved = {death for death in deaths if any(sign in death.why for sign in _RAYS_MEMORY_MONITOR)}
        return tuple(
            replace(death, words=words, out_of_memory=death in starved or num_kills > 0)
            for death, words, num_kills in told
        )


def _fetched(on: Callable[[Path], _T], url: str, place: str, whole: Mapping[str, bytes], sent: Mapping[str, int]) -> _T:
    """Does work on a trial's files, of which some were sent to the storage."""
    with tempfile.TemporaryDirectory(prefix="wattune-trial-") as scratch:
        folder = Path(scratch) / place
        for name, content in whole.items():
            write_whole(folder / name, content)
        RemoteStorage(url).fetch_folder(place, folder, {name: sent[name] for name in sent if name not in whole})
        return on(folder)


def niced(work: Callable[[], _T]) -> _T:
    """Does work in a thread that gives way to others: Linux counts niceness by thread, and only root may lower it."""
    with ThreadPoolExecutor(1, initializer=os.nice, initargs=(NICENESS,)) as aside:
        return aside.submit(work).result()


def sensor_backends(spec: TrialSpec) -> list[str]:
    """Names of the backends that read a trial's nodes."""
    return list(_BACKENDS_OF_VENDOR[spec.cluster.rank_device.vendor])


@contextmanager
def sampling(key: str, spec: TrialSpec, cluster: Cluster, lanes: LaneKeeper) -> Iterator[TrialTelemetry]:
    """Samples the trial's nodes while the body runs; `await_sensors` says from when on.

    Raises `TelemetryError`: a sampler did not start.
    """
    backends = sensor_backends(spec)
    actors = dict(zip(cluster.nodes, lanes.telemetry_actors(cluster.nodes, backends), strict=True))
    named = partial(actor_name, backends=backends, job_id=ray.get_runtime_context().get_job_id())
    post, posts = lanes.top(cluster.nodes)
    top = (post, {node: (at, named(node)) for node, at in posts.items()}) if post is not None else None
    num_ranks = spec.cluster.devices_per_node
    silent: Set[Node] = frozenset()
    try:
        found, failed = _ask(actors, top, START_S, "start", key, num_ranks, settings_of(spec))
        silent = _silent(failed)
        _require(failed, START_S)
        sensed = {node.name: one for node, one in found.items()}
    except Exception:  # also if a node has just died: the samplers of the others must not run on
        _ask({node: one for node, one in actors.items() if node not in silent}, top, STOP_S, "stop", key)
        raise
    telemetry = TrialTelemetry(
        key=key,
        sensed=sensed,
        node_power_w=lambda: _look(key, actors, top),
        actors=actors,
        top=top,
        url=cluster.url,
    )
    try:
        yield telemetry
    finally:
        telemetry.stop()
        # This node's clock is the reference. Measured against itself it would only show the noise of the round trip.
        telemetry.know_clocks(lanes.clocks, cluster.driver_node_id)


def own_devices(specs: Iterable[TrialSpec], cluster: Cluster, lanes: Lanes) -> None:
    """Takes the devices that trials would set, on every node that may run one, for the study's whole life.

    Raises `PlanError`: a device cannot be set, or another study sets it. Nothing is changed then.
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
            _require(ask_all(dict(zip(nodes, owning, strict=True)), START_S)[1], START_S)
    except TelemetryError as error:
        raise PlanError(str(error)) from None


def settings_of(spec: TrialSpec) -> dict[str, Any]:
    """Returns what a trial sets on devices of its nodes; simulated ones obey without."""
    return {} if spec.cluster.simulate_sensors_of else spec.plan.settings


def _silent(failed: Mapping[Node, RayError]) -> Set[Node]:
    return {node for node, error in failed.items() if isinstance(error, GetTimeoutError)}


def _require(failed: Mapping[Node, RayError], within_s: float) -> None:
    if failed:
        raise TelemetryError("; ".join(_told(failed, within_s))) from next(iter(failed.values()))


def _told(failed: Mapping[Node, RayError], within_s: float) -> list[str]:
    """Says what kept nodes from an answer: a line for each, and one for all that are silent."""
    silent = _silent(failed)
    told = [_reason(node, error) for node, error in failed.items() if node not in silent]
    if silent:
        names = ", ".join(node.name for node in failed if node in silent)
        told.append(
            f"telemetry of node{'s' if len(silent) > 1 else ''} {names} did not answer within {within_s:.0f} s; check "
            f"that {'they are' if len(silent) > 1 else 'the node is'} alive"
        )
    return told


def _reason(node: Node, error: RayError) -> str:
    if isinstance(error, RayTaskError):  # raised by the actor itself
        return f"telemetry of node {node.name}: {cause(error)}"
    if ended_with_keeper(error):
        return f"{KEEPER_ENDED}, and telemetry of node {node.name} with it; {KEEPER_REMEDY}"
    return f"telemetry of node {node.name} ended ({ray_words(error)}); check that the node is alive and has memory"


def _ask(
    actors: Mapping[Node, ActorHandle], top: Top, within_s: float, method: str, *given: Any
) -> tuple[dict[Node, Any], dict[Node, RayError]]:
    """Asks actors as `ask_all` does, by posts for half of the time; then those themselves that have not answered.

    So a silent post costs its nodes nothing, and silent nodes cost one time-out.
    """
    answers: dict[Node, Any] = {}
    if top is not None:
        within_s /= 2
        post, names = top
        asked = post.ask.remote([names[node] for node in actors], ASKED_FRAC * within_s, method, *given)
        for told in ask_all({method: asked}, within_s)[0].values():
            answers = dict(zip(actors, told, strict=True))
    raised = {node: one for node, one in answers.items() if isinstance(one, RayTaskError)}
    found = {node: one for node, one in answers.items() if not isinstance(one, Exception)}
    rest = {node: one for node, one in actors.items() if node not in found and node not in raised}
    direct = {node: getattr(actor, method).remote(*given) for node, actor in rest.items()}
    more, failed = ask_all(direct, within_s)
    return found | more, raised | failed


def _look(key: str, actors: Mapping[Node, ActorHandle], top: Top) -> dict[str, float]:
    found, failed = _ask(actors, top, LOOK_S, "node_power_w", key)
    for reason in _told(failed, LOOK_S):  # the trial goes on; its result counts such looks
        _log.warning("the power of a running trial cannot be read: %s", reason)
    return {node.name: power_w for node, power_w in found.items() if power_w is not None}
