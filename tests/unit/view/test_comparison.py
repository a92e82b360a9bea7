"""An estimate beside a result on a terminal."""

import io

from rich.console import Console

from wattune.fitting.estimate_and_result import Beside, Figure
from wattune.view.comparison import beside_view
from wattune.view.console import show

STEP = Figure(name="step_time_s", estimated=0.4, low=0.36, high=0.44, measured=0.5)
INSIDE = Figure(name="tokens_per_s", estimated=100.0, low=90.0, high=110.0, measured=101.0)
COMPUTE = Figure(name="compute", estimated=0.3, measured=None)
WAIT = Figure(name="straggler", estimated=None, measured=0.1)


def shown(was_fitted: bool) -> str:
    text = io.StringIO()
    found = Beside(
        trial="s:1",
        plan="dp4",
        source="h200_sxm: measured here",
        was_fitted=was_fitted,
        metrics=(STEP, INSIDE),
        parts=(COMPUTE, WAIT),
    )
    show(Console(file=text, width=140), *beside_view(found))
    return text.getvalue()


def test_estimates_and_measurements_have_columns_of_their_own() -> None:
    text = shown(was_fitted=False)
    (step,) = [line for line in text.splitlines() if "step_time_s" in line]
    assert step.index("400.0 ms") < step.index("500.0 ms")
    assert step.rstrip().endswith("-20.0% *"), "outside of its interval"
    (speed,) = [line for line in text.splitlines() if "tokens_per_s" in line]
    assert not speed.rstrip().endswith("*")
    (wait,) = [line for line in text.splitlines() if "straggler" in line]
    assert wait.split()[1] == "-", "it was not estimated"


def test_a_fit_that_saw_the_trial_says_so() -> None:
    assert "used this study" in shown(was_fitted=True)
    assert "used this study" not in shown(was_fitted=False)
