"""`ray_cluster.yaml`: Ray takes it, and its shell part does on each kind of node what its comments say."""

import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml
from ray._private.label_utils import parse_node_labels_string, validate_node_labels
from ray.autoscaler._private.util import prepare_config, validate_config

from wattune.orchestrate.cluster import Node, _node

FILE = Path(__file__).parents[3] / "ray_cluster.yaml"
CONFIG = yaml.safe_load(FILE.read_text())

H200 = "#!/bin/sh\nfor i in 0 1 2 3; do echo 'NVIDIA H200'; done\n"
H100 = "#!/bin/sh\nfor i in 0 1; do echo 'NVIDIA H100 80GB HBM3'; done\n"
H100_PCIE = "#!/bin/sh\necho 'NVIDIA H100 PCIe'\n"
A800 = "#!/bin/sh\necho 'NVIDIA A800 80GB PCIe'\n"
H100_NVL = "#!/bin/sh\necho 'NVIDIA H100 NVL'\n"
LONG_NAME = f"#!/bin/sh\necho 'NVIDIA {'X' * 55} PCIe'\n"
MIXED = "#!/bin/sh\necho 'NVIDIA H200'; echo 'NVIDIA H100 80GB HBM3'\n"
NO_DRIVER = "#!/bin/sh\necho 'NVIDIA-SMI has failed' >&2; exit 9\n"
MI250 = r"""#!/bin/sh
printf '\n======== ROCm System Management Interface ========\n'
for i in 0 1 2 3 4 5 6 7; do
  printf 'GPU[%s]\t\t: Card series:\t\tAMD INSTINCT MI250 (MCM) OAM AC MBA\n' $i
  printf 'GPU[%s]\t\t: Card vendor:\t\tAdvanced Micro Devices, Inc. [AMD/ATI]\n' $i
done
"""
# What `ray start --block` is to the script: it says that it runs, stays, and shows how it was called.
FAKE_RAY = r"""#!/bin/bash
printf '%s\n' "$@" > "$HOME/called"
env | grep -E '^(RAY_|REPORTER_|HIP_|ROCR_|CUDA_)' | sort > "$HOME/called_with"
trap 'echo ended >> "$HOME/ended"; exit 0' TERM
echo 'Ray runtime started.'
while true; do sleep 0.1; done
"""


@pytest.fixture
def node(tmp_path: Path):
    """A node of its own: a home folder, its vendor's tools, and an environment for every vendor."""
    home = tmp_path / "home"
    tools = tmp_path / "bin"
    tools.mkdir()
    (home / ".ray").mkdir(parents=True)
    (home / ".ray" / "auth_token").write_text("a" * 64)
    text = CONFIG["setup_commands"][0]
    for vendor in ("cuda", "rocm", "cpu"):
        ray = tmp_path / vendor / "bin" / "ray"
        ray.parent.mkdir(parents=True)
        # The kernel shows a script as its interpreter and path; the real one is told by "ray start" as well.
        ray.write_text(FAKE_RAY)
        ray.chmod(0o755)
        assert text.count(f"/opt/wattune/{vendor} ") == 1
        text = text.replace(f"/opt/wattune/{vendor} ", f"{tmp_path / vendor} ")
    tool_path = os.pathsep.join([str(tools), "/usr/bin", "/bin"])
    environment = {"HOME": str(home), "PATH": tool_path, "ROCR_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}

    def run(command: str, host: str = "node11", **programs: str) -> subprocess.CompletedProcess[str]:
        for name, script in {"hostname": f"#!/bin/sh\necho {host}\n", **programs}.items():
            path = tools / name.replace("_", "-")
            path.write_text(script)
            path.chmod(0o755)
        return subprocess.run(
            # As Ray's command runner calls it: `bash -c -i '... && (COMMAND)'` over ssh.
            ["bash", "-c", f"true && ({command})"],
            env=environment | {"RAY_HEAD_IP": "10.0.0.10", "RAY_USAGE_STATS_ENABLED": "1"},
            capture_output=True,
            text=True,
            timeout=60,
        )

    run.home = home  # type: ignore[attr-defined]
    run.setup = text  # type: ignore[attr-defined]
    yield run
    pid_file = home / ".wattune" / "ray.pid"
    if pid_file.exists() and psutil.pid_exists(int(pid_file.read_text())):
        psutil.Process(int(pid_file.read_text())).kill()


Run = Callable[..., "subprocess.CompletedProcess[str]"]


def started(node: Run) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of a call of `ray start`."""
    deadline_s = time.monotonic() + 20
    while not (node.home / "called_with").exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    environment = (node.home / "called_with").read_text().splitlines()
    return (node.home / "called").read_text().splitlines(), dict(line.split("=", 1) for line in environment)


def described(stdout: str) -> Node:
    """The node that studies see, by the labels `describe` prints."""
    (labels,) = re.findall(r"labels=(\S*)", stdout)
    (num_gpus,) = re.findall(r"num_gpus=(\d+)", stdout)
    parsed = parse_node_labels_string(labels)
    validate_node_labels(parsed)
    entry = {
        "NodeID": "1",
        "NodeManagerAddress": "10.0.0.11",
        "NodeManagerHostname": "node11",
        "Resources": {"CPU": 8.0, "GPU": float(num_gpus)},
        "Labels": parsed,
    }
    return _node(entry, "node11", ())


def test_ray_takes_the_file() -> None:
    prepared = prepare_config(CONFIG)
    validate_config(prepared)
    (node_type,) = prepared["available_node_types"].values()
    assert node_type["min_workers"] == node_type["max_workers"] == len(CONFIG["provider"]["worker_ips"])


def test_a_wrong_key_is_noticed() -> None:
    with pytest.raises(Exception, match="Additional properties"):
        validate_config(prepare_config({**CONFIG, "worker_nodez": {"a": 1}}))


def test_nothing_stops_rays_of_others() -> None:
    commands = [
        line for key in CONFIG if key.endswith("_commands") for text in CONFIG[key] for line in text.splitlines()
    ]
    assert not [line for line in commands if re.search(r"^[^#]*\bray stop\b", line)]


@pytest.mark.parametrize(
    ("programs", "vendor", "num_gpus", "device", "environment"),
    [
        ({"nvidia_smi": H200}, "nvidia", 4, "h200_sxm", "cuda"),
        ({"nvidia_smi": H100}, "nvidia", 2, "h100_sxm", "cuda"),
        ({"nvidia_smi": H100_PCIE}, "nvidia", 1, "h100_pcie", "cuda"),
        ({"nvidia_smi": H100_NVL}, "nvidia", 1, "h100_nvl", "cuda"),
        ({"nvidia_smi": LONG_NAME}, "nvidia", 1, None, "cuda"),
        ({"rocm_smi": MI250}, "amd", 8, "mi250_gcd", "rocm"),
        ({}, "none", 0, "cpu", "cpu"),
        ({"nvidia_smi": NO_DRIVER}, "none", 0, "cpu", "cpu"),
        ({"nvidia_smi": NO_DRIVER, "rocm_smi": MI250}, "amd", 8, "mi250_gcd", "rocm"),
    ],
)
def test_a_node_is_known_by_its_devices(node, programs, vendor, num_gpus, device, environment) -> None:
    done = node(node.setup, **programs)
    assert done.returncode == 0, done.stderr
    assert f"vendor={vendor} num_gpus={num_gpus}" in done.stdout
    assert described(done.stdout).device == device
    assert ("wattune.io/device=cpu" in done.stdout) == (device == "cpu") and done.stdout.rstrip().endswith(environment)
    assert (node.home / ".wattune" / "ray_node.sh").stat().st_mode & 0o777 == 0o700


def test_the_place_of_a_node_is_in_labels_that_ray_takes(node) -> None:
    assert node(node.setup, nvidia_smi=H200).returncode == 0
    done = node(CONFIG["worker_start_ray_commands"][0], nvidia_smi=H200)
    assert done.returncode == 0, done.stderr
    arguments, _ = started(node)
    (labels,) = [one.removeprefix("--labels=") for one in arguments if one.startswith("--labels=")]
    parsed = parse_node_labels_string(labels)
    validate_node_labels(parsed)
    assert parsed == {
        "wattune.io/product": "NVIDIA-H200",
        "wattune.io/rack": "r1",
        "wattune.io/pdu": "r1a",
        "wattune.io/slot": "u10",
        "wattune.io/domain": "r1",
    }
    assert arguments[:4] == ["start", "--block", "--disable-usage-stats", "--num-gpus=4"]
    assert arguments[-1] == "--address=10.0.0.10:6379"


def test_what_a_login_brings_along_is_taken_away_and_ray_is_set_explicitly(node) -> None:
    node(node.setup, rocm_smi=MI250)
    assert node(CONFIG["head_start_ray_commands"][0], rocm_smi=MI250, host="head").returncode == 0
    arguments, environment = started(node)
    assert not {name for name in environment if name.endswith("VISIBLE_DEVICES") and not name.startswith("RAY_")}
    assert environment["RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES"] == "1"
    assert environment["RAY_AUTH_MODE"] == "token"
    assert environment["RAY_USAGE_STATS_ENABLED"] == "0"
    assert int(environment["REPORTER_UPDATE_INTERVAL_MS"]) >= 3_600_000
    assert int(environment["RAY_JOB_STOP_WAIT_TIME_S"]) >= 30
    assert "--dashboard-host=127.0.0.1" in arguments and "--head" in arguments
    assert "--labels=wattune.io/product=AMD-INSTINCT-MI250-MCM-OAM-AC-MBA" in arguments


def test_starting_again_ends_the_earlier_one_and_stop_ends_it_once(node) -> None:
    node(node.setup)
    worker = CONFIG["worker_start_ray_commands"][0]
    assert node(worker).returncode == 0
    first = psutil.Process(int((node.home / ".wattune" / "ray.pid").read_text()))
    assert node(worker).returncode == 0
    second = psutil.Process(int((node.home / ".wattune" / "ray.pid").read_text()))
    assert not first.is_running() or first.status() == psutil.STATUS_ZOMBIE
    assert second.is_running() and (node.home / "ended").read_text() == "ended\n"
    assert node("~/.wattune/ray_node.sh stop").returncode == 0
    assert not second.is_running() or second.status() == psutil.STATUS_ZOMBIE
    assert node("~/.wattune/ray_node.sh stop").returncode == 0


def test_a_process_that_got_the_number_of_an_old_ray_is_left_alone(node) -> None:
    node(node.setup)
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        (node.home / ".wattune" / "ray.pid").write_text(str(stranger.pid))
        assert node("~/.wattune/ray_node.sh stop").returncode == 0
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_board_in_no_catalog_says_its_product_and_a_mixed_node_is_refused(node) -> None:
    done = node(node.setup, nvidia_smi=A800, host="elsewhere")
    assert done.returncode == 0 and "labels=wattune.io/product=NVIDIA-A800-80GB-PCIe " in done.stdout
    assert "its driver says NVIDIA-A800-80GB-PCIe" in str(described(done.stdout))
    done = node("~/.wattune/ray_node.sh describe", nvidia_smi=MIXED)
    assert done.returncode == 1 and "several models: NVIDIA H100 80GB HBM3, NVIDIA H200" in done.stderr


def test_a_missing_environment_and_a_ray_that_ends_at_once_are_said(node, tmp_path: Path) -> None:
    node(node.setup)
    (tmp_path / "cpu" / "bin" / "ray").write_text("#!/bin/sh\necho 'no such option'; exit 2\n")
    done = node("~/.wattune/ray_node.sh worker 10.0.0.10")
    assert done.returncode == 1 and "no such option" in done.stderr
    (tmp_path / "cpu" / "bin" / "ray").unlink()
    done = node("~/.wattune/ray_node.sh worker 10.0.0.10")
    assert done.returncode == 1 and "bin/ray is missing" in done.stderr
    assert node("~/.wattune/ray_node.sh").returncode == 1
