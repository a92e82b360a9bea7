"""Results of scripts are found among the words of others."""

import json

import pytest
from script_results import results


def test_words_before_and_behind_do_not_matter() -> None:
    output = '(pid=7) hello RESULT {"a": 1}(pid=8) {"x"} bye\nother\nRESULT {"a": {"b": [2]}}'
    assert results(output) == [{"a": 1}, {"a": {"b": [2]}}]


def test_no_result_is_none_and_half_a_one_an_error() -> None:
    assert results("nothing to say") == []
    with pytest.raises(json.JSONDecodeError):
        results('RESULT {"a": ')
