"""The post of a node: calls of its ranks go to the process that holds the lanes together, one for all of them.

That process would have some calls of every rank in each trial otherwise, which at a thousand ranks are seconds. Ranks
on its own node, and workers of commands, of which a node has one, call it themselves.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import pyarrow as pa
import ray
from ray.actor import ActorHandle

from wattune.orchestrate.ask import on_node
from wattune.orchestrate.cluster import NAMESPACE
from wattune.orchestrate.lanes.messages import RankAssignment
from wattune.orchestrate.ray_settings import normal_priority
from wattune.workers.outcome import RankOutcome

GATHER_S: Final = 0.02
"""Longest a call waits for those of the node's other ranks; what comes later follows in another one."""

_ALIKE: Final = ("await_window", "stop_order")
"""Calls of all ranks that have one answer. Each of the next has something of its own. All others go out at once."""
_TOGETHER: Final = (*_ALIKE, "join", "next_trial", "deliver")


class Post:
    """Passes on the calls of one node's ranks, of all lanes there, to `LaneKeeper.call`."""

    def __init__(self, keeper: ActorHandle) -> None:
        normal_priority()
        self._keeper = keeper
        self._gathered: dict[tuple[Any, ...], tuple[list[tuple[Any, ...]], asyncio.Event, asyncio.Task[Any]]] = {}
        """Calls that wait for others, by lane, name, and run or group."""
        self._joined: Counter[tuple[str, int]] = Counter()
        """Ranks here, by lane and group."""

    async def call(self, lane: str, name: str, *arguments: Any, **more: Any) -> Any:
        """Calls a method of a lane for a rank."""
        if name not in _TOGETHER:
            return await self._keeper.call.remote(lane, name, *arguments, **more)
        key = (lane, name, arguments[0])
        if key not in self._gathered:
            several, whole = list[tuple[Any, ...]](), asyncio.Event()
            self._gathered[key] = (several, whole, asyncio.create_task(self._send(key, several, whole)))
        several, whole, sent = self._gathered[key]
        several.append(arguments)
        index = len(several) - 1
        if name != "join" and len(several) == self._joined[lane, arguments[0]]:
            whole.set()
        answer = (await asyncio.shield(sent))[index]
        if name == "join":
            self._joined[lane, answer] += 1
        return answer

    async def _send(self, key: tuple[Any, ...], several: list[tuple[Any, ...]], whole: asyncio.Event) -> list[Any]:
        await asyncio.wait([asyncio.create_task(whole.wait())], timeout=GATHER_S)
        whole.set()  # ends the task above where it was not
        del self._gathered[key]  # who comes now is of the next call
        lane, name, _ = key
        if name in _ALIKE:
            return [await self._keeper.call.remote(lane, name, *several[0])] * len(several)
        several = _without_tables(several) if name == "deliver" else several
        answers: list[Any] = await self._keeper.calls.remote(lane, name, several)
        shared = next((one.assignment for one in answers if isinstance(one, RankAssignment)), None)
        if not isinstance(shared, ray.ObjectRef):
            return answers
        assignment = await shared  # one copy for the node
        return [one and replace(one, assignment=assignment) for one in answers]


def _without_tables(delivered: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Keeps the tables of outcomes here, where whoever makes the result fetches them, and returns the rest."""
    outcomes: list[RankOutcome] = [arguments[2] for arguments in delivered]
    spans = [one.spans for one in outcomes if one.spans is not None and one.spans.num_rows]
    tables = [(pa.concat_tables(spans).unify_dictionaries(), None)] if spans else []
    tables += [(None, one.kernels) for one in outcomes if one.kernels is not None]
    held = [ray.put(tables) if tables else None, *[None] * len(outcomes)]
    told = outcomes[0].provenance  # what is equal on all of them is sent once
    left = [
        replace(one, spans=None, kernels=None, provenance=told if one.provenance == told else one.provenance)
        for one in outcomes
    ]
    return [(*each[:2], one, each[3], ref) for each, one, ref in zip(delivered, left, held, strict=False)]


def _name(lane: str, node_id: str) -> str:
    return f"post-{lane.rpartition('@')[2]}-{node_id}"


def open_post(keeper: ActorHandle, lane: str, node_id: str) -> ActorHandle:
    """Starts the post of a node, or returns the one that other lanes have there. It ends with the process it calls."""
    known = {"name": _name(lane, node_id), "namespace": NAMESPACE, "get_if_exists": True}
    # It holds nothing that calls made again do not bring back.
    return on_node(Post, node_id, **known, max_restarts=-1, max_task_retries=-1).remote(keeper)


def nearest(config: Mapping[str, Any]) -> ActorHandle:
    """Returns what a rank calls: the post of its node; on the node of what holds the lanes that itself."""
    here = ray.get_runtime_context().get_node_id()
    return config["keeper"] if here == config["head"] else ray.get_actor(_name(config["lane"], here), NAMESPACE)
