"""Lanes: what a trial costs beside its steps as its ranks grow in number."""

import asyncio
import pickle
import statistics
import time
from collections.abc import Iterator
from typing import Any, Final

from at_scale_rows import Fit, Row, measures
from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import ModelSpec
from wattune.orchestrate.attempt import Attempt
from wattune.orchestrate.cluster import Node
from wattune.orchestrate.lanes.lane import Lane
from wattune.orchestrate.lanes.messages import Assignment, GroupKey, Place, RankAssignment, Report, WorkerPlace
from wattune.plans.axes import Plan
from wattune.run import RunStatus
from wattune.trial import Measure, TrialSpec
from wattune.workers.outcome import RankOutcome
from wattune.workload import Workload

RANKS: Final = (8, 32, 128, 512, 1024, 4096)
PER_NODE: Final = 8
TRIALS: Final = 5
REFERENCE: Any = b"0" * 64
"""As long as what Ray sends of an object that each node fetches once."""

MODEL = ModelSpec(
    name="small",
    num_layers=2,
    hidden_size=256,
    ffn_hidden_size=512,
    num_heads=4,
    num_kv_heads=4,
    vocab_size=1024,
    source="made up: nothing trains it",
)


def assignment(num_ranks: int) -> Assignment:
    """A trial on so many devices, eight a node."""
    num_nodes = num_ranks // PER_NODE
    cluster = ClusterSpec(device="cpu", num_nodes=num_nodes, devices_per_node=PER_NODE, simulate_sensors_of="h200_sxm")
    workload = Workload(seq_len=128, global_batch_size=num_ranks)
    spec = TrialSpec(model=MODEL, cluster=cluster, engine="torch", workload=workload, plan=Plan(dtype="fp32"))
    nodes = tuple(
        Node(node_id=f"{index:056x}", name=f"node-{index:03d}", address="", num_cpus=PER_NODE, num_gpus=0)
        for index in range(num_nodes)
    )
    attempt = Attempt(spec=spec, repeat=0, measure=Measure(), nodes=nodes)
    return Assignment(attempt=attempt, key=GroupKey.of(spec, {"CPU": 1.0}), sensed={})


class Ranks:
    """Workers as coroutines: the calls of a lane's worker, with the message that each would be sent."""

    def __init__(self, given: Assignment) -> None:
        self.nodes = [node.node_id for node in given.attempt.nodes]
        self.lane = Lane(tuple(self.nodes), self.launch, lambda _: None, self.probe, share=lambda _: REFERENCE)

    async def probe(self, _worker: WorkerPlace) -> str:
        """Says that a worker lives."""
        return ""

    async def launch(self, key: GroupKey, _nodes: tuple[str, ...], _restarts: bool, run: int) -> None:
        """Runs the workers until the lane ends them."""
        await asyncio.gather(*(self.serve(run, number) for number in range(key.world_size)))

    async def serve(self, run: int, number: int) -> None:
        """One worker."""
        node, index = divmod(number, PER_NODE)
        handle: Any = None
        group = self.lane.join(
            run, WorkerPlace(number=number, node_id=self.nodes[node], device_index=index, device_uuid=None, pid=number,
                             actor=handle)
        )  # fmt: skip
        report: Report | None = None
        while (assigned := await self.lane.next_trial(group, number, report)) is not None:
            message: RankAssignment = pickle.loads(pickle.dumps(assigned))
            order = asyncio.create_task(self.lane.stop_order(group, message.number))
            await self.lane.await_window(group, message.number)
            place = Place(rank=message.rank, node="", slot=index, device=f"cpu{index}", device_uuid=None, pid=number)
            outcome = RankOutcome(rank=message.rank, status=RunStatus.COMPLETED)
            self.lane.deliver(group, message.number, outcome, place)
            await order
            report = Report(problem=None)


async def overheads_s(num_ranks: int) -> list[float]:
    """Processor seconds that each of some trials takes on a lane that has run one before."""
    given = assignment(num_ranks)
    ranks, found = Ranks(given), []
    for _ in range(TRIALS + 1):
        begun_s = time.process_time()
        ranks.lane.open_window(given.window)
        answer = await ranks.lane.run(given)
        assert len(answer.outcomes) == num_ranks and not answer.failure, answer.failure
        assert not await ranks.lane.settle()
        found.append(time.process_time() - begun_s)
    await ranks.lane.close("the figures are there")
    return found[1:]


@measures(timeout_s=580)
def protocol() -> Iterator[Row]:
    """The lane's own work for a trial against its ranks."""
    middles: dict[int, float] = {}
    for num_ranks in RANKS:
        if num_ranks > 512 and middles[512] > 20:  # four times the ranks would take minutes a trial
            break
        each_s = asyncio.run(overheads_s(num_ranks))
        middles[num_ranks] = statistics.median(each_s)
        yield Row(
            f"lane's work a trial of {num_ranks} ranks",
            "CPU-s",
            value=middles[num_ranks],
            spread=statistics.stdev(each_s),
        )
    yield Fit.of(list(middles), list(middles.values())).row("lane's work a trial against ranks", bar=1.15)
