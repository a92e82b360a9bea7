"""A node's post: which calls go out together, when, and what stays on the node. No Ray is started."""

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import ray
from ray.exceptions import RayActorError

from wattune.orchestrate.lanes import post as posts
from wattune.orchestrate.lanes.messages import RankAssignment
from wattune.orchestrate.lanes.post import Post
from wattune.plans.placement import Slot
from wattune.run import RunStatus
from wattune.workers.outcome import RankOutcome


class Keeper:
    """The process that holds the lanes: notes what comes, and answers at once unless it is held."""

    def __init__(self) -> None:
        self.came: list[tuple[Any, ...]] = []
        self.go = asyncio.Event()
        self.go.set()
        self.error: Exception | None = None
        self.call = SimpleNamespace(remote=self._call)
        self.calls = SimpleNamespace(remote=self._calls)

    async def _call(self, lane: str, name: str, *arguments: Any, **more: Any) -> Any:
        self.came.append((name, *arguments, *more.values()))
        await self.go.wait()
        return self._answer(name)

    async def _calls(self, lane: str, name: str, several: list[tuple[Any, ...]]) -> list[Any]:
        self.came.append((name, several))
        await self.go.wait()
        return [self._answer(name) for _ in several]

    def _answer(self, name: str) -> Any:
        if self.error is not None:
            raise self.error
        return {"join": 1}.get(name, name)


Scenario = Callable[[Keeper, Post], Coroutine[Any, Any, None]]


def with_ranks(number: int) -> Callable[[Scenario], Callable[[], None]]:
    """Runs a scenario at a post where so many ranks have joined group 1."""

    def decorate(scenario: Scenario) -> Callable[[], None]:
        async def run() -> None:
            keeper: Any = Keeper()
            post = Post(keeper, "n0", "head")
            assert await asyncio.gather(*(post.call("lane", "join", 7, at) for at in range(number))) == [1] * number
            assert keeper.came == [("join", [(7, at) for at in range(number)])]
            keeper.came.clear()
            await scenario(keeper, post)

        return lambda: asyncio.run(run())

    return decorate


def test_calls_of_all_ranks_go_out_as_one_when_the_last_has_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    @with_ranks(3)
    async def scenario(keeper: Keeper, post: Post) -> None:
        monkeypatch.setattr(posts, "GATHER_S", 600)
        calls = asyncio.gather(*(post.call("lane", "next_trial", 1, at, None) for at in range(3)))
        assert await asyncio.wait_for(calls, 30) == ["next_trial"] * 3
        assert keeper.came == [("next_trial", [(1, 0, None), (1, 1, None), (1, 2, None)])]

    scenario()


@with_ranks(2)
async def test_a_rank_that_is_late_keeps_no_other_and_follows_alone(keeper: Keeper, post: Post) -> None:
    keeper.go.clear()
    first = asyncio.create_task(post.call("lane", "next_trial", 1, 0, None))
    while not keeper.came:
        await asyncio.sleep(0.001)
    second = asyncio.create_task(post.call("lane", "next_trial", 1, 1, None))
    while len(keeper.came) < 2:
        await asyncio.sleep(0.001)
    keeper.go.set()
    assert await asyncio.gather(first, second) == ["next_trial"] * 2
    assert keeper.came == [("next_trial", [(1, 0, None)]), ("next_trial", [(1, 1, None)])]


@with_ranks(3)
async def test_what_has_one_answer_is_asked_once(keeper: Keeper, post: Post) -> None:
    assert await asyncio.gather(*(post.call("lane", "await_window", 1, 4) for _ in range(3))) == ["await_window"] * 3
    assert keeper.came == [("await_window", 1, 4)]


@with_ranks(2)
async def test_a_failure_waits_for_nobody(keeper: Keeper, post: Post) -> None:
    assert await post.call("lane", "failing", 1, 4, "outcome", keeps_group=True) == "failing"
    assert keeper.came == [("failing", 1, 4, "outcome", True)]


@with_ranks(2)
async def test_an_error_reaches_every_rank_that_waits(keeper: Keeper, post: Post) -> None:
    keeper.error = ConnectionError("gone")
    answers = await asyncio.gather(
        *(post.call("lane", "next_trial", 1, at, None) for at in range(2)), return_exceptions=True
    )
    assert answers == [keeper.error] * 2


def test_tables_stay_on_the_node_and_equal_facts_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Any] = []
    monkeypatch.setattr(ray, "put", lambda one: held.append(one) or "reference")

    def outcome(rank: int, version: str) -> RankOutcome:
        spans = pa.table({"rank": [rank], "phase": pa.array(["step"]).dictionary_encode()})
        return RankOutcome(
            rank=rank,
            status=RunStatus.COMPLETED,
            spans=spans,
            kernels=spans if rank == 9 else None,
            provenance={"version.torch": version},
        )

    @with_ranks(3)
    async def scenario(keeper: Keeper, post: Post) -> None:
        outcomes = [outcome(8, "2"), outcome(9, "2"), outcome(10, "1")]
        await asyncio.gather(*(post.call("lane", "deliver", 1, 4, one, f"place {one.rank}") for one in outcomes))
        [(name, sent)] = keeper.came
        assert name == "deliver" and [each[:2] for each in sent] == [(1, 4)] * 3
        assert [each[3:] for each in sent] == [("place 8", "reference"), ("place 9", None), ("place 10", None)]
        told = [each[2] for each in sent]
        assert all(one.spans is None and one.kernels is None for one in told)
        assert told[1].provenance is told[0].provenance and told[2].provenance == {"version.torch": "1"}
        [[(spans, _), (_, kernels)]] = held
        assert spans["rank"].to_pylist() == [8, 9, 10] and kernels["rank"].to_pylist() == [9]

    scenario()


def test_an_assignment_comes_to_a_node_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reference:
        fetched = 0

        def __await__(self) -> Any:
            Reference.fetched += 1
            yield from asyncio.sleep(0).__await__()
            return "assignment"

    monkeypatch.setattr(ray, "ObjectRef", Reference)
    shared: Any = Reference()
    part = RankAssignment(
        number=1, rank=0, world_size=2, local_rank=0, slot=Slot(node=0, device=0), meeting="m", assignment=shared
    )

    @with_ranks(2)
    async def scenario(keeper: Keeper, post: Post) -> None:
        keeper._answer = lambda _: part  # type: ignore[method-assign]
        parts = await asyncio.gather(*(post.call("lane", "next_trial", 1, at, None) for at in range(2)))
        assert [one.assignment for one in parts] == ["assignment"] * 2 and Reference.fetched == 1

    scenario()


class Tree(Post):
    """A post that finds others in a table: leaders and sensors, by their names."""

    actors: dict[str, Any]

    def _actor(self, name: str) -> Any:
        return self.actors[name]


class Handle:
    """The handle of an actor, which may have ended with its node."""

    def __init__(self, actor: Any) -> None:
        self.actor, self.gone = actor, False

    def __getattr__(self, name: str) -> Any:
        async def remote(*given: Any) -> Any:
            if self.gone:
                raise RayActorError
            return await getattr(self.actor, name)(*given)

        return SimpleNamespace(remote=remote)


NODES = [f"n{number}" for number in range(2 * posts.LED + 4)]


def test_posts_of_many_nodes_are_a_tree_whose_top_calls_for_all_below(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr(posts, "GATHER_S", 600)
        keeper: Any = Keeper()
        tree = {node: Tree(keeper, node, "n0") for node in NODES[1:]}  # the lanes are held on the first
        handles = {f"post-b-{node}": Handle(post) for node, post in tree.items()}
        for post in tree.values():
            post.actors = handles
        lane = f"{'+'.join(NODES)}@b"

        async def of_all(name: str, *given: Any) -> set[Any]:
            return set(await asyncio.gather(*(post.call(lane, name, *given) for post in tree.values())))

        monkeypatch.setattr(posts, "GATHER_S", 0.05)
        assert await of_all("join", 7) == {1}
        monkeypatch.setattr(posts, "GATHER_S", 600)
        keeper.came.clear()
        assert await of_all("next_trial", 1, None) == {"next_trial"}
        assert await of_all("await_window", 1, 4) == {"await_window"}
        assert [(name, len(rest[0]) if name == "next_trial" else rest) for name, *rest in keeper.came] == [
            *(("next_trial", count) for count in (posts.LED - 1, posts.LED, 4)),
            *[("await_window", [1, 4])] * 3,
        ]
        handles[f"post-b-{NODES[posts.LED]}"].gone = True  # its node has left: who it led calls for itself
        keeper.came.clear()
        assert await tree[NODES[-5]].call(lane, "failing", 1, 4, "outcome") == "failing"
        assert keeper.came == [("failing", 1, 4, "outcome")]

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_leader_asks_its_nodes_and_tells_what_kept_those_that_do_not_answer() -> None:
    async def scenario() -> None:
        class Sensors:
            def __init__(self, waits_s: float) -> None:
                self.waits_s = waits_s

            async def start(self, key: str) -> str:
                await asyncio.sleep(self.waits_s)
                return key

        keeper: Any = Keeper()
        post = Tree(keeper, "n0", "head")
        post.actors = {"sound": Handle(Sensors(0)), "silent": Handle(Sensors(600)), "gone": Handle(None)}
        post.actors["gone"].gone = True
        sound, silent, gone = await post.ask(["sound", "silent", "gone"], 0.05, "start", "key")
        assert sound == "key" and isinstance(silent, TimeoutError) and isinstance(gone, RayActorError)

    asyncio.run(asyncio.wait_for(scenario(), 60))
