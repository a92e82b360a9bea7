"""The frame of figures at scale: growth, bars, time-outs, and going on where it was cut."""

import subprocess
import sys
from pathlib import Path

import at_scale
import at_scale_rows
import pytest
from at_scale_rows import Fit, Row


def test_an_exponent_is_that_of_the_power_and_says_where_it_was_fitted() -> None:
    sizes = [8, 64, 512, 4096]
    fit = Fit.of(sizes, [3 * size**1.6 for size in sizes])
    assert fit.exponent == pytest.approx(1.6) and fit.spread == pytest.approx(0, abs=1e-9)
    row = fit.row("overhead", bar=1.15)
    assert "8 to 4,096" in row.figure and not row.is_met
    assert Fit.of(sizes, [5, 5, 5, 5]).row("overhead", bar=1.15).is_met
    scattered = Fit.of(sizes, [1, 9, 60, 700])
    assert 0 < scattered.spread < 0.2


def test_a_bar_holds_on_its_own_side_and_a_figure_that_is_no_number_misses_it() -> None:
    assert Row("a", "s", bar=1, value=1).is_met and not Row("a", "s", bar=1, value=1.01).is_met
    assert Row("a", "", bar=512, value=512, at_least=True).is_met
    assert not Row("a", "", bar=512, value=511, at_least=True).is_met
    assert not Row("a", "s", bar=1).is_met and Row("a", "s", value=1e9).is_met


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A folder for rows, and functions that give them: one hangs, one ends."""
    (tmp_path / "at_scale_rows").mkdir()
    source = Path(at_scale_rows.__file__).read_text()
    (tmp_path / "at_scale_rows" / "__init__.py").write_text(source)
    (tmp_path / "at_scale_rows" / "slow.py").write_text(
        "import time\nfrom at_scale_rows import Row, measures\n\n"
        "@measures(timeout_s=2)\ndef hangs():\n    yield Row('first', 's', bar=1, value=2.0)\n    time.sleep(60)\n\n"
        "@measures(timeout_s=20)\ndef ends():\n    yield Row('second', 's', bar=3, value=2.0, spread=0.1)\n"
    )
    frame = tmp_path / "at_scale.py"
    frame.write_text(Path(at_scale.__file__).read_text())
    (tmp_path / "harness.py").write_text((Path(at_scale.__file__).parent / "harness.py").read_text())
    return tmp_path


def run(out: Path, *words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, out / "at_scale.py", "--out", out / "rows", *words], capture_output=True, text=True
    )
    return done.returncode, done.stdout


def test_rows_before_a_time_out_are_kept_and_the_next_call_measures_only_what_is_missing(out: Path) -> None:
    code, said = run(out)
    assert code == 1 and "slow.hangs took longer than 2 s" in said and "first: 2 s" in said
    assert "| slow.ends | second | s | 2 | 0.1 | at most | 3 | yes |" in said
    table = (out / "rows" / "at_scale.csv").read_text().splitlines()
    assert table[1:] == ["slow.hangs,first,s,2,,at most,1,no", "slow.ends,second,s,2,0.1,at most,3,yes"]
    before = (out / "rows" / "slow.ends.jsonl").stat().st_mtime_ns
    assert run(out, "--only", "slow.ends")[0] == 0
    assert (out / "rows" / "slow.ends.jsonl").stat().st_mtime_ns == before


def test_an_unknown_name_is_refused_with_those_that_are_known(out: Path) -> None:
    code, _ = run(out, "--only", "slow.none")
    assert code == 2
