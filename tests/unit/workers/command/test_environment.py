"""The environment of a command: the job's, without what Ray and wattune need for themselves."""

import os
import subprocess
import sys
import time
from pathlib import Path

from wattune.workers.command.environment import command_environment, node_environment, search_path


def test_what_is_rays_or_of_a_rank_is_left_out():
    own = {
        "PATH": "/bin",
        "HF_HOME": "/data",
        "RAY_AUTH_TOKEN": "secret",
        "WATTUNE_STORAGE": "/s",
        "RANK": "3",
        "MASTER_PORT": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    found = command_environment(own, {"NCCL_ALGO": "Ring"}, node={})
    assert found.pop("PATH").split(os.pathsep)[0] == "/bin"
    assert found == {"HF_HOME": "/data", "CUDA_VISIBLE_DEVICES": "0,1", "NCCL_ALGO": "Ring"}


def test_programs_beside_this_python_are_found_last():
    path = command_environment({"PATH": "/bin:/usr/bin"}, {}, node={})["PATH"]
    assert path.split(os.pathsep) == ["/bin", "/usr/bin", str(Path(sys.executable).parent)]
    assert search_path(None).startswith(os.defpath)


def test_threads_that_the_node_was_given_stay():
    own = {"OMP_NUM_THREADS": "4"}
    assert command_environment(own, {}, node={"OMP_NUM_THREADS": "4"})["OMP_NUM_THREADS"] == "4"
    assert command_environment(own, {"OMP_NUM_THREADS": "8"}, node={})["OMP_NUM_THREADS"] == "8"
    assert "OMP_NUM_THREADS" not in command_environment(own, {}, node={})


def test_a_processs_own_environment_is_read():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={"A_MARK": "x=y"})
    try:
        deadline_s = time.monotonic() + 20
        while not node_environment(child.pid) and time.monotonic() < deadline_s:
            time.sleep(0.01)  # the kernel shows an environment some time after the process has begun
        assert node_environment(child.pid).get("A_MARK") == "x=y"
    finally:
        child.communicate(b"\n", timeout=20)
    assert node_environment(child.pid) == {}
    assert "PATH" in node_environment(os.getpid())
