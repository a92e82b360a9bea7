"""The clocks of public training scripts: read from what the programs leave, and laid over the same steps."""

from argparse import Namespace
from pathlib import Path

import public_scripts as script
import pyarrow as pa
import pyarrow.parquet as pq
import pytest


def test_a_trainer_says_the_time_of_all_its_steps() -> None:
    assert script.trainer_clock("\r60/60 {'train_runtime': '34.88', 'train_samples_per_second': 1}", 60) == [
        (range(60), 34.88)
    ]
    assert script.trainer_clock("it died", 60) == []


def test_lightnings_logger_times_pieces_of_one_epoch(tmp_path: Path) -> None:
    from tensorboardX import FileWriter
    from tensorboardX.summary import scalar

    writer = FileWriter(str(tmp_path))
    for step, wall_s in ((49, 100.0), (99, 110.0), (149, 125.0), (199, 150.0)):
        writer.add_summary(scalar("train_loss", 1.0), step, wall_s)
        writer.add_summary(scalar("val_loss", 1.0), step, wall_s + 1000)
    writer.close()
    assert script.logger_clock(tmp_path, 150) == [(range(50, 100), 10.0), (range(100, 150), 15.0)]


def test_both_clocks_are_of_the_same_steps(tmp_path: Path) -> None:
    """Warm-up steps are negative in spans, and count; a piece that wattune did not see whole does not."""
    starts = [index * 10**9 for index in range(20)]
    spans = {"rank": [0] * 20, "step": list(range(-5, 15)), "start_mono_ns": starts}
    pq.write_table(pa.table({**spans, "end_mono_ns": [one + 5 * 10**8 for one in starts]}), tmp_path / "spans.parquet")
    assert script.told_s(tmp_path, [(range(10), 5.1), (range(10, 20), 5.2), (range(10, 21), 9.9)]) == (
        20,
        pytest.approx(10.0),
        pytest.approx(10.3),
    )


@pytest.mark.parametrize(("device", "ranks"), [("cpu", 1), ("h100_sxm", 2)])
def test_spaces_plan_and_say_nothing_of_steps(device: str, ranks: int, tmp_path: Path, monkeypatch) -> None:
    from wattune import plan

    monkeypatch.setattr(script, "make_trainer_inputs", lambda *_: None)
    program = tmp_path / "transformer.py"
    program.write_text("")
    given = Namespace(lightning=program, work=tmp_path, device=device, ranks=ranks)
    for space in script.spaces(given).values():
        planned = plan(space)
        assert len(planned.kept) >= 2 and "steps" not in space
    assert (tmp_path / "lightning" / "data" / "wikitext-2.txt").stat().st_size > 10_000
