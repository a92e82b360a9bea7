"""The worker of a command: devices of its ranks, what it tells, and its place in a lane."""

import socket
from dataclasses import replace

import pytest

from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import OWN_MODEL
from wattune.errors import NodeError
from wattune.orchestrate.attempt import Attempt
from wattune.orchestrate.cluster import Node
from wattune.orchestrate.lanes import command_worker
from wattune.orchestrate.lanes.command_worker import _devices, _failed, _provenance, held_port
from wattune.orchestrate.lanes.messages import Assignment, GroupKey, Report, WorkerPlace
from wattune.orchestrate.lanes.worker_group import Group, LaneError
from wattune.plans.axes import Plan
from wattune.plans.program import Program
from wattune.run import RunStatus
from wattune.trial import Measure, TrialSpec
from wattune.workload import UNKNOWN_WORKLOAD

SPEC = TrialSpec(
    model=OWN_MODEL,
    cluster=ClusterSpec(device="h200_sxm", num_nodes=2, devices_per_node=2),
    engine="command",
    workload=UNKNOWN_WORKLOAD,
    plan=Plan(),
    program=Program(command=("run", "{lr}"), environment=(("NCCL_ALGO", "{algo}"),), flags=(("algo", "Ring"),)),
)
NAMES = {f"GPU-{index}": f"gpu{index}" for index in range(4)}
KEY = GroupKey.of(SPEC, {"CPU": 0.5, "GPU": 1.0})
NODES = tuple(Node(node_id=f"id{n}", name=f"n{n}", num_cpus=2, num_gpus=0) for n in range(2))
ASSIGNMENT = Assignment(attempt=Attempt(spec=SPEC, repeat=0, measure=Measure(), nodes=NODES), key=KEY, sensed={})


def worker(number, node_id):
    return WorkerPlace(number=number, node_id=node_id, device_index=0, device_uuid=None, pid=number, actor=None)  # type: ignore[arg-type]


def test_a_command_has_one_worker_a_node_with_all_its_devices():
    assert (KEY.world_size, dict(KEY.resources)) == (2, {"CPU": 1.0, "GPU": 2.0})
    assert KEY.environment == ()  # its variables are the command's, so that no worker starts anew for them
    other = replace(SPEC, program=replace(SPEC.program, flags=(("algo", "Tree"),)))
    assert GroupKey.of(other, {"CPU": 0.5, "GPU": 1.0}) == KEY


def test_variables_that_are_flags_make_other_workers_for_a_built_in_engine():
    def key(algo):
        program = Program(environment=(("NCCL_ALGO", "{algo}"),), flags=(("algo", algo),))
        return GroupKey.of(replace(SPEC, engine="megatron", program=program), {"GPU": 1.0})

    assert dict(key("Ring").environment) == {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_ALGO": "Ring"}
    assert key("Ring") != key("Tree") and key("Ring").world_size == 4


def test_nodes_are_ranks_in_the_plans_order_and_meet_at_the_first():
    group = Group(number=1, key=KEY, workers={0: worker(0, "id1"), 1: worker(1, "id0")})
    group.reports = {0: Report(problem=None, rendezvous="b:2"), 1: Report(problem=None, rendezvous="a:1")}
    trial = group.begin(ASSIGNMENT)
    assert {number: rank for number, (rank, *_) in trial.ranks.items()} == {1: 0, 0: 1}
    assert (trial.part.rank, trial.part.world_size, trial.part.rendezvous) == (0, 2, "a:1")
    with pytest.raises(LaneError, match=r"wants 1 worker\(s\) on each of 2 node"):
        Group(number=2, key=KEY, workers={0: worker(0, "id0"), 1: worker(1, "id0")}).begin(ASSIGNMENT)


@pytest.mark.parametrize(
    ("visible", "node", "expected"),
    [("2,3", 0, {0: "gpu2", 1: "gpu3"}), ("GPU-1,GPU-0", 1, {2: "gpu1", 3: "gpu0"}), ("", 0, {0: "gpu0", 1: "gpu1"})],
)
def test_ranks_have_the_devices_that_ray_gave_the_command(monkeypatch, visible, node, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert _devices(SPEC, node, NAMES) == expected


@pytest.mark.parametrize("visible", ["0", "0,9", "0,MIG-1"])
def test_a_device_that_telemetry_does_not_see_is_refused(monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(NodeError, match="telemetry does not see device"):
        _devices(SPEC, 0, NAMES)


def test_what_is_kept_of_a_command_has_no_secret(monkeypatch):
    monkeypatch.setattr(command_worker, "driver_version", lambda: "")
    kept = _provenance({"NCCL_ALGO": "Ring", "HF_TOKEN": "x"}, ["train", "--hf-token", "hf_secret", "--lr", "1"])
    assert kept["command"] == "train --hf-token *** --lr 1"
    assert kept["env.NCCL_ALGO"] == "Ring" and "env.HF_TOKEN" not in kept


def test_a_program_that_is_not_there_is_the_machines_failure():
    assert _failed(1, NodeError('program "x" does not run')).status is RunStatus.INFRA_FAILED
    crashed = _failed(0, ValueError("of ours"))
    assert (crashed.status, crashed.reason) == (RunStatus.CRASHED, "node 0: ValueError: of ours")


def test_a_port_that_a_command_is_told_is_given_to_nobody_else_while_it_starts(monkeypatch, tmp_path):
    given_out = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(command_worker, "GIVEN_OUT", given_out)
    given_out.write_text("20010\t65535\n")
    held = [held_port() for _ in range(8)]
    ports = {one.getsockname()[1] for one in held}
    assert len(ports) == 8 and all(20_000 <= port < 20_010 for port in ports), "outside of the kernel's range"
    for one in held:
        one.close()
    with socket.create_server(("127.0.0.1", ports.pop())):
        pass  # the command listens there at once


@pytest.mark.parametrize("text", ["1024 65535", "", None])
def test_where_no_port_is_left_to_us_the_kernel_chooses(monkeypatch, tmp_path, text):
    given_out = tmp_path / "ip_local_port_range"
    if text is not None:
        given_out.write_text(text)
    monkeypatch.setattr(command_worker, "GIVEN_OUT", given_out)
    with held_port() as held:
        assert held.getsockname()[1] > 0
