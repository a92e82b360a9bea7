"""The section about a study that grew."""

from wattune.objective import Question
from wattune.ranking.order import rank
from wattune.report.spaces import spaces_section
from wattune.run import Numbers, Run, RunStatus
from wattune.search.prune import prune
from wattune.search.space import parse_space
from wattune.storage.spaces import StoredSpace

FIRST = {
    "study": "x",
    "model": "llama3_8b",
    "cluster": {"device": "h200_sxm", "devices_per_node": 2},
    "engine": "torch",
    "workload": {"seq_len": 128, "global_batch_size": 16},
    "space": {"tp": [1]},
    "objective": "maximize tokens_per_s",
}


def stored(number: int, **changed: object) -> StoredSpace:
    document = {**FIRST, "model": {"name": "llama3_8b"}, **changed}
    return StoredSpace(number=number, document=dict(parse_space(document).document), files={})


def test_each_space_says_what_it_changed_and_each_trial_under_which_it_ran() -> None:
    spaces = [stored(1), stored(2, space={"tp": [1, 2]}, measure={"min_seconds": 60})]
    kept = prune(parse_space(spaces[1].document)).kept
    runs = [
        (kept[0].spec, _ran(kept[0].trial_id, 0, None, 15.2)),
        (kept[0].spec, _ran(kept[0].trial_id, 1, 2, 61.0)),
        (kept[1].spec, _ran(kept[1].trial_id, 0, 2, 60.5)),
    ]
    ranking = rank(runs, Question.of("maximize tokens_per_s"))
    html = str(spaces_section(spaces, ranking))
    assert "measure.min_seconds: 15.0 -&gt; 60.0; space.tp: adds 2" in html
    row = html[html.index(f">{kept[0].trial_id}<") :]
    assert "1: 1, 2: 1" in row[:200] and "15.2 s to 61" in row[:300]
    assert str(spaces_section(spaces[:1], ranking)) == ""


def _ran(trial_id: str, repeat: int, space: int | None, window_s: float) -> Run:
    return Run(
        trial_id=trial_id,
        repeat=repeat,
        status=RunStatus.COMPLETED,
        metrics={"tokens_per_s": 100.0 + repeat},
        numbers=Numbers(window_s=window_s, space=space),
    )
