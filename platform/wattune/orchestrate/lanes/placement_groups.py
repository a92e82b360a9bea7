"""Removes placement groups that an earlier process of the actor that holds the lanes left; nobody else does.

Ray keeps an actor's placement group until the actor *and* its job are over. This one is started again when its process
is killed, and trials that want these devices would wait for them as long as the study runs (seen with Ray 2.60). Train
has an actor that removes the group of a dead controller, but tells it of the group only once all workers are up. Runs
here do without it: it is one more process beside each group of workers.
"""

import ray
from ray.core.generated import gcs_pb2
from ray.util.placement_group import PlacementGroup, remove_placement_group


def remove_orphans() -> int:
    """Removes the placement groups of earlier processes of the actor that calls it; returns their number."""
    own_id = ray.get_runtime_context().get_actor_id()
    # Not public: Ray has no public way to ask who made a placement group.
    table = ray._private.state.state._connect_and_get_accessor().get_placement_group_table()
    groups = [gcs_pb2.PlacementGroupTableData.FromString(entry) for entry in table]
    left = [
        ray.PlacementGroupID(group.placement_group_id)
        for group in groups
        if ray.ActorID(group.creator_actor_id).hex() == own_id
        and group.state != gcs_pb2.PlacementGroupTableData.REMOVED
    ]
    for group_id in left:
        remove_placement_group(PlacementGroup(group_id))
    return len(left)
