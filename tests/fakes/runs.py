"""A run as data, from tables that a test makes."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from wattune.analysis.run_data import RunData
from wattune.analysis.signals.readings import Tables
from wattune.trial import TrialSpec


def constant(value: float) -> Callable[[np.ndarray], np.ndarray]:
    """A curve of one value over time."""
    return lambda time_s: np.full(len(time_s), float(value))


def run_data(
    spec: TrialSpec | None, spans: pa.Table | None, tables: Tables, manifests: Mapping[str, Any], **others: Any
) -> RunData:
    """A run's data."""
    return RunData(spec=spec, spans=spans, tables=tables, manifests=manifests, **others)
