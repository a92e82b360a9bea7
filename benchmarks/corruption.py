"""Flips single bytes in the files of finished trials, and counts what is noticed.

    python benchmarks/corruption.py --cases 20000 --seed 20261122           # prints benchmarks/results/corruption.md
    python benchmarks/corruption.py --cases 1500 --seed 20261123 --study    # its spaces and its table of combinations

Every case changes one byte of one file of a trial, or of the study itself, to another value. Then it ranks the study
and analyses the trial's folder. `caught`: one of the two names the damage. `harmless`: both say exactly what they said
of the sound folder. `silent`: a figure, a verdict or a detail changed, and neither says why. The study is made of
recordings of four H200s (tests/golden/h200x4), written as a finished trial is. A case never leaves the study damaged.
"""

import argparse
import csv
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "fakes"))

import pyarrow.parquet as pq  # noqa: E402
from small_study import make_study  # noqa: E402

from wattune import api  # noqa: E402
from wattune.errors import WattuneError  # noqa: E402
from wattune.inspection import inspect  # noqa: E402
from wattune.storage.documents import json_text  # noqa: E402
from wattune.storage.files import write_table  # noqa: E402
from wattune.storage.study import StudyFolder, TrialFolder  # noqa: E402

KINDS: Final = ("caught", "harmless", "silent")


def written(storage: Path) -> tuple[StudyFolder, TrialFolder]:
    """Writes the study with the writers of a finished trial. Returns it, and the trial that will be damaged."""
    study = make_study(storage)
    trial = next(one for one in study.trials() if one.spans() is not None)
    for path in trial.path.rglob("*.parquet"):
        write_table(path, pq.read_table(path))
    trial.write_ranks([{"rank": rank, "node": "node0", "device": f"gpu{rank}", "pid": rank} for rank in range(4)])
    trial.write_stacks({0: "Thread 0x1 (most recent call first):\n  File loop.py, line 1 in run\n"})
    result = trial.result()
    assert result is not None
    trial.write_result(result)
    return study, trial


def said(study: StudyFolder, trial: TrialFolder) -> tuple[str, str, bool]:
    """Returns the ranking and the analysis as texts, and whether either names damage."""
    named, texts = False, []
    for action in (lambda: api.rank(study).to_json(), lambda: inspect(trial.path).to_json()):
        try:
            found = action()
        except WattuneError:
            named = True
            texts.append("")
            continue
        named |= bool(found.get("unreadable"))
        texts.append(json_text(found, sort_keys=True))
    return texts[0], texts[1], named


def cases(seed: int, num_cases: int, *, of_study: bool) -> dict[str, Counter[str]]:
    """Runs the cases on the files of a trial, or on those of the study itself. Returns counts by file and outcome."""
    dice = random.Random(seed)
    counts: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        study, trial = written(Path(temporary))
        damaged, kept = study.path if of_study else trial.path, Path(temporary) / "kept"
        shutil.copytree(damaged, kept)
        sound = said(study, trial)
        assert not sound[2], "the sound study is read without a word"
        paths = kept.glob("*.*") if of_study else kept.rglob("*")
        names = sorted(path.relative_to(kept).as_posix() for path in paths if path.is_file())
        for number in range(num_cases):
            name = names[number % len(names)]
            content = bytearray((kept / name).read_bytes())
            at = dice.randrange(len(content))
            content[at] ^= (
                dice.choice([1 << bit for bit in range(8)]) if dice.random() < 0.5 else dice.randrange(1, 256)
            )
            (damaged / name).write_bytes(content)
            ranking, analysis, named = said(study, trial)
            kind = "caught" if named else "harmless" if (ranking, analysis) == sound[:2] else "silent"
            counts.setdefault(name, Counter())[kind] += 1
            if kind == "silent":
                sys.stderr.write(f"silent: {name} byte {at}, case {number}\n")
            (damaged / name).write_bytes((kept / name).read_bytes())
        assert said(study, trial) == sound
    return counts


def main() -> int:
    """Prints the table. Returns 1 where anything was silent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=20261122)
    parser.add_argument("--study", action="store_true", help="damage the study's own files, not a trial's")
    parser.add_argument("--csv", type=Path)
    given = parser.parse_args()
    start_s = time.monotonic()
    counts = cases(given.seed, given.cases, of_study=given.study)
    rows = [(name, sum(found.values()), *(found[kind] for kind in KINDS)) for name, found in sorted(counts.items())]
    rows.append(("all", *(sum(row[column] for row in rows) for column in range(1, 5))))
    lines = ["| file | cases | caught | harmless | silent |", "|---|---|---|---|---|"]
    lines += [f"| {name} | {' | '.join(f'{count:,}' for count in found)} |" for name, *found in rows]
    sys.stdout.write("\n".join(lines) + f"\n\n{time.monotonic() - start_s:.0f} s, seed {given.seed}\n")
    if given.csv:
        with given.csv.open("w", newline="") as file:
            heading = ("file", "num_cases", *(f"num_{kind}" for kind in KINDS))
            csv.writer(file, lineterminator="\n").writerows([heading, *rows])
    return 1 if rows[-1][4] else 0


if __name__ == "__main__":
    sys.exit(main())
