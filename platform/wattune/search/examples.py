"""Search spaces that travel with the package: `search_spaces/` of the repository."""

from importlib.resources import files

from wattune.errors import PlanError, closest

_MARK = "# yaml-language-server:"


def example_names() -> list[str]:
    """Lists the shipped spaces by name; those of the paper's sweeps begin with `paper/`."""
    folder = files("wattune").joinpath("examples")
    found = {"": folder, "paper/": folder.joinpath("paper")}
    listed = [f"{place}{one.name}" for place, within in found.items() for one in within.iterdir()]
    return sorted(name.removesuffix(".yaml") for name in listed if name.endswith(".yaml"))


def example_text(name: str, first_line: str) -> str:
    """Returns a shipped space, with the line that names the schema from where it will be.

    Raises `PlanError` where there is no such space.
    """
    names = example_names()
    if name not in names:
        raise PlanError(f'unknown example "{name[:60]}"; {closest(name, names)}')
    text = files("wattune").joinpath("examples", f"{name}.yaml").read_text(encoding="utf-8")
    rest = [line for line in text.splitlines() if not line.startswith(_MARK)]
    return "\n".join([first_line, *rest]) + "\n"
