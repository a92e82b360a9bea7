"""Signals that reach a recorded command."""

import signal
import time
from pathlib import Path

from wattune.recording.signals import SignalRelay
from wattune.workers.command.process import TerminalProcess


def test_a_signal_that_came_while_it_started_is_passed_on() -> None:
    with SignalRelay() as relay:
        signal.raise_signal(signal.SIGTERM)
        assert relay.received is signal.SIGTERM
        command = TerminalProcess(["sleep", "60"])
        assert not command.ended_within(0.01)
        relay.attach(command)
        assert command.ended_within(20) and command.exit_code == 143


def test_signals_are_passed_on_while_it_runs_and_handlers_put_back_after(tmp_path: Path) -> None:
    trapped = tmp_path / "trapped"
    before = signal.getsignal(signal.SIGTERM)
    with SignalRelay() as relay:
        command = TerminalProcess(
            ["sh", "-c", "trap 'exit 9' TERM; touch $0; while :; do sleep 0.05; done", str(trapped)]
        )
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
            command = TerminalProcess(["sh", "-c", "kill -HUP $$; exit 6"])
            assert command.ended_within(20) and command.exit_code == 6
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
