"""Placement groups of dead Train runs: only those are removed. Ray's tables are made up; no Ray is started."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.core.generated import gcs_pb2

from wattune.orchestrate.lanes import placement_groups
from wattune.orchestrate.lanes.placement_groups import remove_orphans

JOB, OTHER_JOB = b"\x01\x00\x00\x00", b"\x02\x00\x00\x00"
NO_ACTOR = b"\xff" * 16


def entry(number: int, *, job: bytes = JOB, creator: bytes | None = None, removed: bool = False) -> bytes:
    state = gcs_pb2.PlacementGroupTableData.REMOVED if removed else gcs_pb2.PlacementGroupTableData.CREATED
    return gcs_pb2.PlacementGroupTableData(
        placement_group_id=bytes([number]) * 18,
        creator_actor_id=bytes([number]) * 16 if creator is None else creator,
        creator_job_id=job,
        state=state,
    ).SerializeToString()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ray's tables: `entries` of groups, `actors` by the first byte of their id; `removed` groups, likewise."""
    tables = SimpleNamespace(entries=[], actors={}, removed=[])
    accessor = SimpleNamespace(get_placement_group_table=lambda: tables.entries)
    state = SimpleNamespace(
        _connect_and_get_accessor=lambda: accessor, actor_table=lambda actor_id: tables.actors[int(actor_id[:2], 16)]
    )
    monkeypatch.setattr(placement_groups.ray._private.state, "state", state)
    context = SimpleNamespace(get_job_id=lambda: JOB.hex())
    monkeypatch.setattr(placement_groups.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(
        placement_groups, "remove_placement_group", lambda group: tables.removed.append(group.id.binary()[0])
    )
    return tables


def test_only_the_group_of_a_dead_controller_is_removed(cluster: Any) -> None:
    cluster.entries = [entry(number) for number in (1, 2, 3)]
    cluster.actors = {
        1: {"ActorClassName": "TrainController", "State": "ALIVE"},
        2: {"ActorClassName": "TrainController", "State": "DEAD"},
        3: {"ActorClassName": "TelemetryActor", "State": "DEAD"},
    }
    assert remove_orphans() == 1
    assert cluster.removed == [2]


def test_groups_of_other_jobs_removed_ones_and_those_of_a_driver_stay(cluster: Any) -> None:
    cluster.entries = [entry(1, job=OTHER_JOB), entry(2, removed=True), entry(3, creator=NO_ACTOR)]
    cluster.actors = {number: {"ActorClassName": "TrainController", "State": "DEAD"} for number in (1, 2, 3, 255)}
    assert remove_orphans() == 0 and cluster.removed == []


def test_without_any_group_nothing_happens(cluster: Any) -> None:
    assert remove_orphans() == 0
