"""Events of a study: the sums of a preview."""

from collections.abc import Mapping

from wattune.catalog.hardware import ClusterSpec
from wattune.orchestrate.events import Preview, RaceStep
from wattune.run import RunStatus

ONE = ClusterSpec(device="cpu", devices_per_node=1)
EIGHT = ClusterSpec(device="h200_sxm", num_nodes=2, devices_per_node=4)


def preview(load_s: Mapping[ClusterSpec, float], load_now_s: Mapping[ClusterSpec, float]) -> Preview:
    return Preview(
        num_left=5,
        num_now=3,
        num_references=0,
        num_finalists=0,
        num_again=0,
        done={RunStatus.COMPLETED: 4, RunStatus.OUT_OF_MEMORY: 1},
        load_s=load_s,
        load_now_s=load_now_s,
        most_s=100.0,
        measured=False,
    )


def test_device_seconds_count_every_device_of_a_cluster() -> None:
    event = preview({ONE: 30.0, EIGHT: 10.0}, {ONE: 30.0})
    assert (event.device_s, event.device_now_s) == (30 + 8 * 10, 30)
    assert preview({}, {}).device_s == 0


def test_a_step_of_a_race_names_nobody_where_nobody_can_be_the_best() -> None:
    step = RaceStep(leader=None, best_probability=0.0, before=0.3, num_repeats=2, most_repeats=9, ending="over")
    assert str(step) == "racing: P(best) 0.30 -> 0.00, 2 of at most 9 repeats; over"
