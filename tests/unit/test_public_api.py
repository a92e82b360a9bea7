"""The public interface: `import wattune` is light, its names are what they say whatever else is imported."""

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import wattune

HEAVY = ("ray", "torch", "mlflow", "pandas", "plotly", "pyarrow", "numpy", "pydantic", "typer", "wattune.api")
FUNCTIONS = ("compare", "load_study", "plan", "rank", "record", "run_study")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


def test_importing_wattune_loads_nothing_else() -> None:
    assert run(f"import sys, wattune\nprint([name for name in {HEAVY!r} if name in sys.modules])") == "[]"


def test_using_the_interface_loads_no_heavy_library() -> None:
    code = "import sys, wattune\nwattune.plan, wattune.Study, wattune.Run\n"
    code += f"print([name for name in {HEAVY[:5]!r} if name in sys.modules])"
    assert run(code) == "[]"


def test_every_public_name_is_there_and_no_other() -> None:
    assert set(wattune.__all__) <= set(dir(wattune))
    for name in wattune.__all__:
        assert getattr(wattune, name) is not None
    with pytest.raises(AttributeError, match="module 'wattune' has no attribute 'dance'"):
        wattune.dance  # noqa: B018


PACKAGES = [wattune.__name__, *(one.name for one in pkgutil.walk_packages(wattune.__path__, "wattune.") if one.ispkg)]


def test_no_name_of_a_package_takes_the_place_of_a_module() -> None:
    """Else `import wattune.plans.axes as a` fails, or a function is gone once its namesake is loaded."""
    for name in PACKAGES:
        package = importlib.import_module(name)
        names = getattr(package, "__all__", vars(package))
        inside = {one.name for one in pkgutil.iter_modules(package.__path__)}
        taken = {one for one in inside.intersection(names) if not isinstance(getattr(package, one), ModuleType)}
        assert taken == set(), name


def test_modules_load_under_a_name_and_leave_the_interface_as_it_is() -> None:
    code = "import wattune, wattune.plans.axes as axes, wattune.recording.recorder as recorder, wattune.api as api\n"
    code += f"print(all(callable(getattr(wattune, name)) for name in {FUNCTIONS!r}), axes.Plan().tp, recorder.__name__)"
    assert run(code) == "True 1 wattune.recording.recorder"


@pytest.mark.slow
def test_a_type_checker_sees_the_types(tmp_path: Path) -> None:
    asking = tmp_path / "asking.py"
    asking.write_text(
        "import wattune\n"
        'best = wattune.rank("x", objective="minimize step_time_s").best\n'
        "reveal_type(best)\n"
        'reveal_type(wattune.plan({"study": "x"}))\n'
        'reveal_type(wattune.load_study("x").trials())\n'
        'wattune.rank("x", objektive="")\n'
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(asking)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    said = [line.partition(": ")[2] for line in done.stdout.splitlines() if "asking.py" in line]
    assert said[:3] == [
        'note: Revealed type is "wattune.ranking.assessment.RankedTrial | None"',
        'note: Revealed type is "wattune.api.spaces.StudyPlan"',
        'note: Revealed type is "list[wattune.api.studies.Trial]"',
    ]
    assert len(said) > 3 and said[3].startswith('error: Unexpected keyword argument "objektive"')
