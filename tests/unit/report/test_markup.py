"""HTML templates that escape their values."""

from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wattune.report.markup import fill, section, table


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


@given(st.lists(st.text(), max_size=4), st.text())
def test_a_section_shows_its_title_and_its_parts_as_text(parts, title):
    parser = HTMLParser(convert_charrefs=True)
    seen: list[str] = []
    parser.handle_data = seen.append  # type: ignore[method-assign]
    parser.feed(section(title, *parts))
    parser.close()
    assert "".join(seen) == f"{title}{''.join(parts)}\n"


def test_numbers_align_on_the_right_and_rows_have_the_names_given():
    html = table("how", ["what", "time above"], [["a", "1"], ["b", "2"]], ["time above"], ids=["r1", "r2"])
    assert html.count('<td class="number">') == 2 and html.count('<th class="number">') == 1
    assert '<tr id="r1"><td>a</td><td class="number">1</td></tr>' in html
    assert "<caption>how</caption>" in html
    assert "device_<wbr>power" in table("", ["device_power"], [])
