"""Candidates as numbers: log2 of degrees and sizes, categories for choices, the balance of a layout.

Columns that are equal for all candidates are left out, so that a space of one model pays nothing for others.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import ModelSpec
from wattune.plans.axes import DEGREES
from wattune.storage.known_results import kept
from wattune.trial import TrialSpec, ids_of

Matrix = NDArray[np.float32]

_STEPS: Final = {
    "sharding": ("none", "zero1", "zero2", "zero3"),
    "recompute": ("none", "selective", "full"),
}
"""Choices with an order: each shares, or computes again, more than the one before. They count as numbers too."""

_FLAG: Final = "flags."
"""Begin of the columns of flags."""

_DOUBLINGS_ALIKE: Final = 1.5
"""Distance, in doublings of a number, over which its effect is expected to change."""


@lru_cache(maxsize=256)
def _of_model(model: ModelSpec) -> dict[str, float]:
    return {
        "layers": math.log2(model.num_layers),
        "hidden": math.log2(model.hidden_size),
        "active": math.log2(model.num_active_parameters),
        "parameters": math.log2(model.num_parameters),
    }


def numbers_of(spec: TrialSpec) -> dict[str, float]:
    """Computes the numbers of a specification, in doublings where they are sizes; those of flags as they are."""
    plan, cluster, workload = spec.plan, spec.cluster, spec.workload
    dp = max(plan.dp(cluster.world_size), 1)
    columns = {name: math.log2(getattr(plan, name)) for name in DEGREES}
    columns["dp"] = math.log2(dp)
    columns["dp_replicate"] = math.log2(plan.dp_replicate)
    columns["loss_chunks"] = math.log2(plan.loss_chunks)
    columns["micro_batch_size"] = math.log2(plan.micro_batch_size)
    columns["micro_batches"] = math.log2(max(workload.global_batch_size / (dp * plan.micro_batch_size), 1.0))
    device = cluster.sensed_device
    for name, own in (("power_limit_w", device.power_limit_w), ("clock_mhz", device.sm_clock_max_mhz)):
        columns[name] = math.log2((getattr(plan, name) or own or 1000) / (own or 1000))  # 0 is as found
    columns |= {name: float(steps.index(getattr(plan, name))) for name, steps in _STEPS.items()}
    layers = plan.layout or (1,)
    columns["imbalance"] = 4.0 * math.log2(max(layers) * len(layers) / sum(layers))
    columns["seq_len"] = math.log2(workload.seq_len)
    columns["batch"] = math.log2(workload.global_batch_size)
    columns["nodes"], columns["ranks"] = math.log2(cluster.num_nodes), math.log2(cluster.world_size)
    flags = {
        f"{_FLAG}{name}": float(value)
        for name, value in spec.flags
        if isinstance(value, int | float) and type(value) is not bool
    }
    return columns | _of_model(spec.model) | flags


@lru_cache(maxsize=256)
def _of_cluster(cluster: ClusterSpec) -> dict[str, str]:
    names = "device simulate_sensors_of transformer_engine nvlink_domain_size network host_speed inlet_c"
    return {name: str(getattr(cluster, name)) for name in names.split()}


def categories_of(spec: TrialSpec) -> dict[str, str]:
    """Names the choices of a specification."""
    plan, workload = spec.plan, spec.workload
    return {
        "sharding": plan.sharding,
        "recompute": plan.recompute,
        "offload": plan.offload,
        "overlap": plan.overlap,
        "dtype": plan.dtype,
        "rank_order": str(plan.rank_order),
        "power_profile": str(plan.power_profile),
        "layout": str(plan.layout),
        "engine": spec.engine,
        "model": spec.model.name,
        **_of_cluster(spec.cluster),
        "mode": workload.mode,
        "routing": str(workload.routing),
        **{f"{_FLAG}{name}": str(value) for name, value in spec.flags if type(value) not in (int, float)},
    }


def columns_of(specs: Sequence[TrialSpec]) -> tuple[dict[str, list[float]], dict[str, list[str]]]:
    """Computes the columns of specifications: numbers that all of them have, and choices.

    A flag that some have and some have not, or that is a name for some, is no number: it is a choice, empty where there
    is none.
    """
    numbers = [numbers_of(spec) for spec in specs]
    everywhere = set.intersection(*(set(row) for row in numbers)) if numbers else set()
    choices = [
        categories_of(spec) | {name: str(row[name]) for name in sorted(row.keys() - everywhere)}
        for row, spec in zip(numbers, specs, strict=True)
    ]
    of_all = [name for name in numbers[0] if name in everywhere] if numbers else []
    every = dict.fromkeys(name for row in choices for name in row)
    columns = {name: [row[name] for row in numbers] for name in of_all}
    return (
        {name: _in_doublings(own) if name.startswith(_FLAG) else own for name, own in columns.items()},
        {name: [row.get(name, "") for row in choices] for name in every},
    )


def _in_doublings(values: Sequence[float]) -> list[float]:
    """Returns a flag's numbers in doublings, since learning rates and sizes are chosen by factors.

    Where some are 0 or below, they are counted from 0 in units of the smallest other one: 0, 1, 2, 4 become 0, 1, 1.58,
    2.32. Different numbers stay different and in their order.
    """
    if min(values) > 0:
        return [math.log2(value) for value in values]
    unit = min((abs(value) for value in values if value), default=1.0)
    return [math.copysign(math.log2(1.0 + abs(value) / unit), value) for value in values]


@dataclass(frozen=True, slots=True)
class Features:
    """Candidates, then earlier observations, as rows of two matrices that kernels are computed from."""

    additive: Matrix
    """Feature maps whose inner product is the mean over columns of a kernel of that column alone."""
    place: Matrix
    """Coordinates whose squared distance counts differing choices and squared doublings."""
    num_columns: int
    """Columns that vary."""
    additive_column: NDArray[np.intp]
    """The column that each map belongs to."""
    place_column: NDArray[np.intp]
    """The column that each coordinate belongs to."""

    def similar(
        self, rows: NDArray[np.intp], others: NDArray[np.intp] | slice, weights: NDArray[np.float64] | None = None
    ) -> Matrix:
        """Computes the additive kernel of rows and others, each column counting by its weight."""
        by_map = np.ones(len(self.additive_column)) if weights is None else weights[self.additive_column]
        return (self.additive[rows] * by_map.astype(np.float32)) @ self.additive[others].T

    def distances2(
        self, rows: NDArray[np.intp], others: NDArray[np.intp] | slice, weights: NDArray[np.float64] | None = None
    ) -> Matrix:
        """Computes squared distances between rows and others, each column counting by its weight."""
        near, far = self.place[rows], self.place[others]
        by_place = np.ones(self.place.shape[1]) if weights is None else weights[self.place_column]
        scale = by_place.astype(np.float32)
        squares = (near**2 @ scale)[:, None] + (far**2 @ scale)[None, :] - 2.0 * ((near * scale) @ far.T)
        return np.asarray(np.maximum(squares, 0.0, out=squares))

    def by_column(self, rows: NDArray[np.intp]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Computes the parts of `similar` and `distances2`: [columns, pairs of rows], in a lower triangle's order."""
        one, other = np.tril_indices(len(rows))
        similar, distances2 = np.zeros((2, max(self.num_columns, 1), len(one)))
        maps, places = self.additive[rows].T.astype(np.float64), self.place[rows].T.astype(np.float64)
        for each, column in zip(maps, self.additive_column, strict=True):
            similar[column] += each[one] * each[other]
        for each, column in zip(places, self.place_column, strict=True):
            distances2[column] += (each[one] - each[other]) ** 2
        return similar, distances2


def kept_features(specs: Sequence[TrialSpec], num_earlier: int, path: Path) -> Features:
    """Returns what `make_features` makes, from the file that keeps it if it is of these specifications."""
    make, follows_from = lambda: asdict(make_features(specs, num_earlier)), (ids_of(specs), num_earlier)
    found = kept(path, len(specs), make, *follows_from)
    return Features(**{**found, "num_columns": int(found["num_columns"])})


def make_features(specs: Sequence[TrialSpec], num_earlier: int = 0) -> Features:
    """Computes the features of candidates and of earlier observations.

    The last `num_earlier` specifications are those of the earlier observations. A column tells them apart, as another
    day may have another level.
    """
    maps: list[NDArray[np.float64]] = []
    places: list[NDArray[np.float64]] = []
    numbers, columns = columns_of(specs)
    for column in numbers.values():
        if len({*column}) > 1:
            values, index = np.unique(column, return_inverse=True)
            gaps = np.abs(values[:, None] - values[None, :]) / _DOUBLINGS_ALIKE
            maps.append(np.linalg.cholesky(np.exp(-gaps) + 1e-9 * np.eye(len(gaps)))[index])
            places.append(values[index][:, None])
    columns["earlier"] = [str(index >= len(specs) - num_earlier) for index in range(len(specs))]
    for words in columns.values():
        if len({*words}) > 1:
            names, index = np.unique(words, return_inverse=True)
            one_hot = np.eye(len(names))[index]
            maps.append(one_hot)
            places.append(one_hot / math.sqrt(2.0))  # two different choices are at distance 1
    num_columns = len(maps)
    if not maps:
        maps, places = [np.ones((len(specs), 1))], [np.zeros((len(specs), 1))]
    return Features(
        additive=(np.hstack(maps) / math.sqrt(len(maps))).astype(np.float32),
        place=np.hstack(places).astype(np.float32),
        num_columns=num_columns,
        additive_column=np.repeat(np.arange(len(maps)), [one.shape[1] for one in maps]),
        place_column=np.repeat(np.arange(len(places)), [one.shape[1] for one in places]),
    )
