"""Removes placement groups of Ray Train runs whose controller died; nobody else does.

Ray keeps an actor's placement group until the actor *and* its job are over. A controller may be killed, or end with the
process that holds the lanes, which owns it. Trials that want these devices would then wait for them as long as the
study runs (seen with Ray 2.60). Train has an actor that removes the group of a dead controller, but tells it of the
group only once all workers are up. Runs here do without it: it is one more process beside each group of workers.
"""

import ray
from ray.core.generated import gcs_pb2
from ray.util.placement_group import PlacementGroup, remove_placement_group

_CONTROLLER = "TrainController"
"""Class of a Train run's controller."""


def remove_orphans() -> int:
    """Removes placement groups that dead controllers of this job left behind; returns their number."""
    job_id = ray.get_runtime_context().get_job_id()
    # Not public: Ray has no public way to ask who made a placement group.
    state = ray._private.state.state
    num_removed = 0
    for entry in state._connect_and_get_accessor().get_placement_group_table():
        group = gcs_pb2.PlacementGroupTableData.FromString(entry)
        creator_id = ray.ActorID(group.creator_actor_id)
        removed = group.state == gcs_pb2.PlacementGroupTableData.REMOVED
        if removed or group.creator_job_id.hex() != job_id or creator_id.is_nil():
            continue
        creator = state.actor_table(creator_id.hex())
        if creator.get("ActorClassName") == _CONTROLLER and creator["State"] == "DEAD":
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(group.placement_group_id)))
            num_removed += 1
    return num_removed
