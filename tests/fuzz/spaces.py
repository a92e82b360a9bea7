"""Fuzzer of search spaces, objectives and constraints: each is refused in words, or planned."""

import json
import random
import tempfile
from pathlib import Path

import mutate
import yaml
from hypothesis import strategies as st
from tally import Tally, seed_of

from wattune.errors import NothingToTryError
from wattune.metrics import METRICS
from wattune.objective import parse_constraint, parse_objective
from wattune.search.prune import prune
from wattune.search.space import StudySpec, load_space, parse_space

SPACES = sorted((Path(__file__).parents[2] / "search_spaces").glob("*.yaml"))

MOST_PLANNED = 64
"""Most combinations of a mutated space that are planned: more take long because they are many."""

BITS = (
    "<<: *a", "&a", "*a", "!!binary x", "!!python/object:os.system", "!!timestamp 2001-99-99", "!!float x", "!!int 1__",
    "0x", "1:2:3:4", "1e99999", ".inf", ".nan", "-.inf", "? ", "---", "...", "\t", "%YAML 9", "{", "[", "}", "]", "|",
    ">", "'", '"', "null", "~", "yes", "2001-02-30", "2001-01-01T99:99:99Z", "!!set {a, b}", "!!omap [a: 1]",
    "!!pairs [a: 1]",
    "99999999999999999999", "1000000000", "-1", "0", "\u2028", "=", "!!merge x", "!<tag:x> 1",
)  # fmt: skip

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates(),
    lambda inside: (
        st.lists(inside, max_size=4) | st.dictionaries(st.text(max_size=8) | st.integers(), inside, max_size=4)
    ),
    max_leaves=12,
)
"""Plain data of any kind, for Hypothesis."""


def text_of(dice: random.Random) -> tuple[str, str]:
    """Makes one mutated space as a text. Returns it and a description."""
    source = dice.choice(SPACES)
    text = source.read_text()
    kind = dice.randrange(6)
    if kind == 0:
        return mutate.bytes_of(dice, text.encode()).decode("utf-8", "surrogateescape"), "bytes"
    if kind in (1, 2):
        lines = text.splitlines()
        for _ in range(dice.choice((1, 2, 5))):
            at = dice.randrange(len(lines))
            line = lines[at]
            spot = dice.randrange(len(line) + 1)
            lines[at] = line[:spot] + dice.choice(BITS) + (line[spot:] if dice.random() < 0.7 else "")
        return "\n".join(lines), "bits of YAML"
    if kind == 3:
        width, depth = dice.randrange(2, 12), dice.randrange(2, 12)
        merge = dice.random() < 0.5
        bomb = ["x0: &x0 {a: 1}" if merge else "x0: &x0 [1]"]
        for level in range(1, depth):
            parts = ", ".join([f"*x{level - 1}"] * width)
            bomb.append(f"x{level}: &x{level}\n  <<: [{parts}]" if merge else f"x{level}: &x{level} [{parts}]")
        return "\n".join(bomb) + "\n" + text, f"aliases {width}^{depth}"
    document, said = mutate.data_of(dice, yaml.safe_load(text))
    try:
        return yaml.safe_dump(document, sort_keys=False), said
    except (yaml.YAMLError, RecursionError):
        return repr(document), said


def plan(text: str, path: Path) -> str:
    """Reads a space from a file and plans it where it is small."""
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    return planned(load_space(path))


def planned(study: StudySpec) -> str:
    """Plans a space that was read."""
    json.dumps(study.document, allow_nan=False)
    if study.num_combinations <= MOST_PLANNED:
        candidates = prune(study)
        json.dumps(candidates.to_json(), allow_nan=False)
        try:
            candidates.require_kept()
        except NothingToTryError:
            return "refused"
    return "accepted"


def expression_of(dice: random.Random) -> str:
    """Makes one mutated objective or constraint."""
    parts = [dice.choice((*METRICS, "tokens_per_s", "x", "")), dice.choice(("<=", ">=", "<", "==", "", "minimize"))]
    parts += [dice.choice(("1", "1e999", "nan", "inf", "-0", "2 kW", "9" * 400, "0x1", "1_0", "٣", "1e-400", ""))]
    text = dice.choice((" ".join(parts), f"{dice.choice(('minimize', 'maximize', ''))} {parts[0]}"))
    return mutate.bytes_of(dice, text.encode()).decode("utf-8", "replace") if dice.random() < 0.5 else text


def fuzz_space(tally: Tally, seed: int, number: int, folder: Path) -> None:
    """Runs one case."""
    dice = random.Random(seed_of("space", seed, number))
    text, said = text_of(dice)
    tally.run(f"space {seed}/{number} ({said})", lambda: plan(text, folder / "space.yaml"))


def fuzz_expression(tally: Tally, seed: int, number: int) -> None:
    """Runs one case."""
    dice = random.Random(seed_of("expression", seed, number))
    text = expression_of(dice)

    def parse() -> str:
        (parse_objective if dice.random() < 0.4 else parse_constraint)(text)
        return "accepted"

    tally.run(f"expression {seed}/{number} {text!r:.80}", parse)


def fuzz_document(tally: Tally, data: object) -> None:
    """Runs one case of Hypothesis: any plain data as a whole space, and in the place of each part of a sound one."""
    tally.run(f"document {data!r:.80}", lambda: planned(parse_space(data)))
    sound = yaml.safe_load(SPACES[0].read_text())
    for name in sound:
        tally.run(f"{name}: {data!r:.80}", lambda name=name: planned(parse_space({**sound, name: data})))


def scratch() -> "tempfile.TemporaryDirectory[str]":
    """Returns a folder for the files of a fuzzer."""
    return tempfile.TemporaryDirectory(prefix="wt-fuzz-")
