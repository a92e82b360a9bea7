"""Fuzzer of study folders: a damaged trial is named, and costs itself alone."""

import json
import random
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import mutate
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from small_study import make_study
from tally import Tally, seed_of

from wattune import api
from wattune.errors import TelemetryError, WattuneError
from wattune.inspection import inspect
from wattune.orchestrate.scheduling.controller import recover
from wattune.storage.documents import json_text
from wattune.storage.study import StudyFolder
from wattune.telemetry.replay import ReplayBackend
from wattune.trial import TrialSpec

KEYS = ("digest", "files", "accepted")


class Study:
    """A sound study, what its commands say of it, and the one trial of it that is damaged."""

    def __init__(self, folder: Path) -> None:
        """Writes the study."""
        self.study = make_study(folder)
        document = self.study.document()
        document["cluster"] = [{name: value for name, value in one.items() if value} for one in document["cluster"]]
        self.study.commit(document, self.study.candidates())  # a second space, which can be planned again
        self.trials = [one.path for one in self.study.trials() if one.spans() is not None]
        for path in self.trials:
            trial = self.study.trial(*path.name.split("-"))  # type: ignore[arg-type]
            trial.write_ranks([{"rank": rank, "node": "node0", "device": f"gpu{rank}"} for rank in range(4)])
            trial.write_stacks({0: "a stack"})
            for table in path.rglob("*.parquet"):
                _write(table, pq.read_table(table))
            result = trial.result()
            assert result is not None
            trial.write_result(result)
        self.target = self.trials[0]
        self.others = [path for path in self.trials if path != self.target]
        self._kept = folder / "kept"
        shutil.copytree(self.target, self._kept)
        self._own = {path: path.read_bytes() for path in self.own_files()}
        self.analysis = json_text(inspect(self.target).to_json(), sort_keys=True)
        self.other = json_text(inspect(self.others[0]).to_json(), sort_keys=True)
        self.ranking = json_text(api.rank(self.study).to_json(), sort_keys=True)

    def restore(self) -> None:
        """Puts the sound files of the target back."""
        for path in (self.study.path / "trials").iterdir():
            if path == self.target or "stray" in path.name:
                shutil.rmtree(path)
        shutil.copytree(self._kept, self.target)
        for path, content in self._own.items():
            if path.is_dir():
                path.rmdir()
            path.write_bytes(content)

    def own_files(self) -> list[Path]:
        """Lists the files of the study that are no trial's: its spaces, and the table of combinations."""
        return sorted(path for path in self.study.path.iterdir() if path.suffix in (".yaml", ".parquet"))

    def files(self) -> list[Path]:
        """Lists the files of the target."""
        return sorted(path for path in self.target.rglob("*") if path.is_file())


def _write(path: Path, table: pa.Table) -> None:
    from wattune.storage.files import write_table

    write_table(path, table)


def damage(dice: random.Random, study: Study) -> tuple[str, bool]:
    """Damages the target or the study's own files. Returns a description, and whether its digests still stand."""
    digested = dice.random() < 0.4
    if dice.random() < 0.1:
        return _own_file(dice, dice.choice(study.own_files()), digested=digested), digested
    if not digested:
        data = json.loads((study.target / "run.json").read_text())
        (study.target / "run.json").write_text(json.dumps({k: v for k, v in data.items() if k not in KEYS}))
    path = dice.choice(study.files())
    name = path.relative_to(study.target).as_posix()
    kind = dice.randrange(10)
    if kind == 0:
        path.unlink()
        return f"{name} removed", digested
    if kind == 1:
        shutil.copytree(study.target, study.study.path / "trials" / dice.choice(("stray", "stray-0", "stray-9" * 9)))
        return "a stray folder", digested
    if kind == 2:
        path.unlink()
        path.mkdir()
        return f"{name} is a folder", digested
    if kind in (3, 4, 5) or path.suffix == ".txt":
        path.write_bytes(mutate.bytes_of(dice, path.read_bytes()))
        return f"{name}: bytes", digested
    if path.suffix == ".json":
        return f"{name}: {_json(dice, path)}", digested
    return f"{name}: {_table(dice, path)}", digested


def _own_file(dice: random.Random, path: Path, *, digested: bool) -> str:
    """Damages a file of the study that is no trial's. Returns a description."""
    kind = dice.randrange(8)
    if kind == 0:
        path.unlink()
        return f"{path.name} removed"
    if kind == 1:
        path.unlink()
        path.mkdir()
        return f"{path.name} is a folder"
    content = path.read_bytes()
    if path.suffix == ".parquet":
        if kind > 4:
            return f"{path.name}: {_table(dice, path)}"
    elif not digested:
        content = content.partition(b"\n")[2]  # without the line of its digest
        if kind > 3:
            data, said = mutate.data_of(dice, yaml.safe_load(content))
            with suppress(yaml.YAMLError, RecursionError):
                path.write_text(yaml.safe_dump(data))
            return f"{path.name}: {said}"
    path.write_bytes(mutate.bytes_of(dice, content))
    return f"{path.name}: bytes"


def _json(dice: random.Random, path: Path) -> str:
    if dice.random() < 0.05:
        path.write_text("[" * mutate.NESTED_LEVELS + "]" * mutate.NESTED_LEVELS)
        return "nested"
    data, said = mutate.data_of(dice, json.loads(path.read_text()))
    if path.name == "spec.json" and isinstance(data, dict) and dice.random() < 0.7:
        # With the id of its content, so that what is judged is the content.
        try:
            data["trial_id"] = TrialSpec.from_json(data).trial_id
        except (ValueError, KeyError, TypeError, AttributeError):
            said += "; no specification"
        else:
            said += "; with its id"
            path.write_text(json.dumps(data))
            _rename(path.parent, data["trial_id"])
            return said
    path.write_text(json.dumps(data))
    return said


def _rename(folder: Path, trial_id: str) -> None:
    """Gives the result of a trial the id of its specification; the folder keeps its name where they differ."""
    result = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**result, "trial_id": trial_id}))


def _table(dice: random.Random, path: Path) -> str:
    table = pq.read_table(path)
    names = table.column_names
    name = dice.choice(names)
    at = names.index(name)
    column = table[name]
    kind = dice.randrange(8)
    if kind == 0:
        made, said = table.drop_columns([name]), "column removed"
    elif kind == 1:
        made, said = table.set_column(at, name, pa.nulls(table.num_rows)), "nulls"
    elif kind == 2:
        made, said = table.set_column(at, name, pa.array(["x"] * table.num_rows)), "texts"
    elif kind == 3:
        made, said = table.slice(0, dice.choice((0, 1, 2))), "few rows"
    elif kind == 4:
        made, said = table.take(pa.array(dice.sample(range(table.num_rows), table.num_rows))), "rows in any order"
    elif kind == 5:
        made, said = table.replace_schema_metadata({"wattune.format": b"\xff"}), "metadata"
    elif pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        values = column.to_numpy(zero_copy_only=False).astype(np.float64)
        rows = dice.sample(range(len(values)), min(len(values), dice.choice((1, 5, len(values)))))
        with np.errstate(all="ignore"):
            values[rows] = dice.choice(
                (np.nan, np.inf, -1.0, 0.0, 1e30, -1e18, 9e18, 5000.0, 64000.0, 2.3e6, values[rows] * 1000)
            )
            kept = pa.array(values) if dice.random() < 0.3 else pa.array(np.nan_to_num(values).astype(np.int64))
        made, said = table.set_column(at, name, kept), f"{len(rows)} values"
    else:
        made, said = table.set_column(at, name, pa.array([dice.choice(("", "x", "é"))] * table.num_rows)), "other names"
    pq.write_table(made, path)
    return f"{name}: {said}"


def check(study: Study, *, digested: bool, rare: int | None) -> str:
    """Runs what reads a study.

    Args:
        study: With its damage.
        digested: Whether its digests still stand.
        rare: Which of `RARE` to run besides; None for none of them.

    Returns:
        `refused` where the damage is named, `silent` where figures changed unsaid.
    """
    said: list[str] = []

    def told(action: Callable[[], Any]) -> str | None:
        try:
            return json_text(action(), sort_keys=True)
        except WattuneError as error:
            said.append(str(error))
            return None

    ranking = told(lambda: api.rank(study.study).to_json())
    named = ranking is None or json.loads(ranking)["unreadable"] != []
    analysis = told(lambda: inspect(study.target).to_json())
    if rare is not None:
        told(lambda: RARE[rare % len(RARE)](study))
    finished = (study.target / "run.json").is_file()  # else it is a trial that was cut off, and runs again
    told(lambda: len(recover(StudyFolder(study.study.path), {})[0]))
    try:
        ReplayBackend(str(study.target)).read("gpu0", "fast")
    except (TelemetryError, KeyError) as error:
        if isinstance(error, KeyError) and error.args[0] != ("gpu0", "fast"):
            raise
    if rare is not None:
        kept = json_text(inspect(study.others[0]).to_json(), sort_keys=True)
        assert kept == study.other, "another trial suffered"
    elif ranking is not None:
        assert study.others[0].name.partition("-")[0] in ranking, "another trial suffered"
    if digested and finished and not (named or said):
        same = ranking == study.ranking and (analysis is None or _figures(analysis) == _figures(study.analysis))
        return "accepted" if same or (analysis and '"missing": []' not in analysis) else "silent"
    return "refused" if named or said else "accepted"


def _tables(path: Path) -> list[int]:
    """Reads a study as tables, as a program of a user's would. Returns their lengths."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they name what is damaged
        study = api.load_study(path)
        return [study.metrics().num_rows, *(study.telemetry(tier).num_rows for tier in ("fast", "ring"))]


RARELY = 8
"""Cases for each one that runs one of `RARE` too."""

RARE: tuple[Callable[[Study], Any], ...] = (
    lambda study: api.report(study.study).name,
    lambda study: api.compare(str(study.target), str(study.others[0])).to_json(),
    lambda study: api.frontier(study.study).to_json(),
    lambda study: api.suggest(study.study, budget="1h").to_json(),
    lambda study: (len(api.export(study.study, "csv")), len(api.export(study.study, "json"))),
    lambda study: _tables(study.study.path),
)
"""Readers of a study that take longer."""


def _figures(analysis: str) -> Any:
    found = json.loads(analysis)
    return found["metrics"], found["quality"], found["detail"]


def fuzz_folder(tally: Tally, study: Study, seed: int, number: int) -> None:
    """Runs one case."""
    dice = random.Random(seed_of("folder", seed, number))
    said, digested = damage(dice, study)
    try:
        case = f"folder {seed}/{number} ({said}; {'with' if digested else 'no'} digests)"
        tally.run(case, lambda: check(study, digested=digested, rare=None if number % RARELY else number // RARELY))
    finally:
        study.restore()
