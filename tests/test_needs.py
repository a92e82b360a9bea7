"""An outsider's test of the tree: for each need, the names of folders and files alone lead to the file.

The guess is a plain one: words of the need against words of the path, the file's own name counting most. It knows
nothing of a file's content, so a file that moves or is named by its inside makes a need fail here. The needs are asked
in the field's words, as somebody asks who has never opened the project.
"""

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "platform" / "wattune"
FILES = sorted(path for path in SOURCE.rglob("*.py") if path.name != "__init__.py")
FIRST = 3
"""Files that somebody opens before they call a tree hard to read, of some three hundred."""

NEEDS = {
    "where is the NVML ring drained?": "telemetry/nvml/ring.py",
    "what decides the next trial in the queue?": "orchestrate/scheduling/trial_queue.py",
    "which file adds FP8, and the other axes of a plan?": "plans/axes.py",
    "which rules reject a plan?": "plans/rules.py",
    "which pipeline schedules are there?": "plans/schedule.py",
    "how is the memory of a plan predicted?": "cost/memory/predict.py",
    "how is the time of a step predicted?": "cost/step_time/predict.py",
    "what does a transfer over links cost a step?": "cost/step_time/links.py",
    "how is energy integrated into a metric?": "analysis/metrics/energy.py",
    "which metric says how much throttling cost?": "analysis/metrics/throttle.py",
    "where are excursions of power above the limit found: which metric?": "analysis/metrics/excursion.py",
    "where do workers get their process groups?": "workers/process_groups.py",
    "which watchdog ends workers that hang?": "workers/watchdog.py",
    "where does the torch engine build its pipeline stages?": "engines/torch/pipeline.py",
    "what is Megatron's config?": "engines/megatron/config.py",
    "where do I add a GPU to the catalog of hardware?": "catalog/hardware.py",
    "where is a config.json of Hugging Face read?": "catalog/huggingface.py",
    "which keys may a search space have: its grammar?": "search/grammar.py",
    "what chooses the trials of a model-guided strategy?": "search/strategies/model_guided.py",
    "what would a looser bound buy: the frontier?": "ranking/frontier.py",
    "what renders the page of a report?": "report/page.py",
    "which process samples sensors?": "telemetry/sampler/process.py",
    "what is written as Parquet in storage?": "storage/parquet.py",
    "which changes of a stored space are refused?": "storage/space_changes.py",
    "where is the format of files in storage checked?": "storage/format.py",
    "what keeps a study within its budget?": "orchestrate/scheduling/budget.py",
    "what shows progress on a terminal?": "terminal/progress.py",
    "where is the node's power limit enforced on a running trial?": "orchestrate/power_limit.py",
    "where are simulated sensors computed?": "simulation/sensors.py",
    "how are confidence intervals computed?": "intervals.py",
    "which error is out of memory?": "workers/out_of_memory.py",
    "what draws the Pareto front in a report?": "report/pareto.py",
    "where is an estimate put beside a result?": "fitting/estimate_and_result.py",
    "what ends a study whose cluster is lost?": "orchestrate/lost_cluster.py",
}
_EMPTY = re.compile(
    r"\b(?:a|an|and|are|by|do|does|file|for|from|how|i|in|into|is|it|its|may|of|on|or|s|that|the|there|to|what|"
    r"where|which|who|with|would)\b"
)


def words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", _EMPTY.sub(" ", text.lower()))


def alike(a: str, b: str) -> bool:
    """Tells whether two words are the same but for their endings: five letters, or all of a shorter word."""
    least = min(len(a), len(b), 5)
    return a == b or (least >= 4 and a[:least] == b[:least])


def score(need: str, path: Path) -> float:
    """Scores a path as an answer: words of its name count twice, and words that miss count against it."""
    *folders, name = path.relative_to(SOURCE).with_suffix("").parts
    asked = words(need)

    def hits(found: list[str]) -> int:
        return sum(any(alike(word, one) for one in asked) for word in found)

    named, within = name.split("_"), [word for folder in folders for word in folder.split("_")]
    missed = 0.3 * (len(named) - hits(named)) + 0.1 * (len(within) - hits(within))
    return 2 * hits(named) + hits(within) - missed


@pytest.mark.parametrize("need", NEEDS)
def test_the_names_alone_lead_to_the_file(need: str) -> None:
    assert (SOURCE / NEEDS[need]).exists(), "the file of this need has moved: is its new name as easy to guess?"
    guesses = sorted(FILES, key=lambda path: (-score(need, path), len(path.parts), path))
    opened = [path.relative_to(SOURCE).as_posix() for path in guesses[:FIRST]]
    assert NEEDS[need] in opened


@pytest.mark.parametrize("need", NEEDS)
def test_the_first_line_of_the_file_says_that_it_is_the_one(need: str) -> None:
    first = (ast.get_docstring(ast.parse((SOURCE / NEEDS[need]).read_text())) or "").split("\n\n")[0]
    assert any(alike(one, said) for one in words(need) for said in words(first)), first


def test_twenty_needs_are_asked_of_all_rooms_that_people_look_for() -> None:
    assert len(NEEDS) >= 20 and len(set(NEEDS.values())) == len(NEEDS)
    assert len({file.partition("/")[0] for file in NEEDS.values()}) >= 15
    assert score("where is the NVML ring?", SOURCE / "report" / "page.py") < 0, (
        "a path that says nothing is not guessed"
    )
