"""Uses of Ray that Ray does not promise. Each is a row of docs/dependencies.md."""

from pathlib import Path

import pytest
from installed import get, load, parameters, source


@pytest.mark.private_api("ray._private.utils.set_sigterm_handler")
def test_set_sigterm_handler() -> None:
    assert len(parameters(get("ray._private.utils.set_sigterm_handler"))) == 1
    assert "ray._private.utils.set_sigterm_handler(" in source("ray._private.worker")


@pytest.mark.private_api("ray._raylet.Config")
def test_config() -> None:
    raylet = load("ray._raylet")
    assert callable(raylet.Config.initialize)
    assert callable(raylet.AuthenticationTokenLoader.instance().reset_cache)


@pytest.mark.private_api("ray._raylet.get_authentication_mode")
def test_get_authentication_mode() -> None:
    mode_name = get("ray._private.authentication.authentication_utils.get_authentication_mode_name")
    assert mode_name(get("ray._raylet.get_authentication_mode")()) in ("disabled", "token")
    assert mode_name(get("ray._raylet.AuthenticationMode").TOKEN) == "token"


@pytest.mark.private_api("ray._common.usage.usage_lib.usage_stats_enabled")
def test_usage_stats_enabled() -> None:
    assert get("ray._common.usage.usage_lib.usage_stats_enabled")() in (True, False)


@pytest.mark.private_api("ray._private.worker.print_to_stdstream")
def test_print_to_stdstream() -> None:
    assert parameters(get("ray._private.worker.print_to_stdstream"))[0] == "data"
    listens = source("ray._private.worker.listen_error_messages") + source("ray._private.worker.connect")
    assert "print_to_stdstream" in listens  # by the module's name, at the time of the call


@pytest.mark.private_api("ray.core.generated.gcs_pb2.PlacementGroupTableData")
def test_placementgrouptabledata() -> None:
    table = get("ray.core.generated.gcs_pb2.PlacementGroupTableData")
    fields = table.DESCRIPTOR.fields_by_name
    assert {"state", "creator_job_id", "creator_actor_id", "placement_group_id"} <= set(fields.keys())
    assert isinstance(table.REMOVED, int)
    assert get("ray.ActorID").nil().is_nil() and callable(get("ray.PlacementGroupID"))
    assert parameters(get("ray.util.placement_group.PlacementGroup"))[0] == "id"


@pytest.mark.private_api("ray.train.v2._internal.execution.controller.controller.TrainController")
def test_train_controller() -> None:
    fit = source("ray.train.v2.api.data_parallel_trainer.DataParallelTrainer.fit")
    given = ("train_fn_ref", "scaling_policy", "failure_policy", "train_run_context", "callbacks", "validation_config")
    controller = "ray.train.v2._internal.execution.controller.controller.TrainController"
    assert set(given) <= set(parameters(get(f"{controller}.__init__")))
    assert all(f"{name}=" in fit for name in given) and "ObjectRefWrapper(train_fn)" in fit
    assert "train_fn = self._get_train_func()" in fit
    assert "while not self.get_state().is_terminal():" in source(f"{controller}.run")
    assert callable(get(f"{controller}.get_training_failed_error"))
    # What blocks is in `_step`, and in the state of running in `_poll_workers` alone.
    running = source(f"{controller}._step").split("elif isinstance(controller_state, RunningState):")[1]
    assert running.strip().startswith("worker_group_status: WorkerGroupPollStatus = await self._poll_workers()")
    for part in ("self._health_check_interval_s", "self._worker_group.poll_status(", "self._latest_poll_time = "):
        assert part in source(f"{controller}._poll_workers")
    assert "self._failure_policy.make_decision(" in source(f"{controller}._run_control_loop_iteration")
    policy = "ray.train.v2._internal.execution.failure_handling.DefaultFailurePolicy.make_decision"
    assert parameters(get(policy)) == ["self", "training_failed_error"]
    assert get("ray.train.v2._internal.execution.failure_handling.FailureDecision").RAISE


@pytest.mark.private_api("ray.train.v2._internal.execution.worker_group.worker_group.SynchronizationActor")
def test_synchronization_actor() -> None:
    starts = source("ray.train.v2._internal.execution.worker_group.worker_group.WorkerGroup._start_impl")
    assert "sync_actor = SynchronizationActor.options(" in starts and ").remote(" in starts
    state = source("ray.train.v2._internal.execution.worker_group.state")
    assert state.count("_shutdown_sync_actor(self.sync_actor)") == 2


@pytest.mark.private_api("ray.train.v2._internal.execution.worker_group.worker_group.WorkerGroup")
def test_worker_group() -> None:
    starts = source("ray.train.v2._internal.execution.worker_group.worker_group.WorkerGroup._start_impl")
    assert "= self._create_placement_group(" in starts and "not pg_handle.wait(" in starts
    assert starts.index("self._create_placement_group(") < starts.index("pg_handle.wait(")
    group = "ray.train.v2._internal.execution.worker_group.worker_group.WorkerGroup"
    creates = parameters(get(f"{group}._create_workers"))
    assert creates[:4] == ["self", "num_workers", "placement_group", "resources_per_worker"]
    assert parameters(get(f"{group}._get_worker_runtime_env")) == ["custom_runtime_env"]
    assert "self._get_worker_runtime_env(" in source(f"{group}._create_workers")
    assert "self._worker_group_context: WorkerGroupContext" in source(f"{group}.__init__")
    shut = source("ray.train.v2._internal.execution.worker_group.state.WorkerGroupState.shutdown")
    assert "self.placement_group_handle.shutdown()" in shut, "a group leaves its place once"
    controller = "ray.train.v2._internal.execution.controller.controller.TrainController"
    assert "self.worker_group_cls.create(" in source(f"{controller}._start_worker_group")
    handle = "ray.train.v2._internal.execution.worker_group.placement_group_handle.PlacementGroupHandle"
    assert parameters(get(f"{handle}.wait")) == ["self", "timeout_seconds"] and callable(get(f"{handle}.shutdown"))


@pytest.mark.private_api("ray.tune.execution.tune_controller.RayActorManager")
def test_ray_actor_manager() -> None:
    manager = "ray.air.execution._internal.actor_manager.RayActorManager"
    tune = source("ray.tune.execution.tune_controller")
    assert "self._actor_manager = RayActorManager(resource_manager=resource_manager)" in tune
    assert parameters(get(f"{manager}.add_actor"))[:4] == ["self", "cls", "kwargs", "resource_request"]
    for name in ("cleanup", "get_live_actors_resources", "_actor_start_resolved"):
        assert callable(get(f"{manager}.{name}"))
    kept = source(f"{manager}.__init__")
    assert all(f"self.{name}" in kept for name in ("_live_actors_to_ray_actors_resources", "_actor_state_events"))
    # What Tune calls of a trial's actor.
    called = tune + source(manager) + source("ray.tune.experiment.trial")
    for name in ("get_auto_filled_metrics", "__ray_terminate__", '"stop"', '"train"'):
        assert name in called


@pytest.mark.private_api("ray.train.torch.config._set_torch_distributed_env_vars")
def test_set_torch_distributed_env_vars() -> None:
    assert parameters(get("ray.train.torch.config._set_torch_distributed_env_vars")) == []
    # What `TorchConfig` does at a start is what wattune does, but for the process group.
    starts = source("ray.train.torch.config._TorchBackend.on_start")
    for part in (
        "get_address_and_port",
        '"MASTER_ADDR"',
        '"MASTER_PORT"',
        "(_set_torch_distributed_env_vars)",
    ):
        assert part in starts
    assert parameters(get("ray.train._internal.utils.get_address_and_port")) == []
    assert "return TorchConfigContextManager" in source("ray.train.torch.config.TorchConfig")
    assert get("ray.train.torch.config._TorchBackend").share_cuda_visible_devices


@pytest.mark.private_api("ray REPORTER_UPDATE_INTERVAL_MS")
def test_reporter_update_interval_ms() -> None:
    from wattune.orchestrate.ray_settings import RAYS_POLL_INTERVAL_MS

    assert f'"REPORTER_UPDATE_INTERVAL_MS", {RAYS_POLL_INTERVAL_MS}' in source(
        "ray.dashboard.modules.reporter.reporter_consts"
    )


@pytest.mark.private_api("ray RAY_TRAIN_ENABLE_PREEMPTION_WATCHER")
def test_settings_of_a_job() -> None:
    readers = {
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "ray.train.v2._internal.constants",
        "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "ray.tune.utils.callback",
        "TUNE_GLOBAL_CHECKPOINT_S": "ray.tune.execution.tune_controller",
        "RAY_AIR_NEW_OUTPUT": "ray.tune.experimental.output",
        "RAY_CHDIR_TO_TRIAL_DIR": "ray.train.constants",
        "TUNE_DISABLE_SIGINT_HANDLER": "ray.tune.tune",
        "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES": "ray._private.accelerators.amd_gpu",
        "RAY_USAGE_STATS_ENABLED": "ray._common.usage.usage_constants",
    }
    from wattune.orchestrate.ray_settings import JOB_SETTINGS, NICENESS_VARIABLE

    # Ray's C++ reads it; tests/e2e/test_priority.py sees what it does.
    assert set(JOB_SETTINGS) <= {*readers, NICENESS_VARIABLE}
    assert get("ray._private.ray_constants.RAY_WORKER_NICENESS") == NICENESS_VARIABLE
    assert [name for name, module in readers.items() if name not in source(module)] == []


@pytest.mark.private_api("ray.exceptions.RayTaskError.cause")
def test_cause() -> None:
    cause = ValueError("why")
    assert get("ray.exceptions.RayTaskError")("function", "traceback", cause).cause is cause


@pytest.mark.private_api("ray.nodes")
def test_nodes() -> None:
    said = Path(load("ray._raylet").__file__).read_bytes()
    for key in ("NodeID", "Alive", "NodeManagerHostname", "NodeManagerAddress", "NodeManagerPort", "Labels"):
        assert key.encode() in said, key
    assert load("ray._private.resource_and_label_spec").RESOURCE_CONSTRAINT_PREFIX == "accelerator_type:"
    assert load("ray._common.constants").NODE_ID_PREFIX == "node:"


@pytest.mark.private_api("ray._private.state.state.available_resources_per_node")
def test_who_holds_what_of_a_node() -> None:
    assert parameters(get("ray._private.state.GlobalState.available_resources_per_node")) == ["self"]
    table = load("ray.core.generated.gcs_pb2").PlacementGroupTableData
    assert {"creator_job_id", "state", "bundles"} <= set(table.DESCRIPTOR.fields_by_name)
    bundle = table.DESCRIPTOR.fields_by_name["bundles"].message_type.fields_by_name
    assert {"unit_resources", "node_id"} <= set(bundle)


@pytest.mark.private_api("ray._private.worker.global_worker.gcs_client")
def test_what_an_autoscaler_says() -> None:
    constants = load("ray._private.ray_constants")
    assert isinstance(constants.DEBUG_AUTOSCALING_STATUS, str)
    client = load("ray._raylet").InnerGcsClient  # `GcsClient` hands calls on to it
    assert callable(client.internal_kv_get) and callable(client.get_cluster_status)
    reply = load("ray.core.generated.autoscaler_pb2").GetClusterStatusReply.DESCRIPTOR.fields_by_name
    assert "ray_node_type_name" in (
        reply["cluster_resource_state"].message_type.fields_by_name["node_states"].message_type.fields_by_name
    )
    assert "infeasible_gang_resource_requests" in reply["autoscaling_state"].message_type.fields_by_name
