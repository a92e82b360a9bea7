"""Corrections to counted memory, fitted to measured peaks, with the error on configurations that were left out."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from wattune.arrays import Bools, Floats
from wattune.cost.batch import batches
from wattune.cost.coefficients import MemoryCoefficients
from wattune.cost.memory.predict import predict
from wattune.fitting.interval import half_width
from wattune.trial import TrialSpec

FRACTIONS: Final = np.linspace(0.94, 1.06, 13)
"""Tried values of `EngineMemory.activations_frac`: the counts are of tensors in the code, so that they are nearly 1."""

OFFSET_QUANTILES: Final = (0.5, 0.6, 0.7, 0.8, 0.9)
"""Tried offsets, as quantiles of what the counts miss."""

BELOW_WEIGHT: Final = 2.0
"""Weight of a prediction below the measured peak: a plan that runs out of memory costs more than one not tried."""

LEAST_CONFIGURATIONS: Final = 5
"""Configurations that an engine needs for a fit of its own."""

EXCESS_INTERVALS: Final = 2.0
"""Half widths of a prediction's interval that an excess is carried over from. With one, trials that lie at the end of
the interval mislead the others."""

LEAST_ERROR_FRAC: Final = 0.02
"""Least half width of the interval: no fit of a few configurations is trusted further."""


def fit_memory(
    measured: Sequence[tuple[TrialSpec, float]], default: MemoryCoefficients, versions: Mapping[str, str]
) -> tuple[MemoryCoefficients, Floats]:
    """Fits each engine's offset and share of activations to peaks of allocated bytes.

    Both are fitted to the mean relative error, errors below the measured peak weighted by `BELOW_WEIGHT`. A
    configuration is a specification: its repeats are left out together. `default` is taken for engines without enough
    configurations; `versions` are those of the measured ones.

    Returns the corrections, and predicted over measured less 1 of every measurement, its configuration left out of the
    fit; NaN where its engine has too few to leave one out.
    """
    peaks_bytes = np.array([peak for _, peak in measured], np.float64)
    counted = _counted(measured, default)
    _, configuration = np.unique([spec.trial_id for spec, _ in measured], return_inverse=True)
    engine_of = np.array([spec.engine for spec, _ in measured])
    held_out = np.full(len(measured), np.nan)
    engines = dict(default.engines)
    for name, before in default.engines.items():
        own = engine_of == name
        groups = np.unique(configuration[own])
        if len(groups) < LEAST_CONFIGURATIONS:
            continue
        for group in groups:
            out = own & (configuration == group)
            place, offset_bytes = _fit(counted, peaks_bytes, own & ~out)
            held_out[out] = (counted[place, out] + offset_bytes) / peaks_bytes[out] - 1
        place, offset_bytes = _fit(counted, peaks_bytes, own)
        engines[name] = replace(
            before,
            version=versions.get(name, ""),
            offset_bytes=offset_bytes,
            activations_frac=float(FRACTIONS[place]),
            error_frac=max(half_width(held_out[own], configuration[own].tolist()) or 0.0, LEAST_ERROR_FRAC),
        )
    return replace(default, engines=engines, origin="measured here"), held_out


def measured_excess(measured: Sequence[tuple[TrialSpec, float]], coefficients: MemoryCoefficients) -> dict[str, float]:
    """Finds the bytes that trials held beyond their prediction, by `MemoryCoefficients.excess_key`.

    Only where `EXCESS_INTERVALS` are exceeded.

    The median over configurations counts. A smaller excess is scatter between plans: carrying it over raised the median
    error of 45 trials on H200 from 0.4 % to 0.8 % (`benchmarks/results/prediction.md`). A larger one is what the counts
    do not know, such as another version's buffers.
    """
    own = replace(coefficients, excess_bytes={})
    excess: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    inside: dict[str, list[float]] = defaultdict(list)
    for positions, batch in batches([spec for spec, _ in measured]):
        found = predict(batch, own)
        key = own.excess_key(batch.engine, batch.model.name)
        for place, predicted, error_frac in zip(positions, found.peak_bytes, found.error_frac, strict=True):
            spec, peak_bytes = measured[place]
            excess[key][spec.trial_id].append(float(peak_bytes - predicted))
            inside[key].append(float(error_frac * predicted))
    median = {key: float(np.median([np.mean(each) for each in one.values()])) for key, one in excess.items()}
    return {key: one for key, one in median.items() if abs(one) > EXCESS_INTERVALS * float(np.median(inside[key]))}


def _counted(measured: Sequence[tuple[TrialSpec, float]], default: MemoryCoefficients) -> Floats:
    """Predicts every peak without an offset at each of `FRACTIONS`, [fractions, measurements]."""
    counted = np.empty((len(FRACTIONS), len(measured)))
    groups = batches([spec for spec, _ in measured])
    for place, frac in enumerate(FRACTIONS):
        engines = {
            name: replace(engine, offset_bytes=0.0, activations_frac=float(frac))
            for name, engine in default.engines.items()
        }
        tried = replace(default, engines=engines)
        for positions, batch in groups:
            counted[place, positions] = predict(batch, tried).peak_bytes
    return counted


def _fit(counted: Floats, peaks_bytes: Floats, chosen: Bools) -> tuple[int, float]:
    """Finds the place in `FRACTIONS` of the share of activations, and the offset in bytes, of the least mean error."""
    best: tuple[float, int, float] | None = None
    for place, frac in enumerate(FRACTIONS):
        missing = peaks_bytes[chosen] - counted[place, chosen]
        for offset_bytes in np.maximum(np.quantile(missing, OFFSET_QUANTILES), 0.0):
            below = (missing - offset_bytes) / peaks_bytes[chosen]
            error = float(np.mean(np.where(below > 0, BELOW_WEIGHT * below, -below)))
            error += 1e-4 * abs(float(frac) - 1)  # of equal fits the one nearest to the counts
            if best is None or error < best[0]:
                best = error, place, float(offset_bytes)
    assert best is not None
    return best[1], best[2]
