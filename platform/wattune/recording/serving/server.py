"""An HTTP server of running recordings' metrics, in the formats of OpenMetrics and Prometheus.

Three threads meet here. A recorder's says where its sampler writes. One reads the sampler's files, when somebody
asks and otherwise every `CATCH_UP_S`. One answers all clients, of which none can hold another up: a connection has
`DEADLINE_S` altogether, and where too many are open the oldest is closed. Whatever fails here, the recording goes on.
"""

import asyncio
import contextlib
import errno
import ipaddress
import re
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Final, Self

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, Metric, generate_latest
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE_OPENMETRICS
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from wattune.errors import PlanError
from wattune.recording.serving.families import families
from wattune.recording.serving.follower import Follower, Snapshot
from wattune.units import ns_to_s

PATH: Final = "/metrics"

FRESH_S: Final = 1.0
"""Age up to which what was read is served again: the sampler writes every 0.8 s."""
CATCH_UP_S: Final = 20.0
"""Longest time between two looks at the files, so that peaks are complete without a scrape too."""
IDLE_SHARE: Final = 9
"""Idle time after a look, in multiples of its duration: looking never uses more than a tenth of a CPU."""
ANSWER_S: Final = 2.0
"""Longest wait for a new look. After that the last one is served. Its age is a metric."""
DEADLINE_S: Final = 5.0
"""Longest life of a connection, from its opening to the last byte. Prometheus gives up after 10 s."""
MOST_CONNECTIONS: Final = 16
_BACKLOG: Final = 128
"""Connections that the kernel keeps until they are accepted; accepting is what closes the oldest."""
MOST_REQUEST_BYTES: Final = 8192
CLOSING_S: Final = 2.0

_ERRORS: Final = {
    errno.EADDRINUSE: "is taken; choose another port, or see what listens there with `ss -ltnp`",
    errno.EACCES: "needs more rights; choose a port from 1024 on",
    errno.EADDRNOTAVAIL: "is no address of this machine; choose one that `ip address` lists, such as 127.0.0.1",
}
_PAGE: Final = (
    b'<!doctype html><title>wattune</title><p>A recording is served at <a href="/metrics">/metrics</a>.</p>\n'
)


def listening_socket(text: str, *, remote: bool = False) -> socket.socket:
    """Opens a listening socket.

    It is `HOST:PORT`, or `[HOST]:PORT` for IPv6, and port 0 is any free one. `remote` allows addresses that other
    machines can reach. Raises `PlanError` where the address cannot be used: as written, because other machines could
    reach it, or because it is taken.
    """
    host, _, port_text = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    port = int(port_text) if port_text.isascii() and port_text.isdecimal() and len(port_text) <= 5 else -1
    if not host or not 0 <= port <= 65535 or (":" in host and not bracketed):
        raise PlanError(
            f'"{text}" is not an address to serve at; write HOST:PORT, such as 127.0.0.1:9400 or [::1]:9400'
        )
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise PlanError(f'"{text}" is not an address to serve at: {error}; write for example 127.0.0.1:9400') from error
    family, _, _, _, address = found[0]
    if not remote and not ipaddress.ip_address(str(address[0])).is_loopback:
        raise PlanError(
            f"{text} can be reached from other machines, and asks nobody for a password; serve at 127.0.0.1, or add "
            "--serve-remote"
        )
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an earlier recording's port in TIME_WAIT
        opened.bind(address)
        opened.listen(_BACKLOG)
    except OSError as error:
        opened.close()
        raise PlanError(f"{text} {_ERRORS.get(error.errno or 0, f'cannot be served at: {error}')}") from error
    return opened


def encode(found: list[Metric], accept: str) -> tuple[bytes, str]:
    """Encodes metrics in the format of a client's `Accept` header; returns the text and its content type.

    It is OpenMetrics unless the client wants plain text only, as old scrapers and browsers do.
    """
    collected: Any = SimpleNamespace(collect=lambda: found)  # as the library's encoders take them
    plain = "openmetrics" not in accept and ("text/plain" in accept or "text/html" in accept)
    if plain:
        return generate_latest(collected), CONTENT_TYPE_PLAIN_0_0_4
    text: bytes = generate_openmetrics(collected)  # type: ignore[no-untyped-call]
    return text, CONTENT_TYPE_OPENMETRICS


class _Looker:
    """The thread that reads the files of the recordings' samplers."""

    def __init__(self) -> None:
        self.num_failures = 0
        self._followers: dict[Path, Follower] = {}
        """By the sampler's folder, in the order in which they came; replaced and never changed."""
        self._seen: dict[Path, Snapshot] = {}
        """The last look at each that was seen; likewise."""
        self._over: set[Path] = set()
        """Those that have ended and were forgotten: their recorders may still call."""
        self._lock = threading.Lock()
        self._wanted, self._ended = threading.Event(), threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: list[asyncio.Future[None]] = []
        self._thread = threading.Thread(target=self._run, name="metrics-files", daemon=True)

    @property
    def snapshots(self) -> list[Snapshot]:
        """The last look at each recording, the newest recording first."""
        followers, seen = self._followers, self._seen
        return [seen[folder] for folder in reversed(followers) if folder in seen]

    def follow(self, sampler_folder: Path, start_mono_ns: int) -> None:
        """Names a recording; once or again."""
        if sampler_folder not in self._followers and sampler_folder not in self._over:
            with self._lock:
                self._followers = {**self._followers, sampler_folder: Follower(sampler_folder, start_mono_ns)}
            self._wanted.set()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._wanted.set()
        self._thread.join(CLOSING_S)

    async def fresh(self) -> list[Snapshot]:
        """Returns snapshots that are at most `FRESH_S` old, or after `ANSWER_S` the last ones there are."""
        last, now_ns = self.snapshots, time.monotonic_ns()
        if len(last) == len(self._followers) and all(ns_to_s(now_ns - one.taken_mono_ns) <= FRESH_S for one in last):
            return last
        self._loop = asyncio.get_running_loop()
        looked = self._loop.create_future()
        self._waiting.append(looked)
        self._wanted.set()
        try:
            await asyncio.wait_for(looked, ANSWER_S)
        except TimeoutError:
            with contextlib.suppress(ValueError):  # the look ended in the same moment, and nobody waits any more
                self._waiting.remove(looked)
        return self.snapshots

    def _run(self) -> None:
        rest_s = 0.0
        while not self._ended.wait(rest_s):
            self._wanted.wait(CATCH_UP_S)
            self._wanted.clear()
            if not self._followers or self._ended.is_set():
                continue
            begun_s = time.monotonic()
            for folder, follower in self._followers.items():
                try:
                    self._seen = {**self._seen, folder: follower.look()}
                except Exception:  # counted and served as a metric: the recording is what matters
                    self.num_failures += 1
            self._forget_ended()
            rest_s = IDLE_SHARE * (time.monotonic() - begun_s)
            if self._loop is not None:
                with contextlib.suppress(RuntimeError):  # the server has ended
                    self._loop.call_soon_threadsafe(self._release)

    def _forget_ended(self) -> None:
        """Forgets recordings that have ended, except the newest, which says so as long as no other one begins."""
        with self._lock:
            *earlier, _ = self._followers
            self._over |= {each for each in earlier if each in self._seen and not self._seen[each].sampler_alive}
            self._followers = {each: one for each, one in self._followers.items() if each not in self._over}
        self._seen = {each: one for each, one in self._seen.items() if each in self._followers}

    def _release(self) -> None:
        waiting, self._waiting = self._waiting, []
        for looked in waiting:
            if not looked.done():
                looked.set_result(None)


class MetricsServer:
    """Serves metrics of recordings while entered; call it as `wattune.recording.recorder.Watcher` of each."""

    def __init__(self, address: str, *, remote: bool = False) -> None:
        """Opens the port as `listening_socket` does; nothing is answered before it is entered."""
        self._socket = listening_socket(address, remote=remote)
        host, port = self._socket.getsockname()[:2]
        self.loopback = ipaddress.ip_address(host).is_loopback
        """Tells whether only this machine can reach it."""
        names = ["localhost", socket.gethostname(), address.rpartition(":")[0]]
        self._names = {name.lower() for name in (names if self.loopback else [*names, socket.getfqdn()])}
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}{PATH}"
        """Address of the metrics."""
        self._looker = _Looker()
        self._connections: dict[asyncio.Task[Any], None] = {}
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="metrics-http", daemon=True)

    def __call__(self, sampler_folder: Path, start_mono_ns: int) -> None:
        """Follows the recording whose sampler writes there, beside those that it follows already; does nothing else."""
        self._looker.follow(sampler_folder, start_mono_ns)

    def __enter__(self) -> Self:
        self._looker.start()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(CLOSING_S)
        self._looker.stop()
        self._socket.close()

    def _run(self) -> None:
        # A client's error is nobody's here: the terminal belongs to the command.
        self._loop.set_exception_handler(lambda _loop, _context: None)
        try:
            self._loop.run_until_complete(self._answer_all())
        finally:
            self._loop.close()

    async def _answer_all(self) -> None:
        server = await asyncio.start_server(
            self._connected, sock=self._socket, limit=MOST_REQUEST_BYTES, backlog=_BACKLOG
        )
        await self._stop.wait()
        server.close()
        left = list(self._connections)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= MOST_CONNECTIONS:
            next(iter(self._connections)).cancel()
        self._connections[task] = None
        try:
            async with asyncio.timeout(DEADLINE_S):
                writer.write(await self._response(reader))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError, EOFError, asyncio.CancelledError):
            pass  # a client that is slow or gone, one too many, or the end
        finally:
            self._connections.pop(task, None)
            writer.transport.abort()

    async def _response(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except asyncio.LimitOverrunError:
            return _message("431 Request Header Fields Too Large", b"the request is too long\n")
        first, *lines = head.split("\r\n")
        words = first.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _message("400 Bad Request", b"not a request of HTTP/1.1\n")
        method, target, _ = words
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        bodiless = method == "HEAD"
        if not self._is_here(fields.get("host", "")):
            return _message(
                "421 Misdirected Request", b"this host is not served here; ask by address, or as localhost\n"
            )
        if method not in ("GET", "HEAD"):
            return _message("405 Method Not Allowed", b"only GET\n", extra="Allow: GET, HEAD\r\n")
        path = target.partition("?")[0]
        if path == "/":
            return _message("200 OK", _PAGE, kind="text/html; charset=utf-8", bodiless=bodiless)
        if path != PATH:
            return _message("404 Not Found", b"see /metrics\n", bodiless=bodiless)
        found = families(await self._looker.fresh(), time.monotonic_ns(), num_failures=self._looker.num_failures)
        text, kind = encode(found, fields.get("accept", ""))
        return _message("200 OK", text, kind=kind, bodiless=bodiless)

    def _is_here(self, host: str) -> bool:
        """Tells whether a client asked for this machine, by address or name.

        A page of the web that has its own name lead to 127.0.0.1 (DNS rebinding) has that name here.
        """
        name = re.sub(r":\d*$", "", host).strip("[]").rstrip(".").lower()
        with contextlib.suppress(ValueError):
            return bool(ipaddress.ip_address(name))
        return not name or name in self._names


def _message(
    status: str, body: bytes, *, kind: str = "text/plain; charset=utf-8", extra: str = "", bodiless: bool = False
) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{extra}"
        "X-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (b"" if bodiless else body)
