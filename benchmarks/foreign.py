"""Asks wattune about other people's programs, logs and failures, and counts how many answers are right.

    python benchmarks/foreign.py                        # the cases of tests/fixtures/cases
    python benchmarks/foreign.py --cases FOLDER         # others of the same kinds, such as ones that were kept aside
    python benchmarks/foreign.py --kind steps --kind failures

Every case is asked by the product's own commands, as processes. What is right stands in the case itself: in the first
lines of a program, in a comment of `fail.py`, `make.py` or a space, or in a file beside it. A file `NAME.right.json`
says it for programs: `{"num_steps": 60, "step_time_s": 0.1}`, `{"num_kv_heads": 8}`, `{"total_energy_j": 1200.0}`.

An answer is `right`; `none`, where wattune says that it does not know; or `wrong`: a figure or a cause that is not so.
Each case has a control of the opposite kind where one can be made: what is healthy must stay as it is.
"""

import csv
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow.parquet as pq
import yaml
from harness import Found, Rows, benchmark

ROOT: Final = Path(__file__).parents[1]
CASES: Final = ROOT / "tests" / "fixtures" / "cases"
BAR_FRAC: Final = 0.9
STEPS_WITHIN: Final = 2
TIME_WITHIN: Final = 0.10
TOKENS_WITHIN: Final = 0.05
ENERGY_WITHIN: Final = 0.005
LONGEST_S: Final = 600

PRESETS: Final = {"[titan]": "torchtitan", "elapsed time per iteration": "megatron", "global_step": "nemo"}
"""Preset of the program that prints such words, for lines that stand alone."""

STATUSES: Final = ("out_of_memory", "infra_failed", "timed_out", "crashed", "completed", "invalid")


class Answer(NamedTuple):
    """The outcome of one case."""

    case: str
    asked: str
    right: str
    got: str
    verdict: str
    """`right`, `wrong`, `none`, or `unjudged` where the case does not say what is right in a form that is read here."""


def wattune(*arguments: object, folder: Path | None = None) -> tuple[int, dict[str, Any], str]:
    """Runs a command of the product; returns its exit code, its one JSON object, and its words."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "platform"), "NO_COLOR": "1"}
    command = [sys.executable, "-m", "wattune", *map(str, arguments)]
    try:
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=LONGEST_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return 124, {}, f"no end within {LONGEST_S} s"
    starts = done.stdout.find("{")
    try:
        found = json.loads(done.stdout[starts:]) if starts >= 0 else {}
    except ValueError:
        found = {}
    return done.returncode, found, " ".join((done.stdout + done.stderr).split())


def told(path: Path) -> dict[str, Any]:
    """Returns what `NAME.right.json` says of a case, empty where there is none."""
    beside = path.with_name(f"{path.stem}.right.json")
    return json.loads(beside.read_text()) if beside.exists() else {}


def near(value: float | None, wanted: float, within: float) -> bool:
    """Returns whether a figure is there and close to what is wanted."""
    return value is not None and abs(value - wanted) <= within * abs(wanted)


# ---- steps

_STEPS = re.compile(r"[Rr]ight: (?:(\d+) steps.*?of ([\d.]+) (m?s)|no steps)")
_ASKED = re.compile(r"wattune record (?:--steps (\S+) )?-- ")
_TOKENS = re.compile(r"a step of ([\d.]+) s: (\d+) \* ([\d,]+)")
_NUMBER = re.compile(r"(step:?\s+|iteration\s+|global_step[:=]\s*)(\d+)")
_PLAYER = """
import re, sys, time
line, each_s, count = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
for number in range(1, count + 1):
    time.sleep(each_s); print(re.sub({number!r}, lambda m: m[1] + str(number), line, count=1), flush=True)
"""


def record(storage: Path, source: str, *command: object, folder: Path) -> dict[str, Any]:
    """Records a program and returns what came of it."""
    asked = ["--steps", source] if source else []
    name = f"case-{time.monotonic_ns()}"
    return wattune("record", *asked, "--json", "--storage", storage, "--name", name, "--", *command, folder=folder)[1]


def steps_cases(folder: Path, storage: Path) -> Iterator[Answer]:
    """Programs that print steps, each asked by its preset and without one."""
    for path in sorted(folder.glob("*.py")):
        text = path.read_text()[:2000]
        said, asked, own = _STEPS.search(text), _ASKED.search(text), told(path)
        num = own.get("num_steps", int(said[1] or 0) if said else None)
        each_s = own.get("step_time_s", float(said[2] or 0) * (1e-3 if said[3] == "ms" else 1.0) if said else None)
        for source in dict.fromkeys((own.get("preset") or (asked[1] if asked else "") or "", "")):
            found = record(storage, source, sys.executable, path, folder=folder)
            yield judged_steps(f"{path.stem}, {source or 'auto'}", source, found, num, each_s)
    for path in sorted(folder.glob("*.txt")):
        words = path.read_text()
        if (said := _TOKENS.search(words)) is None:
            yield Answer(path.stem, "record", "", "", "unjudged")
            continue
        line, each_s, ranks, tps = words.splitlines()[1], float(said[1]), int(said[2]), float(said[3].replace(",", ""))
        for source in dict.fromkeys((next((name for word, name in PRESETS.items() if word in line), ""), "")):
            player = ("-c", _PLAYER.format(number=_NUMBER.pattern), line, each_s, 14)
            found = record(storage, source, sys.executable, *player, folder=folder)
            of_all = (found.get("metrics") or {}).get("tokens_per_s")
            devices = max(len(found.get("devices") or ()), 1)  # the line does not say how many train
            right = of_all is not None and near(of_all / devices, tps, TOKENS_WITHIN)
            right = right or near(of_all, ranks * tps, TOKENS_WITHIN)
            verdict = "right" if right else "none" if of_all is None else "wrong"
            wanted = f"{ranks * tps:,.0f} tokens/s, {tps:,.0f} a device"
            got = "no tokens" if of_all is None else f"{of_all:,.0f} tokens/s, {devices} device(s)"
            yield Answer(f"{path.stem}, {source or 'auto'}", f"record --steps {source or 'auto'}", wanted, got, verdict)


def judged_steps(case: str, source: str, found: Mapping[str, Any], num: int | None, each_s: float | None) -> Answer:
    """Judges the steps of a recording."""
    steps, metrics = found.get("steps") or {}, found.get("metrics") or {}
    count, time_s = steps.get("num_steps") or 0, metrics.get("step_time_s")
    asked, got = f"record --steps {source or 'auto'}", "no steps" if not count else f"{count} of {time_s or 0:.4g} s"
    if num is None or each_s is None:
        return Answer(case, asked, "", got, "unjudged")
    wanted = f"{num} of {each_s:g} s" if num else "no steps"
    if not num:
        return Answer(case, asked, wanted, got, "wrong" if count else "right")
    right = abs(count - num) <= STEPS_WITHIN and near(time_s, each_s, TIME_WITHIN)
    return Answer(case, asked, wanted, got, "right" if right else "wrong" if count else "none")


# ---- failures

_CASE = re.compile(r"^(?:el)?if case(.*):\s*# right: (.+)")


def rights_of(folder: Path) -> dict[str, tuple[str, str]]:
    """Returns the status, and the exception in its reason, that are right of each case of a space.

    A case without a comment in `fail.py` is a control: it completes. A status that is not named is empty.
    """
    found = {
        name: (text, "startswith" in condition)
        for line in lines(folder / "fail.py")
        for condition, text in _CASE.findall(line)
        for name in re.findall(r'"([^"]+)"', condition)
    }
    rights = {}
    for case in yaml.safe_load((folder / "space.yaml").read_text())["flags"]["case"]:
        texts = [text for name, (text, starts) in found.items() if case == name or (starts and case.startswith(name))]
        text = texts[0] if texts else "completed"
        exception = re.search(r"with the (\w+) as reason", text)
        status = next((one for one in STATUSES if re.match(rf"\W*{one}\b", text)), "")
        rights[case] = (status, exception[1] if exception else "")
    return rights


def failures_cases(folder: Path, storage: Path) -> Iterator[Answer]:
    """Programs that end as other people's do: the status of each trial, and the exception that stands in its reason."""
    _, _, words = wattune("run", "space.yaml", "--storage", storage, "--json", folder=folder)
    ended: dict[str, tuple[str, str]] = {}
    for path in sorted(storage.glob("*/trials/*/run.json")):
        spec, result = (json.loads((path.parent / name).read_text()) for name in ("spec.json", "run.json"))
        ended[str(dict(spec["program"]["flags"])["case"])] = (result["status"], result.get("reason", ""))
    for case, (status, exception) in rights_of(folder).items():
        got, reason = ended.get(case, ("not run", ""))
        verdict = "right" if got == status and exception in reason else "none" if got == "not run" else "wrong"
        shown = f"{got}: {reason}"[:120] if reason else got if got != "not run" else f"not run: {words[-80:]}"
        yield Answer(case, "run", f"{status} {exception}".strip(), shown, verdict if status else "unjudged")


def lines(path: Path) -> Sequence[str]:
    """Returns the lines of a file that may be missing."""
    return path.read_text().splitlines() if path.exists() else ()


# ---- config

_READ = """
import json, sys
import wattune
model = wattune.plan(sys.argv[1]).spec.models[0]
print(json.dumps({name: getattr(model, name) for name in model.__dataclass_fields__}, default=str))
"""
_FIELD = re.compile(r"\b(num_\w+|hidden_size|head_dim|vocab_size) is (\d+)")
_WIDTHS = re.compile(r"(\d+) heads of (\d+) on hidden size (\d+)")
_KEYS: Final = {"num_kv_heads": "num_key_value_heads", "num_heads": "num_attention_heads"}


def read_config(path: Path, content: Mapping[str, Any], storage: Path) -> tuple[dict[str, Any], str]:
    """Plans a space with a configuration; returns the model that was read, and the words where it was refused."""
    config, space = storage / path.name, storage / f"{path.stem}.yaml"
    config.write_text(json.dumps(content))
    model = {"name": "of_a_case", "from_config": str(config)}
    content = {"study": "case", "model": model, "cluster": "1x8 h200_sxm", "engine": "torch"}
    content |= {"workload": {"seq_len": 1024, "global_batch_size": 8}, "space": {"tp": [1]}}
    space.write_text(yaml.safe_dump(content | {"objective": "maximize tokens_per_s"}))
    code, _, words = wattune("plan", space, "--json")
    if code not in (0, 3):  # 3: read, and too large for every plan
        return {}, words
    env = {**os.environ, "PYTHONPATH": str(ROOT / "platform")}
    done = subprocess.run(
        [sys.executable, "-c", _READ, space], env=env, capture_output=True, text=True, check=True, timeout=LONGEST_S
    )
    return json.loads(done.stdout), ""


def config_cases(folder: Path, storage: Path) -> Iterator[Answer]:
    """Configurations that leave keys out; each is asked again with the key given, which must be read."""
    for path in sorted(folder.glob("*.json")):
        if path.name.endswith(".right.json"):
            continue
        text = path.with_name(f"{path.stem}.right.txt")
        words, content = text.read_text() if text.exists() else "", json.loads(path.read_text())
        wanted = told(path) or {name: int(value) for name, value in _FIELD.findall(words)}
        if said := _WIDTHS.search(words):
            wanted |= dict(zip(("num_heads", "head_dim", "hidden_size"), map(int, said.groups()), strict=True))
        model, refused = read_config(path, content, storage)
        got = {name: model.get(name) for name in wanted} if model else {}
        keys = [_KEYS.get(name, name) for name in wanted]
        if not wanted:
            verdict = "unjudged"
        elif model:
            verdict = "right" if got == wanted else "wrong"
        else:
            names_it = "refusal that names" in words and any(key in refused for key in keys)
            verdict = "right" if names_it else "none"
        yield Answer(path.stem, "plan", shown(wanted), shown(got) if model else f"refused: {refused[:80]}", verdict)
        given = {key: wanted[name] for key, name in zip(keys, wanted, strict=True) if key not in content}
        if given:
            model, refused = read_config(path, {**content, **given}, storage)
            got = {name: model.get(name) for name in wanted}
            verdict = "right" if got == wanted else "wrong" if model else "none"
            yield Answer(
                f"{path.stem}, with the key", "plan", shown(wanted), shown(got) if model else refused[:80], verdict
            )


def shown(values: Mapping[str, Any]) -> str:
    """Returns values as a cell of the table."""
    return ", ".join(f"{name} {value}" for name, value in values.items())


# ---- import


def nvidia_smi(path: Path) -> dict[str, float]:
    """Reads a log of `nvidia-smi --format=csv` by itself: joules of its power column, and readings that are numbers."""
    rows = [[cell.strip() for cell in row] for row in csv.reader(lines(path))]
    heads = rows[0] if rows else []
    column = next((at for at, head in enumerate(heads) if head.startswith("power.draw")), None)
    key = next((at for at, head in enumerate(heads) if head in ("index", "uuid", "gpu_uuid", "pci.bus_id")), None)
    if column is None or "timestamp" not in heads:
        return {}
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows[1:]:
        try:
            at = datetime.strptime(row[heads.index("timestamp")], "%Y/%m/%d %H:%M:%S.%f").timestamp()  # noqa: DTZ007
            power_w = float(row[column].split()[0])
        except (ValueError, IndexError):
            continue
        series.setdefault("" if key is None else row[key], []).append((at, power_w))
    pairs = [pair for points in series.values() for pair in itertools.pairwise(points)]
    return {
        "energy_j": sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairs),
        "num_power_readings": sum(map(len, series.values())),
    }


def readings(folder: Path) -> int:
    """Counts the readings of power in a recording's tables: what was not read is no reading."""
    count = 0
    for path in folder.glob("telemetry/*/*.parquet"):
        for column in pq.read_table(path).select([n for n in pq.read_schema(path).names if n.startswith("power_")]):
            count += len(column) - column.null_count
    return count


def import_cases(folder: Path, storage: Path) -> Iterator[Answer]:
    """Logs of other tools: read, taken by `analyze`, and of the energy that the file itself integrates to."""
    for path in sorted(folder.iterdir()):
        if path.name.endswith((".right.json", "right.txt", ".py", ".md")) or not path.is_file():
            continue
        code, found, words = wattune("import", path, "--storage", storage, "--name", path.stem, "--json")
        if code != 0:
            yield Answer(path.name, "import", "read", f"refused: {words[:100]}", "none")
            continue
        made = Path(found.get("folder", storage / "recordings" / path.stem))
        code, _, words = wattune("analyze", made, "--json")
        if code != 0:
            yield Answer(path.name, "import, analyze", "read", words[:100], "none")
            continue
        energies = [one["energy_j"] for one in (found.get("energies") or {}).values()]
        known = {**(found.get("metrics") or {}), "num_power_readings": readings(made)}
        known |= {"energy_j": sum(energies)} if energies else {}
        wanted = told(path) or nvidia_smi(path)
        got = {name: known.get(name) for name in wanted}
        right = all(near(got[name], value, ENERGY_WITHIN) for name, value in wanted.items())
        lacks = any(value is None for value in got.values())
        verdict = "unjudged" if not wanted else "right" if right else "none" if lacks else "wrong"
        yield Answer(path.name, "import, analyze", shown(rounded(wanted)), shown(rounded(got or known)), verdict)


def rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns numbers with five digits."""
    return {name: f"{value:.5g}" if isinstance(value, float) else value for name, value in values.items()}


# ---- traces

_WRITTEN = re.compile(r'((?:^#.*\n)+)write\("(\w+)"', re.MULTILINE)
_RIGHT = re.compile(r"Right: (.*?)(?: Got:|$)", re.DOTALL)
_QUALITIES: Final = ("invalid", "indicative", "publishable")


def trace_cases(folder: Path, storage: Path) -> Iterator[Answer]:
    """Folders of other tools, each with a fault, beside the same folder without one."""
    maker = folder / "make.py"
    text = maker.read_text()
    subprocess.run([sys.executable, maker, storage], check=True, timeout=LONGEST_S)
    control = storage / "control.py"
    control.write_text(f'{re.split(_WRITTEN, text)[0]}\nwrite("healthy")\n')
    subprocess.run([sys.executable, control, storage], check=True, timeout=LONGEST_S)
    healthy = wattune("analyze", storage / "healthy", "--json")[1]
    usual = set(healthy.get("quality_reasons", ()))
    verdict = "right" if healthy.get("quality") != "invalid" and healthy.get("metrics") else "wrong"
    yield Answer("healthy", "analyze", "not invalid", quality_of(healthy), verdict)
    for comment, name in _WRITTEN.findall(text):
        said = _RIGHT.search(comment)
        found = wattune("analyze", storage / name, "--json")[1]
        words = said[1].strip() if said else ""
        quality = next((one for one in _QUALITIES if words.startswith(one)), "")
        new = set(found.get("quality_reasons", ())) - usual
        right = bool(new) and quality in ("", found.get("quality"))
        yield Answer(
            name, "analyze", words[:100], quality_of(found), "right" if right else "wrong" if words else "unjudged"
        )


def quality_of(found: Mapping[str, Any]) -> str:
    """Returns quality and its reasons as a cell of the table."""
    return f"{found.get('quality', 'no answer')}: {', '.join(found.get('quality_reasons', ()))}"


# ---- command

_REMEDY = re.compile(r"\benv\b|\blist\b|bash, -c")


def command_cases(folder: Path, storage: Path) -> Iterator[Answer]:
    """Commands with text that only a shell obeys; each again as `[bash, -c, TEXT]`, which is kept."""
    for path in sorted(folder.glob("*.yaml")):
        refused = "refused" in lines(path)[0] or "asked about" in lines(path)[0]
        code, found, words = wattune("plan", path, "--json")
        asked_about = code == 0 and any(_REMEDY.search(one) for one in found.get("warnings", ()))
        told_off = asked_about or (code == 2 and _REMEDY.search(words) is not None)
        got = "refused with a remedy" if told_off else f"exit code {code}, {found.get('num_trials', 0)} kept"
        verdict = "right" if told_off is refused else "wrong" if code == 0 else "none"
        yield Answer(path.stem, "plan", "refused with a remedy" if refused else "kept", got, verdict)
        space = yaml.safe_load(path.read_text())
        if refused and isinstance(space["command"], str):
            again = storage / path.name
            again.write_text(yaml.safe_dump(space | {"command": ["bash", "-c", space["command"]]}))
            code, found, words = wattune("plan", again, "--json")
            got = f"{found.get('num_trials', 0)} kept" if code == 0 else words[:100]
            yield Answer(f"{path.stem}, by bash -c", "plan", "kept", got, "right" if code == 0 else "wrong")


KINDS: Final[dict[str, Callable[[Path, Path], Iterator[Answer]]]] = {
    "steps": steps_cases,
    "failures": failures_cases,
    "config": config_cases,
    "import": import_cases,
    "trace": trace_cases,
    "command": command_cases,
}


def options(parser: ArgumentParser) -> None:
    """Adds the folder and the kinds."""
    parser.add_argument("--cases", type=Path, default=CASES, help="folder with a folder of each kind")
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="only this kind; may be repeated")


@benchmark(
    claim="Other people's programs, logs and failures are answered rightly, and none wrongly.",
    bar=f"at least {BAR_FRAC:.0%} of the answers of each kind are right, and none is wrong",
    options=options,
)
def main(given: Namespace) -> Found:
    """Asks every case, and counts by kind."""
    rows, notes, missed = Rows("kind", "case", "asked", "right", "got", "verdict", "wall_s"), [], []
    total: list[str] = []
    for kind, ask in KINDS.items():
        folder = (given.cases / kind).resolve()
        if not folder.is_dir() or kind not in (given.kind or KINDS):
            continue
        verdicts = []
        with tempfile.TemporaryDirectory(prefix=f"foreign-{kind}-") as storage:
            since = time.monotonic()
            for answer in ask(folder, Path(storage)):
                now = time.monotonic()
                rows.add(kind, *(cell.replace("|", "/").replace(f"{ROOT}/", "") for cell in answer), now - since)
                verdicts.append(answer.verdict)
                print(kind, *answer, sep=" | ", file=sys.stderr, flush=True)
                since = now
        total += verdicts
        notes.append(f"{kind}: {summed(verdicts)}")
        asked = [one for one in verdicts if one != "unjudged"]
        if "wrong" in asked or asked.count("right") < BAR_FRAC * len(asked):
            missed.append(notes[-1])
    return Found(rows, notes=[*notes, f"all: {summed(total)}"], missed=missed)


def summed(verdicts: Sequence[str]) -> str:
    """Says how many of a kind are right and how many confidently wrong."""
    count = {one: verdicts.count(one) for one in ("right", "wrong", "none", "unjudged")}
    asked = len(verdicts) - count["unjudged"]
    more = f", {count['unjudged']} say in no form that is read here what is right" if count["unjudged"] else ""
    return f"{count['right']} of {asked} right, {count['wrong']} confidently wrong, {count['none']} not answered{more}"


if __name__ == "__main__":
    main()
