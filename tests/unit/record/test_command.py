"""Commands: when they ran, how they ended, and which signals reach them."""

import signal
import time
from pathlib import Path

import pytest

from wattune.record.command import Command, SignalRelay


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 4", 4), ("kill -9 $$", 137), ("kill -TERM $$", 143)]
)
def test_exit_codes_are_a_shells(script: str, code: int) -> None:
    command = Command(["sh", "-c", script])
    assert command.ended_within(None)
    assert command.exit_code == code


def test_its_end_is_seen_at_once() -> None:
    ran_s = []
    while len(ran_s) < 5 and min(ran_s, default=1.0) >= 1.0:  # a busy machine wakes one late, not each of five
        command = Command(["sleep", "0.3"])
        assert command.ended_within(20)
        ran_s.append((command.end_mono_ns - command.start_mono_ns) / 1e9)
    assert 0.3 <= min(ran_s) < 1.0
    command.send(signal.SIGTERM)  # too late, and no error
    assert command.exit_code == 0


def test_a_signal_that_came_while_it_started_is_passed_on() -> None:
    with SignalRelay() as relay:
        signal.raise_signal(signal.SIGTERM)
        assert relay.received is signal.SIGTERM
        command = Command(["sleep", "60"])
        assert not command.ended_within(0.01)
        relay.attach(command)
        assert command.ended_within(20) and command.exit_code == 143


def test_signals_are_passed_on_while_it_runs_and_handlers_put_back_after(tmp_path: Path) -> None:
    trapped = tmp_path / "trapped"
    before = signal.getsignal(signal.SIGTERM)
    with SignalRelay() as relay:
        command = Command(["sh", "-c", "trap 'exit 9' TERM; touch $0; while :; do sleep 0.05; done", str(trapped)])
        relay.attach(command)
        while not trapped.exists():  # pytest-timeout ends it
            time.sleep(0.02)
        signal.raise_signal(signal.SIGTERM)
        assert command.ended_within(20) and command.exit_code == 9
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with SignalRelay() as relay:
            signal.raise_signal(signal.SIGHUP)
            assert relay.received is None
            command = Command(["sh", "-c", "kill -HUP $$; exit 6"])
            assert command.ended_within(20) and command.exit_code == 6
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
