"""The process that compiles ahead: it takes plans one batch after another, tells what fails, and ends when told to."""

import io
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import tiny_models
from specs import trial_spec

from wattune.engines import ahead
from wattune.engines.ahead import Ahead, RankOfPlan, main
from wattune.workers.engine import Ranks

SPEC = trial_spec(tiny_models.LLAMA, on="1x1 cpu", seq_len=8, batch=2)
COMING: RankOfPlan = (SPEC, Ranks(rank=0, world_size=1, local_rank=0, device="cpu"))


def told(coming: list[RankOfPlan]) -> str:
    return json.dumps([(spec.to_json(), asdict(ranks)) for spec, ranks in coming])


@pytest.fixture
def one() -> Iterator[Ahead]:
    made = Ahead()
    yield made
    made.end()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In the place of Python, which would load torch: a program that keeps what it is given and stays."""
    program = tmp_path_factory.mktemp("program") / "python"
    program.write_text('#!/bin/sh\ncat > "$0.got"\nexec sleep 60\n')
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    return Path(f"{program}.got")


def test_what_comes_while_it_compiles_waits_for_the_next_process(waits: Path, one: Ahead) -> None:
    one.go_on()
    assert one.pids == (), "nothing to do"
    one.go_on([COMING])
    pid, *_ = one.pids
    one.go_on([COMING, COMING])
    assert one.pids[0] == pid
    end_s = time.monotonic() + 20
    while not (waits.exists() and waits.stat().st_size) and time.monotonic() < end_s:
        time.sleep(0.01)
    assert waits.read_text() == told([COMING])
    one.end()
    assert one.pids == () and not Path(f"/proc/{pid}").exists()
    one.go_on()
    assert one.pids[0] != pid, "with the two that waited"
    one.end()


def test_a_plan_that_fails_is_told_and_the_next_one_compiled(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from wattune.engines.torch import ahead as of_torch

    def compile_ahead(spec: object, ranks: Ranks) -> None:
        (tmp_path / str(os.getpid())).touch()
        if len(list(tmp_path.iterdir())) == 1:
            raise RuntimeError("no compiler here")

    class Input:
        buffer = io.BytesIO(told([COMING] * 5).encode())

    monkeypatch.setattr(of_torch, "compile_ahead", compile_ahead)
    monkeypatch.setattr(sys, "stdin", Input)
    monkeypatch.setattr(os, "nice", lambda _: 0)
    monkeypatch.setattr(ahead, "_AT_ONCE", 1)
    monkeypatch.setattr(ahead, "_end_with_parent", lambda _: None)
    monkeypatch.setattr(ahead, "_log", logging.Logger("alone"))
    main()
    assert len(list(tmp_path.iterdir())) == 5
    said = capfd.readouterr().err
    assert SPEC.trial_id in said and said.count("RuntimeError: no compiler here") == 1
