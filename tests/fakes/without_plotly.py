"""A machine without plotly."""

import sys

import pytest


def hide_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every import of plotly fail, also where it was imported before."""
    for name in list(sys.modules):
        if name.startswith(("plotly", "wattune.report.")) and name != "wattune.report.write":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "plotly", None)
