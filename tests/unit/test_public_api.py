"""The public interface: `import wattune` is light, its names are what they say whatever else is imported."""

import subprocess
import sys
from pathlib import Path

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
    code = "import sys, wattune\nwattune.plan, wattune.Study, wattune.Recording\n"
    code += f"print([name for name in {HEAVY[:5]!r} if name in sys.modules])"
    assert run(code) == "[]"


def test_every_public_name_is_there_and_no_other() -> None:
    assert set(wattune.__all__) <= set(dir(wattune))
    for name in wattune.__all__:
        assert getattr(wattune, name) is not None
    with pytest.raises(AttributeError, match="module 'wattune' has no attribute 'dance'"):
        wattune.dance  # noqa: B018


@pytest.mark.parametrize("first", ["wattune.plan.axes", "wattune.record.recorder", "wattune.api", "wattune.cli"])
def test_a_package_of_the_same_name_never_takes_a_function_s_place(first: str) -> None:
    code = f"import wattune\nimport {first}\nfrom wattune.plan.axes import Plan\nfrom wattune.record import recorder\n"
    code += f"print(all(callable(getattr(wattune, name)) for name in {FUNCTIONS!r}), Plan().tp)"
    assert run(code) == "True 1"


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
