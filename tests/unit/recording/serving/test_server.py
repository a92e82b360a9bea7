"""The metrics server: addresses it takes, what it answers, and clients that are slow, many or wrong."""

import asyncio
import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from living_sampler import LivingSampler
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from wattune.errors import PlanError
from wattune.recording.serving import server as serving
from wattune.recording.serving.follower import Follower
from wattune.recording.serving.server import MetricsServer, listening_socket
from wattune.telemetry.sampler.process import SamplerProcess

LOOPBACK = "127.0.0.1:0"


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    with MetricsServer(LOOPBACK) as opened:
        yield opened


def port_of(server: MetricsServer) -> int:
    return int(server.url.removesuffix("/metrics").rpartition(":")[2])


def get(server: MetricsServer, path: str = "/metrics", method: str = "GET", **headers: str) -> tuple[int, str, str]:
    """Returns status, content type and body."""
    connection = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=10)
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read().decode()


def sent(server: MetricsServer, request: bytes) -> bytes:
    """Returns everything that comes back."""
    with socket.create_connection(("127.0.0.1", port_of(server)), timeout=10) as client:
        client.sendall(request)
        parts = []
        with contextlib.suppress(ConnectionResetError):
            while part := client.recv(4096):
                parts.append(part)
        return b"".join(parts)


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("9400", "write HOST:PORT"),
        (":9400", "write HOST:PORT"),
        ("127.0.0.1", "write HOST:PORT"),
        ("127.0.0.1:", "write HOST:PORT"),
        ("127.0.0.1:65536", "write HOST:PORT"),
        ("127.0.0.1:-1", "write HOST:PORT"),
        ("127.0.0.1:٣", "write HOST:PORT"),
        ("::1:9400", "write HOST:PORT"),
        ("no host:9400", "is not an address"),
        ("a.invalid:9400", "is not an address"),
        ("0.0.0.0:0", "--serve-remote"),
        ("[::]:0", "--serve-remote"),
    ],
)
def test_a_wrong_address_is_one_line_with_the_remedy(address: str, why: str) -> None:
    with pytest.raises(PlanError) as error:
        listening_socket(address)
    assert why in str(error.value) and address in str(error.value) and "\n" not in str(error.value)


def test_a_taken_port_says_so_and_an_address_elsewhere_too() -> None:
    with contextlib.closing(listening_socket(LOOPBACK)) as first:
        port = first.getsockname()[1]
        with pytest.raises(PlanError, match=f"127.0.0.1:{port} is taken"):
            listening_socket(f"127.0.0.1:{port}")
    with pytest.raises(PlanError, match="is no address of this machine"):
        listening_socket("192.0.2.1:9400", remote=True)  # TEST-NET-1, RFC 5737


def test_other_machines_reach_it_only_where_that_was_asked_for() -> None:
    with contextlib.closing(listening_socket("localhost:0")) as opened:
        assert opened.getsockname()[0] in ("127.0.0.1", "::1")
    with MetricsServer("0.0.0.0:0", remote=True) as remote:
        assert not remote.loopback
    with MetricsServer(LOOPBACK) as local:
        assert local.loopback


def test_it_speaks_openmetrics_and_plain_text_to_those_who_know_nothing_else(server: MetricsServer) -> None:
    for accept in ("", "*/*", "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.3"):
        status, kind, body = get(server, **({"Accept": accept} if accept else {}))
        assert (status, kind) == (200, "application/openmetrics-text; version=1.0.0; charset=utf-8")
        assert body.endswith("\n# EOF\n") and [*text_string_to_metric_families(body)]
    status, kind, body = get(server, Accept="text/plain;version=0.0.4")
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert "# EOF" not in body and "# TYPE wattune_build_info gauge" in body


def test_other_requests_have_the_usual_answers(server: MetricsServer) -> None:
    assert get(server, "/")[0] == 200 and "/metrics" in get(server, "/")[2]
    assert get(server, "/metrics?name[]=x")[0] == 200
    assert get(server, "/etc/passwd")[0] == 404
    assert get(server, method="POST")[0] == 405
    status, _, body = get(server, method="HEAD")
    assert (status, body) == (200, "")
    assert sent(server, b"nonsense\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert sent(server, b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 20_000).startswith(b"HTTP/1.1 431 ")
    assert get(server)[0] == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:9400", 200),
        ("127.0.0.1:9400", 200),
        ("[::1]:9400", 200),
        ("10.0.0.7", 200),
        (socket.gethostname(), 200),
        ("evil.example", 421),
        ("evil.example:9400", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost.evil.example", 421),
        ("localhost:9400@evil.example", 421),
        ("[::1].evil.example", 421),
        ("metadata.internal", 421),
    ],
)
def test_a_page_whose_name_leads_here_is_told_nothing(server: MetricsServer, host: str, status: int) -> None:
    """DNS rebinding: a browser then sends the page's own name as the host."""
    assert get(server, Host=host)[0] == status
    assert get(server, "/", Host=host)[0] == status


def test_a_slow_client_is_cut_off_and_holds_nobody_up(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "DEADLINE_S", 0.6)
    with socket.create_connection(("127.0.0.1", port_of(server)), timeout=10) as slow:
        begun_s = time.monotonic()
        others = []
        with contextlib.suppress(ConnectionError):
            for letter in b"GET /metrics HTTP/1.1\r\nAccept: text/plain;q=":
                slow.sendall(bytes([letter]))  # a byte now and then: no single read takes long
                time.sleep(0.05)
                if len(others) < 3:
                    others.append(get(server)[0])
            slow.recv(1)
        assert others == [200, 200, 200]
        assert time.monotonic() - begun_s < 2.0


def test_a_client_that_reads_nothing_is_cut_off(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "DEADLINE_S", 0.3)
    monkeypatch.setattr(serving, "encode", lambda *_: (b"x" * 50_000_000, "text/plain"))
    with socket.create_connection(("127.0.0.1", port_of(server)), timeout=10) as deaf:
        deaf.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        time.sleep(0.8)
        received = 0
        with contextlib.suppress(ConnectionResetError):
            while part := deaf.recv(1 << 20):
                received += len(part)
    assert received < 50_000_000
    monkeypatch.undo()
    assert get(server)[0] == 200


def test_clients_that_hang_take_neither_threads_nor_the_place_of_a_scraper(server: MetricsServer) -> None:
    num_threads = threading.active_count()
    with contextlib.ExitStack() as held:
        for _ in range(5 * serving.MOST_CONNECTIONS):
            held.enter_context(socket.create_connection(("127.0.0.1", port_of(server)), timeout=10))
        begun_s = time.monotonic()
        assert get(server)[0] == 200
        assert time.monotonic() - begun_s < serving.DEADLINE_S / 2
        assert threading.active_count() == num_threads


def test_it_ends_at_once_with_clients_connected() -> None:
    before = set(threading.enumerate())
    with contextlib.ExitStack() as held:
        with MetricsServer(LOOPBACK) as opened:
            port = port_of(opened)
            for _ in range(3):
                held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            begun_s = time.monotonic()
        assert time.monotonic() - begun_s < 1.5
    assert set(threading.enumerate()) <= before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=10)
    listening_socket(f"127.0.0.1:{port}").close()  # free for the next recording


def test_a_look_that_fails_is_counted_and_answered(
    server: MetricsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "ANSWER_S", 1.0)
    folder = tmp_path / "recordings" / "gone" / "telemetry" / "n0"
    monkeypatch.setattr(SamplerProcess, "alive", lambda _: True)
    server(folder, 0)  # nothing is there
    status, _, body = get(server)
    assert status == 200 and "wattune_device" not in body
    failures = [line for line in body.splitlines() if line.startswith("wattune_exporter_failed_looks_total")]
    assert float(failures[0].split()[1]) >= 1


def test_a_look_that_hangs_delays_an_answer_and_does_not_stop_it(
    server: MetricsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "ANSWER_S", 0.2)
    freed = threading.Event()
    monkeypatch.setattr(Follower, "look", lambda _: freed.wait(20))
    server(tmp_path / "recordings" / "stuck" / "telemetry" / "n0", 0)
    begun_s = time.monotonic()
    assert [get(server)[0] for _ in range(3)] == [200, 200, 200]
    assert time.monotonic() - begun_s < 3.0
    freed.set()


def test_a_look_that_ends_just_as_the_wait_for_it_does_is_answered(
    server: MetricsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "ANSWER_S", 0.2)
    freed = threading.Event()
    monkeypatch.setattr(Follower, "look", lambda _: freed.wait(20))

    class Waiting(list):
        """Those who wait, as they are once the look has ended between the end of a wait and the one's leaving."""

        def append(self, looked: asyncio.Future[None]) -> None:
            super().append(looked)
            looked.add_done_callback(lambda _: server._looker._release())

    server._looker._waiting = Waiting()
    server(tmp_path / "recordings" / "late" / "telemetry" / "n0", 0)
    assert get(server)[0] == 200
    freed.set()


def test_two_scrapes_within_a_second_are_one_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SamplerProcess, "alive", lambda _: True)
    looks = []
    look = Follower.look

    def counted(self: Follower) -> object:
        looks.append(1)
        return look(self)

    monkeypatch.setattr(Follower, "look", counted)
    living = LivingSampler(tmp_path)
    living.write_until(25.0)
    with MetricsServer(LOOPBACK) as server:
        server(living.folder, living.at_ns(20.0))
        bodies = [get(server)[2] for _ in range(5)]
    assert all('recording="live"' in body for body in bodies)
    assert 1 <= len(looks) <= 2


def test_one_server_follows_several_recordings_until_each_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after another, and two at once; a recorder says where it writes again and again."""
    ended: set[Path] = set()
    monkeypatch.setattr(SamplerProcess, "alive", lambda self: self.folder not in ended)
    monkeypatch.setattr(serving, "FRESH_S", 0.0)
    monkeypatch.setattr(serving, "IDLE_SHARE", 0)
    recordings = {}
    for name in ("first", "second", "third"):
        living = LivingSampler(tmp_path / name)
        living.write_until(25.0)
        recordings[name] = tmp_path / name / "recordings" / name / "telemetry" / living.folder.name
        living.folder.parents[1].rename(tmp_path / name / "recordings" / name)

    def shown(server: MetricsServer) -> set[str]:
        for name in begun:
            server(recordings[name], living.at_ns(20.0))
        found = {one.name: one for one in text_string_to_metric_families(get(server)[2])}
        info = found.get("wattune_recording")
        return set() if info is None else {sample.labels["recording"] for sample in info.samples}

    def comes(server: MetricsServer, *names: str) -> bool:
        """A look that had begun before may be answered first."""
        return any(shown(server) == set(names) for _ in range(100))

    with MetricsServer(LOOPBACK) as server:
        begun = ["first"]
        assert comes(server, "first")
        begun = ["first", "second"]
        assert comes(server, "first", "second") and shown(server) == {"first", "second"}
        ended.add(recordings["first"])
        assert comes(server, "second")
        ended.add(recordings["second"])
        shown(server)
        assert shown(server) == {"second"}, "the last one is shown as ended"
        begun = ["second", "third"]
        assert comes(server, "third") and shown(server) == {"third"}
