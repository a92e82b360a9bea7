"""A search space, checked and sorted into what can run and what cannot."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml

from wattune.catalog.hardware import DEVICES
from wattune.catalog.models import MODELS
from wattune.catalog.networks import FABRICS, HOST_CLOCKS_GHZ, NETWORKS
from wattune.cost.defaults import default_coefficients
from wattune.cost.tables import EstimatedMetric
from wattune.errors import SpaceError
from wattune.plans.engines import runs_program, untrained
from wattune.scale_down.cut import parse_target
from wattune.scale_down.invariants import Scaled, compare
from wattune.search.command_entry import NEEDS_TOKENS
from wattune.search.fields import listed
from wattune.search.model_entry import other_than_named
from wattune.search.prune import SCALE_DOWN, Candidate, Candidates, LeftOut, prune
from wattune.search.space import StudySpec, load_space, parse_space
from wattune.search.strategies.protocol import Observation, Problem, Strategy
from wattune.search.strategy import is_searcher, make_strategy
from wattune.steps.source import AUTO
from wattune.storage.documents import parse_yaml
from wattune.storage.known_results import LEAST_KEPT, PLAN, read_known, write_known
from wattune.trial import TrialSpec, packed, unpacked

GUIDED: Final = "model_guided"
"""The strategy that uses estimates and earlier results."""

_PEAK: Final = re.compile(r"_peak_(\d+)(ms|s)_")
"""Window in the name of a peak's metric."""

_MOST_LEFT_OUT: Final = 0.5
"""Largest share of a window that may be left out as warm-up (`wattune.analysis.signals.steady_state.steady_from`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyPlan:
    """A search space and every combination in it."""

    spec: StudySpec
    """The space, checked, with every default filled in."""
    candidates: Candidates
    """Every combination, in one of three lists."""

    @property
    def name(self) -> str:
        """The study's name."""
        return self.spec.name

    @property
    def kept(self) -> tuple[Candidate, ...]:
        """The combinations that are trials."""
        return self.candidates.kept

    @property
    def rejected(self) -> tuple[LeftOut, ...]:
        """The combinations that cannot run, each with its rule and reason."""
        return self.candidates.rejected

    @property
    def equivalent(self) -> tuple[LeftOut, ...]:
        """The combinations that do the same work as one that is kept."""
        return self.candidates.equivalent

    @property
    def num_trials(self) -> int:
        """Different trials the study tries: all that are kept, or as many as `search.num_trials` allows."""
        return min(self.spec.search.num_trials or len(self.kept), len(self.kept))

    @property
    def reference(self) -> TrialSpec | None:
        """The trial that `search.reference` names; None where it names none.

        Raises:
            SpaceError: It is not a trial of this space.
        """
        wanted = self.spec.search.reference
        if wanted is None:
            return None
        for kept in self.kept:
            if kept.trial_id == wanted:
                return kept.spec
        count = len(self.kept)
        raise SpaceError(
            f"search.reference: {wanted} is none of the {count} trials of the space; `wattune plan` lists them"
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about settings that can be used and may not give what is asked."""
        others = filter(None, map(other_than_named, self.spec.models))
        return (
            *self._unmeasured_peaks(),
            *self._unknown_work(),
            *self._unknown_tokens(),
            *self.untrained,
            *(f"model: {text}" for text in others),
        )

    @property
    def untrained(self) -> tuple[str, ...]:
        """Models that an engine of the space cannot train, each with the reason: they can be estimated, and not run."""
        texts = (untrained(engine, model) for model in self.spec.models for engine in self.spec.engines)
        return tuple(f"model: {text}" for text in texts if text)

    def _unmeasured_peaks(self) -> Iterator[str]:
        windows = {bound.metric: _window_s(bound.metric) for bound in self.spec.constraints}
        longest = max(windows, key=lambda metric: windows[metric], default="")
        least_s, got_s = windows.get(longest, 0.0) / (1.0 - _MOST_LEFT_OUT), self.spec.measure.min_seconds
        if got_s < least_s:
            yield (
                f"measure.min_seconds: got {got_s:g}; up to half of a window may be left out as warm-up, so {longest} "
                f"may not be measured and its bound not be decided; give {least_s:g} or more"
            )

    def _unknown_work(self) -> Iterator[str]:
        if self.spec.search.strategy == GUIDED and any(runs_program(each.engine) for each in self.candidates.specs):
            yield (
                "search.strategy: a command has no analytic estimate, so model_guided learns from its trials alone, "
                "and from earlier studies of the same command"
            )

    def _unknown_tokens(self) -> tuple[str, ...]:
        programs = [each.program for each in self.candidates.specs if not each.workload.is_known]
        if not any(program is not None and program.steps == AUTO.kind for program in programs):
            return ()
        asked = {
            "objective": self.spec.objective.metric,
            **{f"constraints[{index}]": bound.metric for index, bound in enumerate(self.spec.constraints)},
        }
        return tuple(
            f"{key}: {metric} is known where the program tells its tokens: by wattune.spans, or as a Trainer of "
            "Hugging Face or Lightning; else give workload, or ask for step_time_s"
            for key, metric in asked.items()
            if metric in NEEDS_TOKENS
        )

    def strategy(
        self, estimates: Mapping[str, EstimatedMetric] | None = None, warm: Sequence[Observation] = ()
    ) -> Strategy:
        """The strategy that proposes trials, new each time.

        Args:
            estimates: Predicted metrics of the kept candidates, in their order, for strategies that use them.
            warm: Results of earlier studies, likewise.
        """
        asked, question = self.spec.search, self.spec.question
        of = Problem(specs=self.candidates.specs, seed=asked.seed, question=question, estimates=estimates, warm=warm)
        if is_searcher(asked.strategy):
            from wattune.orchestrate.ray_searcher import RaySearcher  # planning does not wait for Ray

            return RaySearcher(asked.strategy, of)
        return make_strategy(asked.strategy, of)


def _window_s(metric: str) -> float:
    """Returns the seconds that a peak is a mean over; 0 for other metrics."""
    found = _PEAK.search(metric)
    return int(found[1]) * (1.0 if found[2] == "s" else 1e-3) if found else 0.0


Space = str | Path | Mapping[str, Any] | StudyPlan
"""A search space: its file, its content, or what `plan` made of it."""


def plan(space: Space) -> StudyPlan:
    """Reads a search space and sorts every combination of it. Starts nothing.

    Args:
        space: The path of a YAML file, or its content as a mapping.

    Raises:
        SpaceError: It is not a valid space; every problem is in the message.
    """
    if isinstance(space, StudyPlan):
        return space
    spec = parse_space(dict(space)) if isinstance(space, Mapping) else load_space(space)
    return StudyPlan(spec=spec, candidates=prune(spec))


def plan_again(document: Mapping[str, Any], study: Path) -> StudyPlan:
    """Plans a study's space for who needs its trials alone: its folder keeps those of a large space; see `plan`."""
    spec = parse_space(dict(document))
    if known := read_known(study / PLAN, spec.document):
        kept = tuple(Candidate(spec=one, config={}) for one in unpacked(known["specs"].tobytes()))
        return StudyPlan(spec=spec, candidates=Candidates(kept=kept, rejected=(), equivalent=()))
    found = StudyPlan(spec=spec, candidates=prune(spec))
    keep_plan(found, study)
    return found


def keep_plan(planned: StudyPlan, study: Path) -> None:
    """Keeps the trials of a large space with its study, for the next time that it is planned."""
    if len(planned.kept) >= LEAST_KEPT:
        content = np.frombuffer(packed(planned.candidates.specs), np.uint8)
        write_known(study / PLAN, {"specs": content}, planned.spec.document)


def scale(path: Path, to: str, *, allow_percent: float | None = None) -> tuple[str, StudyPlan, list[Scaled]]:
    """Makes the space whose small runs stand for the plans of a large one. Starts nothing, writes nothing.

    Returns the text of the small space, what would run, and the distance of each run from its plan. Raises
    `SpaceError`: the file is no valid space, is scaled already, has no plan that can run, or none that a small run
    stands for, `PlanError`: `to` names no cluster.

    Args:
        path: The large space.
        to: The cluster to run on, such as `1x2:h100_sxm`.
        allow_percent: Largest distance of a small run, in percent of a step; None is 5.
    """
    target, large = parse_target(to), load_space(path)
    if allow_percent is not None and not 0 < allow_percent < 100:
        raise SpaceError(f"--allow: got {allow_percent:g}, allowed: more than 0 and less than 100 percent of a step")
    document = parse_yaml(path.read_text("utf-8"))
    if not document.get("model"):
        raise SpaceError(f"{path}: has no model, and nobody knows what its command computes; only a model is scaled")
    if large.targets:
        raise SpaceError(f"{path}: is scaled already (model.scale_to); scale the space that it was made of")
    own = {"scale_to": target.text} | ({} if allow_percent is None else {"allow_percent": float(allow_percent)})
    models = [({"name": one} if isinstance(one, str) else one) | own for one in listed(document["model"])]
    model = models if len(models) > 1 else models[0]
    document |= {"study": f"{large.name}_on_{target.text.replace(' ', '_')}", "model": model}
    try:
        spec = parse_space(document, str(path), path.parent)
    except SpaceError as error:  # the large space is valid: what is wrong is the target, in one line
        raise SpaceError(f"{path}: {'; '.join(error.problems)}") from None
    planned = StudyPlan(spec=spec, candidates=prune(spec))
    if not planned.kept and all(one.rule != SCALE_DOWN for one in planned.rejected):
        first = planned.rejected[0]
        raise SpaceError(f"{path}: has no plan that can run, of {len(planned.rejected)}; {first.rule}: {first.reason}")
    planned.candidates.require_kept()
    found = compare(planned.candidates.specs, default_coefficients)
    lines = [
        f"# Small runs on {target.text} that stand for the plans of {path.name}; `wattune scale` wrote this.",
        "# cluster, workload and space are the large ones, and results are read as theirs. Each plan runs as:",
        *(f"#   {one.large.label}: {one.text}; {one.label}" for one in found),
        yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=120),
    ]
    return "\n".join(lines), planned, found


def catalog() -> dict[str, Any]:
    """Lists the devices, networks and models that spaces can name, as plain data, with parameter counts."""
    models = [
        {**asdict(model), "num_parameters": model.num_parameters, "num_active_parameters": model.num_active_parameters}
        for model in MODELS.values()
    ]
    return {
        "devices": [asdict(device) for device in DEVICES.values()],
        "networks": [asdict(network) for network in NETWORKS.values()],
        "fabrics": [
            {"name": name, "num_devices": joined, "vendor": vendor, "source": source}
            for name, (joined, vendor, source) in FABRICS.items()
        ],
        "hosts": [{"name": name, "clock_ghz": clock} for name, clock in HOST_CLOCKS_GHZ.items()],
        "models": models,
    }
