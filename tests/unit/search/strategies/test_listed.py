"""Listed strategies: told candidates are left out, and a drawn order ignores how candidates are listed."""

from dataclasses import replace

from specs import trial_spec

from wattune.plans.axes import Plan
from wattune.run import Run, RunStatus
from wattune.search.strategy import Grid, Random

BASE = trial_spec(on="1x1 cpu", seq_len=128, batch=64)
SPECS = [replace(BASE, plan=Plan(micro_batch_size=size)) for size in range(1, 9)]


def test_grid_skips_what_was_told():
    grid = Grid(SPECS)
    grid.tell(SPECS[0], Run(trial_id=SPECS[0].trial_id, repeat=0, status=RunStatus.CRASHED))
    assert grid.ask(2) == SPECS[1:3]
    assert grid.stopped_because is None and not grid.learns


def test_a_drawn_order_is_that_of_the_seed_alone():
    assert Random(SPECS, seed=4).ask(8) == Random(SPECS[::-1], seed=4).ask(8)
    assert Random(SPECS, seed=4).ask(8) != Random(SPECS, seed=5).ask(8)
