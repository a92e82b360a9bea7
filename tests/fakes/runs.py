"""A run as data, from tables that a test makes."""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from wattune.analysis.run_data import RunData
from wattune.analysis.signals.readings import Tables
from wattune.trial import TrialSpec


def run_data(
    spec: TrialSpec | None, spans: pa.Table | None, tables: Tables, manifests: Mapping[str, Any], **others: Any
) -> RunData:
    """A run's data."""
    return RunData(spec=spec, spans=spans, tables=tables, manifests=manifests, **others)
