"""Summary of one trial or recording: from spans and readings to metrics and a verdict."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from wattune.analysis.figures import figures
from wattune.analysis.metrics.energy import (
    PowerTrace,
    limit_readings_w,
    powers,
)
from wattune.analysis.metrics.outlier import VARIES_FRAC
from wattune.analysis.metrics.thermal import all_settled_from_s
from wattune.analysis.quality import quality_of
from wattune.analysis.run_data import Examined, RunData
from wattune.analysis.signals.align import Aligned
from wattune.analysis.signals.energy_grid import SWING_BAND_HZ, EnergySum, pieces
from wattune.analysis.signals.series import Series
from wattune.arrays import Floats
from wattune.errors import ImpossibleValueError
from wattune.run import INVALID, NO_NUMBERS, Numbers
from wattune.schema import DeviceKey

NO_WINDOW: Final = "no_window"
"""Without spans or a given window nothing was measured."""

IMPOSSIBLE: Final = "impossible_value"
"""A table has a value that cannot be (`wattune.schema.BOUNDS`); the tag of this name has the place and the value."""

_OF_SEVERAL: Final = ("node_", "cluster_", "nic_", "power_coincidence", "device_temp_spread")
"""Prefixes of metrics that do not describe a single device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Metrics and quality of a trial or recording."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Finite values by the names of `wattune.metrics.METRICS`; unmeasured metrics are absent."""
    quality: str
    """`publishable`, `indicative` or `invalid`."""
    quality_reasons: tuple[str, ...] = ()
    """Codes of `wattune.analysis.quality.THRESHOLDS`, of `wattune.analysis.signals.schema_check`, or `no_window` or
    `impossible_value`."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Method of the measurement: `power_source`, `excursion_limit`, `power_swing_band_hz`, `simulated`, `outlier`,
    `saturated`, schema problems, and `quality_<group>` for a group of metrics (`thermal`, `step_breakdown`) of lower
    quality than the rest."""
    numbers: Numbers = NO_NUMBERS
    """The window, and what the run told of itself before."""


def summarize(data: RunData) -> Summary:
    """Computes every metric that the data allow, and a verdict. Pure: the same data give the same summary."""
    try:
        if data.examined is not None:
            return summary_of(data.examined)
        return Summary(quality=INVALID, quality_reasons=tuple(data.problems) or (NO_WINDOW,), tags=data.problems)
    except ImpossibleValueError as error:
        return impossible(error)


def impossible(error: ImpossibleValueError) -> Summary:
    """Returns the summary of tables with a value that cannot be: no figure of them is trusted."""
    return Summary(quality=INVALID, quality_reasons=(IMPOSSIBLE,), tags={IMPOSSIBLE: str(error)})


def summary_of(examined: Examined) -> Summary:
    """Computes metrics and verdict of what is examined."""
    data, metrics = examined.data, figures(examined)
    quality, reasons, groups = quality_of(examined, metrics)
    tags = {
        "simulated": str(data.simulated).lower(),
        **_power_tags(examined, metrics),
        **_found_tags(examined),
        **examined.doubts,
        **{f"quality_{group}": worse for group, worse in groups.items()},
    }
    return Summary(
        metrics=metrics,
        quality=quality,
        quality_reasons=reasons,
        tags=tags,
        numbers=_numbers(examined),
    )


def metrics_by_device(data: RunData) -> dict[DeviceKey, dict[str, float]]:
    """Metrics of each device as if it had been sampled alone; those of nodes and between devices are left out."""
    examined = data.examined
    found = {} if examined is None else {one: summary_of(examined.only(one)).metrics for one in data.devices}
    return {
        device: {name: value for name, value in metrics.items() if not name.startswith(_OF_SEVERAL)}
        for device, metrics in found.items()
    }


def node_power_series(aligned: Aligned, *, window_s: float = 0.1) -> dict[str, tuple[Floats, Floats]]:
    """Sums each node's devices in consecutive windows, for plots: middles of windows in seconds, and mean watts.

    `window_s` is a multiple of `wattune.analysis.signals.energy_grid.GRID_S`. Empty if a sensor does not cover the
    window.
    """
    sums: dict[str, EnergySum] = {}

    def add(trace: PowerTrace, series: Series) -> PowerTrace:
        node = sums.setdefault(trace.node, EnergySum(aligned.duration_s))
        for _ in node.add(pieces(series), trace.sensor_period_s, trace.smoothed_s):
            pass
        return trace

    usable = powers(aligned, add).usable
    return {node: total.energy.means_w(window_s) for node, total in sums.items()} if usable else {}


def _numbers(examined: Examined) -> Numbers:
    """Returns the numbers of the run with those of its window."""
    steps, start, settled_s = (
        examined.aligned.steps,
        examined.data.first_step,
        all_settled_from_s(examined.temperatures),
    )
    return replace(
        examined.data.numbers,
        window_s=round(examined.aligned.duration_s, 3),
        first_step=None if steps is None else int(steps.number.min()) - start,
        last_step=None if steps is None else int(steps.number.max()) - start,
        steady_from_step=examined.num_unsteady_steps or None,
        thermally_settled_from_s=None if settled_s is None else float(settled_s),
    )


def _found_tags(examined: Examined) -> dict[str, str]:
    """Returns findings that are not numbers, as tags."""
    tags = {}
    if examined.outliers and examined.outliers[0].deviation_frac > VARIES_FRAC:
        tags["outlier"] = str(examined.outliers[0])
    saturated = [one.claim for one in examined.saturation if one.saturated]
    if saturated:
        tags["saturated"] = ", ".join(saturated)
    return tags


def _power_tags(examined: Examined, metrics: Mapping[str, float]) -> dict[str, str]:
    aligned, traces, tags = examined.aligned, examined.powers, {}
    if traces.traces:
        sources = {"ring" if one.from_ring else "average" if one.averaged_s else "fast" for one in traces.traces}
        tags["power_source"] = "+".join(sorted(sources))
    if "excursion_count" in metrics or "over_limit_20ms_time_frac" in metrics:
        read = all(len(limit_readings_w(aligned, trace)) for trace in traces.traces)
        tags["excursion_limit"] = "enforced" if read else "manifest"
    if "power_swing_rms_w" in metrics:
        high_hz = min(SWING_BAND_HZ[1], 0.5 / metrics["sensor_period_s"])
        tags["power_swing_band_hz"] = f"{SWING_BAND_HZ[0]:g}-{high_hz:g}"
    return tags
