"""Ray's settings: that they are what Ray reads, that they do what they are for, and that a user's own stand."""

import os
import subprocess
import sys

import pytest
from ray._private import ray_constants
from ray._private.accelerators.amd_gpu import AMDGPUAcceleratorManager
from ray.train.v2._internal.callbacks import accelerators

from wattune.orchestrate import ray_settings


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that is put back, without what a developer's shell may have set."""
    for name in [
        name for name in os.environ if name.startswith(("RAY_", "TUNE_", "GLOO_", "REPORTER_", "HIP_", "ROCR_"))
    ]:
        monkeypatch.delenv(name)
    # What is set behind monkeypatch's back is put back too.
    names = {*ray_settings.JOB_SETTINGS, *ray_settings._LOCAL_SETTINGS, "GLOO_SOCKET_IFNAME", "HIP_VISIBLE_DEVICES"}
    for name in names | {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR}:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_what_the_user_has_set_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNE_GLOBAL_CHECKPOINT_S", "99")
    ray_settings.apply(ray_settings.JOB_SETTINGS)
    assert os.environ["TUNE_GLOBAL_CHECKPOINT_S"] == "99"
    assert os.environ["RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES"] == "1"


def test_ray_reads_its_polling_interval_from_that_variable() -> None:
    code = "from ray.dashboard.modules.reporter.reporter_consts import REPORTER_UPDATE_INTERVAL_MS as ms; print(ms)"
    for value, expected in (
        ({}, ray_settings.RAYS_POLL_INTERVAL_MS),
        ({ray_settings.POLL_VARIABLE: "3600000"}, 3_600_000),
    ):
        seen = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **value}, capture_output=True, text=True, timeout=60
        )
        assert seen.stdout.strip() == str(expected), seen.stderr


def test_a_cluster_of_our_own_is_on_loopback_with_a_token_and_only_while_it_starts() -> None:
    name = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    os.environ["RAY_AUTH_MODE"] = "disabled"  # a token would stay with this process
    before = ray_constants.ENABLE_RAY_CLUSTER
    with ray_settings.local_cluster():
        assert ray_constants.ENABLE_RAY_CLUSTER is False and os.environ[name] == "0"
        assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0" and os.environ["REPORTER_UPDATE_INTERVAL_MS"] == "3600000"
    assert ray_constants.ENABLE_RAY_CLUSTER is before and name not in os.environ
    os.environ[name] = "1"
    with ray_settings.local_cluster():
        assert ray_constants.ENABLE_RAY_CLUSTER is before
    assert os.environ[name] == "1"


def test_on_amd_a_worker_keeps_the_devices_ray_train_gives_it() -> None:
    """Ray gives a worker one device in HIP_VISIBLE_DEVICES, which the switch leaves alone (ray#49260)."""
    AMDGPUAcceleratorManager.set_current_process_visible_accelerator_ids(["3"])
    assert os.environ.pop("HIP_VISIBLE_DEVICES") == "3"
    ray_settings.apply(ray_settings.JOB_SETTINGS)
    AMDGPUAcceleratorManager.set_current_process_visible_accelerator_ids(["3"])
    assert "HIP_VISIBLE_DEVICES" not in os.environ
    # The other half: Ray Train shares this one variable, whatever the vendor. When that changes, the switch has to go.
    assert accelerators.CUDA_VISIBLE_DEVICES_ENV_VAR == "CUDA_VISIBLE_DEVICES"
    assert not hasattr(accelerators, "HIP_VISIBLE_DEVICES_ENV_VAR")


def test_ray_refuses_what_slurm_sets_on_amd_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0,1")
    with pytest.raises(RuntimeError, match="ROCR_VISIBLE_DEVICES"):
        AMDGPUAcceleratorManager.get_visible_accelerator_ids_env_var()


def test_the_tags_of_several_nodes_are_those_of_the_worst(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = [
        {"poll_ms": "3600000", "usage_stats": "off", "niceness": "0"},
        {"poll_ms": "5000", "usage_stats": "on", "niceness": "15"},
    ]
    monkeypatch.setattr(ray_settings, "_ask", lambda _node_ids: answers)
    monkeypatch.setattr(ray_settings, "dashboard", lambda: "127.0.0.1:8265")
    tags = ray_settings.ray_tags(["a", "b", "c"], ours=False)
    assert tags["ray.gpu_poll_interval_s"] == "5" and tags["ray.usage_stats"] == "on"
    assert tags["ray.cluster"] == "joined" and tags["ray.silent_nodes"] == "1"
    assert tags["ray.worker_niceness"] == "15" and "start Ray with RAY_worker_niceness=0" in caplog.text
    monkeypatch.setattr(ray_settings, "_ask", lambda _node_ids: [])
    tags = ray_settings.ray_tags(["a"], ours=False)
    assert tags["ray.gpu_poll_interval_s"] == tags["ray.usage_stats"] == tags["ray.worker_niceness"] == "unknown"
