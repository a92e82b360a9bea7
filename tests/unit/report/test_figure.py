"""Figures on a page and as images."""

import pytest
from made_report import Page, all_charts, figure_of, render

from wattune.errors import WattuneError
from wattune.report.figure import write_images
from wattune.units import with_unit


def test_simulated_figures_say_so_everywhere():
    page = Page(render(simulated=True))
    assert "SIMULATED TELEMETRY" in page.text[:200]
    assert page.text.count("SIMULATED TELEMETRY. ") == 4  # the tables that show figures
    charts = all_charts(simulated=True)
    assert len(charts) == 6
    for chart in charts:
        assert "SIMULATED" in [note.get("text") for note in figure_of(chart)[1]["annotations"]]


@pytest.mark.parametrize(
    ("said", "means"),
    [
        (
            "\n\nKaleido requires Google Chrome to be installed.\n\nEither download ...",
            "no Chrome or Chromium is installed",
        ),
        ("Image export requires the Kaleido package,\nwhich can be ...", r"install wattune\[figures\]"),
        ("something\nelse", "something else"),
    ],
)
def test_an_image_that_cannot_be_drawn_says_in_one_line_what_is_missing(tmp_path, monkeypatch, said, means):
    def cannot(*_args, **_settings):
        raise RuntimeError(said)

    monkeypatch.setattr("plotly.io.write_images", cannot)
    with pytest.raises(WattuneError, match=means) as caught:
        write_images(all_charts(), tmp_path)
    assert "\n" not in str(caught.value)


def test_an_image_that_was_not_written_is_not_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr("plotly.io.write_images", lambda *_args, **_settings: None)
    with pytest.raises(WattuneError, match=r"did not write throughput-against-power\.png"):
        write_images(all_charts(), tmp_path)
    assert write_images([], tmp_path) == []


@pytest.mark.parametrize(
    ("metric", "title"),
    [
        ("tokens_per_s", "tokens_per_s [1/s]"),
        ("mfu_frac", "mfu_frac"),
        ("device_temp_max_c", "device_temp_max_c [degC]"),
    ],
)
def test_an_axis_is_named_with_its_unit_where_it_has_one(metric, title):
    assert with_unit(metric) == title


def test_every_figure_has_a_name_of_its_own_a_caption_and_a_description():
    charts = all_charts()
    assert len({chart.name for chart in charts}) == len(charts)
    for chart in charts:
        page = Page(chart.html())
        assert chart.title in page.text and chart.caption in page.text
        assert ("div", ("role", "aria-label")) in page.elements


def test_a_figure_is_not_changed_by_being_shown():
    chart = all_charts(simulated=True)[0]
    before = len(chart.figure.layout.annotations)
    assert chart.html() == chart.html()
    assert len(chart.figure.layout.annotations) == before
