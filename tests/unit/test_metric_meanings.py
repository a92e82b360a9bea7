"""Meanings of metrics: each has one, of tables that exist, and no two read alike."""

from wattune.metric_meanings import MEANINGS
from wattune.schema import METRICS, TELEMETRY


def test_every_metric_has_a_meaning_in_the_order_of_tables() -> None:
    assert list(MEANINGS) == list(METRICS)


def test_every_meaning_is_a_short_line_of_its_own() -> None:
    texts = [meaning.text for meaning in MEANINGS.values()]
    assert len(set(texts)) == len(texts)
    assert all(10 < len(text) <= 100 and not text.endswith(".") for text in texts)


def test_tables_are_those_that_exist() -> None:
    named = {table for meaning in MEANINGS.values() for table in meaning.tables}
    assert named == {*TELEMETRY, "spans", "kernels", "result"}


def test_what_sensors_measure_names_no_spans_alone() -> None:
    """A recording of any command has no spans: its metrics of power and heat need telemetry only."""
    of_sensors = [name for name, metric in METRICS.items() if metric.group in ("power", "thermal", "throttle")]
    assert all(set(MEANINGS[name].tables) <= {*TELEMETRY} for name in of_sensors)
