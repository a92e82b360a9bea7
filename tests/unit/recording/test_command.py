"""Commands: when they ran, how they ended, and which signals reach them."""

import signal
import time
from pathlib import Path

import pytest

from wattune.recording.command import Command, SignalRelay


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


def test_each_line_of_a_progress_bar_is_heard_with_its_own_time(tmp_path: Path) -> None:
    heard: list[tuple[str, int]] = []
    script = r"for at in 1 2 3; do printf '\r%s/3 [00:01<' $at; sleep 0.2; done; echo; echo end"
    with (tmp_path / "out").open("wb") as out:
        command = Command(["sh", "-c", script], stdout=out.fileno(), listener=lambda *line: heard.append(line))
        assert command.ended_within(20)
    lines = [(text.strip("\r"), at_ns) for text, at_ns in heard if text.strip("\r")]
    assert [text for text, _ in lines] == ["1/3 [00:01<", "2/3 [00:01<", "3/3 [00:01<", "end"]
    assert lines[2][1] - lines[0][1] > 0.1e9  # a busy machine reads one late, not all three
    assert (tmp_path / "out").read_bytes().endswith(b"\r3/3 [00:01<\nend\n")


def test_a_listener_that_fails_holds_up_no_command(tmp_path: Path) -> None:
    """Output that nobody reads any more would stop it once the pipe is full."""
    heard: list[str] = []

    def fails(line: str, _mono_ns: int) -> None:
        heard.append(line)
        raise OverflowError(line)

    with (tmp_path / "out").open("wb") as out:
        command = Command(["sh", "-c", "seq 100000"], stdout=out.fileno(), listener=fails)
        assert command.ended_within(60) and command.exit_code == 0
    assert (tmp_path / "out").read_text().splitlines()[-1] == "100000"
    assert heard == ["1"] and isinstance(command.unheard, OverflowError)
