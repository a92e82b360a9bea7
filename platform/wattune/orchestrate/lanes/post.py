"""The post of a node: calls of its ranks go to the process that holds the lanes together, one for all of them.

That process would have some calls of every rank in each trial otherwise, which at a thousand ranks are seconds. On many
nodes the posts are a tree: some lead others, pass on their calls, and ask their nodes' sensors. What ranks measured
stays at their post, and that process hears which of them completed. Ranks on its own node, and workers of commands, of
which a node has one, call it themselves. A post that is killed is started again, and called again; a leader that is
gone with its node is left out.
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
from wattune.orchestrate.lanes.messages import part_of
from wattune.orchestrate.ray_settings import normal_priority
from wattune.run import RunStatus
from wattune.workers.outcome import RankOutcome

GATHER_S: Final = 0.02
"""Longest a call waits for those of the node's other ranks; what comes later follows in another one."""
LED: Final = 16
"""Nodes of a leader, itself among them, and leaders of one of their own. A lane of no more nodes has none."""

ASKED_FRAC: Final = 0.8
"""Part of the time for answers that is left to who asks below."""

_ALIKE: Final = ("turn", "await_window", "stop_order")
"""Calls of all ranks that have one answer. Each of the next has something of its own. All others go out at once."""
_TOGETHER: Final = ("join", "next_trial", "deliver")
_OF_A_TRIAL: Final = ("deliver", "delivered")
_found = cache(partial(ray.get_actor, namespace=NAMESPACE))


class Post:
    """Passes on the calls of one node's ranks, of all lanes there, to `LaneKeeper.call`."""

    def __init__(self, keeper: ActorHandle, node_id: str, head: str) -> None:
        normal_priority()
        self._keeper, self._node_id, self._head = keeper, node_id, head
        self._above: dict[str, ActorHandle] = {}
        self._gathered: dict[tuple[Any, ...], tuple[list[tuple[Any, ...]], asyncio.Event, asyncio.Task[Any]]] = {}
        """Calls that wait for others, by lane, name, and run or group; of outcomes by their trial too."""
        self._asked: dict[tuple[Any, ...], asyncio.Task[Any]] = {}
        """Calls that have one answer, until it is there."""
        self._joined: Counter[tuple[str, int]] = Counter()
        """Ranks here and at posts it leads, by lane and group."""
        self._own: Counter[tuple[str, int]] = Counter()
        """Those here."""

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
        answer = await self.calls(lane, name, [arguments])
        if name == "join":
            self._own.update((lane, group) for group in answer)
            return answer[0]
        return answer and part_of(answer[0], answer[1][0])

    async def calls(self, lane: str, name: str, given: Sequence[tuple[Any, ...]]) -> Any:
        """Calls a method of a lane for ranks, here or of a post that it leads, each with arguments of its own.

        Returns what each has joined, or one part and the rank and slot of each; see `Lane.next_trials`.
        """
        key = (lane, name, *given[0][: 2 if name in _OF_A_TRIAL else 1])
        if key not in self._gathered:
            several, whole = list[tuple[Any, ...]](), asyncio.Event()
            self._gathered[key] = (several, whole, asyncio.create_task(self._send(key, several, whole)))
        several, whole, sent = self._gathered[key]
        first = len(several)
        several += given
        count = sum(len(each[2]) + len(each[3]) for each in several) if name == "delivered" else len(several)
        if name != "join" and count == (self._own if name == "deliver" else self._joined)[lane, given[0][0]]:
            whole.set()
        answer, own = await asyncio.shield(sent), slice(first, first + len(given))
        if name == "join":
            self._joined.update((lane, group) for group in answer[own])
            return answer[own]
        return answer and (answer[0], answer[1][own])

    async def _send(self, key: tuple[Any, ...], several: list[tuple[Any, ...]], whole: asyncio.Event) -> Any:
        await asyncio.wait([asyncio.create_task(whole.wait())], timeout=GATHER_S)
        whole.set()  # ends the task above where it was not
        del self._gathered[key]  # who comes now is of the next call
        lane, name, *_ = key
        if name == "deliver":
            return await self.calls(lane, "delivered", [_held(several)])
        answer = await self._up("calls", lane, name, [_joint(several)] if name == "delivered" else several)
        return None if name == "delivered" else answer

    def _actor(self, name: str) -> ActorHandle:
        return _found(name)

    async def _up(self, method: str, lane: str, *given: Any, **more: Any) -> Any:
        if lane not in self._above:
            self._above[lane] = self._keeper
            first = leader(lane.partition("@")[0].split("+"), self._node_id, self._head)
            if first != self._node_id:
                self._above[lane] = self._actor(post_name(lane, first))
        try:
            return await getattr(self._above[lane], method).remote(lane, *given, **more)
        except RayActorError:
            if self._above[lane] is self._keeper:
                raise
            self._above[lane] = self._keeper
            return await getattr(self._keeper, method).remote(lane, *given, **more)

    async def ask(self, actors: Sequence[tuple[str, str]], within_s: float, method: str, *given: Any) -> list[Any]:
        """Asks actors of nodes, by the names of their posts and of their own; returns their answers, or what kept them.

        Many are asked by other posts, which have most of the time. Who a silent one was to ask did not answer.
        """

        async def asked(name: str, method: str, *given: Any) -> Any:
            async with asyncio.timeout(within_s):
                return await getattr(self._actor(name), method).remote(*given)

        if len(actors) <= LED:
            return await asyncio.gather(*(asked(name, method, *given) for _, name in actors), return_exceptions=True)
        parts = [actors[first : first + LED] for first in range(0, len(actors), LED)]
        several = (asked(part[0][0], "ask", part, ASKED_FRAC * within_s, method, *given) for part in parts)
        told = zip(parts, await asyncio.gather(*several, return_exceptions=True), strict=True)
        return [one for part, answer in told for one in (answer if isinstance(answer, list) else [answer] * len(part))]


def _held(delivered: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Keeps here what ranks measured, where whoever makes the result fetches it; returns arguments of `Lane.delivered`.

    Outcomes that a lane looks at go there, without tables.
    """
    (group, number, *_), *_ = delivered
    delivered = sorted(delivered, key=lambda each: each[2].rank)
    outcomes: list[RankOutcome] = [each[2] for each in delivered]
    spans = [one.spans for one in outcomes if one.spans is not None and one.spans.num_rows]
    tables = [(pa.concat_tables(spans).unify_dictionaries(), None)] if spans else []
    tables += [(None, one.kernels) for one in outcomes if one.kernels is not None]
    completed, others = list[tuple[RankOutcome, Any]](), list[tuple[RankOutcome, Any]]()
    for outcome, (*_, where) in zip(outcomes, delivered, strict=True):
        told = outcomes[0].provenance  # sent once if equal
        facts = told if outcome.provenance == told else outcome.provenance
        is_plain = outcome.status is RunStatus.COMPLETED and "profile" not in outcome.facts
        (completed if is_plain else others).append(
            (replace(outcome, spans=None, kernels=None, provenance=facts), where)
        )
    return group, number, [outcome.rank for outcome, _ in completed], others, ray.put((completed, tables))


def _joint(several: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Returns what posts have of their ranks as that of one post."""
    if len(several) == 1:
        return several[0]
    group, number, *_ = several[0]
    ranks, others = ([one for each in several for one in each[at]] for at in (2, 3))
    return group, number, ranks, others, ray.put([each[4] for each in several])


def leader(nodes: Sequence[str], node_id: str, head: str) -> str:
    """Returns the node whose post leads that of a node of a lane; itself where it has no leader.

    The node of the process that holds the lanes has no post.
    """
    size, first = 1, node_id
    while first == node_id and max(size, LED) < len(nodes):
        size *= LED
        begin = nodes.index(node_id) // size * size
        first = next((node for node in nodes[begin : begin + size] if node != head), node_id)
    return first


def post_name(born: str, node_id: str) -> str:
    """Returns the name of the post of a node; lanes' names, which do as well, end with what they were born as."""
    return f"post-{born.rpartition('@')[2]}-{node_id}"


def open_post(keeper: ActorHandle, born: str, node_id: str, head: str) -> ActorHandle:
    """Starts the post of a node; it ends with the process that it calls, of whose lanes' names `born` is a part."""
    known = {"name": post_name(born, node_id), "namespace": NAMESPACE, "get_if_exists": True}
    return on_node(Post, node_id, **known, max_restarts=-1, max_task_retries=-1).remote(keeper, node_id, head)


def nearest(config: Mapping[str, Any]) -> ActorHandle:
    """Returns what a rank calls: the post of its node; on the node of what holds the lanes that itself."""
    here = ray.get_runtime_context().get_node_id()
    return config["keeper"] if here == config["head"] else _found(post_name(config["lane"], here))
