"""The environment of a command whose steps are read."""

from pathlib import Path

from wattune.steps.launch import INJECTED, environment


def test_what_was_set_stays(tmp_path: Path) -> None:
    found = environment(tmp_path, {"PYTHONPATH": "/a:/b", "HOME": "/h", "PYTHONUNBUFFERED": "x"})
    assert found == {
        "WATTUNE_STEPS": str(tmp_path),
        "PYTHONPATH": f"{INJECTED}:/a:/b",
        "HOME": "/h",
        "PYTHONUNBUFFERED": "x",
    }
    assert environment(tmp_path, {})["PYTHONPATH"] == str(INJECTED)  # an empty part would be the working directory


def test_without_hooks_only_the_folder_is_named(tmp_path: Path) -> None:
    assert environment(tmp_path, {}, hooks=False, unbuffered=False) == {"WATTUNE_STEPS": str(tmp_path)}


def test_the_injected_folder_hides_no_module() -> None:
    assert {path.name for path in INJECTED.glob("*.py")} == {"__init__.py", "sitecustomize.py"}
