"""Placement groups of an earlier process: only those are removed. Ray's tables are made up; no Ray is started."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.core.generated import gcs_pb2

from wattune.orchestrate.lanes import actor
from wattune.orchestrate.lanes.actor import remove_orphans

NO_ACTOR = b"\xff" * 16


def entry(number: int, *, creator: bytes | None = None, removed: bool = False) -> bytes:
    state = gcs_pb2.PlacementGroupTableData.REMOVED if removed else gcs_pb2.PlacementGroupTableData.CREATED
    return gcs_pb2.PlacementGroupTableData(
        placement_group_id=bytes([number]) * 18,
        creator_actor_id=bytes([number]) * 16 if creator is None else creator,
        state=state,
    ).SerializeToString()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ray's table: `entries` of groups, and `removed` ones by the first byte of their id. This is actor 2."""
    tables = SimpleNamespace(entries=[], removed=[])
    accessor = SimpleNamespace(get_placement_group_table=lambda: tables.entries)
    state = SimpleNamespace(_connect_and_get_accessor=lambda: accessor)
    monkeypatch.setattr(actor.ray._private.state, "state", state)
    context = SimpleNamespace(get_actor_id=lambda: (b"\x02" * 16).hex())
    monkeypatch.setattr(actor.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(actor, "remove_placement_group", lambda group: tables.removed.append(group.id.binary()[0]))
    return tables


def test_only_the_groups_of_an_earlier_process_of_this_actor_are_removed(cluster: Any) -> None:
    cluster.entries = [entry(1), entry(2), entry(3), entry(4, creator=NO_ACTOR), entry(5, creator=b"\x02" * 16)]
    assert remove_orphans() == 2
    assert cluster.removed == [2, 5]
    cluster.entries = [entry(2, removed=True)]
    assert remove_orphans() == 0 and cluster.removed == [2, 5]
    cluster.entries = []
    assert remove_orphans() == 0
