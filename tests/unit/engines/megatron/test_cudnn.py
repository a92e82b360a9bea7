"""The cuDNN that TransformerEngine is told to load."""

import subprocess
import sys

import pytest

from wattune.engines.megatron.cudnn import share_cudnn

MAPS = """\
7f1c00000000-7f1c00a00000 r--p 00000000 08:01 131 /opt/my env/torch/lib/libtorch_cuda.so
7f1c10000000-7f1c10020000 r-xp 00001000 08:01 132 /opt/my env/nvidia/cudnn/lib/libcudnn.so.9
7f1c20000000-7f1c20020000 r-xp 00001000 08:01 133 /usr/lib/libcudnn_graph.so.9
7f1c30000000-7f1c30020000 rw-p 00000000 00:00 0
"""


def test_it_is_the_one_that_torch_has_loaded():
    environment = {"CUDA_HOME": "/usr/local/cuda"}
    share_cudnn(environment, MAPS)
    assert environment == {"CUDA_HOME": "/usr/local/cuda", "CUDNN_HOME": "/opt/my env/nvidia/cudnn/lib"}


@pytest.mark.parametrize("name", ["CUDNN_HOME", "CUDNN_PATH"])
def test_what_the_user_named_stays(name):
    environment = {name: "/usr/local/cudnn"}
    share_cudnn(environment, MAPS)
    assert environment == {name: "/usr/local/cudnn"}


def test_without_a_cudnn_nothing_is_named():
    environment: dict[str, str] = {}
    share_cudnn(environment, MAPS.splitlines()[0])
    assert environment == {}


def test_it_is_named_before_megatron_is_imported():
    code = (
        "import sys, wattune.engines.megatron.cudnn as cudnn\n"
        "loaded = [name for name in sys.modules if name.startswith(('megatron', 'transformer_engine'))]\n"
        "assert loaded == [], loaded\n"
        "assert cudnn.share_torchs_cudnn.__doc__"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
