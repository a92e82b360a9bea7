"""A study as its YAML file describes it: models, clusters, engines, axes to vary, objective and limits."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import ValidationError

from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import OWN_MODEL, ModelSpec
from wattune.deadline import read_bounded
from wattune.errors import SpaceError
from wattune.objective import Constraint, Objective, Question
from wattune.plans.axes import AXES, FOUND, Plan
from wattune.plans.program import FlagValue, Program, split_command
from wattune.scale_down.cut import Target
from wattune.search.cluster_entry import plain_cluster
from wattune.search.command_entry import OF_PLAN, Products, fields_of, flag_value, products
from wattune.search.fields import FOLDER
from wattune.search.grammar import SpaceFile
from wattune.search.model_entry import ModelEntry
from wattune.search.problems import problems_of
from wattune.search.requirements import Requirement, parse_requirement
from wattune.search.search_entry import Search
from wattune.steps.source import parse_source
from wattune.storage.documents import MOST_YAML_BYTES, yaml_tree
from wattune.storage.space_changes import plain_value
from wattune.trial import Measure
from wattune.workload import OF_WORK, UNKNOWN_WORKLOAD, Workload

MAX_COMBINATIONS: Final = 1_000_000
"""Most combinations that one study may list. More are a slip, or several studies."""


Outer = tuple[ModelSpec, ClusterSpec, str, Workload]
"""A model, cluster, engine and workload that a plan is crossed with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySpec:
    """One checked study: everything a search space file says, in wattune's own types."""

    name: str
    models: tuple[ModelSpec, ...]
    """Overridden as the file asks."""
    clusters: tuple[ClusterSpec, ...]
    engines: tuple[str, ...]
    workloads: tuple[Workload, ...]
    """Every mode, sequence length and batch that the file lists, each with each."""
    axes: Mapping[str, tuple[Any, ...]]
    """Values by axis, as `Plan` holds them. An axis that is neither here nor in a plan has its neutral value."""
    measure: Measure
    isolation: str
    """`warm`: workers run one trial after another. `fresh`: they start anew for each."""
    objective: Objective
    constraints: tuple[Constraint, ...]
    limits: Mapping[str, float]
    """Hard limits by metric name, in the metric's unit."""
    program: Program | None
    """The command, environment and source of steps, without values of flags; None where the file has none of them."""
    flags: Mapping[str, tuple[FlagValue, ...]]
    """Values by flag."""
    plans: tuple[Mapping[str, Any], ...]
    """Plans in mind: values by axis and, under `flags`, by flag, in the place of those of `axes` and `flags`; with the
    names of `OF_PLAN` that they are of, and `dp`."""
    requires: tuple[Requirement, ...]
    """Conditions that every trial keeps."""
    search: Search
    targets: Mapping[ModelSpec, Target]
    """Small clusters that stand for `clusters`, by model; empty where none is scaled down."""
    document: Mapping[str, Any]
    """The file as plain data with every default, as `study.yaml` keeps it. It is itself a valid space."""

    @property
    def question(self) -> Question:
        """The question that the study asks of its trials."""
        return Question(objective=self.objective, constraints=self.constraints)

    @property
    def num_combinations(self) -> int:
        """Number of combinations of models, clusters, engines, workloads, axis values and flags."""
        each = (math.prod(map(len, [*axes.values(), *flags.values()])) for axes, flags in self.products)
        places, counts = self.places, zip(self.plans or [{}], each, strict=True)
        return sum(count * sum(is_of(plan, place) for place in places) for plan, count in counts)

    @property
    def places(self) -> list[Outer]:
        """Every model with every cluster, engine and workload, in the order of the file."""
        return list(itertools.product(self.models, self.clusters, self.engines, self.workloads))

    @property
    def products(self) -> Products:
        """Values by axis and by flag, crossed for each plan; one pair where there are no plans."""
        return products(self.axes, self.flags, self.plans)


def is_of(plan: Mapping[str, Any], place: Outer) -> bool:
    """Tells whether a plan in mind is of a model, cluster, engine and workload: of every one unless it says which."""
    model, cluster, engine, workload = place
    values = (model.name, cluster.label, engine, *(getattr(workload, name) for name in OF_WORK))
    return all(plan.get(name, value) == value for name, value in zip(OF_PLAN, values, strict=True))


def load_space(path: str | Path) -> StudySpec:
    """Reads the study that a YAML file describes.

    Raises `SpaceError` where the file cannot be read, is not a YAML mapping, or says something that cannot be used.
    Every problem is listed with its path inside the file.
    """
    source = str(path)
    try:
        text = read_bounded(path, MOST_YAML_BYTES).decode()
    except OSError as error:
        raise SpaceError(f"{source}: cannot be read ({error.strerror}); give the path of a search space") from error
    except UnicodeDecodeError as error:
        raise SpaceError(f"{source}: is not UTF-8 text ({error.reason}); give the path of a search space") from error
    except ValueError as error:
        raise SpaceError(f"{source}: is {error}; give the path of a search space") from error
    try:
        node, document = yaml_tree(text)
    except ValueError as error:
        kind = "is not YAML" if isinstance(error.__cause__, yaml.YAMLError) else "is YAML that cannot be read"
        raise SpaceError(f"{source}: {kind}: {error}") from error
    return _study(document, source, [] if node is None else _duplicate_keys(node), Path(path).parent)


def parse_space(document: Any, source: str = "space", folder: Path | None = None) -> StudySpec:
    """Reads the study that the content of a file describes.

    `source` names it in messages; relative paths in it start in `folder`, else in that of this process. Raises
    `SpaceError` where it says something that cannot be used. Every problem is listed with its path.
    """
    return _study(document, source, [], folder or Path())


def _study(document: Any, source: str, problems: Sequence[str], folder: Path) -> StudySpec:
    if not isinstance(document, dict):
        kind = "empty" if document is None else f"a {type(document).__name__}"
        raise SpaceError(f"{source}: is {kind}; a search space is a mapping that begins with study, model, cluster")
    try:
        file = SpaceFile.model_validate(document, context={FOLDER: folder})
    except ValidationError as error:
        raise SpaceError.from_problems(source, [*problems, *problems_of(error, document, SpaceFile)]) from None
    if problems:
        raise SpaceError.from_problems(source, problems)
    study = _resolved(file)
    if study.num_combinations > MAX_COMBINATIONS:
        text = f"space: {study.num_combinations:,} combinations, allowed: {MAX_COMBINATIONS:,}; list fewer values"
        raise SpaceError.from_problems(source, [text])
    return study


def _resolved(file: SpaceFile) -> StudySpec:
    """Turns a file without problems into wattune's own types."""
    models = tuple(entry.resolve() for entry in file.model) if file.model else (OWN_MODEL,)
    clusters = tuple(entry.resolve() for entry in file.cluster)
    given = file.workload
    workloads = given.resolve(has_experts=file.has_experts) if given is not None else (UNKNOWN_WORKLOAD,)
    measure = file.measure.settings
    spoken = {*(file.space or ()), *(set.intersection(*map(set, file.plans)) if file.plans else ())}
    limits, axes, known = file.limits.model_dump(exclude_none=True), file.space or {}, fields_of(file)
    return StudySpec(
        name=file.study,
        models=models,
        clusters=clusters,
        engines=tuple(file.engine),
        workloads=workloads,
        axes={name: tuple(map(_plan_value, values)) for name, values in axes.items()},
        measure=measure,
        isolation=file.isolation,
        objective=file.objective,
        constraints=tuple(file.constraints),
        limits=limits,
        search=file.search,
        program=_program(file),
        flags={name: tuple(map(flag_value, values)) for name, values in file.flags.items()},
        plans=tuple(map(_plan_values, file.plans)),
        targets={entry.resolve(): entry.target for entry in file.model or () if entry.target is not None},
        requires=tuple(parse_requirement(text, known) for text in file.requires),
        document={
            "study": file.study,
            **({"model": [_plain_model(entry) for entry in file.model]} if file.model else {}),
            "cluster": [plain_cluster(cluster) for cluster in clusters],
            "engine": list(file.engine),
            **_command_document(file),
            **({} if given is None else {"workload": given.plain(has_experts=file.has_experts)}),
            "space": {**axes, **{name: [value] for name, value in _NEUTRAL.items() if name not in spoken}},
            "measure": asdict(measure),
            "isolation": file.isolation,
            "objective": str(file.objective),
            "constraints": [str(constraint) for constraint in file.constraints],
            "limits": limits,
            "search": file.search.model_dump(),
        },
    )


def _plain_model(entry: ModelEntry) -> dict[str, Any]:
    written = {key: value for key, value in asdict(entry.resolve()).items() if key != "source"}
    return written | entry.model_dump(include={"scale_to", "allow_percent"}, exclude_none=True)


def _program(file: SpaceFile) -> Program | None:
    """Returns what trials run beside their plans, before flags have values."""
    if file.command is None and not file.env:
        return None
    command = () if file.command is None else split_command(file.command)
    environment = tuple(sorted(file.env.items()))
    steps, warm = parse_source(file.steps).text, isinstance(file.command, dict) and file.command.get("warm", False)
    return Program(command=command, environment=environment, steps=steps, warm=warm)


def _command_document(file: SpaceFile) -> dict[str, Any]:
    """Returns the keys of a command, and plans, as the file has them. Keys without a value are left out.

    Nothing else says what an axis that the file leaves out shows in the command, so none is added.
    """
    keys = ("command", "env", "flags", "plans", "requires", "steps")
    return {key: value for key in keys if (value := getattr(file, key)) not in (None, {}, [])}


def _plan_value(value: Any) -> Any:
    """Returns an axis value as `Plan` holds it."""
    return tuple(value) if isinstance(value, list) else () if value == "even" else None if value == FOUND else value


def _plan_values(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a plan with its values as `Plan` and trials hold them."""
    own = {name: _plan_value(value) for name, value in plan.items() if name != "flags"}
    return own | {"flags": {name: flag_value(value) for name, value in plan.get("flags", {}).items()}}


_NEUTRAL: Final = {
    field.name: plain_value(field.default) for field in fields(Plan) if field.name in AXES.keys() - {"etp", "dtype"}
}
"""Neutral values that do not depend on the rest. `etp` follows `tp`, and `dtype` the device."""


def _duplicate_keys(root: yaml.Node) -> list[str]:
    """Lists every key that a mapping of the file has twice. YAML would keep the last silently."""
    problems, waiting, seen = [], [("", root)], set()
    while waiting:
        path, node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += [(f"{path}[{index}]", item) for index, item in enumerate(node.value)]
        elif isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for key, value in node.value:
                name = str(key.value)
                if name in lines and name != "<<":
                    line = key.start_mark.line + 1
                    problems.append(
                        f"{path}.{name}".lstrip(".") + f": twice, in lines {lines[name]} and {line}; keep one"
                    )
                lines.setdefault(name, key.start_mark.line + 1)
                waiting.append((f"{path}.{name}", value))
    return sorted(problems)
