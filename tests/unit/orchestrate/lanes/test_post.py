"""A node's post: which calls go out together, when, and what stays on the node. No Ray is started."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import ray
from ray.exceptions import RayActorError

from wattune.orchestrate.lanes import post as posts
from wattune.orchestrate.lanes.messages import Answer, Place, RankAssignment, whole
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

    async def _calls(self, lane: str, name: str, several: list[tuple[Any, ...]]) -> Any:
        self.came.append((name, several))
        await self.go.wait()
        answer = self._answer(name)
        if name == "next_trial":
            return answer, [(worker, 0, 0, worker) for _, worker, _ in several]
        return [answer for _ in several]

    def _answer(self, name: str) -> Any:
        if self.error is not None:
            raise self.error
        return {"join": 1, "next_trial": PART}.get(name, name)


PART = RankAssignment(
    number=1, rank=0, world_size=9, local_rank=0, slot=Slot(node=0, device=0), meeting="m", assignment=None
)


def part(worker: int) -> RankAssignment:
    """Returns the part of a worker, whose rank is its number."""
    return replace(PART, rank=worker, slot=Slot(node=0, device=worker))


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
        assert await asyncio.wait_for(calls, 30) == [part(0), part(1), part(2)]
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
    assert await asyncio.gather(first, second) == [part(0), part(1)]
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


def outcome(rank: int, version: str = "2", status: RunStatus = RunStatus.COMPLETED) -> RankOutcome:
    spans = pa.table({"rank": [rank], "phase": pa.array(["step"]).dictionary_encode()})
    kernels = spans if rank == 9 else None
    return RankOutcome(rank=rank, status=status, spans=spans, kernels=kernels, provenance={"version.torch": version})


@pytest.mark.usefixtures("kept")
def test_a_rank_that_leaves_its_trial_late_is_not_one_of_the_next() -> None:
    @with_ranks(2)
    async def scenario(keeper: Keeper, post: Post) -> None:
        await asyncio.gather(*(post.call("lane", "deliver", 1, 4 + at, outcome(at), "place") for at in range(2)))
        assert sorted(given[:3] for _, [given] in keeper.came) == [(1, 4, [0]), (1, 5, [1])]

    scenario()


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    """Replaces Ray's store: what posts keep, by a number in the place of a reference."""
    found: dict[int, Any] = {}
    monkeypatch.setattr(ray, "put", lambda one: found.update({len(found): one}) or len(found) - 1)
    monkeypatch.setattr(ray, "get", lambda refs, timeout: [found[ref] for ref in refs])
    return found


def test_what_ranks_measured_stays_on_the_node_and_equal_facts_are_one(kept: dict[int, Any]) -> None:
    @with_ranks(4)
    async def scenario(keeper: Keeper, post: Post) -> None:
        outcomes = [outcome(10, "1"), outcome(8), outcome(9), outcome(11, status=RunStatus.CRASHED)]
        assert (
            await asyncio.gather(*(post.call("lane", "deliver", 1, 4, one, f"place {one.rank}") for one in outcomes))
            == [None] * 4
        )
        [(name, [(group, number, ranks, [(crashed, where)], ref)])] = keeper.came
        assert (name, group, number, ranks, where) == ("delivered", 1, 4, [8, 9, 10], "place 11")
        assert crashed.rank == 11 and crashed.spans is None, "a lane looks at it"
        completed, [(spans, _), (_, kernels)] = kept[ref]
        assert [(one.rank, at) for one, at in completed] == [(8, "place 8"), (9, "place 9"), (10, "place 10")]
        assert all(one.spans is None and one.kernels is None for one, _ in completed)
        assert completed[1][0].provenance is completed[0][0].provenance
        assert completed[2][0].provenance == {"version.torch": "1"}
        assert spans["rank"].to_pylist() == [8, 9, 10, 11] and kernels["rank"].to_pylist() == [9]

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

        async def of_all(name: str, *given: Any) -> list[Any]:
            return await asyncio.gather(*(post.call(lane, name, *given) for post in tree.values()))

        monkeypatch.setattr(posts, "GATHER_S", 0.05)
        assert {*await of_all("join", 7)} == {1}
        monkeypatch.setattr(posts, "GATHER_S", 600)
        keeper.came.clear()
        calls = (post.call(lane, "next_trial", 1, at, None) for at, post in enumerate(tree.values()))
        assert await asyncio.gather(*calls) == [part(at) for at in range(len(tree))], "each has its own"
        assert {*await of_all("await_window", 1, 4)} == {"await_window"}
        [(_, several), *rest] = keeper.came
        assert len(several) == len(tree) and rest == [("await_window", 1, 4)]
        handles[f"post-b-{NODES[posts.LED]}"].gone = True  # its node has left: who it led calls for itself
        keeper.came.clear()
        assert await tree[NODES[-5]].call(lane, "failing", 1, 4, "outcome") == "failing"
        assert keeper.came == [("failing", 1, 4, "outcome")]

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_who_makes_the_result_finds_what_all_posts_of_a_tree_hold(
    kept: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        keeper: Any = Keeper()
        tree = {node: Tree(keeper, node, "head") for node in NODES}
        handles = {f"post-b-{node}": Handle(post) for node, post in tree.items()}
        for post in tree.values():
            post.actors = handles
        lane = f"{'+'.join(NODES)}@b"

        async def of_all(name: str, given: Callable[[int], tuple[Any, ...]]) -> None:
            await asyncio.gather(*(post.call(lane, name, *given(at)) for at, post in enumerate(tree.values())))

        def place(rank: int) -> Place:
            return Place(rank=rank, node=NODES[rank], slot=0, device="cpu0", device_uuid=None, pid=rank)

        monkeypatch.setattr(posts, "GATHER_S", 0.2)
        await of_all("join", lambda at: (7, at))
        monkeypatch.setattr(posts, "GATHER_S", 600)
        keeper.came.clear()
        ended = {5: outcome(5, status=RunStatus.CRASHED)}
        await of_all("deliver", lambda at: (1, 4, ended.get(at, outcome(at)), place(at)))
        [(name, [(_, _, ranks, others, ref)])] = keeper.came
        assert name == "delivered" and sorted([*ranks, others[0][0].rank]) == list(range(len(NODES)))
        answer = Answer(outcomes=(others[0][0],), completed=frozenset(ranks), places=(place(5),), held=(ref,))
        told, tables = whole(answer, 60)
        assert [one.rank for one in told.outcomes] == [place.rank for place in told.places] == list(range(len(NODES)))
        assert [one.rank for one in told.outcomes if one.status is RunStatus.CRASHED] == [5]
        assert sorted(spans["rank"][0].as_py() for spans, _ in tables if spans is not None) == list(range(len(NODES)))

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
        several = [("post", name) for name in ("sound", "silent", "gone")]
        sound, silent, gone = await post.ask(several, 0.05, "start", "key")
        assert sound == "key" and isinstance(silent, TimeoutError) and isinstance(gone, RayActorError)
        post.actors |= {
            "post": Handle(post),
            "silent post": Handle(SimpleNamespace(ask=post.actors["silent"].actor.start)),
        }
        sound_s = [("post", "sound")] * posts.LED
        answers = await post.ask([*sound_s, ("silent post", "sound"), *sound_s], 0.5, "start", "key")
        assert answers[: posts.LED] == ["key"] * posts.LED
        assert all(isinstance(one, Exception) for one in answers[posts.LED : 2 * posts.LED]), "nobody asked them"
        assert answers[2 * posts.LED :] == ["key"]

    asyncio.run(asyncio.wait_for(scenario(), 60))
