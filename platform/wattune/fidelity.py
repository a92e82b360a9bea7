"""Fidelity: how much of a trial a result measured. A burst measured a few steps, and never passes as a full result."""

from typing import Final

from wattune.trial import TrialResult

FIDELITY: Final = "fidelity"
"""Tag of a result that measured less or more than its study's settings ask of a trial."""

BURST: Final = "burst"
"""Value of that tag, and quality reason, of a few steps that decide whether a trial is worth a full measurement."""

STOPPED_EARLY: Final = "stopped_early"
"""Tag, with the proof, and quality reason of a measurement that ended once its steps proved that the trial loses."""


def is_burst(result: TrialResult) -> bool:
    """Returns true for a burst. A burst that failed tells as much of its trial as a full run that failed."""
    return result.tags.get(FIDELITY) == BURST
