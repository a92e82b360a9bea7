"""The post of a node: calls of its ranks go to the process that holds the lanes together, one for all of them.

That process would have some calls of every rank in each trial otherwise, which at a thousand ranks are seconds. On many
nodes the posts are a tree: some lead others, pass on their calls, and ask their nodes' sensors. Ranks on its own node,
and workers of commands, of which a node has one, call it themselves. A post that is killed is started again, and called
again; a leader that is gone with its node is left out.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, Final

import pyarrow as pa
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from wattune.orchestrate.ask import on_node
from wattune.orchestrate.cluster import NAMESPACE
from wattune.orchestrate.lanes.messages import RankAssignment
from wattune.orchestrate.ray_settings import normal_priority
from wattune.workers.outcome import RankOutcome

GATHER_S: Final = 0.02
"""Longest a call waits for those of the node's other ranks; what comes later follows in another one."""
LED: Final = 16
"""Nodes of a leader, itself among them. A lane of no more than that has none."""

_ALIKE: Final = ("turn", "await_window", "stop_order")
"""Calls of all ranks that have one answer. Each of the next has something of its own. All others go out at once."""
_TOGETHER: Final = ("join", "next_trial", "deliver")
_OF_A_RANK: Final = 4  # arguments of `Lane.deliver`: its post adds another
_found = cache(partial(ray.get_actor, namespace=NAMESPACE))


class Post:
    """Passes on the calls of one node's ranks, of all lanes there, to `LaneKeeper.call`."""

    def __init__(self, keeper: ActorHandle, node_id: str, head: str) -> None:
        normal_priority()
        self._keeper, self._node_id, self._head = keeper, node_id, head
        self._above: dict[str, ActorHandle] = {}
        self._gathered: dict[tuple[Any, ...], tuple[list[tuple[Any, ...]], asyncio.Event, asyncio.Task[Any]]] = {}
        """Calls that wait for others, by lane, name, and run or group."""
        self._asked: dict[tuple[Any, ...], asyncio.Task[Any]] = {}
        """Calls that have one answer, until it is there."""
        self._parts: dict[str, tuple[ray.ObjectRef, asyncio.Future[Any]]] = {}
        self._joined: Counter[tuple[str, int]] = Counter()
        """Ranks here and at posts it leads, by lane and group."""

    async def call(self, lane: str, name: str, *arguments: Any, **more: Any) -> Any:
        """Calls a method of a lane for a rank."""
        key = (lane, name, *arguments)
        if name in _ALIKE:
            if key not in self._asked:
                self._asked[key] = asyncio.create_task(self._up("call", *key))
                self._asked[key].add_done_callback(lambda _: self._asked.pop(key))
            return await asyncio.shield(self._asked[key])
        if name not in _TOGETHER:
            return await self._up("call", *key, **more)
        (answer,) = await self.calls(lane, name, [arguments])
        if not isinstance(answer, RankAssignment) or not isinstance(answer.assignment, ray.ObjectRef):
            return answer
        if lane not in self._parts or self._parts[lane][0] != answer.assignment:
            self._parts[lane] = (answer.assignment, asyncio.ensure_future(answer.assignment))
        return replace(answer, assignment=await asyncio.shield(self._parts[lane][1]))

    async def calls(self, lane: str, name: str, given: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Calls a method of a lane for ranks, here or of a post that it leads, each with arguments of its own."""
        key = (lane, name, given[0][0])
        if key not in self._gathered:
            several, whole = list[tuple[Any, ...]](), asyncio.Event()
            self._gathered[key] = (several, whole, asyncio.create_task(self._send(key, several, whole)))
        several, whole, sent = self._gathered[key]
        first = len(several)
        several += given
        if name != "join" and len(several) == self._joined[lane, given[0][0]]:
            whole.set()
        answers: list[Any] = (await asyncio.shield(sent))[first : first + len(given)]
        if name == "join":
            self._joined.update((lane, group) for group in answers)
        return answers

    async def _send(self, key: tuple[Any, ...], several: list[tuple[Any, ...]], whole: asyncio.Event) -> Any:
        await asyncio.wait([asyncio.create_task(whole.wait())], timeout=GATHER_S)
        whole.set()  # ends the task above where it was not
        del self._gathered[key]  # who comes now is of the next call
        lane, name, _ = key
        return await self._up("calls", lane, name, _without_tables(several) if name == "deliver" else several)

    def _actor(self, name: str) -> ActorHandle:
        return _found(name)

    async def _up(self, method: str, lane: str, *given: Any, **more: Any) -> Any:
        if lane not in self._above:
            self._above[lane] = self._keeper
            first = leader(lane.partition("@")[0].split("+"), self._node_id, self._head)
            if first != self._node_id:
                self._above[lane] = self._actor(_name(lane, first))
        try:
            return await getattr(self._above[lane], method).remote(lane, *given, **more)
        except RayActorError:
            if self._above[lane] is self._keeper:
                raise
            self._above[lane] = self._keeper
            return await getattr(self._keeper, method).remote(lane, *given, **more)

    async def ask(self, actors: Sequence[str], within_s: float, method: str, *given: Any) -> list[Any]:
        """Asks actors of nodes that it leads, by their names; returns their answers, or what kept them."""

        async def asked(name: str) -> Any:
            return await getattr(self._actor(name), method).remote(*given)

        several = (asyncio.wait_for(asked(name), within_s) for name in actors)
        return await asyncio.gather(*several, return_exceptions=True)


def _without_tables(delivered: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Keeps the tables of own ranks' outcomes here, where whoever makes the result fetches them; returns the rest.

    Those of ranks elsewhere are kept there already.
    """
    own = sorted((each for each in delivered if len(each) == _OF_A_RANK), key=lambda each: each[2].rank)
    outcomes: list[RankOutcome] = [each[2] for each in own]
    spans = [one.spans for one in outcomes if one.spans is not None and one.spans.num_rows]
    tables = [(pa.concat_tables(spans).unify_dictionaries(), None)] if spans else []
    tables += [(None, one.kernels) for one in outcomes if one.kernels is not None]
    held, told, left = [ray.put(tables)] if tables else [], delivered[0][2].provenance, list[tuple[Any, ...]]()
    for each in (*own, *(each for each in delivered if len(each) > _OF_A_RANK)):
        facts = told if each[2].provenance == told else each[2].provenance  # sent once if equal
        one = replace(each[2], spans=None, kernels=None, provenance=facts)
        ref = each[4] if len(each) > _OF_A_RANK else held.pop() if held else None
        left.append((*each[:2], one, each[3], ref))
    return left


def leader(nodes: Sequence[str], node_id: str, head: str) -> str:
    """Returns the node whose post leads that of a node of a lane; itself where it has no leader.

    The node of the process that holds the lanes has no post.
    """
    if len(nodes) <= LED:
        return node_id
    first = nodes.index(node_id) // LED * LED
    return next(node for node in nodes[first : first + LED] if node != head)


def _name(born: str, node_id: str) -> str:
    return f"post-{born.rpartition('@')[2]}-{node_id}"


def open_post(keeper: ActorHandle, born: str, node_id: str, head: str) -> ActorHandle:
    """Starts the post of a node; it ends with the process that it calls, of whose lanes' names `born` is a part."""
    known = {"name": _name(born, node_id), "namespace": NAMESPACE, "get_if_exists": True}
    return on_node(Post, node_id, **known, max_restarts=-1, max_task_retries=-1).remote(keeper, node_id, head)


def nearest(config: Mapping[str, Any]) -> ActorHandle:
    """Returns what a rank calls: the post of its node; on the node of what holds the lanes that itself."""
    here = ray.get_runtime_context().get_node_id()
    return config["keeper"] if here == config["head"] else _found(_name(config["lane"], here))
