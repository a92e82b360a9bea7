"""Metrics: each has a unit, a group, a direction and a meaning of its own, of tables that exist."""

from wattune.metrics import METRICS
from wattune.schema import TELEMETRY


def test_every_metric_has_a_unit_a_group_and_a_direction():
    for name, metric in METRICS.items():
        assert metric.name == name
        assert metric.unit, name
        assert metric.better in {"lower", "higher", "none"}


def test_where_the_step_goes_sums_to_one_of_the_same_kind():
    where = [metric.name for metric in METRICS.values() if metric.group == "step_breakdown"]
    whole = {"compute_frac", "exposed_comm_frac", "bubble_frac", "straggler_frac", "other_frac"}
    by_axis = {f"exposed_comm_{axis}_frac" for axis in ("tp", "pp", "cp", "dp", "ep")}
    assert set(where) == whole | by_axis | {"host_bound_frac"}


def test_every_meaning_is_a_short_line_of_its_own() -> None:
    texts = [metric.meaning for metric in METRICS.values()]
    assert len(set(texts)) == len(texts)
    assert all(10 < len(text) <= 100 and not text.endswith(".") for text in texts)


def test_tables_are_those_that_exist() -> None:
    named = {table for metric in METRICS.values() for table in metric.tables}
    assert named == {*TELEMETRY, "spans", "kernels", "result"}


def test_what_sensors_measure_names_no_spans_alone() -> None:
    """A recording of any command has no spans: its metrics of power and heat need telemetry only."""
    of_sensors = [metric for metric in METRICS.values() if metric.group in ("power", "thermal", "throttle")]
    assert all(set(metric.tables) <= {*TELEMETRY} for metric in of_sensors)
