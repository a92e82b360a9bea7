"""Sources of steps as people write them: every word is read or refused with what is allowed."""

from typing import Any

import pytest

from wattune.errors import SpaceError
from wattune.steps.source import AUTO, HOOKS, PRESETS, StepSource, parse_source


@pytest.mark.parametrize("word", ["auto", *HOOKS, "none"])
def test_words_are_kinds(word: str) -> None:
    assert parse_source(word) == StepSource(kind=word) and str(parse_source(word)) == word


def test_presets_patterns_and_nothing() -> None:
    assert parse_source(None) == AUTO
    assert parse_source("megatron") is PRESETS["megatron"] and str(PRESETS["megatron"]) == "pattern megatron"
    own = parse_source({"pattern": "step time: ([0-9.]+) ms", "unit": "ms"})
    assert (own.kind, own.unit, own.preset) == ("pattern", "ms", "")
    assert parse_source(own) is own
    assert parse_source("pattern/ms:step time: ([0-9.]+) ms") == own
    assert parse_source("pattern:took (.*)s").unit == "s"
    assert parse_source("optimizer").kind == "optimizer"


@pytest.mark.parametrize("value", ["auto", "none", "tqdm", "pattern:took (.*)s", "pattern/us:a: (?P<time>.*)\nb"])
def test_a_source_is_read_back_from_its_text(value: str) -> None:
    assert parse_source(parse_source(value).text) == parse_source(value)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("optimiser", 'did you mean "optimizer"'),
        ("pattern", "pattern: REGULAR_EXPRESSION"),
        (7, "got 7"),
        ({"unit": "ms"}, "pattern: REGULAR_EXPRESSION"),
        ({"pattern": "a", "units": "ms"}, "pattern: REGULAR_EXPRESSION"),
        ({"pattern": "a", "unit": "h"}, "use one of s, ms, us"),
        ({"pattern": "", "unit": "s"}, "give a regular expression"),
        ({"pattern": "(a", "unit": "s"}, "not a regular expression"),
        ({"pattern": "(?P<speed>[0-9]+)"}, "use the groups step, time, tokens, tokens_per_s, tokens_per_s_per_device"),
    ],
)
def test_what_is_no_source_is_refused(value: Any, said: str) -> None:
    with pytest.raises(SpaceError, match="steps") as caught:
        parse_source(value)
    assert said in str(caught.value)
