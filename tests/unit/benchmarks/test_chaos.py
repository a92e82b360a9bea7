"""The chaos benchmark notices what it looks for, and its table can be collected over several calls."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def chaos(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import chaos as found

    yield found
    for name in ("chaos", "chaos_study"):
        del sys.modules[name]


def write(study: Path, trial: str, status: str, text: str = "") -> None:
    folder = study / "trials" / trial
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"status": status, "reason": text}))


def watched_at(chaos: ModuleType, study: Path) -> Any:
    return chaos.Watched(SimpleNamespace(study=study), "1-0")


def test_a_result_that_is_lost_or_changed_is_a_breach_and_a_repeated_failure_is_not(chaos, tmp_path: Path) -> None:
    watched = watched_at(chaos, tmp_path)
    for trial, status in (("a-0", "completed"), ("b-0", "completed"), ("c-0", "infra_failed"), ("d-0", "completed")):
        write(tmp_path, trial, status)
    watched.look()
    assert watched.breaches == [] and watched.acknowledged.keys() == {"a-0", "b-0", "d-0"}
    write(tmp_path, "b-0", "completed", "another")
    write(tmp_path, "c-0", "completed")  # tried again: it was not acknowledged before
    (tmp_path / "trials" / "d-0" / "run.json").unlink()
    watched.look()
    assert watched.breaches == ["changed: b-0", "lost: d-0"]


def test_logs_that_an_error_names_are_kept_on_purpose_and_nothing_else_is(chaos, tmp_path: Path) -> None:
    from chaos_study import Place

    temporary = tmp_path / "t"
    place = SimpleNamespace(temporary=temporary, folder=tmp_path, mounts=False, servers={})
    folders = [temporary / f"wattune-{os.getuid()}" / f"ray-{name}" for name in "ab"]
    for folder in folders:
        (folder / "tmp").mkdir(parents=True)
        (folder / "failed").touch()
    assert len(Place.left(place)) == 6  # no message named them
    (tmp_path / "log.txt").write_text(f"error: Ray does not start; see the logs in {folders[0]}, and try again\n")
    assert Place.left(place) == [
        str(path.relative_to(temporary)) for path in (folders[1], *sorted(folders[1].iterdir()))
    ]
    (tmp_path / "log.txt").write_text("".join(f"see the logs in {folder}\n" for folder in folders))
    assert len(Place.left(place)) == 6  # the latest alone may stay


def test_half_a_result_is_a_breach(chaos, tmp_path: Path) -> None:
    watched = watched_at(chaos, tmp_path)
    write(tmp_path, "a-0", "completed")
    path = tmp_path / "trials" / "a-0" / "run.json"
    path.write_text(path.read_text()[:-4])
    watched.look()
    assert [one.partition(":")[0] for one in watched.breaches] == ["unreadable"]


def test_hazards_take_turns_and_a_seed_draws_the_same_ones_however_many_are_asked_for(chaos) -> None:
    kinds = list(chaos.HAZARDS)
    drawn = chaos.drawn_hazards(3, kinds, 2 * len(kinds))
    assert sorted(drawn[: len(kinds)]) == sorted(drawn[len(kinds) :]) == sorted(kinds)
    assert chaos.drawn_hazards(3, kinds, 7) == drawn[:7] != chaos.drawn_hazards(4, kinds, 7)


def test_rows_are_appended_and_a_breach_gives_exit_code_1(chaos, tmp_path: Path, capsys) -> None:
    table = tmp_path / "chaos.csv"
    row = dict.fromkeys(chaos.COLUMNS, "") | {"study": "1-0", "hazard": "gcs", "recover_s": 20.5, "breaches": "none"}
    chaos.append(table, [row])
    assert chaos.show(chaos.read(table)) == 0
    chaos.append(table, [row | {"study": "1-1", "breaches": "lost: a-0; twice: b-0"}])
    assert len(chaos.read(table)) == 2 and chaos.show(chaos.read(table)) == 2
    assert "lost 1, changed 0, twice 1" in capsys.readouterr().out
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "chaos.py"), "--table", "--csv", str(table)],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 1 and "| gcs | 2 |" in done.stdout, done.stderr
    table.write_text("other,columns\n1,2\n")
    with pytest.raises(SystemExit, match="has columns"):
        chaos.read(table)


def test_a_disk_that_was_filled_takes_no_byte_more(chaos, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000_001,) * 2)\n"
    limit += f"sys.path.insert(0, {str(BENCHMARKS)!r})\nfrom pathlib import Path\nfrom chaos_study import fill\n"
    limit += f"fill(Path({str(tmp_path / 'filler')!r}))"
    subprocess.run([sys.executable, "-c", limit], check=True, timeout=60)
    assert (tmp_path / "filler").stat().st_size == 20_000_001
