"""All hooks together in a process: they load no library, and find the steps of one that the program loads."""

import subprocess
import sys
from pathlib import Path

import pytest

from wattune import spans
from wattune.steps.launch import environment
from wattune.steps.reader import StepReader
from wattune.steps.source import AUTO

TORCH = """
hooks = []
def register_optimizer_step_post_hook(hook): hooks.append(hook)
class Optimizer:
    param_groups = [{"params": [object()]}]
    def step(self):
        for hook in hooks: hook(self, (), {})
"""


def run(folder: Path, code: str, python: str = sys.executable, **variables: str) -> str:
    done = subprocess.run(
        [python, "-c", code],
        env=environment(folder, {"HOME": "/", **variables}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def library(root: Path, torch: str = TORCH) -> str:
    """Makes a library with a module of the name and form of torch's."""
    (root / "torch" / "optim").mkdir(parents=True)
    (root / "torch" / "__init__.py").write_text("")
    (root / "torch" / "optim" / "__init__.py").write_text("")
    (root / "torch" / "optim" / "optimizer.py").write_text(torch)
    return str(root)


def test_no_library_is_loaded_and_no_file_is_written(tmp_path: Path) -> None:
    loaded = run(tmp_path, "import sys; print([name for name in ('torch', 'transformers') if name in sys.modules])")
    assert loaded == "[]\n" and not list(tmp_path.iterdir())


def test_steps_of_an_optimizer_are_found(tmp_path: Path) -> None:
    told = tmp_path / "told"
    told.mkdir()
    code = "from torch.optim.optimizer import Optimizer\none = Optimizer()\nfor _ in range(5): one.step()"
    run(told, code, PYTHONPATH=library(tmp_path / "library"))
    reader = StepReader(told, AUTO)
    assert [step.index for step in reader.poll()[0]] == [0, 1, 2, 3] and reader.source.startswith("optimizer")


def test_the_header_tells_when_the_library_that_trains_was_loaded(tmp_path: Path) -> None:
    told = tmp_path / "told"
    told.mkdir()
    code = (
        "import time; begun = time.monotonic_ns(); from torch.optim.optimizer import Optimizer\n"
        "done = time.monotonic_ns(); one = Optimizer()\nfor _ in range(5): one.step()\nprint(begun, done)"
    )
    slow = TORCH + "\nimport time; time.sleep(0.2)\n"
    begun_ns, done_ns = map(int, run(told, code, PYTHONPATH=library(tmp_path / "library", slow)).split())
    reader = StepReader(told, AUTO)
    reader.poll()
    assert begun_ns + 2e8 <= reader.headers()[0]["loaded_mono_ns"] <= done_ns


def test_a_library_of_another_form_is_told_and_works(tmp_path: Path) -> None:
    told = tmp_path / "told"
    told.mkdir()
    code = "import torch.optim.optimizer as one; print(one.value)"
    assert run(told, code, PYTHONPATH=library(tmp_path / "library", "value = 5")) == "5\n"
    reader = StepReader(told, AUTO)
    assert reader.poll() == {}
    assert "register_optimizer_step_post_hook" in reader.problems[0]


@pytest.mark.parametrize("installed", [False, True])
def test_the_three_lines_work_where_wattune_is_not_installed(tmp_path: Path, installed: bool) -> None:
    other = tmp_path / "wattune"
    if installed:  # one that the program has comes first
        other.mkdir()
        (other / "__init__.py").write_text("")
        (other / "spans.py").write_text("print('its own')")
    told = tmp_path / "told"
    told.mkdir()
    code = "from wattune import spans\nwith spans.step(tokens=3): print(spans.__file__)"
    outside = sys._base_executable  # type: ignore[attr-defined] - the Python that the environment was made with
    if installed:
        assert run(told, "from wattune import spans", outside, PYTHONPATH=str(tmp_path)) == "its own\n"
        return
    assert run(told, code, outside).strip() == spans.__file__
    assert StepReader(told, AUTO).poll()[0][0].tokens == 3
