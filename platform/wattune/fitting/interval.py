"""Half widths of 95 % intervals, from the errors of predictions on configurations that were left out."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from wattune.arrays import Floats
from wattune.intervals import NORMAL_95

COVERAGE: Final = 0.95
"""Share of measurements that an interval is to hold."""

FEW_KINDS: Final = 3  # fewer models and engines do not tell how the next one differs


def half_width(error_frac: Floats | Sequence[float], configurations: Sequence[object]) -> float | None:
    """Returns the least half width that holds a measurement of the next configuration with 95 % probability.

    An interval lies around the prediction, so a measurement is as far away as measured over predicted, less 1, says.
    Repeats of a configuration err alike: each configuration counts once, by its worst repeat. Of n such errors it is
    the one of rank 0.95 (n + 1), rounded up (split conformal prediction: Lei et al. 2018, arXiv 1604.04173, section
    2.2); the 95th percentile of few errors is too small for the next one. Fewer than 19 configurations cannot promise
    95 %: the largest error of n holds the next one with probability n / (n + 1). Errors are of measurements that no fit
    has seen, NaN is left out. None where nothing is known.
    """
    worst: dict[object, float] = {}
    for error, configuration in zip(error_frac, configurations, strict=True):
        if np.isfinite(error):
            away = abs(1.0 / (1.0 + float(error)) - 1.0)
            worst[configuration] = max(away, worst.get(configuration, 0.0))
    if not worst:
        return None
    rank = min(int(np.ceil(COVERAGE * (len(worst) + 1))), len(worst))
    return sorted(worst.values())[rank - 1]


def half_width_elsewhere(error_frac: Floats, configurations: Sequence[object], kinds: Sequence[object]) -> float | None:
    """Returns the half width that holds a measurement of a kind that was not seen, such as another model.

    Configurations of one kind err alike, as repeats of one do. So errors, of fits without their kind, are taken as the
    kind's own (its median), which scatters about 0 as the next one's will, and the rest, as `half_width` says; both add
    in squares. With fewer than `FEW_KINDS` the errors count as they are.
    """
    errors, of = np.asarray(error_frac, float), np.array([*map(str, kinds)])
    known = sorted({kind for kind, error in zip(of, errors, strict=True) if np.isfinite(error)})
    if len(known) < FEW_KINDS:
        return half_width(errors, configurations)
    own = {kind: float(np.nanmedian(np.log1p(errors[of == kind]))) for kind in known}
    rest = half_width(np.expm1(np.log1p(errors) - [own.get(kind, np.nan) for kind in of]), configurations)
    return float(np.hypot(NORMAL_95 * np.sqrt(np.mean(np.square([*own.values()]))), rest or 0.0))
