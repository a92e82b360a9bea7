"""Metrics, a line each in `metrics.csv`: unit in the name, group, direction that is better, tables, meaning."""

import csv
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final, Protocol, TypeAlias

from wattune.units import unit_of


class MetricInput(Protocol):
    """Facts of a run that formulas use, beside its other metrics (`wattune.analysis.run_data.Examined`)."""

    @property
    def num_steps(self) -> int | None:
        """Measured steps; None without spans."""

    @property
    def duration_s(self) -> float:
        """Length of the window."""

    @property
    def first_step_time_s(self) -> float | None:
        """Time of the very first step on its slowest rank; None where no step of warm-up is known."""

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens of a step over all ranks."""

    @property
    def energy_j(self) -> float | None:
        """Energy of all devices over the window; None unless every power sensor covers it."""

    @property
    def device_outlier_frac(self) -> float | None:
        """Distance of the oddest device to the median of its peers."""

    def host_bound_frac(self, step_time_s: float) -> float | None:
        """Share of a step in which devices wait for their host; None without a profiled pass."""


Formula: TypeAlias = Callable[[MetricInput, Mapping[str, float]], float | None]
"""Computes a metric of a run, with the run's other metrics by name; one that was not measured is a `KeyError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One figure that a trial's result may hold."""

    name: str
    group: str
    better: str
    """`lower`, `higher`, or `none` where neither is better by itself."""
    meaning: str
    """A line that stands alone; docs/metrics says more: windows, formulas, pitfalls."""
    tables: tuple[str, ...]
    """Tables that it is computed from: tiers of telemetry, `spans`, `kernels`; `result` is what workers report, or a
    recorder."""
    formula: Formula | None
    """None where the function of its group finds it (`wattune.analysis.figures.GROUPS`), or where it is told."""

    @property
    def is_told(self) -> bool:
        """True where only the run's own processes, or a recorder, know it."""
        return self.tables == ("result",)

    @property
    def unit(self) -> str | None:
        """The unit that its name declares."""
        return unit_of(self.name)


def over(value: float | None, divisor: float | None) -> float | None:
    """Returns a figure over another; None where either is not known, or the divisor is 0."""
    return None if value is None or not divisor else value / divisor


_FORMULAS: Final[Mapping[str, Formula]] = {
    "first_step_time_s": lambda run, _: run.first_step_time_s,
    "compile_time_s": lambda _, m: max(m["first_step_time_s"] - m["step_time_s"], 0.0),
    "device_bound_step_time_s": lambda _, m: (1 - m["host_bound_frac"]) * m["step_time_s"],
    "total_energy_j": lambda run, _: run.energy_j if run.num_steps is None else None,
    "energy_per_step_j": lambda run, _: over(run.energy_j, run.num_steps),
    "energy_per_token_j": lambda run, m: over(m["energy_per_step_j"], run.tokens_per_step) or None,
    "tokens_per_j": lambda run, m: over(run.tokens_per_step, m["energy_per_step_j"]),
    "energy_delay_product_js": lambda _, m: m["energy_per_step_j"] * m["step_time_s"],
    "thermal_margin_settled_c": lambda _, m: (
        m["thermal_margin_min_c"] - (m["device_temp_settled_c"] - m["device_temp_max_c"])
    ),
    "host_bound_frac": lambda run, m: run.host_bound_frac(m["step_time_s"]),
    "device_outlier_frac": lambda run, _: run.device_outlier_frac,
}
"""Formulas by metric; the others are found by the function of their group, or told."""


def _read() -> dict[str, Metric]:
    text = resources.files(__package__).joinpath("metrics.csv").read_text(encoding="utf-8")
    rows: Iterable[dict[str, Any]] = csv.DictReader(text.splitlines())
    return {
        row["name"]: Metric(**row | {"tables": tuple(row["tables"].split())}, formula=_FORMULAS.get(row["name"]))
        for row in rows
    }


METRICS: Final[dict[str, Metric]] = _read()
"""Every metric by name, in the order of tables. Ranking, MLflow, exports and `wattune metrics` read it."""
assert METRICS.keys() >= _FORMULAS.keys(), "formulas are of metrics"

PER_STEP_METRICS: Final = (
    "step_time_s",
    "step_time_p95_s",
    "device_bound_step_time_s",
    "energy_per_step_j",
    "energy_delay_product_js",
)
"""Metrics of one step: of steps with different numbers of tokens they do not compare."""
