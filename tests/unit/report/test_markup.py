"""HTML templates that escape their values."""

from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wattune.report.markup import fill, table


@settings(deadline=None)
@given(st.text(), st.text())
def test_a_template_shows_any_text_as_it_is(first, second):
    parser = HTMLParser(convert_charrefs=True)
    seen: list[str] = []
    parser.handle_data = seen.append  # type: ignore[method-assign]
    parser.handle_starttag = lambda tag, attrs: seen.append(dict(attrs).get("title", ""))  # type: ignore[method-assign]
    parser.feed(fill('<p title="{}">{}</p>', first, second))
    parser.close()
    assert seen[0] == first
    assert "".join(seen[1:]) == second


def test_markup_is_not_escaped_twice():
    assert fill("<p>{}</p>", fill("<b>{}</b>", "&")) == "<p><b>&amp;</b></p>"


def test_a_row_of_another_length_is_refused():
    with pytest.raises(ValueError, match="argument 2 is"):
        table("", ["a", "b"], [["1", "2", "3"]])
