"""HTML templates that escape their values."""

import re
from html.parser import HTMLParser

from hypothesis import given, settings
from hypothesis import strategies as st
from made_report import render

from wattune.report.figure import STYLE
from wattune.view.html import fill, section, table
from wattune.view.table import FIGURE, Cell, Column, Table


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


@given(st.lists(st.text(), max_size=4), st.text())
def test_a_section_shows_its_title_and_its_parts_as_text(parts, title):
    parser = HTMLParser(convert_charrefs=True)
    seen: list[str] = []
    parser.handle_data = seen.append  # type: ignore[method-assign]
    parser.feed(section(title, *parts))
    parser.close()
    assert "".join(seen) == f"{title}{''.join(parts)}\n"


def test_numbers_align_on_the_right_and_rows_have_the_names_given():
    columns = [Column("what", lambda row: row[0]), Column("time above", lambda row: row[1], FIGURE)]
    html = table(Table("", columns, ["a1", "b2"]), "how", name=lambda row: f"r{row[1]}")
    assert html.count('<td class="number"') == 2 and html.count('<th class="number">') == 1
    first = '<tr id="r1"><td data-column="what"><span>a</span></td>'
    assert f'{first}<td class="number" data-column="time above"><span>1</span></td></tr>' in html
    assert "<caption>how</caption>" in html
    assert "device_<wbr>power" in table(Table("", [Column("device_power", str)], []))


def test_a_short_heading_tells_its_whole_one_and_a_card_has_it():
    bound = 'a_w <= "1"'
    columns = [Column(bound, lambda _: Cell(text="y", tone="breaks", title="by 2 W"), short="1")]
    html = table(Table("", columns * 6, ["x"]), "how")
    assert '<th title="a_w &lt;= &quot;1&quot;">1</th>' in html and 'data-column="a_w &lt;= &quot;1&quot;"' in html
    assert '>✕ </span><small class="detail">y, by 2 W</small>' in html and "1: a_w" in html
    assert ">✕ y</span>" in table(Table("", columns * 5, ["x"])), "five have room for their names and values"


def widths(rules: str) -> list[str]:
    """Lengths in pixels that could be wider than a window of 420 pixels."""
    found = re.findall(r"(?<![-\w])(?:min-)?width: *(\d+)px", rules)
    return [length for length in found if int(length) > 340]


def test_nothing_on_the_page_has_a_width_that_a_narrow_window_lacks():
    wide, narrow = STYLE.split("@media (max-width: 720px)")
    assert widths(wide) == [] and widths(narrow) == []
    assert "max-width: 1320px" in wide
    assert "overflow-wrap: anywhere" in wide, "long words of cells break"
    assert "content: attr(data-column)" in narrow, "a row is a card with the names of its columns"
    page = render()
    assert 'name="viewport" content="width=device-width, initial-scale=1"' in page
    tables = "".join(re.findall(r"<div class=\"scroll\"><table>.*?</table>", page, re.DOTALL))
    assert tables.count("<table>") == 6
    assert not re.search(r"<(?:table|td|th|div|section)[^>]*(?:width=|style=\"[^\"]*width: *\d{3,}px)", tables)


def test_only_values_are_kept_on_one_line():
    """A text that may not wrap sets the least width of its column: a value and its unit, never a sentence."""
    page = render()
    kept = re.findall(r'<td class="number"[^>]*><span[^>]*>(.*?)</span>', page)
    assert kept and max(map(len, kept)) <= 24, kept
    assert STYLE.split("td.number small {")[1].split("}")[0].strip() == "white-space: normal;"
